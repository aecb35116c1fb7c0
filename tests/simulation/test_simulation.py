"""Some seconds of the simulation, and that it can fail. For more: ``make simulate`` and ``make simulate-bugs``."""

from __future__ import annotations

import importlib
import math
import multiprocessing

import pytest

from tests.simulation.__main__ import explain
from tests.simulation.bugs import BUGS, plant
from tests.simulation.scenarios import choose_scenario
from tests.simulation.simulator import run, simulate

# As many for each, however busy the machine is: a few seconds.
NUM_SEEDS = 70


# In parts: pytest prints all stacks of a test that takes a minute, and seconds of a core may take long to get.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1_000_000, 2_000_000])
def test_nothing_that_goes_wrong_breaks_a_pass(seed):
    report = simulate(math.inf, seed, NUM_SEEDS)
    assert report.failed_seed is None, explain(report.failed_seed)
    assert report.num_faults > 1_000


def test_a_seed_is_always_the_same_run():
    outcomes = [run(choose_scenario(7)) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def find_and_explain(name: str) -> str:
    """Plant a bug, for good."""
    plant(next(bug for bug in BUGS if bug.name == name))
    report = importlib.import_module("tests.simulation.simulator").simulate(600.0)
    assert report.failed_seed is not None
    text: str = importlib.import_module("tests.simulation.__main__").explain(report.failed_seed)
    return text


@pytest.mark.timeout(600)
def test_a_failure_shows_its_seed_and_what_is_needed_of_its_schedule():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        text = pool.apply(find_and_explain, ["streams whose workers die are forgotten"])
    assert text.startswith("seed ")
    assert "there are no workers" in text
    shrunk = [line for line in text.splitlines() if line.startswith("  at ")]
    assert len(shrunk) <= 15  # of more than a hundred
