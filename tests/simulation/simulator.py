"""Run a scenario with its faults, from the first event to the last; and one scenario after the other."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.cluster import Cluster
from tests.simulation.faults import heal, inject
from tests.simulation.ranks import Rank
from tests.simulation.scenarios import Fault, Scenario, choose_faults, choose_scenario


@dataclass
class Outcome:
    """What came of a run, or of many until one fails; ``violation`` is empty if all held."""

    counts: Counter[str] = field(default_factory=Counter)
    num_passes: int = 0
    violation: str = ""
    trace: str = ""
    ended_at: float = 0.0
    failed_seed: int | None = None
    seconds: float = 0.0

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        simulated = f"{self.num_faults:,} faults in {self.seconds:.0f} s, {self.num_passes:,} passes"
        return f"{simulated}: {int(self.failed_seed is not None)} violations"


def run(scenario: Scenario, faults: Iterable[Fault] | None = None) -> Outcome:
    """Run a scenario; with these faults only, if they are given."""
    cluster = Cluster(scenario)
    outcome = Outcome(cluster.counts)
    try:
        _run(cluster, choose_faults(scenario) if faults is None else faults)
    except Exception as exc:
        kind = "" if isinstance(exc, AssertionError) else f"{type(exc).__name__}: "
        outcome.violation = f"at {cluster.now:g} s: {kind}{exc}"
        outcome.trace = traceback.format_exc()
    outcome.num_passes, outcome.ended_at = cluster.num_passes, cluster.now
    return outcome


def _run(cluster: Cluster, faults: Iterable[Fault]) -> None:
    cluster.ranks = [Rank(cluster, number) for number in range(cluster.scenario.num_ranks)]
    for rank in cluster.ranks:
        rank.begin()
    for fault in faults:
        while cluster.step(fault.time):
            pass
        cluster.now = fault.time
        inject(cluster, fault)
    heal(cluster)
    cluster.has_ended = True
    deadline = cluster.now + _longest(cluster)
    while not all(rank.is_done for rank in cluster.ranks) and cluster.step():
        assert cluster.now <= deadline, f"a pass does not end: {_describe(cluster)}"
    assert all(rank.is_done for rank in cluster.ranks), f"nothing happens any more: {_describe(cluster)}"


def _longest(cluster: Cluster) -> float:
    """Seconds that what is left may take."""
    scenario = cluster.scenario
    num_undelivered = sum(scenario.offered) * max(2, scenario.options.prefetch_factor) * 2
    slowest = 22.0 * scenario.seconds  # with the noise that it has begun with
    # A deadly batch may take a hundred times as long before it kills, again and again.
    num_deadly = len(cluster.deadly)
    return (
        1000.0
        + scenario.options.reconnect_timeout
        + num_undelivered * (slowest + scenario.step)
        + num_deadly * 2 * scenario.options.max_retries * 100 * slowest
    )


def _describe(cluster: Cluster) -> str:
    ranks = [rank for rank in cluster.ranks if not rank.is_done and rank.crew is not None]
    return "; ".join(f"rank {rank.number} has {len(rank.crew.judge.tasks)} tasks left" for rank in ranks)


def simulate(seconds: float, seed: int = 0, num_seeds: int | None = None) -> Outcome:
    """Simulate for some time, until a run fails.

    Args:
        seconds: How long, in seconds that this process has one core for itself: others on the machine do not count.
        seed: The first one.
        num_seeds: How many at most; not limited if None.
    """
    report = Outcome()
    end = None if num_seeds is None else seed + num_seeds
    began = time.process_time()
    gc.collect()
    gc.freeze()
    gc.disable()  # the cycles of one run are few, and are collected after some of them
    try:
        while report.seconds < seconds and seed != end:
            outcome = run(choose_scenario(seed))
            report.counts += outcome.counts
            report.num_passes += outcome.num_passes
            report.seconds = time.process_time() - began
            if outcome.violation:
                report.failed_seed, report.violation = seed, outcome.violation
                break
            seed += 1
            if seed % 100 == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return report
