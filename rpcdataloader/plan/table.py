"""The undelivered tasks of one pass: their order of delivery, and their limit in bytes. Pure.

Two kinds of tables decide which worker gets a task: :class:`~rpcdataloader.plan.batches.BatchTable` for a map-style
dataset, where any worker may load any task, and :class:`~rpcdataloader.plan.streams.StreamTable` for an iterable-style
dataset, where a task belongs to a stream. Each refuses what it cannot do: a stream has no retries, and a batch is never
the end of a stream.

Workers are named by numbers. A delivered task leaves nothing behind but its second copy, until that is answered, so an
event costs the same in the millionth batch as in the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rpcdataloader.plan.actions import PlanOptions

# The estimated size of a batch jumps up to the largest seen and sinks this fraction of the way towards smaller ones. A
# memory limit must hold when sizes vary, where an average is too low half of the time; without the sinking, one giant
# batch at the start would throttle the whole epoch.
_SIZE_DECAY = 1 / 16


@dataclass(slots=True)
class Entry:
    """A batch to load.

    Attributes:
        answer: Argument of :meth:`Table.replied`; None for a condemned task.
        size_bytes: Bytes of the answer; None until it is here.
        num_deaths: Number of workers that died at work on it.
        stream: Stream that it belongs to; None without streams.
        condemned: Text of the error that is delivered in place of an answer, if the task has killed too many workers.
    """

    number: int
    payload: Any
    answer: Any = None
    size_bytes: int | None = None
    num_deaths: int = 0
    stream: int | None = None
    condemned: str | None = None


T = TypeVar("T", bound=Entry)


class Table(ABC, Generic[T]):
    """The tasks of one pass.

    Args:
        options: ``num_workers`` and ``prefetch_factor`` make the window. ``max_in_flight_bytes`` limits the bytes of
            undelivered answers plus the estimated bytes of tasks in flight; the next task to be delivered is always
            allowed. Sizes are unknown before the first answer, so only the window limits the first tasks, as in torch's
            loader.
        batch_size_bytes: Initial estimate, for example that of the epoch before.

    Attributes:
        tasks: Undelivered tasks by number, in the order of the numbers.
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        window: Limit on the number of undelivered tasks.
        num_doubled: Number of tasks in flight at two workers.
        answered_bytes: Bytes of undelivered answers.

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
        self.window = self._wanted_window = options.num_workers * options.prefetch_factor
        self._num_in_flight = 0  # unanswered copies
        self.answered_bytes = 0
        self._answered: deque[T] = deque()  # in the order of the answers; unused with in_order
        self._timeouts: Timeouts | None = None if options.task_timeout is None else Timeouts(options.task_timeout)

    # Workers

    @abstractmethod
    def worker_joined(self, worker: int, now: float, host: Hashable = None, place: int = 0) -> None:
        """Add a worker. One that left may join again; its past is forgotten.

        Args:
            host: Host of the worker, which second copies and retries of its tasks avoid; None if unknown.
            place: Place of the worker: the stream that it serves.
        """

    @abstractmethod
    def worker_draining(self, worker: int) -> None:
        """Give a worker no new tasks if others can have them; it still answers those that it has."""

    @abstractmethod
    def worker_left(self, worker: int, now: float) -> list[int]:
        """Remove a worker; returns its unanswered tasks, oldest first, which wait for another one now."""

    @abstractmethod
    def needs(self, place: int) -> bool:
        """Whether this place misses a worker when it is vacant."""

    @abstractmethod
    def resize(self, num_workers: int) -> None:
        """Set the window to that of this number of workers, if it may change at all."""

    @abstractmethod
    def in_flight(self, worker: int) -> list[int]:
        """Unanswered tasks of a worker, oldest first; another worker may have answered and delivered them."""

    @abstractmethod
    def running(self, worker: int, said: int | None = None) -> int | None:
        """The task to blame for a worker's death; None if it is at no task that is still needed.

        ``said`` is its last task from its own record, as an earlier answer may be lost with it.
        """

    @abstractmethod
    def blame(self, number: int, *, is_too_many: bool) -> bool:
        """Note that a worker died at work on this task, and has left; ``is_too_many`` if no other one may try.

        Returns:
            True if the task is condemned: it counts as answered, and an error is delivered in its place.
        """

    @abstractmethod
    def holder(self, task: T) -> int | None:
        """The worker that loads an unanswered task; None if it waits for one."""

    def awaited(self) -> T | None:
        """The oldest unanswered task; None if all are answered."""
        return next((task for task in self.tasks.values() if task.size_bytes is None), None)

    def _condemn(self, task: T) -> None:
        task.size_bytes = 0
        if not self._in_order:
            self._answered.append(task)

    # Time

    def timed_out(self, now: float) -> list[tuple[int, int]]:
        """Workers whose running task exceeds its time, each once per task, with the number of the task.

        The driver ends such a worker, reports that it left, and passes the task to :meth:`blame`.
        """
        expired = [] if self._timeouts is None else self._timeouts.expire(now)
        # Without a task, its stream has ended.
        return [(worker, number) for worker in expired for number in self.in_flight(worker)[:1]]

    @abstractmethod
    def due(self, now: float) -> float | None:
        """Time for the next :meth:`assign` and :meth:`timed_out` without further events; None for never.

        It is later than ``now``, if both were called at ``now`` and returned nothing more.
        """

    # Tasks, from the input to a worker

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` takes a task. Stays true until a task is added or delivered, or the input ends."""
        return not self._ended and len(self.tasks) < self.window

    @abstractmethod
    def add_task(self, payload: Any) -> int | None:
        """Add the next task of the input; returns its number, or None without room for it."""

    def end_of_input(self) -> None:
        """Note that the sampler has no more tasks."""
        self._ended = True

    @abstractmethod
    def assign(self, now: float) -> tuple[int, int] | None:
        """Send a task; returns worker and number, None while no task may be sent."""

    def _has_room(self) -> bool:
        """Whether the bytes allow one more task."""
        return self.answered_bytes + (self._num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes

    # Answers, from a worker to the consumer

    @abstractmethod
    def replied(
        self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float, answer: Any = None
    ) -> bool:
        """Note a worker's answer to a task.

        Args:
            size_bytes: Bytes that the answer occupies in this process.
            task_seconds: Working time, without queueing and travelling; None if that says nothing about the worker's
                speed, as for an exception or a cancelled task.
            answer: The answer, kept until the task is delivered.

        Returns:
            False if the answer is to be ignored: the task is not in flight at that worker, or another worker was
                faster.
        """

    def _settle(self, task: T, size_bytes: int, answer: Any) -> None:
        """Note that a task is answered."""
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
        """Note a worker's answer that a task failed and is to be retried: instead of :meth:`replied`.

        The task waits for another worker, on another host if possible. A copy in flight at another worker is the new
        attempt. The caller counts the attempts.

        Args:
            delay: Seconds before it may be assigned again.

        Returns:
            False as for :meth:`replied`; None if retries are impossible.
        """

    @abstractmethod
    def ended(self, worker: int, number: int, now: float) -> bool:
        """Note a worker's answer that its stream ended before this task; returns False as :meth:`replied` does."""

    @abstractmethod
    def losers(self, number: int) -> list[int]:
        """Workers with a superfluous copy of an answered task that is not delivered yet."""

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
        self.window = self._wanted_window
        self.answered_bytes -= task.size_bytes or 0
        return task

    def stream_of(self, number: int) -> int | None:
        """The stream of a task, until it is delivered; None without streams."""
        task = self.tasks.get(number)
        return None if task is None else task.stream

    def forget(self) -> None:
        """Drop all tasks."""
        self.tasks.clear()
        self._answered.clear()

    @property
    def finished(self) -> bool:
        """Whether the input has ended and everything is delivered."""
        return self._ended and not self.tasks


class Timeouts:
    """Time limits of running tasks. An event costs the same for any number of workers.

    Only the task at the head of a worker's queue counts, from the time it came there: a task behind another one is not
    running.

    Args:
        task_timeout: Seconds that a task may run.
    """

    def __init__(self, task_timeout: float) -> None:
        self._task_timeout = task_timeout
        # Deadline of each worker at work: the limit is the same for all, so deadlines come in the order of the
        # beginnings, which is that of the dictionary.
        self._deadlines: dict[int, float] = {}

    def begin(self, worker: int, now: float) -> None:
        """Note that a task has come to the head of the worker's queue."""
        self._deadlines.pop(worker, None)
        self._deadlines[worker] = now + self._task_timeout

    def end(self, worker: int) -> None:
        """Note that the worker has no task, or has left."""
        self._deadlines.pop(worker, None)

    @property
    def due(self) -> float | None:
        """Time at which the next worker exceeds the limit, if its task goes on; None for never."""
        return next(iter(self._deadlines.values()), None)

    def expire(self, now: float) -> list[int]:
        """Workers that exceed their limit. Each is named once, until it begins another task."""
        expired: list[int] = []
        for worker, deadline in self._deadlines.items():
            if now < deadline:
                break
            expired.append(worker)
        for worker in expired:
            del self._deadlines[worker]
        return expired
