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
