"""What a batch costs the task table, counted in function calls: seconds would depend on the machine."""

from __future__ import annotations

import sys

import pytest

from tests.unit.loader.simulation import Simulation


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


@pytest.mark.parametrize("options", [{}, {"hedging": True}, {"in_order": False}, {"max_in_flight_bytes": 20}])
def test_batch_costs_the_same_with_many_workers_as_with_few(options):
    few = count_calls(8, 1500, **options)
    # The first tasks of a pass are given out while all workers have room, and nothing is known of any.
    assert count_calls(256, 1500, **options) < 1.5 * few


def test_batch_costs_the_same_in_a_long_epoch_as_in_a_short_one():
    assert count_calls(8, 8000) < 1.1 * count_calls(8, 500)
