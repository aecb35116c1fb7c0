"""Exceptions on the wire, where tests/behaviour/test_exceptions.py does not look."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from rpcdataloader.errors import RemoteError
from rpcdataloader.wire.exceptions import dumps_exception, loads_exception
from rpcdataloader.wire.pickling import dumps, loads
from tests.support.failures import MAKERS, Decoding, NoSample, WithLock


def sent(exc: BaseException) -> Exception:
    return loads_exception(dumps_exception(exc, "worker 1"))


def test_arguments_that_cannot_be_sent_arrive_in_words():
    found = sent(ValueError(threading.Lock(), [1], WithLock("cat.jpg")))
    assert type(found) is ValueError
    lock, numbers, inner = found.args
    assert re.fullmatch(r"<unlocked _thread.lock object at \w+>", lock)
    assert numbers == [1]
    assert (type(inner), inner.args, vars(inner)) == (WithLock, ("cat.jpg",), {"name": "cat.jpg"})


class Own(Exception):
    """Says itself what it is made of."""

    made = 0

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number
        Own.made += 1

    def __reduce__(self) -> Any:
        return Own, (self.number,)


def test_class_that_says_how_it_is_pickled_is_pickled_that_way():
    error = Own(3)
    made = Own.made
    found: Any = sent(error)
    assert (type(found), str(found), found.number) == (Own, "number 3", 3)
    assert Own.made > made


class Misleading(Own):
    def __reduce__(self) -> Any:
        return Misleading, (str(self),)


def test_class_whose_own_way_makes_another_text_is_taken_apart():
    found: Any = sent(Misleading(3))
    assert (type(found), str(found), found.number) == (Misleading, "number 3", 3)


def test_exception_may_lead_back_to_itself():
    error: Any = Decoding("cat.jpg")
    error.response = {"error": error}
    found: Any = sent(error)
    assert found.response["error"] is found
    error.lock = threading.Lock()
    found = sent(error)
    assert (type(found), str(found), found.path) == (Decoding, "cannot decode cat.jpg", "cat.jpg")


class Missing(KeyError, FileNotFoundError):
    """Has the memory of its second base class."""

    def __init__(self, path: str) -> None:
        FileNotFoundError.__init__(self, 2, "no such sample", path)


class Both(ValueError, AttributeError):
    pass


@pytest.mark.parametrize("error", [Missing("/a/b"), Both("text", 3)])
def test_exception_may_have_several_built_in_base_classes(error):
    found: Any = sent(error)
    assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))
    assert getattr(found, "filename", None) == getattr(error, "filename", None)


class Vanishing(Exception):
    pass


def test_class_that_is_missing_where_the_exception_arrives_is_told_in_words(monkeypatch):
    payload = dumps_exception(Vanishing("gone"), "worker 1")
    monkeypatch.delattr("tests.unit.wire.test_exceptions.Vanishing")
    found = loads_exception(payload)
    assert type(found) is RemoteError
    assert re.fullmatch(r"worker 1 raised \S*Vanishing: gone", str(found))


@pytest.mark.parametrize("error", [Decoding("cat.jpg"), NoSample("/a/b", "train"), MAKERS["required arguments"]()])
def test_exception_in_any_message_is_made_without_its_constructor(error):
    encoded = dumps({"error": error}, name="message")
    found = loads(encoded.payload, [])["error"]
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
