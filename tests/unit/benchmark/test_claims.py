from __future__ import annotations

import operator
from dataclasses import replace

from tests.benchmark import startup
from tests.benchmark.claims import CLAIMS, Claim, find_losses, format_claims, measure_claims, median_ratio, plan
from tests.benchmark.loaders import LOADERS
from tests.benchmark.trainer import Figures, Phase
from tests.benchmark.workloads import WORKLOADS

FASTER = Claim("images", "torch", 1.35, "images", "ours", "torch", "idle.rate")
CHEAPER = Claim("CPU", "sockets", 1.1, "images", "ours", "bare", "idle.cpu", at_most=True)
CLAIMS_HERE = {"faster": FASTER, "cheaper": CHEAPER}


def test_ratio_is_the_median_of_those_within_a_round():
    # The machine was twice as slow in the second round, and one loader failed in the last.
    found = {("images", "ours"): {0: 30j, 1: 15j, 2: 90j, 3: 1j}, ("images", "torch"): {0: 20j, 1: 10j, 2: 30j}}
    assert median_ratio(found, "images", "ours", "torch", "imag") == 1.5
    assert median_ratio(found, "images", "ours", "bare", "imag") is None
    assert median_ratio({**found, ("images", "bare"): {0: 0j}}, "images", "ours", "bare", "imag") is None


def test_goal_is_a_lower_or_an_upper_limit():
    assert [FASTER.is_met(ratio) for ratio in (1.34, 1.35, 2.0)] == [False, True, True]
    assert [CHEAPER.is_met(ratio) for ratio in (1.0, 1.1, 1.11)] == [True, True, False]


def test_claims_are_shown_with_their_goals():
    assert format_claims(CLAIMS_HERE, {"cheaper": 1.2, "faster": 1.4}).splitlines()[2:] == [
        "| images | torch | 1.40 | at least 1.35 | yes |",
        "| CPU | sockets | 1.20 | at most 1.1 | no |",
    ]


def test_loss_is_found_in_either_direction():
    recorded = {"faster": 2.0, "cheaper": 1.0}
    assert find_losses(CLAIMS_HERE, {"faster": 1.6, "cheaper": 1.25}, recorded) == []
    assert find_losses(CLAIMS_HERE, {"faster": 1.5, "cheaper": 1.6}, recorded) == [
        "faster (images, against torch): 1.50, 2.00 recorded: 75% of that",
        "cheaper (CPU, against sockets): 1.60, 1.00 recorded: 62% of that",
    ]


def test_what_was_recorded_and_not_measured_is_a_loss_and_not_the_other_way_round():
    assert find_losses(CLAIMS_HERE, {"faster": 1.0}, {"cheaper": 1.0}) == [
        "cheaper (CPU, against sockets): not measured, 1.00 recorded"
    ]


def test_each_claim_names_what_there_is():
    figures = Figures(0.5, Phase(1, 1.0, 1.0, 1.0), Phase(1, 1.0, 1.0, 1.0))
    for claim in CLAIMS.values():
        assert {claim.loader, claim.reference} <= LOADERS.keys()
        assert claim.subject in WORKLOADS
        assert operator.attrgetter(claim.figure)(figures) == 1.0
    for claim in startup.CLAIMS.values():
        assert {claim.loader, claim.reference} <= set(startup.ROWS[claim.subject][3])
        assert claim.figure in startup.Start.__dataclass_fields__


def test_what_the_claims_need_is_measured_once():
    claims = {"one": FASTER, "two": CHEAPER, "three": replace(FASTER, subject="integer", figure="imag")}
    assert plan(claims, ["bare", "ours", "torch", "other"]) == {
        "images": ["bare", "ours", "torch"],
        "integer": ["ours", "torch"],
    }
    found = {("integer", "ours"): {0: 3j}, ("integer", "torch"): {0: 2j}}
    assert measure_claims(claims, found) == {"three": 1.5}
