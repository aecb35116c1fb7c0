from __future__ import annotations

import pytest

from rpcdataloader.plan.budget import ByteBudget


def test_everything_fits_while_sizes_are_unknown():
    budget = ByteBudget(10, 0.0)
    budget.num_in_flight = 1000
    assert budget.has_room


def test_answered_bytes_and_the_estimate_of_what_is_in_flight_count_until_delivered():
    budget = ByteBudget(30, 10.0)
    budget.num_in_flight = 2
    assert budget.has_room  # for a third
    budget.num_in_flight = 3
    assert not budget.has_room
    budget.num_in_flight = 2
    budget.answered(10)
    assert not budget.has_room
    budget.delivered(10)
    assert budget.has_room


def test_estimate_jumps_to_the_largest_and_sinks_slowly():
    budget = ByteBudget(1000, 0.0)
    sizes = [100, 20, 20, 400]
    estimates = []
    for size in sizes:
        budget.answered(size)
        estimates.append(budget.batch_size_bytes)
    assert estimates == [100, 95, pytest.approx(90.3, abs=0.1), 400]
