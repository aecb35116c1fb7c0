"""What is needed of a schedule that fails, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.simulation.scenarios import Fault, Noise, Scenario, choose_faults
from tests.simulation.simulator import Outcome, run

MAX_RUNS = 400


def shrink(scenario: Scenario) -> tuple[Scenario, list[Fault], Outcome]:
    """Take out of a run that fails what can be taken out; what is left fails, too, if perhaps with other words."""
    faults = list(choose_faults(scenario))
    outcome = run(scenario, faults)
    faults = [fault for fault in faults if fault.time <= outcome.ended_at]
    budget = iter(range(MAX_RUNS))
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler, fewer in _smaller(scenario, faults):
            if next(budget, None) is None:
                return scenario, faults, outcome
            found = run(simpler, fewer)
            if found.violation:
                scenario, outcome = simpler, found
                faults = [fault for fault in fewer if fault.time <= found.ended_at]
                is_smaller = True
                break
    return scenario, faults, outcome


def _smaller(scenario: Scenario, faults: Sequence[Fault]) -> Iterator[tuple[Scenario, list[Fault]]]:
    """Runs that are a little smaller."""
    size = len(faults)
    while size:
        for first in range(0, len(faults), size):
            yield scenario, [*faults[:first], *faults[first + size :]]
        size //= 2
    for index, rate in enumerate(scenario.noise):
        if rate:
            noise = Noise(*(0.0 if index == other else old for other, old in enumerate(scenario.noise)))
            yield replace(scenario, noise=noise), list(faults)
    if scenario.num_ranks > 1:
        yield replace(scenario, num_ranks=1), list(faults)
    if scenario.num_tasks > 1:
        yield replace(scenario, num_tasks=scenario.num_tasks // 2), list(faults)
    if len(scenario.offered) > 1:
        yield replace(scenario, offered=scenario.offered[:-1]), list(faults)
    if max(scenario.offered) > 1:
        yield replace(scenario, offered=tuple(max(1, number // 2) for number in scenario.offered)), list(faults)
