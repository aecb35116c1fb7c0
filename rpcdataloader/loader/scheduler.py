"""The task table of one pass over a loader: which batch is where, who gets the next one, which may be delivered.

Pure: events go in, decisions come out, time is passed in, and the caller holds one lock around every call. The
invariant: each task that was added and not delivered is in exactly one of three places, waiting for a worker, in
flight at one worker, or answered. Delivered tasks leave nothing behind, so an event costs the same in the millionth
batch as in the first.

The driver's loop, whenever something has changed::

    while (worker := scheduler.choose_worker(now)) is not None:
        number = scheduler.next_requeued()
        if number is None:
            try:
                number = scheduler.add_task(next(sampler))
            except StopIteration:
                scheduler.end_of_input()
                break
        scheduler.dispatch(number, worker, now)
        send(worker, scheduler.payload(number))

The sampler is user code, so a driver that wants it outside of its lock may also call :meth:`Scheduler.add_task` ahead
of time, while :attr:`Scheduler.wants_input` is true; the loop then ends when ``next_requeued`` returns None.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.loader.budget import ByteBudget

W = TypeVar("W", bound=Hashable)

# Weight of the newest measurement in an average task time. The second answer of a worker replaces the first, which says
# more about imports and cold caches than about speed.
_SMOOTHING = 0.25

# A running task is overdue by far when it takes this many times its worker's average. Wrong alarms are harmless: the
# worker only gets no second task while others may take it. Exponentially distributed times pass 4 in 2 % of tasks. A
# measurement counts for at most that much as well, so that one outlier does not make a slow worker.
_OVERDUE_FACTOR = 4.0

# Shorter times count as this: an average of zero could never grow again.
_CLOCK_SECONDS = 1e-6

# A worker is passed over when waiting for a full one is expected to be this many times faster. Without, the slowest
# worker dictates the pace: it holds a task that all others, with the window full, come to wait for. In a simulation
# of seven workers and one that is 20 times slower, whose times vary by 30 %: 0.75 batches per unit of time without,
# 6.0 with.
_PATIENCE = 1.5

# What is known of a worker is old when it was idle for this many of its own task times. It is tried again then, if it
# was passed over, and its next answer replaces what was known.
_STALE_FACTOR = 8.0


@dataclass(slots=True)
class _Task:
    payload: Any
    size_bytes: int | None = None  # of the reply; None until it is there
    num_deaths: int = 0  # of workers that were at work on it


@dataclass(slots=True, eq=False)
class _Worker(Generic[W]):
    id: W
    order: int  # of joining, which breaks ties
    since: float  # when the first task in flight began or, without one, when the worker fell idle
    in_flight: dict[int, None] = field(default_factory=dict)  # an ordered set of task numbers; the first one runs
    task_seconds: float | None = None  # average of recent answers
    num_averaged: int = 0  # how many answers are in it
    draining: bool = False


class Scheduler(Generic[W]):
    """Decide which worker gets which task, and in which order the answers are delivered.

    Args:
        num_workers: With ``prefetch_factor``, the size of the window: ``num_workers * prefetch_factor`` tasks at most
            are undelivered at any time, so that the sampler is consumed as far ahead as by torch's loader. It does
            not follow workers that join or leave.
        prefetch_factor: Tasks in flight per worker at most.
        in_order: Deliver by number; otherwise in the order of the answers.
        max_in_flight_bytes: Answered and not delivered bytes, plus the estimated bytes of what is in flight, stay
            below it; the task that is next to be delivered is always allowed. Nothing is known before the first answer,
            so only the window limits the first tasks, as in torch's loader.
        batch_size_bytes: Estimate to start with, for example that of the epoch before.
        max_retries: A task at which so many workers died is not given to another one.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        prefetch_factor: int = 2,
        in_order: bool = True,
        max_in_flight_bytes: int = 2**30,
        batch_size_bytes: float = 0.0,
        max_retries: int = 3,
    ) -> None:
        for name, value in (
            ("num_workers", num_workers),
            ("prefetch_factor", prefetch_factor),
            ("max_in_flight_bytes", max_in_flight_bytes),
            ("max_retries", max_retries),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._window = num_workers * prefetch_factor
        self._prefetch_factor = prefetch_factor
        self._max_retries = max_retries
        self._in_order = in_order
        self._budget = ByteBudget(max_in_flight_bytes, batch_size_bytes)

        self._tasks: dict[int, _Task] = {}  # every undelivered task
        self._num_added = 0
        self._ended = False
        self._waiting: list[int] = []  # heap
        self._answered: deque[int] = deque()  # in the order of the answers; unused when in_order
        self._next_delivery = 0  # used when in_order

        self._workers: dict[W, _Worker[W]] = {}
        # Those that may be given a task. While the consumer keeps up all others are full, and when it does not the
        # window is: choosing looks at few workers however many there are.
        self._open: dict[W, _Worker[W]] = {}
        self._num_joined = 0
        self._task_seconds: float | None = None  # average over all workers, expected of those without an answer so far

    # Workers

    def worker_joined(self, worker: W, now: float) -> None:
        """A worker may be given tasks from now on. One that left may join again, with nothing remembered of it."""
        if worker in self._workers:
            raise LocalProtocolError(f"{worker!r} has joined already")
        self._workers[worker] = self._open[worker] = _Worker(worker, self._num_joined, since=now)
        self._num_joined += 1

    def worker_draining(self, worker: W) -> None:
        """A worker gets no new tasks; it still answers those that it has."""
        self._get(worker).draining = True
        self._open.pop(worker, None)

    def worker_left(self, worker: W, now: float) -> list[int]:  # noqa: ARG002  every event carries its time
        """A worker is gone. Its unanswered tasks wait for another one; returns their numbers, oldest first."""
        record = self._get(worker)
        del self._workers[worker]
        self._open.pop(worker, None)
        for number in record.in_flight:
            heapq.heappush(self._waiting, number)
        self._budget.num_in_flight -= len(record.in_flight)
        return list(record.in_flight)

    def blame(self, number: int) -> bool:
        """A worker died at work on this task, which waits for another one now.

        Returns:
            Whether that was one too many: the task counts as answered, and what is delivered for it is an error.
        """
        task = self._tasks[number]
        task.num_deaths += 1
        if task.num_deaths < self._max_retries:
            return False
        self._waiting.remove(number)
        heapq.heapify(self._waiting)
        task.size_bytes = 0
        if not self._in_order:
            self._answered.append(number)
        return True

    def in_flight(self, worker: W) -> list[int]:
        """Tasks that a worker has not answered, oldest first; it is at work on the first."""
        return list(self._get(worker).in_flight)

    # Tasks, from the sampler to a worker

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` is allowed: the input has not ended and the window has room."""
        return not self._ended and len(self._tasks) < self._window

    def add_task(self, payload: Any) -> int:
        """Add the next task of the input; returns its number. ``payload`` is kept until the task is delivered."""
        if not self.wants_input:
            state = "the input has ended" if self._ended else f"{len(self._tasks)} tasks are not delivered yet"
            raise LocalProtocolError(f"no task can be added: {state}")
        number = self._num_added
        self._num_added += 1
        self._tasks[number] = _Task(payload)
        heapq.heappush(self._waiting, number)
        return number

    def end_of_input(self) -> None:
        """The sampler has no more tasks."""
        self._ended = True

    def payload(self, number: int) -> Any:
        """What was added under ``number``, until it is delivered."""
        task = self._tasks.get(number)
        if task is None:
            raise LocalProtocolError(f"task {number} was never added or is delivered already")
        return task.payload

    def choose_worker(self, now: float) -> W | None:
        """The worker to give the next task to, or None while none may be sent.

        That task is :meth:`next_requeued`, or else a new one. It goes where it is expected to be finished first; while
        nothing is known that is where the fewest are in flight.
        """
        if not self._open or not self._may_send():
            return None
        if len(self._open) == 1:
            (best,) = self._open.values()
        else:
            best = min(self._open.values(), key=lambda worker: self._rank(worker, now))
        return None if self._had_better_wait(best, now) else best.id

    def _rank(self, worker: _Worker[W], now: float) -> tuple[bool, float, int]:
        return self._is_overdue(worker, now), self._expect_finish(worker), worker.order

    def assign(self, now: float) -> tuple[W, int] | None:
        """Send the lowest task that waits; returns the worker and the number, None while none may be sent."""
        number = self.next_requeued()
        worker = None if number is None else self.choose_worker(now)
        if number is None or worker is None:
            return None
        self.dispatch(number, worker, now)
        return worker, number

    def next_requeued(self) -> int | None:
        """The lowest number that waits for a worker: it came back from one that left, or was added ahead of time."""
        return self._waiting[0] if self._waiting else None

    def dispatch(self, number: int, worker: W, now: float) -> None:
        """The task goes to the worker: it is the lowest that waits, and the worker one that may be given a task."""
        record = self._open.get(worker)
        if record is None:
            raise LocalProtocolError(f"{worker!r} may not be given a task: it is absent, draining or full")
        if number != self.next_requeued():
            raise LocalProtocolError(f"task {number} is not the next one to send, which is {self.next_requeued()}")
        heapq.heappop(self._waiting)
        if not record.in_flight:
            if self._is_stale(record, now):
                record.num_averaged = min(record.num_averaged, 1)
            record.since = now
        record.in_flight[number] = None
        self._budget.num_in_flight += 1
        if len(record.in_flight) == self._prefetch_factor:
            del self._open[worker]

    # Answers, from a worker to the consumer

    def replied(self, worker: W, number: int, *, size_bytes: int, task_seconds: float, now: float) -> bool:
        """A worker answered a task.

        Args:
            worker: Whoever answered; one that left is no error.
            number: The task.
            size_bytes: What the answer occupies in this process.
            task_seconds: Working time, without the time that the task was queued or travelling.
            now: Time of the answer.

        Returns:
            False if the task is not in flight at that worker (any more): ignore the answer.
        """
        if not 0 <= number < self._num_added:
            raise LocalProtocolError(f"task {number} was never added")
        if not (size_bytes >= 0 and 0 <= task_seconds < math.inf):
            raise LocalProtocolError(f"task {number} cannot have {size_bytes} bytes and {task_seconds} seconds")
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return False
        del record.in_flight[number]
        record.since = now
        if not record.draining:
            self._open[worker] = record
        record.task_seconds = _smooth(record.task_seconds if record.num_averaged > 1 else None, task_seconds)
        record.num_averaged += 1
        self._task_seconds = _smooth(self._task_seconds, task_seconds)
        self._tasks[number].size_bytes = size_bytes
        self._budget.answered(size_bytes)
        if not self._in_order:
            self._answered.append(number)
        return True

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`pop_deliverable` gives a task now."""
        if not self._in_order:
            return bool(self._answered)
        task = self._tasks.get(self._next_delivery)
        return task is not None and task.size_bytes is not None

    def pop_deliverable(self) -> int | None:
        """Take the next task to deliver out of the table; None while it is not answered."""
        if not self.has_deliverable:
            return None
        number = self._next_delivery if self._in_order else self._answered.popleft()
        self._budget.delivered(self._tasks.pop(number).size_bytes or 0)
        self._next_delivery += 1
        return number

    @property
    def finished(self) -> bool:
        """Whether the input has ended and every task is delivered."""
        return self._ended and not self._tasks

    @property
    def batch_size_bytes(self) -> float:
        """Estimated size of a batch, 0 before the first answer."""
        return self._budget.batch_size_bytes

    # Helpers

    def _get(self, worker: W) -> _Worker[W]:
        record = self._workers.get(worker)
        if record is None:
            raise LocalProtocolError(f"{worker!r} has not joined, or has left")
        return record

    def _may_send(self) -> bool:
        """Whether window and bytes allow one more task in flight."""
        if self._waiting:
            number = self._waiting[0]
        elif self.wants_input:
            number = self._num_added
        else:
            return False
        # What the consumer waits for must never be held back, or nothing would ever free a byte.
        if self._in_order:
            needed_next = number == self._next_delivery
        else:
            needed_next = not self._budget.num_in_flight and not self._answered
        return needed_next or self._budget.has_room

    def _expect_seconds(self, worker: _Worker[W]) -> float | None:
        return self._task_seconds if worker.task_seconds is None else worker.task_seconds

    def _expect_finish(self, worker: _Worker[W]) -> float:
        """Seconds until the worker would answer one more task; in units of a task while nothing is known."""
        expected_seconds = self._expect_seconds(worker)
        return (len(worker.in_flight) + 1) * (1.0 if expected_seconds is None else expected_seconds)

    def _is_overdue(self, worker: _Worker[W], now: float) -> bool:
        expected_seconds = self._expect_seconds(worker)
        if expected_seconds is None or not worker.in_flight:
            return False
        return now - worker.since > _OVERDUE_FACTOR * expected_seconds

    def _is_stale(self, worker: _Worker[W], now: float) -> bool:
        return not worker.in_flight and now - worker.since > _STALE_FACTOR * self._expect_finish(worker)

    def _had_better_wait(self, worker: _Worker[W], now: float) -> bool:
        """Whether a task for this open worker is better kept until one of the others, which are full, has room.

        This cannot wait forever: what it waits for is a task of a worker that is on time.
        """
        finish = self._expect_finish(worker)
        if self._is_overdue(worker, now):
            limit = math.inf
        elif self._is_stale(worker, now):
            return False
        else:
            limit = finish / _PATIENCE
        return any(
            not other.draining and self._expect_finish(other) < limit and not self._is_overdue(other, now)
            for other in self._workers.values()
        )


def _smooth(average: float | None, value: float) -> float:
    value = max(value, _CLOCK_SECONDS)
    if average is None:
        return value
    return average + _SMOOTHING * (min(value, _OVERDUE_FACTOR * average) - average)
