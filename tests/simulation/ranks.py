"""Consumers, one for each rank: they begin passes, wait for batches, pause, leave early, and go on where they were."""

from __future__ import annotations

from collections import deque

from rpcdataloader.plan.actions import PlanOptions
from tests.simulation.cluster import Cluster, Worker
from tests.simulation.judge import ViolationError
from tests.simulation.passes import Pass


class Rank:
    """A training process."""

    def __init__(self, cluster: Cluster, number: int, world_size: int) -> None:
        self.cluster = cluster
        self.number = number
        self.world_size = world_size
        # Sessions on nodes, by name: the incarnation of the node.
        self.sessions = {node.name: node.incarnation for node in cluster.nodes.values() if node.answers}
        self.lost: deque[Worker] = deque(maxlen=8)
        self.crew: Pass | None = None
        self.is_waiting = self.is_done = False
        self.wakes_at = -1.0
        self.paused_until = 0.0
        self.num_begun = 0
        self.next_id = 0
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
        options = PlanOptions(
            num_workers=len(homes),
            is_iterable=scenario.is_iterable,
            prefetch_factor=scenario.prefetch_factor,
            in_order=scenario.in_order,
            max_in_flight_bytes=scenario.max_in_flight_bytes,
            max_retries=scenario.max_retries,
            task_timeout=scenario.task_timeout,
            reconnect_timeout=scenario.reconnect_timeout,
            connect_timeout=scenario.connect_timeout,
            marks_last_try=scenario.marks_last_try,
            leaves_out=scenario.leaves_out,
            label=f"rank {self.number}: " if self.world_size > 1 else "",
            rank=self.number,
            world_size=self.world_size,
            num_offered=sum(cluster.nodes[name].offered for name in (*dict.fromkeys(homes), *others)),
            max_workers=scenario.max_workers,
        )
        self._start(
            options,
            homes,
            others,
            payloads if payloads is not None else self.new_payloads(),
            self.new_lengths(len(homes)),
        )

    def _start(
        self,
        options: PlanOptions,
        homes: list[str],
        others: list[str],
        payloads: list[int],
        lengths: list[int],
        positions: list[int] | None = None,
        turn: int = 0,
    ) -> None:
        self.num_begun += 1
        self.cluster.num_passes += 1
        self.crew = Pass(
            self.cluster,
            self,
            options,
            homes,
            others,
            payloads=payloads,
            lengths=lengths,
            positions=positions or [0] * len(lengths),
            turn=turn,
        )
        self._go_on()

    def _go_on(self) -> None:
        self.generation += 1
        self.is_waiting = False
        assert self.crew is not None
        self.crew.draw()
        self.consume()

    def new_payloads(self) -> list[int]:
        if self.cluster.scenario.is_iterable:
            return []
        num = self.cluster.scenario.num_tasks
        return self.cluster.new_ids(num)

    def new_lengths(self, num_streams: int) -> list[int]:
        scenario = self.cluster.scenario
        if not scenario.is_iterable:
            return []
        return [self.cluster.random.randint(0, scenario.num_tasks) for _ in range(num_streams)]

    def next_pass(self) -> None:
        """After one that has ended, or was left."""
        crew = self.crew
        assert crew is not None
        if self.cluster.has_ended:
            self.is_done = True
            crew.close()
        elif self.cluster.scenario.is_persistent and crew.engine.failure is None:
            self.cluster.num_passes += 1
            crew.begin_epoch(self.new_payloads(), self.new_lengths(len(crew.lengths)))
            self._go_on()
        else:
            crew.close()
            self.later(0.5 + self.cluster.random.random(), self.begin)

    def later(self, delay: float, call: object) -> None:
        """Call something after a while, unless something else comes first."""
        self.generation += 1
        self.is_waiting = False
        self.cluster.at(delay, self._call, self.generation, call)

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
        crew.close()
        self.later(0.1, lambda: self._resume(crew))

    def _resume(self, crew: Pass) -> None:
        if crew.lengths:
            names = list(self.cluster.nodes)
            self.cluster.random.shuffle(names)
            homes = [names[stream % len(names)] for stream in range(len(crew.lengths))]
            others = names[len(homes) :]
            self._start(crew.options, homes, others, [], crew.lengths, crew.delivered, crew.turn)
        else:
            self.begin(sorted(crew.undelivered))

    # The consumer

    def consume(self) -> None:
        """Take what is there; what comes later wakes it."""
        crew, cluster = self.crew, self.cluster
        assert crew is not None
        engine, judge, now = crew.engine, crew.judge, cluster.now
        self.wakes_at = -1.0
        num_ticks = 0
        while True:
            if self.paused_until > now:
                self.later(self.paused_until - now, self.consume)
                return
            if engine.failure is not None:
                self.next_pass()
                return
            has_deliverable = engine.table.has_deliverable
            delivery = engine.deliver()
            if (delivery is not None) != has_deliverable:
                raise ViolationError(f"there is something to deliver: {has_deliverable}, but {delivery}")
            if delivery is not None:
                crew.take(delivery)
                crew.draw()
                if cluster.scenario.step:
                    self.later(cluster.scenario.step, self.consume)
                    return
                continue
            if judge.deliverable() is not None:
                raise ViolationError(f"task {judge.deliverable()} is answered, and is not delivered")
            if engine.table.finished:
                crew.check_complete()
                self.next_pass()
                return
            if judge.is_finished:
                raise ViolationError("all is delivered, and the pass does not end")
            if engine.table.wants_input:
                crew.draw()
                continue
            engine.consumer_waits(now)
            judge.waiting_since = now if judge.waiting_since is None else judge.waiting_since
            due = engine.due(now)
            judge.check_due(due, now)
            if due is None or due > now:
                break
            num_ticks += 1
            if num_ticks > 5:
                raise ViolationError(f"at {now} the engine wants to be asked again and again")
            engine.tick(now)
            judge.ticked(engine.failure, now)
            crew.acts()
        self.is_waiting = True
        if due is not None:
            self.wakes_at = due
            cluster.at(due - now, self.wake_at, due)

    def wake(self) -> None:
        """Something has happened while this waits."""
        crew = self.crew
        assert crew is not None
        table, failure = crew.engine.table, crew.engine.failure
        if table.has_deliverable or table.finished or table.wants_input or failure is not None:
            self.is_waiting = False
            self.consume()
            return
        due = crew.engine.due(self.cluster.now)
        if due is not None and (due < self.wakes_at or self.wakes_at < 0):
            self.wakes_at = due
            self.cluster.at(max(0.0, due - self.cluster.now), self.wake_at, due)

    def wake_at(self, due: float) -> None:
        if self.is_waiting and due == self.wakes_at:
            self.is_waiting = False
            self.consume()
