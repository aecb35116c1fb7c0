"""A dataset that several nodes build at the same time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rpcdataloader.client import mutable
from rpcdataloader.client.discovery import Local
from rpcdataloader.client.mutable import MutableDataset
from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.wire.pickling import Build

CANNOT_SHARE = {"shared": False, "reason": "it holds threads", "leaves_threads": True}


class Session:
    """A session that shares nothing; before its answer, ``meanwhile`` happens."""

    connection = SimpleNamespace(release=lambda _key: None)
    is_usable, is_local, workers = True, True, ()

    def __init__(self, name, meanwhile=lambda: None):
        self.name = self.address = name
        self.meanwhile, self.asked, self.is_closed = meanwhile, [], False

    def is_born_with(self, _key):
        return False

    def update(self):
        return lambda _timeout: None

    def import_early(self, _modules):
        pass

    def knows(self, _key):
        return False

    def submit(self, _kind, content, _found):
        shared = Build.decode(content.payload).shared
        self.asked.append(shared)
        return SimpleNamespace(wait=lambda: self.answer(shared))

    def answer(self, shared):
        self.meanwhile()
        return CANNOT_SHARE if shared else {"shared": False}

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_node_that_was_asked_to_share_is_told_to_leave_it_to_workers_whatever_others_answer(monkeypatch, is_needed):
    dataset = MutableDataset("Threaded", None, shared=True, is_iterable=False, where=Local())

    def build_on_first():
        monkeypatch.setattr(second, "meanwhile", lambda: None)
        with pytest.raises(ConnectionLostError, match="first was ended"):
            dataset.build_on(first)

    first, second = Session("first"), Session("second", build_on_first)
    if is_needed:
        monkeypatch.setattr(mutable, "_holding", {second})
        dataset.build_on(second)
        assert (second.asked, second.is_closed) == ([True, False], False)
    else:
        with pytest.raises(ConnectionLostError, match="second was ended"):
            dataset.build_on(second)
        assert (second.asked, second.is_closed) == ([True], True)
    assert first.is_closed
    again = Session("first")
    dataset.build_on(again)
    assert again.asked == [False]
