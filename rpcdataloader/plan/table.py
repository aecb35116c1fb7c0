"""The undelivered tasks of one pass: where each is, their order of delivery, and their limit in bytes. Pure.

Each undelivered task is in one of three states: waiting for a worker, in flight at one or two workers, or answered. Two
kinds of tables decide which worker gets a task: :class:`~rpcdataloader.plan.batches.BatchTable` for a map-style
dataset, where any worker may load any task, and :class:`~rpcdataloader.plan.streams.StreamTable` for an iterable-style
dataset, where a task belongs to a stream.

Workers are named by numbers. A delivered task leaves nothing behind but its second copy, until that is answered, so an
event costs the same in the millionth batch as in the first.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.workers import Pace, WorkerPace

# The estimated size of a batch jumps up to the largest seen and sinks this fraction of the way towards smaller ones. A
# memory limit must hold when sizes vary, where an average is too low half of the time; without the sinking, one giant
# batch at the start would throttle the whole epoch.
_SIZE_DECAY = 1 / 16


@dataclass(slots=True)
class Entry:
    """A batch to load."""

    number: int
    payload: Any
    answer: Any = None  # argument of :meth:`Table.replied`; None for a condemned task
    size_bytes: int | None = None  # bytes of the answer; None until it is here
    holders: list[WorkerPace] = field(default_factory=list)  # workers with an unanswered copy, oldest first
    num_deaths: int = 0  # number of workers that died at work on it
    stream: int | None = None  # stream that it belongs to; None without streams
    # Text of the error that is delivered in place of an answer, if the task has killed too many workers.
    condemned: str | None = None


class Undelivered:
    """The undelivered tasks as the consumer sees them: their window, their sizes, and their order of delivery.

    Args:
        options: ``num_workers`` and ``prefetch_factor`` make the window.
        batch_size_bytes: Initial estimate, for example that of the epoch before.

    Attributes:
        tasks: Undelivered tasks by number, in the order of the numbers.
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        window: Limit on the number of undelivered tasks.
        answered_bytes: Bytes of undelivered answers.

    Raises:
        ValueError: An option is out of its range.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0) -> None:
        for name in ("num_workers", "prefetch_factor", "max_in_flight_bytes", "max_retries"):
            if (value := getattr(options, name)) < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.tasks: dict[int, Entry] = {}
        self.batch_size_bytes = float(batch_size_bytes)
        self.answered_bytes = 0
        self._prefetch_factor = options.prefetch_factor
        self.window = self._wanted_window = options.num_workers * options.prefetch_factor
        self._num_added = 0
        self._ended = False
        self._waiting: list[int] = []  # sorted
        self._in_order = options.in_order
        self._answered: deque[Entry] = deque()  # in the order of the answers; unused with in_order

    def resize(self, num_workers: int) -> None:
        """Set the window to that of this number of workers, if it may change at all.

        The window grows at once. It shrinks with the next delivery, without dropping tasks: so the driver can ask the
        sampler in between, without holding a lock.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self._wanted_window = num_workers * self._prefetch_factor
        self.window = max(self.window, self._wanted_window)

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` takes a task. Stays true until a task is added or delivered, or the input ends."""
        return not self._ended and len(self.tasks) < self.window

    def add_task(self, payload: Any) -> int | None:
        """Add the next task of the input; returns its number, or None without room for it."""
        if self._ended or len(self.tasks) >= self.window:
            return None
        number = self._num_added
        self._num_added += 1
        self.tasks[number] = Entry(number, payload)
        self._waiting.append(number)
        return number

    def end_of_input(self) -> None:
        """Note that the sampler has no more tasks."""
        self._ended = True

    def awaited(self) -> Entry | None:
        """The oldest unanswered task; None if all are answered."""
        return next((task for task in self.tasks.values() if task.size_bytes is None), None)

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`pop_deliverable` gives a task now."""
        if not self._in_order:
            return bool(self._answered)
        return bool(self.tasks) and self.tasks[next(iter(self.tasks))].size_bytes is not None

    def pop_deliverable(self) -> Entry | None:
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


class Table(Undelivered, ABC):
    """The tasks of one pass, and the workers that have them.

    Args:
        options: ``max_in_flight_bytes`` limits the bytes of undelivered answers plus the estimated bytes of tasks in
            flight; the next task to be delivered is always allowed. Sizes are unknown before the first answer, so only
            the window limits the first tasks, as in torch's loader.
        batch_size_bytes: Initial estimate.

    Attributes:
        num_doubled: Number of tasks in flight at two workers.
    """

    _measures_speed = True

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0) -> None:
        super().__init__(options, batch_size_bytes)
        self.num_doubled = 0
        self._max_bytes = options.max_in_flight_bytes
        self._workers: dict[int, WorkerPace] = {}
        self._num_joined = 0
        self._pace = Pace(self.window)
        self._num_in_flight = 0  # unanswered copies
        # Only the task at the head of a worker's queue has a deadline, from the time it came there: a task behind
        # another one is not running. The limit is the same for all, so deadlines come in the order of the beginnings,
        # which is that of the dictionary.
        self._task_timeout = options.task_timeout
        self._deadlines: dict[int, float] = {}

    # Workers

    def worker_joined(self, worker: int, now: float = 0.0, host: Hashable = None, place: int = 0) -> None:  # noqa: ARG002
        """Add a worker. One that left may join again; its past is forgotten.

        Args:
            host: Host of the worker, which second copies of its tasks avoid; None if unknown.
            place: Place of the worker: the stream that it serves.
        """
        if worker in self._workers:
            raise LocalProtocolError(f"worker {worker} has joined already")
        record = self._workers[worker] = WorkerPace(worker, host, self._num_joined, self._pace, since=now)
        self._num_joined += 1
        self._queue_changed(record)

    def worker_draining(self, worker: int) -> None:
        """Give a worker no new tasks if others can have them; it still answers those that it has."""
        record = self._get(worker)
        record.draining = True
        record.leave_ranking()

    def worker_left(self, worker: int, now: float) -> list[int]:  # noqa: ARG002  every event carries its time
        """Remove a worker; returns its unanswered tasks, oldest first, which wait for another one now."""
        record = self._get(worker)
        del self._workers[worker]
        record.leave_ranking()
        self._deadlines.pop(worker, None)
        self._num_in_flight -= len(record.in_flight)
        lost = []
        for number in record.in_flight:
            task = self._drop_copy(record, number)
            if task is not None and not task.holders:
                bisect.insort(self._waiting, number)
                lost.append(number)
        return lost

    def needs(self, place: int) -> bool:  # noqa: ARG002  without streams, all places are equal
        """Whether this place misses a worker when it is vacant."""
        return True

    def in_flight(self, worker: int) -> list[int]:
        """Unanswered tasks of a worker, oldest first; another worker may have answered and delivered them."""
        return list(self._get(worker).in_flight)

    def running(self, worker: int, said: int | None = None) -> int | None:
        """The task to blame for a worker's death; None if it is at no task that is still needed.

        ``said`` is its last task from its own record, as an earlier answer may be lost with it.
        """
        in_flight = self._get(worker).in_flight
        number = said if said in in_flight else next(iter(in_flight), None)
        task = None if number is None else self.tasks.get(number)
        return None if task is None or task.size_bytes is not None else number

    def blame(self, number: int, *, is_too_many: bool) -> bool:
        """Note that a worker died at work on this task, and has left; ``is_too_many`` if no other one may try.

        The death counts, but does not condemn the task while another worker has a copy, which may still be answered. If
        that worker leaves without reporting the task, the task is assigned once more. After the first death there are
        no second copies: a task that is late because it kills its workers would always have one somewhere.

        Returns:
            True if the task is condemned: it counts as answered, and an error is delivered in its place.
        """
        task = self.tasks.get(number)
        if task is None or task.size_bytes is not None:
            return False  # answered by another worker
        task.num_deaths += 1
        if not is_too_many or task.holders:
            return False
        self._waiting.remove(number)
        self._condemn(task)
        return True

    def _condemn(self, task: Entry) -> None:
        task.size_bytes = 0
        if not self._in_order:
            self._answered.append(task)

    def _get(self, worker: int) -> WorkerPace:
        record = self._workers.get(worker)
        if record is None:
            raise LocalProtocolError(f"worker {worker} has not joined, or has left")
        return record

    @abstractmethod
    def _queue_changed(self, record: WorkerPace) -> None:
        """Called when a worker has joined, or has more or fewer tasks."""

    # Time

    def timed_out(self, now: float) -> list[tuple[int, int]]:
        """Workers whose running task exceeds its time, each once per task, with the number of the task.

        The driver ends such a worker, reports that it left, and passes the task to :meth:`blame`.
        """
        late = list(takewhile(lambda worker: self._deadlines[worker] <= now, self._deadlines))
        for worker in late:
            del self._deadlines[worker]
        return [(worker, next(iter(self._workers[worker].in_flight))) for worker in late]

    def due(self, now: float) -> float | None:  # noqa: ARG002  every event carries its time
        """Time for the next :meth:`assign` and :meth:`timed_out` without further events; None for never.

        It is later than ``now``, if both were called at ``now`` and returned nothing more.
        """
        return next(iter(self._deadlines.values()), None)

    def _head_changed(self, record: WorkerPace, now: float) -> None:
        """Note that another task is at the head of a worker's queue, or none."""
        self._deadlines.pop(record.id, None)
        if record.in_flight and self._task_timeout is not None:
            self._deadlines[record.id] = now + self._task_timeout

    # Tasks, from the input to a worker

    @abstractmethod
    def assign(self, now: float) -> tuple[int, int] | None:
        """Send a task; returns worker and number, None while no task may be sent."""

    def _may_send(self, number: int) -> bool:
        """Whether the bytes allow one more task: this one, which waits."""
        if self.answered_bytes + (self._num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes:
            return True
        # The task that the consumer needs next is always allowed, or no byte would ever be freed. Copies of delivered
        # tasks do not count here, as their workers may hang.
        if self._in_order:
            return number == next(iter(self.tasks))
        return len(self.tasks) == len(self._waiting)

    def _send(self, record: WorkerPace, task: Entry, now: float) -> None:
        """Note that a copy goes to the worker."""
        is_head = not record.in_flight
        record.sent(task.number, now)
        task.holders.append(record)
        self._num_in_flight += 1
        if is_head and self._task_timeout is not None:
            self._head_changed(record, now)
        self._queue_changed(record)

    # Answers, from a worker to the consumer

    def replied(
        self,
        worker: int,
        number: int,
        *,
        size_bytes: int,
        task_seconds: float | None = None,
        now: float = 0.0,
        answer: Any = None,
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
        if not (size_bytes >= 0 and (task_seconds is None or 0 <= task_seconds < math.inf)):
            raise LocalProtocolError(f"task {number} cannot have {size_bytes} bytes and {task_seconds} seconds")
        task = self._take_answer(worker, number, task_seconds, now)
        if task is None:
            return False
        task.size_bytes, task.answer = size_bytes, answer
        self.answered_bytes += size_bytes
        if size_bytes > self.batch_size_bytes:
            self.batch_size_bytes = float(size_bytes)
        else:
            self.batch_size_bytes += _SIZE_DECAY * (size_bytes - self.batch_size_bytes)
        if not self._in_order:
            self._answered.append(task)
        return True

    def ended(self, worker: int, number: int, now: float = 0.0) -> bool:  # noqa: ARG002
        """Note a worker's answer that its stream ended before this task; returns False as :meth:`replied` does."""
        raise LocalProtocolError(f"task {number} of worker {worker} is no task of a stream, and cannot be its end")

    def _take_answer(self, worker: int, number: int, task_seconds: float | None, now: float) -> Entry | None:
        """Note a worker's answer; returns the task, None if the answer is to be ignored."""
        if not 0 <= number < self._num_added:
            raise LocalProtocolError(f"task {number} was never added")
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return None
        if (
            record.answered(number, task_seconds if self._measures_speed else None, now)
            and self._task_timeout is not None
        ):
            self._head_changed(record, now)
        self._num_in_flight -= 1
        self._queue_changed(record)
        return self._drop_copy(record, number)

    def _drop_copy(self, record: WorkerPace, number: int) -> Entry | None:
        """Note that a copy is no longer in flight; returns its task, None if another worker has answered that."""
        task = self.tasks.get(number)
        if task is None:
            return None
        if len(task.holders) > 1:
            self.num_doubled -= 1
        task.holders.remove(record)
        return task if task.size_bytes is None else None

    def losers(self, number: int) -> list[int]:
        """Workers with a superfluous copy of an answered task that is not delivered yet."""
        task = self.tasks[number]
        return [] if task.size_bytes is None else [record.id for record in task.holders]
