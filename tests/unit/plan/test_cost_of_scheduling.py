"""What a batch costs the tables of tasks, counted in calls and lines: seconds would depend on the machine."""

from __future__ import annotations

import sys
from collections import deque

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table


def run(num_workers, num_tasks, **options) -> None:
    """Workers answer in turn, each task in a second, and the consumer takes at once."""
    is_iterable = options.get("is_iterable", False)
    table = Table(PlanOptions(num_workers, **options))
    for worker in range(num_workers):
        table.worker_joined(worker, 0.0, place=worker if is_iterable else 0)
    in_flight: deque[tuple[int, float]] = deque()
    num_delivered = 0
    for turn in range(num_tasks):
        now = turn / num_workers
        while table.wants_input:
            table.add_task(None)
        in_flight += [(worker, number) for worker, number, _payload in table.assign(now)]
        assert table.replied(*in_flight.popleft(), size_bytes=1, task_seconds=1.0, now=now + 1.0)
        while table.pop_deliverable() is not None:
            num_delivered += 1
    assert num_delivered > num_tasks // 2


def count(events: tuple[str, ...], setter, function, *arguments, **options) -> int:
    """What the interpreter tells a profiler or tracer of a call."""
    number = 0

    def note(_frame, event, _argument):
        nonlocal number
        number += event in events
        return note

    setter(note)
    try:
        function(*arguments, **options)
    finally:
        setter(None)
    return number


def calls_per_task(num_workers, num_tasks, **options) -> float:
    """Calls of functions of Python and C."""
    return count(("call", "c_call"), sys.setprofile, run, num_workers, num_tasks, **options) / num_tasks


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"max_in_flight_bytes": 20}])
def test_batch_costs_the_same_with_many_workers_as_with_few(options):
    few = calls_per_task(8, 1500, **options)
    # The first tasks of a pass are given out while all workers have room, and nothing is known of any.
    assert calls_per_task(256, 1500, **options) < 1.5 * few


def test_batch_costs_the_same_in_a_long_epoch_as_in_a_short_one():
    assert calls_per_task(8, 8000) < 1.1 * calls_per_task(8, 500)


@pytest.mark.parametrize("in_order", [False, True])
def test_batch_costs_the_same_with_many_streams_as_with_few(in_order):
    """In lines: what loops without calling anything shows here."""
    few, many = (
        count(("line",), sys.settrace, run, num_streams, 600, in_order=in_order, is_iterable=True)
        for num_streams in (4, 128)
    )
    assert many < 2 * few
