"""Consumers, one for each rank: they begin passes, wait for batches, pause, leave early, and go on where they were."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.simulation.cluster import Cluster, Session
from tests.simulation.passes import Pass


class Rank:
    """A training process."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.world_size = cluster.scenario.num_ranks
        # Sessions on nodes, by name.
        self.sessions = {node.name: Session(node) for node in cluster.nodes.values() if node.answers}
        self.crew: Pass | None = None
        self.is_waiting = self.is_done = False
        self.num_sleeps = 0
        self.paused_until = 0.0
        self.generation = 0  # of what is to be called later

    def seconds(self) -> float:
        """What a task takes."""
        scenario = self.cluster.scenario
        return scenario.seconds * (1.0 + scenario.spread * (2.0 * self.cluster.random.random() - 1.0))

    def size(self, result: object) -> int:
        """Bytes of a batch."""
        return 1000 + hash(result) % 7 * 150

    # Passes

    def begin(self, payloads: list[int] | None = None) -> None:
        """Begin a pass with new workers."""
        cluster, scenario = self.cluster, self.cluster.scenario
        random = cluster.random
        if not any(node.answers for node in cluster.nodes.values()):
            self.later(1.0 + 5 * random.random(), lambda: self.begin(payloads))  # the first contact must succeed
            return
        names = list(cluster.nodes)
        dealt = [
            name for index in range(max(scenario.offered)) for name in names if index < cluster.nodes[name].offered
        ]
        homes = dealt[self.number :: self.world_size] or [dealt[self.number % len(dealt)]]
        if random.random() < 0.3:
            homes = homes[: random.randint(1, len(homes))]
        others = [name for name in names if name not in homes]
        if random.random() < 0.3:
            others = others[: random.randint(0, len(others))]
        options = replace(
            scenario.options,
            num_workers=len(homes),
            label=f"rank {self.number}: " if self.world_size > 1 else "",
            rank=self.number,
            world_size=self.world_size,
            num_offered=sum(cluster.nodes[name].offered for name in (*dict.fromkeys(homes), *others)),
        )
        payloads = self.new_payloads() if payloads is None else payloads
        self._start(options, homes, others, payloads=payloads, lengths=self.new_lengths(len(homes)))

    def _start(self, *args: Any, **options: Any) -> None:
        self.cluster.num_passes += 1
        self.crew = Pass(self.cluster, self, *args, **options)
        self._go_on()

    def _go_on(self) -> None:
        self.generation += 1
        self.is_waiting = False
        assert self.crew is not None
        self.advance(self.crew, wants_input=True)
        self.consume()

    def new_payloads(self) -> list[int]:
        scenario = self.cluster.scenario
        return [] if scenario.options.is_iterable else self.cluster.new_ids(scenario.num_tasks)

    def new_lengths(self, num_streams: int) -> list[int]:
        scenario = self.cluster.scenario
        if not scenario.options.is_iterable:
            return []
        return [self.cluster.random.randint(0, scenario.num_tasks) for _ in range(num_streams)]

    def next_pass(self) -> None:
        """After one that has ended, or was left."""
        crew = self.crew
        assert crew is not None
        if self.cluster.has_ended:
            self.is_done = True
            crew.leave()
        elif self.cluster.scenario.is_persistent and crew.engine.failure is None:
            self.cluster.num_passes += 1
            crew.begin_epoch(self.new_payloads(), self.new_lengths(len(crew.lengths)))
            self._go_on()
        else:
            crew.leave()
            self.later(0.5 + self.cluster.random.random(), self.begin)

    def later(self, delay: float, call: object) -> None:
        """Call something after a while, unless something else comes first."""
        self.generation += 1
        self.is_waiting = False
        self.cluster.after(delay, self._call, self.generation, call)

    def _call(self, generation: int, call: object) -> None:
        if generation == self.generation:
            call()  # type: ignore[operator]

    def leave(self) -> None:
        """Leave the pass early."""
        if self.crew is not None and not self.crew.is_closed:
            self.next_pass()

    def resume(self) -> None:
        """Save the pass, and go on in a new one; of a map-style dataset with other workers."""
        crew = self.crew
        if crew is None or crew.is_closed:
            return
        crew.leave()
        self.later(0.1, lambda: self._resume(crew))

    def _resume(self, crew: Pass) -> None:
        if crew.lengths:
            names = list(self.cluster.nodes)
            self.cluster.random.shuffle(names)
            homes = [names[stream % len(names)] for stream in range(len(crew.lengths))]
            saved = {"lengths": crew.lengths, "positions": crew.delivered, "turn": crew.turn}
            self._start(crew.options, homes, names[len(homes) :], payloads=[], **saved)
        else:
            self.begin(sorted(crew.undelivered))

    # The consumer

    def advance(self, crew: Pass, *, wants_input: bool) -> None:
        crew.driver.advance(wants_input, self.cluster.now)

    def consume(self) -> None:
        """Take what is there; what comes later wakes it."""
        crew, cluster = self.crew, self.cluster
        assert crew is not None
        driver, engine, now = crew.driver, crew.engine, cluster.now
        num_naps = 0
        if driver.sleeps_until >= 0:
            self._wake_up(crew)
        while self.paused_until <= now:
            is_over, delivery = False, None
            with driver.condition:
                delivery = driver.take()
                if delivery is None:
                    is_over = engine.failure is not None or engine.table.finished
                    if not is_over and not engine.table.wants_input and (until := driver.falls_asleep(now, None)) > now:
                        self._sleep(until)
                        return
                wants_input = not is_over and engine.table.wants_input
            if is_over:
                if engine.failure is None:
                    crew.check_complete()
                self.next_pass()
                return
            if delivery is None and driver.sleeps_until >= 0:
                num_naps += 1
                assert num_naps <= 5, f"at {now} the engine wants to be asked again and again"
                self._wake_up(crew)
                continue
            if delivery is not None:
                crew.take(delivery)
                driver.taken = None
                num_naps = 0
            self.advance(crew, wants_input=wants_input)
            if delivery is not None and cluster.scenario.step:
                self.later(cluster.scenario.step, self.consume)
                return
        self.later(self.paused_until - now, self.consume)

    def _wake_up(self, crew: Pass) -> None:
        with crew.driver.condition:
            crew.driver.wakes_up(self.cluster.now)
            wants_input = crew.engine.failure is None and crew.engine.table.wants_input
        self.advance(crew, wants_input=wants_input)

    def _sleep(self, until: float) -> None:
        self.is_waiting = True
        self.num_sleeps += 1
        if until < math.inf:
            self.cluster.at(until, self._slept, self.num_sleeps)

    def _slept(self, number: int) -> None:
        if number == self.num_sleeps:
            self.wake()

    def wake(self) -> None:
        """What this waits for may be there."""
        if self.is_waiting:
            self.is_waiting = False
            self.consume()
