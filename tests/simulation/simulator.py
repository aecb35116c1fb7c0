"""Run a scenario with its faults, from the first event to the last."""

from __future__ import annotations

import heapq
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.cluster import Cluster
from tests.simulation.faults import heal, inject
from tests.simulation.ranks import Rank
from tests.simulation.scenarios import Fault, Scenario, choose_faults


@dataclass
class Outcome:
    """What came of a run; ``violation`` is empty if all held."""

    counts: Counter[str] = field(default_factory=Counter)
    num_passes: int = 0
    violation: str = ""
    trace: str = ""
    ended_at: float = 0.0

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())


def run(scenario: Scenario, faults: Iterable[Fault] | None = None) -> Outcome:
    """Run a scenario; with these faults only, if they are given."""
    cluster = Cluster(scenario)
    outcome = Outcome(cluster.counts)
    try:
        _run(cluster, choose_faults(scenario) if faults is None else faults)
    except AssertionError as exc:
        outcome.violation = str(exc)
        outcome.trace = traceback.format_exc()
    except Exception as exc:
        outcome.violation = f"{type(exc).__name__}: {exc}"
        outcome.trace = traceback.format_exc()
    outcome.num_passes, outcome.ended_at = cluster.num_passes, cluster.now
    if outcome.violation:
        outcome.violation = f"at {cluster.now:g} s: {outcome.violation}"
    return outcome


def _run(cluster: Cluster, faults: Iterable[Fault]) -> None:
    cluster.ranks = [Rank(cluster, number, cluster.scenario.num_ranks) for number in range(cluster.scenario.num_ranks)]
    for rank in cluster.ranks:
        rank.begin()
    heap = cluster.heap
    pop = heapq.heappop
    for fault in faults:
        while heap and heap[0][0] <= fault.time:
            cluster.now, _tie, call, args = pop(heap)
            call(*args)
        cluster.now = fault.time
        inject(cluster, fault)
    heal(cluster)
    cluster.has_ended = True
    deadline = cluster.now + _longest(cluster)
    while heap and not all(rank.is_done for rank in cluster.ranks):
        cluster.now, _tie, call, args = pop(heap)
        call(*args)
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
    told = []
    for rank in cluster.ranks:
        if rank.is_done or rank.crew is None:
            continue
        judge = rank.crew.judge
        members = {number: list(member.in_flight) for number, member in list(judge.members.items())[:8]}
        told.append(f"rank {rank.number} has {len(judge.tasks)} tasks left, at workers {members}")
    return "; ".join(told)
