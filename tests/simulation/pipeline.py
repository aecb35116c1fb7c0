"""A pass in virtual time, from the sampler to the consumer, which is recorded as the trainer would record it.

The decisions are those of the real task table. Workers share the cores of their node, replies share the link, receivers
share the interpreter lock, and the consumer takes its time for each batch. What limits such a pass is known, so the
diagnosis can be right or wrong.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.diagnosis.records import Probe, Recorder, Setup
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table
from rpcdataloader.wire.messages import Stages
from tests.simulation.cluster import Clock


@dataclass(frozen=True)
class Scenario:
    """What a pass is made of. Times are seconds per batch, and vary by a factor that is lognormal."""

    nodes: tuple[int, ...] = (4,)  # workers on each
    cores: int = 64  # CPUs of each node
    cpu: float = 0.02  # CPU time in the dataset
    stall: float = 0.0  # time in the dataset without a CPU
    collate: float = 0.001  # CPU time in the collate function
    spread: float = 0.2  # standard deviation of the logarithm of all of these
    slowness: float = 1.0  # factor of the first node's times
    stop_every: float = math.inf  # seconds between two stops of a worker, of each in turn
    stop_seconds: float = 0.0  # length of a stop
    latency: float = 0.0004  # round trip
    link_rate: float = math.inf  # bytes per second into the trainer
    size_bytes: int = 600_000  # of a batch
    receive_cpu: float = 0.0002  # time to copy a batch out of the kernel
    decode_cpu: float = 0.0001  # time in Python for a reply
    holds_lock: bool = False  # the consumer holds the interpreter lock while it computes
    draw: float = 0.00001  # time in the sampler
    own: float = 0.00002  # time of the loader in the consumer's thread
    copy: float = 0.0  # time on the way to the device
    consumer: float = 0.01  # time that the consumer takes
    startup: float = 0.05  # seconds until workers are there
    prefetch_factor: int = 2
    max_in_flight_bytes: int = 2**30
    is_iterable: bool = False
    streams: tuple[int, ...] = ()  # batches of each stream, after which it ends; empty for streams without end
    num_batches: int = 400


class Shared:
    """Something of which each job gets a fair share: cores, a link, a lock."""

    def __init__(self, pipeline: Pipeline, capacity: float, most: float = math.inf) -> None:
        self._pipeline = pipeline
        self._capacity = capacity
        self._most = most  # for one job
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # a heap: when ``_done`` is this, it is called
        self._ids = itertools.count()
        self._done = 0.0  # for each job that was there all the time
        self._since = 0.0
        self._version = 0

    def run(self, work: float, done: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._jobs, (self._done + work, next(self._ids), done))
        self._plan()

    def resize(self, capacity: float) -> None:
        self._advance()
        self._capacity = capacity
        self._plan()

    @property
    def _rate(self) -> float:
        return min(self._most, self._capacity / len(self._jobs)) if self._jobs else 0.0

    def _advance(self) -> None:
        passed, self._since = self._pipeline.now - self._since, self._pipeline.now
        self._done += passed * self._rate

    def _plan(self) -> None:
        self._version += 1
        if rate := self._rate:
            self._pipeline.after(max(0.0, self._jobs[0][0] - self._done) / rate, self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        _done, _id, call = heapq.heappop(self._jobs)
        self._plan()
        call()


@dataclass
class Worker:
    number: int
    node: str
    cpu: Shared
    slowness: float
    inbox: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[int, Stages]] = field(default_factory=deque)
    is_busy: bool = False
    is_sending: bool = False
    idle_since: float = 0.0
    stopped_until: float = 0.0
    received_until: float = 0.0  # in the trainer
    num_left: float = math.inf  # batches of its stream


class Pipeline(Clock):
    """One pass."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        super().__init__()
        self.scenario = scenario
        self.random = random.Random(seed)
        self._link = Shared(self, scenario.link_rate)
        self._lock = Shared(self, 1.0, 1.0)
        self.workers: list[Worker] = []
        for node, count in enumerate(scenario.nodes):
            cpu = Shared(self, scenario.cores, 1.0)
            slowness = scenario.slowness if node == 0 else 1.0
            for _ in range(count):
                self.workers.append(Worker(len(self.workers), f"node{node}", cpu, slowness))
        for worker, num_left in zip(self.workers, scenario.streams, strict=False):
            worker.num_left = num_left
        options = PlanOptions(
            num_workers=len(self.workers),
            is_iterable=scenario.is_iterable,
            prefetch_factor=scenario.prefetch_factor,
            max_in_flight_bytes=scenario.max_in_flight_bytes,
        )
        self._table: Any = Table(options)
        self.recorder = Recorder(contextlib.nullcontext(), 0.0)
        self.recorder.setup = self.setup()
        self._probes: dict[int, Probe | None] = {}
        self._sent_at: dict[tuple[int, int], float] = {}
        self._held: dict[int, tuple[float, Worker]] = {}  # answered and not delivered, in the order of the answers
        self._ahead: int | None = None  # the batch on its way to the device
        self._ahead_done = False
        self._taken: tuple[int, float, float, Worker] | None = None
        self._asked = 0.0
        self._blocked_at: float | None = None
        self._num_drawn = self.num_delivered = 0
        self._due_at = math.inf
        if scenario.stop_every < math.inf:
            self.after(scenario.stop_every, self._stop, 0)
        self.after(scenario.startup, self._join)
        self._ask()

    def setup(self) -> Setup:
        scenario = self.scenario
        window = len(self.workers) * scenario.prefetch_factor
        nodes = {worker.number: worker.node for worker in self.workers}
        return Setup(nodes, window, scenario.prefetch_factor, scenario.max_in_flight_bytes)

    def run(self) -> Pipeline:
        """To the end of the pass."""
        while self.num_delivered < self.scenario.num_batches:
            self.step()
        return self

    def vary(self, seconds: float) -> float:
        spread = self.scenario.spread
        return seconds * math.exp(self.random.gauss(-(spread**2) / 2, spread)) if seconds else 0.0

    # The consumer

    def _ask(self) -> None:
        self._asked, self._blocked_at = self.now, None
        self._draw()

    def _draw(self) -> None:
        """Fill the window, then take what is there; in the consumer's thread."""
        # A stream that ends drops tasks, so more are drawn than come back.
        if self._table.wants_input and (self.scenario.streams or self._num_drawn < self.scenario.num_batches):
            seconds = self.vary(self.scenario.draw)
            self.after(seconds, self._drawn, seconds)
        elif self._taken is None:
            self._take()
        else:
            self.after(self.scenario.own, self._return)

    def _drawn(self, seconds: float) -> None:
        if self._table.wants_input:  # unless a stream has ended
            number = self._table.add_task(None)
            self._num_drawn += 1
            is_probe = self.now >= self.recorder.next_probe
            self._probes[number] = self.recorder.probe(self.now, seconds, number) if is_probe else None
            self._pump()
        self._draw()

    def _take(self) -> None:
        self._carry()
        if self._ahead is None or not self._ahead_done:
            if self._blocked_at is None:
                self._blocked_at = self.now
            return
        number, self._ahead = self._ahead, None
        blocked = 0.0 if self._blocked_at is None else self.now - self._blocked_at
        self._blocked_at = None
        _answered, worker = self._held.pop(number)
        later = next(iter(self._held.values()), None)
        ready = 0.0 if later is None else min(blocked, self.now - later[0])
        self._taken = number, blocked, ready, worker
        self._carry()
        self._draw()

    def _carry(self) -> None:
        """Begin to copy what is delivered next."""
        if self._ahead is None and (task := self._table.pop_deliverable()) is not None:
            self._ahead, self._ahead_done = task.number, False
            seconds = self.vary(self.scenario.copy)
            if (probe := self._probes[task.number]) is not None:
                probe.copy = seconds
            if seconds:
                self.after(seconds, self._carried)
            else:
                self._ahead_done = True
            self._pump()

    def _carried(self) -> None:
        self._ahead_done = True
        if self._blocked_at is not None:
            self._take()

    def _return(self) -> None:
        assert self._taken is not None
        (number, blocked, ready, worker), self._taken = self._taken, None
        waited = self.now - self._asked
        if (probe := self._probes.pop(number)) is not None:
            probe.size_bytes = self.scenario.size_bytes
        ready = ready if blocked else 0.0
        self.recorder.delivered(self.now, waited, blocked, ready=ready, worker=worker.number, probe=probe)
        self.num_delivered += 1
        seconds = self.vary(self.scenario.consumer)
        if self.scenario.holds_lock:
            self._lock.resize(0.0)
        self.after(seconds, self._computed)

    def _computed(self) -> None:
        if self.scenario.holds_lock:
            self._lock.resize(1.0)
        self._ask()

    # From the table to a worker

    def _join(self) -> None:
        for worker in self.workers:
            worker.idle_since = self.now
            self._table.worker_joined(worker.number, self.now, worker.node, worker.number)
        self._pump()

    def _pump(self) -> None:
        for number, task, _payload in self._table.assign(self.now):
            self._sent_at[number, task] = self.now
            self.after(self.scenario.latency / 2, self._request, self.workers[number], task)
        if (due := self._table.due(self.now)) < self._due_at:
            self._due_at = max(self.now, due)
            self.at(self._due_at, self._due)

    def _due(self) -> None:
        self._due_at = math.inf
        self._pump()

    # A worker

    def _request(self, worker: Worker, task: int) -> None:
        worker.inbox.append(task)
        if not worker.is_busy:
            self._begin_task(worker, self.now - worker.idle_since)

    def _begin_task(self, worker: Worker, idle: float) -> None:
        worker.is_busy = True
        task = worker.inbox.popleft()
        if not worker.num_left:
            worker.is_busy = False
            self.after(self.scenario.latency / 2, self._end_stream, worker, task)
            return
        worker.num_left -= 1
        scenario, slowness = self.scenario, worker.slowness
        fetch, stall, collate = [
            self.vary(seconds) * slowness for seconds in (scenario.cpu, scenario.stall, scenario.collate)
        ]
        times = {"idle": idle, "cpu": fetch + collate}
        began = self.now

        def fetched_cpu() -> None:
            self.after(stall, fetched)

        def fetched() -> None:
            times["fetch"] = self.now - began
            worker.cpu.run(collate, collated)

        def collated() -> None:
            stopped = max(0.0, worker.stopped_until - self.now)
            self.after(stopped, ended, stopped)

        def ended(stopped: float) -> None:
            total = self.now - began
            times["collate"] = total - times["fetch"]
            times["runqueue"] = max(0.0, total - stall - fetch - collate - stopped)
            worker.outbox.append((task, Stages(**times)))
            self._send(worker)
            worker.is_busy = False
            worker.idle_since = self.now
            if worker.inbox:
                self._begin_task(worker, 0.0)

        worker.cpu.run(fetch, fetched_cpu)

    def _stop(self, number: int) -> None:
        worker = self.workers[number % len(self.workers)]
        worker.stopped_until = self.now + self.scenario.stop_seconds
        self.after(self.scenario.stop_every, self._stop, number + 1)

    def _send(self, worker: Worker) -> None:
        if worker.is_sending or not worker.outbox:
            return
        worker.is_sending = True
        task, stages = worker.outbox.popleft()
        began = self.now

        def sent() -> None:
            worker.is_sending = False
            arrived = began + self.scenario.latency / 2 + 1e-6
            self.after(self.scenario.latency / 2 + 1e-6, self._arrive, worker, task, stages, arrived)
            self._send(worker)

        if self.scenario.link_rate < math.inf:
            self._link.run(self.scenario.size_bytes, sent)
        else:
            sent()

    # Back in the trainer

    def _end_stream(self, worker: Worker, task: int) -> None:
        # Later requests, on their way or in the inbox, are answered in the same way, and ignored.
        self._table.ended(worker.number, task, self.now)

    def _arrive(self, worker: Worker, task: int, stages: Stages, arrived: float) -> None:
        scenario = self.scenario
        received, cpu = self.now, scenario.decode_cpu
        if scenario.holds_lock:
            cpu += scenario.receive_cpu
        else:
            arrived = max(arrived, worker.received_until)  # a receiver reads one reply after the other
            received = worker.received_until = max(received, worker.received_until) + scenario.receive_cpu
        answer = functools.partial(self._answer, worker, task, stages, cpu, arrived, received)
        self.after(received - self.now, self._lock.run, cpu, answer)

    def _answer(
        self, worker: Worker, task: int, stages: Stages, decode: float, arrived: float, received: float
    ) -> None:
        scenario, now = self.scenario, self.now
        seconds = stages.fetch + stages.collate
        self.recorder.tasks[worker.number].append(seconds)
        self.recorder.received(arrived, received)
        counts = self._table.replied(worker.number, task, size_bytes=scenario.size_bytes, task_seconds=seconds, now=now)
        sent_at = self._sent_at.pop((worker.number, task))
        if counts:
            self._held[task] = now, worker
            if (probe := self._probes[task]) is not None:
                probe.assigned = probe.sent = sent_at
                probe.arrived, probe.received, probe.answered = arrived, received, now
                probe.receive_cpu, probe.decode_cpu = scenario.receive_cpu, scenario.decode_cpu
                probe.lock = max(0.0, now - received - decode)
                probe.stages = stages
        self._pump()
        if self._blocked_at is not None:
            self._take()
