from __future__ import annotations

from rpcdataloader.plan.table import Timeouts


def test_workers_expire_in_the_order_in_which_they_began_each_once():
    timeouts: Timeouts = Timeouts(10.0)
    for now, worker in enumerate("abca"):
        timeouts.begin(worker, float(now))
    assert timeouts.due == 11.0
    assert timeouts.expire(10.9) == []
    assert timeouts.expire(12.0) == ["b", "c"]
    assert timeouts.expire(12.0) == []
    assert timeouts.due == 13.0
    timeouts.end("a")
    timeouts.end("a")
    assert timeouts.due is None
