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


def test_details_that_change_are_no_other_cause():
    told = Seldom()
    assert told.is_due("node01 is full, 3 of 4 workers are of others; this process has 1")
    assert not told.is_due("node01 is full, 2 of 4 workers are of others; this process has 2")
    assert not told.is_due("node01 is full; this process has 4")
    assert told.is_due("node02 is full, 3 of 4 workers are of others; this process has 1")


def test_any_number_of_causes_takes_no_more_memory(monkeypatch):
    monkeypatch.setattr(seldom, "MAX_CAUSES", 3)
    told = Seldom()
    for cause in "abcd":
        assert told.is_due(cause)
    assert not told.is_due("d")
    assert told.is_due("a")
