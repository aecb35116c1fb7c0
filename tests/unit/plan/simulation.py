"""A pass over workers that take simulated time, driven as the loader drives its table."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table


class Simulation:
    """Workers, the messages between, and a consumer that takes each batch as soon as it is there.

    Args:
        seconds: What a task takes that begins at this worker at this time; infinite for one that hangs.
        spread: Times vary by so much, evenly.
        options: Of the scheduler.
    """

    def __init__(self, num_workers: int, seconds: Callable[[int, float], float], *, spread=0.3, seed=0, **options):
        self.scheduler = Table(PlanOptions(num_workers, **options))
        self.seconds = seconds
        self.spread = spread
        self.random = random.Random(seed)
        self.now = 0.0
        self.delivered: list[int] = []
        self.ended: list[int] = []  # workers over their time
        self.num_sent: Counter[int] = Counter()
        self.queues: dict[int, list[int]] = {worker: [] for worker in range(num_workers)}
        self.events: list[tuple[float, int, int, int, float]] = []  # answers: time, tie, worker, number, task time
        self.ties = itertools.count()
        for worker in self.queues:
            self.scheduler.worker_joined(worker, 0.0)

    def run(self, until: float, num_tasks: float = math.inf) -> None:
        """Go on until this time, or until everything is delivered."""
        while True:
            for worker, number in self.scheduler.timed_out(self.now):
                self.end(worker, number)
            self.drive(num_tasks)
            if self.scheduler.finished:
                return
            event = self.events[0][0] if self.events else math.inf
            due = self.scheduler.due(self.now)
            assert due > self.now
            self.now = min(event, due, until)
            if self.now == until:
                return
            if event <= self.now:
                self.answer(*heapq.heappop(self.events)[2:])

    def end(self, worker: int, number: int) -> None:
        self.ended.append(worker)
        self.scheduler.worker_left(worker)
        assert not self.scheduler.blame(number, "it died")
        del self.queues[worker]

    def drive(self, num_tasks: float) -> None:
        scheduler = self.scheduler
        while True:
            while (task := scheduler.pop_deliverable()) is not None:
                self.delivered.append(task.number)
            while scheduler.wants_input:
                if len(self.delivered) + len(scheduler.tasks) == num_tasks:
                    scheduler.end_of_input()
                else:
                    scheduler.add_task(None)
            if (assigned := scheduler.assign(self.now)) is None:
                return
            worker, number = assigned
            self.num_sent[number] += 1
            self.queues[worker].append(number)
            if len(self.queues[worker]) == 1:
                self.begin(worker)

    def begin(self, worker: int) -> None:
        seconds = self.seconds(worker, self.now) * self.random.uniform(1 - self.spread, 1 + self.spread)
        if seconds < math.inf:
            event = (self.now + seconds, next(self.ties), worker, self.queues[worker][0], seconds)
            heapq.heappush(self.events, event)

    def answer(self, worker: int, number: int, seconds: float) -> None:
        assert self.queues[worker].pop(0) == number
        task = self.scheduler.replied(worker, number, size_bytes=1, task_seconds=seconds, now=self.now)
        for loser in [] if task is None else task.holders:
            self.cancel(loser.id, number)
        if self.queues[worker]:
            self.begin(worker)

    def cancel(self, worker: int, number: int) -> None:
        """What is running runs to its end; what is behind it is dropped, which the worker says when it is there."""
        if self.queues[worker].index(number) > 0 and self.seconds(worker, self.now) < math.inf:
            self.queues[worker].remove(number)
            assert not self.scheduler.replied(worker, number, size_bytes=0, task_seconds=None, now=self.now)
