"""What a batch costs the tables of tasks, counted in calls and lines: seconds would depend on the machine."""

from __future__ import annotations

import sys
from collections import deque

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table
from tests.unit.plan.simulation import Simulation


def count_calls(num_workers, num_tasks, **options) -> float:
    """Calls of functions per batch, of Python and C, the driver's included."""
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    simulation = Simulation(num_workers, lambda _worker, _now: 1.0, **options)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation.run(1e9, num_tasks)
    finally:
        sys.setprofile(before)
    assert len(simulation.delivered) == num_tasks
    return num_calls / num_tasks


def count_lines(function) -> int:
    """Lines of Python that a function runs: what loops without calling anything shows here."""
    num_lines = 0

    def trace(_frame, event, _argument):
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("options", [{}, {"in_order": False}, {"max_in_flight_bytes": 20}])
def test_batch_costs_the_same_with_many_workers_as_with_few(options):
    few = count_calls(8, 1500, **options)
    # The first tasks of a pass are given out while all workers have room, and nothing is known of any.
    assert count_calls(256, 1500, **options) < 1.5 * few


def test_batch_costs_the_same_in_a_long_epoch_as_in_a_short_one():
    assert count_calls(8, 8000) < 1.1 * count_calls(8, 500)


def run_streams(num_streams, num_tasks, in_order) -> None:
    """Every stream answers in turn, and the consumer takes at once."""
    table = Table(PlanOptions(num_streams, is_iterable=True, in_order=in_order))
    for stream in range(num_streams):
        table.worker_joined(stream, place=stream)
    in_flight: deque[tuple[int, int]] = deque()
    num_delivered = 0
    while num_delivered < num_tasks:
        while table.wants_input:
            table.add_task(None)
        while (assigned := table.assign(0.0)) is not None:
            in_flight.append(assigned)
        assert table.replied(*in_flight.popleft(), size_bytes=1)
        assert table.pop_deliverable() is not None
        num_delivered += 1


@pytest.mark.parametrize("in_order", [False, True])
def test_batch_costs_the_same_with_many_streams_as_with_few(in_order):
    few = count_lines(lambda: run_streams(4, 600, in_order))
    assert count_lines(lambda: run_streams(128, 600, in_order)) < 2 * few
