from __future__ import annotations

from rpcdataloader.host import seldom
from rpcdataloader.host.seldom import Seldom


def test_each_cause_is_told_once_per_period(monkeypatch):
    now = 100.0
    monkeypatch.setattr(seldom.time, "monotonic", lambda: now)
    told = Seldom()
    assert told.is_due("a")
    now = 130.0
    assert told.is_due("b")
    assert not told.is_due("a")
    now = 161.0
    assert told.is_due("a")
    assert not told.is_due("b")


def test_causes_that_begin_alike_are_told_each():
    told = Seldom()
    assert told.is_due("no room for dataset faces, train: [Errno 11]")
    assert told.is_due("no room for dataset faces, train: [Errno 24]")
    assert told.is_due("no room for dataset faces, test: [Errno 24]")
    assert not told.is_due("no room for dataset faces, train: [Errno 11]")


def test_any_number_of_causes_takes_no_more_memory(monkeypatch):
    monkeypatch.setattr(seldom, "MAX_CAUSES", 3)
    told = Seldom()
    for cause in "abcd":
        assert told.is_due(cause)
    assert not told.is_due("d")
    assert told.is_due("a")
