"""What slow, hanging and stalling workers cost, in a simulation. Times are in units of the time of a task."""

from __future__ import annotations

import math

import pytest

from tests.unit.plan.simulation import Simulation

SEEDS = range(3)


def throughput(simulation, *, since, until) -> float:
    """Batches per unit of time."""
    simulation.run(since)
    num_delivered = len(simulation.delivered)
    simulation.run(until)
    assert simulation.delivered == list(range(len(simulation.delivered)))
    return (len(simulation.delivered) - num_delivered) / (until - since)


def num_copies(simulation) -> int:
    return simulation.num_sent.total() - len(simulation.num_sent)


def slow(worker, _now):
    return 20.0 if worker == 3 else 1.0


def slow_later(worker, now):
    return 20.0 if worker == 3 and now >= 100 else 1.0


def slow_for_a_time(worker, now):
    return 20.0 if worker == 3 and 100 <= now < 300 else 1.0


def hangs(worker, now):
    return math.inf if worker == 3 and now >= 100 else 1.0


# Of the 7 that are reached without the slow worker, less than 3 % may be lost.
@pytest.mark.parametrize(
    ("seconds", "since"),
    [(slow, 0), (slow_later, 100), (slow_for_a_time, 100), (hangs, 100)],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_worker_of_eight_costs_little_more_than_itself(seconds, since, seed):
    simulation = Simulation(8, seconds, seed=seed)
    assert throughput(simulation, since=since, until=since + 1000) > 6.8


def test_worker_that_recovers_is_used_again():
    simulation = Simulation(8, slow_for_a_time)
    assert throughput(simulation, since=1000, until=1300) > 7.8


def test_copies_are_few():
    simulation = Simulation(8, lambda _worker, _now: 1.0, spread=0.9)
    simulation.run(1000)
    assert num_copies(simulation) == 0
    simulation = Simulation(8, slow)
    simulation.run(1000)
    assert 0 < num_copies(simulation) < 15


@pytest.mark.parametrize("in_order", [False, True])
def test_several_hung_workers_stop_nothing_and_all_is_delivered(in_order):
    hung = {1, 5, 20, 31}
    simulation = Simulation(32, lambda worker, _now: math.inf if worker in hung else 1.0, in_order=in_order)
    simulation.run(200, num_tasks=1000)
    assert sorted(simulation.delivered) == list(range(1000))
    assert simulation.now < 1000 / 28 + 20
    assert num_copies(simulation) == 8


def test_stall_of_all_workers_leads_to_few_copies():
    """A file system that stalls for 120: nobody else would be any faster."""

    def stalls(_worker, now):
        return 220.0 - now if 100 <= now < 220 else 1.0

    simulation = Simulation(64, stalls, spread=0.1)
    simulation.run(200)
    assert num_copies(simulation) <= 64 // 16
    simulation.run(400)
    assert num_copies(simulation) <= 64  # of what takes longest to recover
    assert len(simulation.delivered) > 0.95 * 64 * (400 - 120)


def test_short_tasks_are_not_copied_for_a_hiccup():
    simulation = Simulation(8, lambda worker, _now: 0.7 if worker == 3 else 0.001)
    simulation.run(4)
    assert num_copies(simulation) == 0


@pytest.mark.parametrize("in_order", [False, True])
def test_worker_that_hangs_over_its_time_is_ended(in_order):
    simulation = Simulation(8, hangs, in_order=in_order, task_timeout=30.0)
    simulation.run(1000, num_tasks=5000)
    assert sorted(simulation.delivered) == list(range(5000))
    assert simulation.ended == [3]
    # 8 until it hangs, then 7 but for the time limit.
    assert simulation.now < 100 + 30 + 4200 / 7 + 10
