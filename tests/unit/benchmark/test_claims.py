from __future__ import annotations

import pytest

from tests.benchmark.claims import CLAIMS, Claim, Goal, find_losses, format_claims, measure_claims, median_ratio, plan
from tests.benchmark.loaders import LOADERS
from tests.benchmark.report import FIGURES
from tests.benchmark.workloads import WORKLOADS

FASTER = Goal("images", "torch", 1.35)
CHEAPER = Goal("CPU", "sockets", 1.1, at_most=True)
GOALS = {"faster": FASTER, "cheaper": CHEAPER}


def test_ratio_is_the_median_of_those_within_a_round():
    # The machine was twice as slow in the second round, and one loader failed in the last.
    assert median_ratio({0: 30.0, 1: 15.0, 2: 90.0, 3: 1.0}, {0: 20.0, 1: 10.0, 2: 30.0}) == 1.5
    assert median_ratio({0: 1.0}, {1: 1.0}) is None
    assert median_ratio({0: 1.0}, {0: 0.0}) is None


def test_goal_is_a_lower_or_an_upper_limit():
    assert [FASTER.is_met(ratio) for ratio in (1.34, 1.35, 2.0)] == [False, True, True]
    assert [CHEAPER.is_met(ratio) for ratio in (1.0, 1.1, 1.11)] == [True, True, False]


def test_claims_are_shown_with_their_goals():
    assert format_claims(GOALS, {"cheaper": 1.2, "faster": 1.4}).splitlines()[2:] == [
        "| images | torch   |  1.40 | at least 1.35 | yes |",
        "| CPU    | sockets |  1.20 |   at most 1.1 |  no |",
    ]


def test_loss_is_found_in_either_direction():
    recorded = {"faster": 2.0, "cheaper": 1.0}
    assert find_losses(GOALS, {"faster": 1.6, "cheaper": 1.25}, recorded, 0.8) == []
    assert find_losses(GOALS, {"faster": 1.5, "cheaper": 1.6}, recorded, 0.8) == [
        "faster (images, against torch): 1.50, 2.00 recorded: 75% of that",
        "cheaper (CPU, against sockets): 1.60, 1.00 recorded: 62% of that",
    ]


def test_what_was_recorded_and_not_measured_is_a_loss_and_not_the_other_way_round():
    assert find_losses(GOALS, {"faster": 1.0}, {"cheaper": 1.0}, 0.8) == [
        "cheaper (CPU, against sockets): not measured, 1.00 recorded"
    ]


def test_each_claim_names_what_there_is():
    for claim in CLAIMS.values():
        assert {claim.loader, claim.reference} <= LOADERS.keys()
        assert claim.workload in WORKLOADS
        assert claim.figure in FIGURES


def test_what_the_claims_need_is_measured_once():
    claims = {
        "one": Claim(FASTER, "images", "ours", "torch", "rate"),
        "two": Claim(CHEAPER, "images", "ours", "bare", "cpu"),
        "three": Claim(FASTER, "integer", "ours", "torch", "rate"),
    }
    assert plan(claims, ["bare", "ours", "torch", "other"]) == {
        "images": ["bare", "ours", "torch"],
        "integer": ["ours", "torch"],
    }

    def get(workload, loader, figure):
        figures = {("images", "ours", "rate"): {0: 3.0}, ("images", "torch", "rate"): {0: 2.0}}
        return figures.get((workload, loader, figure), {})

    assert measure_claims(claims, get) == {"one": pytest.approx(1.5)}
