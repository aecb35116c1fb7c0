"""The number of workers that a loop wants, decision by decision. Simulated loops have tests of their own."""

from __future__ import annotations

import math

import pytest

from rpcdataloader.plan.demand import Demand, Seen


def seen(num_workers, needed, waited=0.0, allowed=math.inf, rate=1.0, spread=0.0):
    return Seen(needed, allowed, waited, spread, dict.fromkeys(range(num_workers), rate))


def decide(demand, *looks):
    return [demand.decide(5.0 * number, look) for number, look in enumerate(looks)]


def test_fewer_are_wanted_when_two_decisions_agree():
    assert decide(Demand(), seen(8, 3.0), seen(8, 7.5), seen(8, 3.0), seen(8, 3.0)) == [8, 8, 8, 3]


def test_more_are_wanted_at_once_if_the_loop_waits():
    demand = Demand()
    assert decide(demand, seen(4, 7.5, waited=0.04), seen(4, 7.5, waited=0.5)) == [4, 8]


def test_workers_that_were_never_seen_are_as_fast_as_the_others():
    assert decide(Demand(), seen(4, 20.0, waited=0.5, rate=2.0)) == [10]


@pytest.mark.parametrize(("waited", "wanted"), [(0.049, 4), (0.05, 8)])
def test_waiting_for_less_than_a_twentieth_of_its_time_does_not_count(waited, wanted):
    assert decide(Demand(), seen(4, 7.5, waited)) == [wanted]


def test_a_loop_that_never_waited_leaves_no_margin():
    assert decide(Demand(), *[seen(8, 7.5)] * 3, *[seen(8, 3.0)] * 2) == [8, 8, 8, 8, 3]


@pytest.mark.parametrize("needed", [math.inf, 1e9])
def test_a_loop_that_does_nothing_wants_four_times_as_many_with_each_decision(needed):
    looks = [seen(count, needed, waited=0.9) for count in (1, 4, 16, 16)]
    assert decide(Demand(), *looks) == [4, 16, 64, 64]


def test_what_the_network_does_not_carry_is_not_wanted():
    assert decide(Demand(), *[seen(8, 20.0, waited=0.7, allowed=3.5)] * 3)[-1] == 4


def test_the_least_is_kept():
    assert decide(Demand(3), *[seen(8, 0.1)] * 3)[-1] == 3
