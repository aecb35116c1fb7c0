"""The number of workers that a loop wants follows its need, in simulated pipelines whose loop changes."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from rpcdataloader.diagnosis.records import Setup
from rpcdataloader.loader.waits import Auto, WantedWorkers
from tests.simulation.pipeline import Pipeline, Scenario, Worker

TASK = 0.2  # seconds of a worker for a batch
STARTUP = 2.0  # seconds until a worker that is asked for takes tasks
LENGTH, LONG = 200.0, 600.0  # seconds until the loop changes
NUM_OFFERED = 16

SCENARIO = Scenario(nodes=(16,), cpu=TASK, spread=0.3, num_batches=10**9)
SCENARIOS = {
    "times that vary by 30 %": SCENARIO,
    "times that vary by 10 %": replace(SCENARIO, spread=0.1),
    "samples that sleep": replace(SCENARIO, cpu=0.001, stall=TASK),
    "slow node first": replace(SCENARIO, nodes=(8, 8), slowness=2.0),
    "fast node first": replace(SCENARIO, nodes=(8, 8), slowness=0.5),
    "a second for each batch": replace(SCENARIO, cpu=1.0),
}

# Workers that the loop needs if they never wait, before and after it changes.
NEEDS = ((12, 3), (3, 12), (8, 2), (2, 8))


class Elastic(Pipeline):
    """A pipeline that has as many of its workers as its loop wants."""

    def __init__(self, scenario: Scenario, consumers: Sequence[float], seed: int, length: float) -> None:
        self.wants = WantedWorkers(Auto(), 1)
        self.decisions: list[tuple[float, int]] = []
        self.waits: list[tuple[float, float]] = []  # times, and seconds until then
        self.present: set[int] = set()
        self.leaving: set[int] = set()
        self.coming: set[int] = set()
        super().__init__(scenario, seed)
        self._consumers, self._length = consumers, length

    def run(self) -> Elastic:
        for number, consumer in enumerate(self._consumers):
            self.after(number * self._length, self._change, consumer)
        while self.now < len(self._consumers) * self._length:
            self.step()
        return self

    def _change(self, consumer: float) -> None:
        self.scenario = replace(self.scenario, consumer=consumer)

    def setup(self) -> Setup:
        nodes = {number: self.workers[number].node for number in sorted(self.present - self.leaving)}
        return replace(super().setup(), workers=nodes, window=len(nodes) * self.scenario.prefetch_factor)

    def _join(self) -> None:
        super()._join()
        self.present.update(range(len(self.workers)))

    def _return(self) -> None:
        assert self._taken is not None
        blocked = self._taken[1]
        super()._return()
        self.waits.append((self.now, blocked))
        self.recorder.setup = self.setup()
        if self.wants.decide(self.now, self.recorder, self._places):
            assert self.wants.most is not None
            self.use(self.wants.most)

    def _places(self) -> dict[int, int]:
        return {number: number for number in self.recorder.setup.workers}

    def use(self, number: int) -> None:
        wanted = set(range(min(number, len(self.workers))))
        self.decisions.append((self.now, len(wanted)))
        leaving = self.present - wanted - self.leaving
        self.leaving |= leaving
        for other in sorted(leaving):
            self._table.worker_draining(other)
            self._leave(self.workers[other])
        coming = wanted - self.present - self.coming
        self.coming |= coming
        for other in sorted(coming):
            self.after(STARTUP, self._come, self.workers[other])
        self._table.resize(len(wanted))

    def _come(self, worker: Worker) -> None:
        worker.idle_since = self.now
        self.coming.discard(worker.number)
        self.present.add(worker.number)
        self._table.worker_joined(worker.number, self.now, worker.node, worker.number)
        self._pump()

    def _leave(self, worker: Worker) -> None:
        if not self._table.in_flight(worker.number):
            self._table.worker_left(worker.number)
            self.leaving.discard(worker.number)
            self.present.discard(worker.number)

    def _answer(self, worker: Worker, *args: Any) -> None:
        super()._answer(worker, *args)
        if worker.number in self.leaving:
            self._leave(worker)


class Seen(NamedTuple):
    """What happened while the loop was the same, from the third decision on."""

    optimum: int
    numbers: list[int]  # decisions
    wait_share: float
    num_reversals: int

    @property
    def share_near(self) -> float:
        """Share of the decisions that are within one worker of the optimum."""
        return sum(abs(number - self.optimum) <= 1 for number in self.numbers) / len(self.numbers)


@functools.cache
def find_optimum(scenario: Scenario) -> int:
    """The least number of workers for which the loop waits less than 5 % of its time."""

    def is_enough(number: int) -> bool:
        first = min(number, scenario.nodes[0])
        fewer = replace(scenario, nodes=(first, number - first)[: len(scenario.nodes)], num_batches=1500)
        pipeline = Pipeline(fewer, 100).run()
        return pipeline.recorder.records().totals.blocked < 0.05 * pipeline.now

    return bisect.bisect_left(range(NUM_OFFERED), True, lo=1, key=is_enough)


def run(scenario: Scenario, needs: Sequence[int], seed: int, length: float = LENGTH) -> list[Seen]:
    task = scenario.cpu + scenario.stall
    consumers = [task / need for need in needs]
    elastic = Elastic(scenario, consumers, seed, length).run()
    found = []
    for number, consumer in enumerate(consumers):
        end = (number + 1) * length
        decisions = [(at, wanted) for at, wanted in elastic.decisions if end - length < at <= end][2:]
        numbers, begin = [wanted for _at, wanted in decisions], decisions[0][0]
        changes = [after - before for before, after in pairwise(numbers) if after != before]
        found.append(
            Seen(
                find_optimum(replace(scenario, consumer=consumer)),
                numbers,
                sum(seconds for at, seconds in elastic.waits if begin < at <= end) / (end - begin),
                sum((before > 0) != (after > 0) for before, after in pairwise(changes)),
            )
        )
    return found


def check(found: Seen) -> None:
    assert abs(found.numbers[0] - found.optimum) <= 1 or found.numbers[0] == NUM_OFFERED, found
    assert found.num_reversals <= 1, found
    if found.optimum < NUM_OFFERED:
        assert found.wait_share <= 0.05, found


@pytest.mark.parametrize(("name", "needs"), [("times that vary by 30 %", (12, 3)), ("slow node first", (2, 8))])
def test_wanted_workers_follow_a_loop_whose_steps_change_fourfold(name, needs):
    for found in run(SCENARIOS[name], needs, 0):
        check(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_wanted_workers_follow_every_loop(name):
    everything = [found for needs in NEEDS for seed in range(5) for found in run(SCENARIOS[name], needs, seed, LONG)]
    near = [found.share_near for found in everything]
    at_third = [abs(found.numbers[0] - found.optimum) <= 1 for found in everything]
    assert sum(at_third) >= 0.9 * len(everything)
    assert sum(near) >= 0.9 * len(everything)
    assert max(found.wait_share for found in everything if found.optimum < NUM_OFFERED) <= 0.05
    # The noise of decisions from 32 batches each turns the number back by one more often.
    if name != "a second for each batch":
        assert sum(found.num_reversals > 1 for found in everything) <= 0.1 * len(everything)


def test_a_loop_whose_workers_suffice_wants_no_others():
    """Noise alone changes nothing."""
    (found,) = run(replace(SCENARIO, spread=0.05), [5], 0)
    assert set(found.numbers) == {5}
