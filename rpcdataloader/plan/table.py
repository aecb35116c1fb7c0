"""The undelivered tasks of one pass: in which order they are delivered, and how many bytes they may have. Pure.

Two kinds of tables decide which worker gets a task. :class:`~rpcdataloader.plan.batches.BatchTable` is that of a
map-style dataset, where any worker may load any task. :class:`~rpcdataloader.plan.streams.StreamTable` is that of an
iterable-style dataset, where a task belongs to a stream. What one of them cannot do, it answers with "no": a stream is
not asked twice, and a batch is no end of a stream.

Workers are named by numbers. Delivered tasks leave nothing behind but their second copies, until the workers have
answered these too, so an event costs the same in the millionth batch as in the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rpcdataloader.plan.actions import PlanOptions

# The estimated size of a batch jumps up to the largest seen and sinks this fraction of the way towards smaller ones. A
# limit on memory must hold when sizes vary, where an average is too low half of the time; without the sinking, one
# giant batch at the start would throttle the whole epoch.
_SIZE_DECAY = 1 / 16


@dataclass(slots=True)
class Entry:
    """A batch to load.

    Attributes:
        size_bytes: Of the answer; None until it is there.
        num_deaths: Workers that died while they were at work on it.
        stream: That it belongs to; None where there are no streams.
    """

    number: int
    payload: Any
    answer: Any = None
    size_bytes: int | None = None
    num_deaths: int = 0
    stream: int | None = None


T = TypeVar("T", bound=Entry)


class Table(ABC, Generic[T]):
    """The tasks of one pass.

    Args:
        options: ``num_workers`` and ``prefetch_factor`` make the window. ``max_in_flight_bytes`` limits the bytes of
            answers that are not delivered, plus the estimated bytes of what is in flight; the task that is next to be
            delivered is always allowed. Nothing is known before the first answer, so only the window limits the first
            tasks, as in torch's loader.
        batch_size_bytes: Estimate to start with, for example that of the epoch before.

    Attributes:
        tasks: Those that are not delivered, by number, in the order of the numbers.
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        num_doubled: Tasks in flight at two workers.
        answered_bytes: Bytes of what is answered and not delivered.

    Raises:
        ValueError: An option is out of its range.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0) -> None:
        for name in ("num_workers", "prefetch_factor", "max_in_flight_bytes", "max_retries"):
            if (value := getattr(options, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.tasks: dict[int, T] = {}
        self.batch_size_bytes = float(batch_size_bytes)
        self.num_doubled = 0
        self._in_order = options.in_order
        self._prefetch_factor = options.prefetch_factor
        self._max_bytes = options.max_in_flight_bytes
        self._num_added = 0
        self._ended = False
        self._window = self._wanted_window = options.num_workers * options.prefetch_factor
        self._num_in_flight = 0  # copies that were sent and not answered
        self.answered_bytes = 0
        self._answered: deque[T] = deque()  # in the order of the answers; unused when in order
        self._timeouts: Timeouts | None = None if options.task_timeout is None else Timeouts(options.task_timeout)

    # Workers

    @abstractmethod
    def worker_joined(self, worker: int, now: float, host: Hashable = None, place: int = 0) -> None:
        """A worker takes tasks from now on. One that left may join again, with nothing remembered of it.

        Args:
            host: Where it runs, for second copies and retries, which prefer another one; None if that is not known.
            place: Of the worker: the stream that it serves.
        """

    @abstractmethod
    def worker_draining(self, worker: int) -> None:
        """A worker gets no new tasks, if others can have them; it still answers those that it has."""

    @abstractmethod
    def worker_left(self, worker: int, now: float) -> list[int]:
        """A worker is gone; returns its unanswered tasks, oldest first, which wait for another one now."""

    @abstractmethod
    def needs(self, place: int) -> bool:
        """Whether a worker is missed at this place while there is none."""

    @abstractmethod
    def resize(self, num_workers: int) -> None:
        """The window is that of this number of workers from now on, if it may change at all."""

    @abstractmethod
    def in_flight(self, worker: int) -> list[int]:
        """Tasks that a worker has not answered, oldest first; another one may have answered and delivered them."""

    @abstractmethod
    def running(self, worker: int, said: int | None = None) -> int | None:
        """The task to be blamed for a worker's death; None if it is at none that is still waited for.

        ``said`` is what it was at in its own words, as an answer before may be lost with it.
        """

    @abstractmethod
    def blame(self, number: int, *, is_too_many: bool) -> bool:
        """A worker died at work on this task, and has left; ``is_too_many`` for another one to try.

        Returns:
            Whether the task is condemned: it counts as answered, and what is delivered for it is an error.
        """

    @abstractmethod
    def holder(self, task: T) -> int | None:
        """The worker that loads a task which is not answered; None if it waits for one."""

    def awaited(self) -> T | None:
        """The oldest unanswered task; None if all are answered."""
        return next((task for task in self.tasks.values() if task.size_bytes is None), None)

    def _condemn(self, task: T) -> None:
        task.size_bytes = 0
        if not self._in_order:
            self._answered.append(task)

    # Time

    @abstractmethod
    def timed_out(self, now: float) -> list[tuple[int, int]]:
        """Workers whose running task is over its time, each once per task, with the number of the task.

        The driver ends such a worker, and reports that it left, and which task to :meth:`blame`.
        """

    @abstractmethod
    def due(self, now: float) -> float | None:
        """When to ask :meth:`assign` and :meth:`timed_out` again if nothing happens before; None for never.

        Later than ``now``, if both have been asked at ``now`` and have nothing more to say.
        """

    # Tasks, from the input to a worker

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` takes a task. Stays true until one is added or delivered, or the input ends."""
        return not self._ended and len(self.tasks) < self._window

    @abstractmethod
    def add_task(self, payload: Any) -> int | None:
        """Add the next task of the input; returns its number, or None if there is no room for it now."""

    def end_of_input(self) -> None:
        """The sampler has no more tasks."""
        self._ended = True

    @abstractmethod
    def assign(self, now: float) -> tuple[int, int] | None:
        """Send a task; returns worker and number, None while none may be sent."""

    def _has_room(self) -> bool:
        """Whether the bytes allow one more task."""
        return self.answered_bytes + (self._num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes

    # Answers, from a worker to the consumer

    @abstractmethod
    def replied(
        self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float, answer: Any = None
    ) -> bool:
        """A worker answered a task.

        Args:
            size_bytes: What the answer occupies in this process.
            task_seconds: Working time, without the time that the task was queued or travelling; None if that says
                nothing about the worker's speed, as for an exception or a task that was cancelled.
            answer: Kept until the task is delivered.

        Returns:
            False if the answer is to be ignored: the task is not in flight at that worker (any more), or another
            worker was faster.
        """

    def _settle(self, task: T, size_bytes: int, answer: Any) -> None:
        """A task is answered."""
        task.size_bytes, task.answer = size_bytes, answer
        self.answered_bytes += size_bytes
        if size_bytes > self.batch_size_bytes:
            self.batch_size_bytes = float(size_bytes)
        else:
            self.batch_size_bytes += _SIZE_DECAY * (size_bytes - self.batch_size_bytes)
        if not self._in_order:
            self._answered.append(task)

    @abstractmethod
    def retry(self, worker: int, number: int, *, delay: float, now: float) -> bool | None:
        """A worker answered that it could not do a task, which is to be tried again: instead of :meth:`replied`.

        The task waits for another worker, on another host if possible. If it is in flight at another one already,
        that is the new attempt. The caller counts the attempts.

        Args:
            delay: Seconds until it may be given out again.

        Returns:
            False as :meth:`replied` does; None if nothing can be tried again.
        """

    @abstractmethod
    def ended(self, worker: int, number: int, now: float) -> bool:
        """A worker answered that its stream ended before this task; returns False as :meth:`replied` does."""

    @abstractmethod
    def losers(self, number: int) -> list[int]:
        """Workers that have a copy of an answered task, which is not delivered yet: they may as well drop it."""

    @property
    def window(self) -> int:
        """Tasks that may be undelivered."""
        return self._window

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`pop_deliverable` gives a task now."""
        if not self._in_order:
            return bool(self._answered)
        return bool(self.tasks) and self.tasks[next(iter(self.tasks))].size_bytes is not None

    def pop_deliverable(self) -> T | None:
        """Take the next task to deliver out of the table; None while it is not answered."""
        if self._in_order:
            task = self.tasks[next(iter(self.tasks))] if self.tasks else None
            if task is None or task.size_bytes is None:
                return None
        elif self._answered:
            task = self._answered.popleft()
        else:
            return None
        del self.tasks[task.number]
        self._window = self._wanted_window
        self.answered_bytes -= task.size_bytes or 0
        return task

    def stream_of(self, number: int) -> int | None:
        """The stream that a task belongs to, until it is delivered; None where there are no streams."""
        task = self.tasks.get(number)
        return None if task is None else task.stream

    def forget(self) -> None:
        """Let all tasks go."""
        self.tasks.clear()
        self._answered.clear()

    @property
    def finished(self) -> bool:
        """Whether the input has ended and everything is delivered."""
        return self._ended and not self.tasks


class Timeouts:
    """Which workers are at a task for longer than a task may take. An event costs the same for any number of workers.

    What counts is the task at the head of a worker's queue, from the moment it came there: a task that waits behind
    another one is not running.

    Args:
        task_timeout: Seconds that a task may run.
    """

    def __init__(self, task_timeout: float) -> None:
        self._task_timeout = task_timeout
        # When the limit ends for each worker that is at work: the limit is the same for all, so whoever began first
        # is over it first, and the order of the dictionary is that of the deadlines.
        self._deadlines: dict[int, float] = {}

    def begin(self, worker: int, now: float) -> None:
        """A task has come to the head of the worker's queue."""
        self._deadlines.pop(worker, None)
        self._deadlines[worker] = now + self._task_timeout

    def end(self, worker: int) -> None:
        """The worker has no task any more, or has left."""
        self._deadlines.pop(worker, None)

    @property
    def due(self) -> float | None:
        """When the next worker is over its time, if its task goes on; None for never."""
        return next(iter(self._deadlines.values()), None)

    def expire(self, now: float) -> list[int]:
        """The workers that are over their time. Each is named once, until it begins another task."""
        expired: list[int] = []
        for worker, deadline in self._deadlines.items():
            if now < deadline:
                break
            expired.append(worker)
        for worker in expired:
            del self._deadlines[worker]
        return expired
