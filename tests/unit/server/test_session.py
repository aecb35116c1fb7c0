"""What a session says of itself."""

from __future__ import annotations

import itertools
import os
import threading
import types

import pytest

from rpcdataloader.server.session import Session


@pytest.mark.parametrize(
    ("tasks_at_each_look", "num_warnings"), [(["12", "1"], 0), (["12", "12", "1"], 0), (["12"], 1)]
)
def test_threads_that_end_while_a_session_looks_are_no_warning(monkeypatch, caplog, tasks_at_each_look, num_warnings):
    looks = itertools.chain(tasks_at_each_look, itertools.repeat(tasks_at_each_look[-1]))
    monkeypatch.setattr(os, "listdir", lambda _path: list(next(looks)))
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    Session._warn_of_threads(types.SimpleNamespace(_has_warned=False))
    monkeypatch.undo()
    assert ["(1 of C libraries)" in text for text in caplog.messages] == [True] * num_warnings
