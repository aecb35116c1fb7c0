"""Which task of an iterable-style dataset goes to which stream, and in which order the answers are delivered.

A stream is what one worker iterates over. Tasks are dealt to the streams in turn and delivered in that order, as by
torch's loader, so the order of the batches depends on the number of streams and on nothing else. A stream that ends
leaves the turn, and the tasks that it still had are dropped.

A pure state machine, as the scheduler for map-style datasets is. What that does with a task, a stream cannot do: a
second copy would come from another stream, and nothing can be asked for again, because an iterator that has raised an
exception has come to its end, or is past the place. So an exception is an answer here, whatever its type. The number of
streams never changes, either, because the order of the batches depends on it.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.budget import ByteBudget
from rpcdataloader.plan.timeouts import Timeouts

W = TypeVar("W", bound=Hashable)


@dataclass(slots=True)
class _Task:
    payload: Any
    stream: int
    is_sent: bool = False
    size_bytes: int | None = None  # of the reply; None until it is there
    num_deaths: int = 0  # of workers that were at work on it


class StreamTable(Generic[W]):
    """The tasks of one pass.

    Args:
        num_streams: Each is the work of one worker.
        prefetch_factor: Undelivered tasks per stream that has not ended, at most.
        in_order: Deliver in turn; otherwise in the order of the answers.
        max_in_flight_bytes: As for the scheduler: the task that is next to be delivered is always allowed.
        batch_size_bytes: Estimate to start with.
        max_retries: A task at which so many workers died is not given to another one.
        turn: The stream whose batch comes first.
        task_timeout: Seconds that a task may run at a worker; None for any time.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_streams: int,
        prefetch_factor: int = 2,
        in_order: bool = True,
        max_in_flight_bytes: int = 2**30,
        batch_size_bytes: float = 0.0,
        max_retries: int = 3,
        turn: int = 0,
        task_timeout: float | None = None,
    ) -> None:
        for name, value in (("num_streams", num_streams), ("prefetch_factor", prefetch_factor)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._prefetch_factor = prefetch_factor
        self._max_retries = max_retries
        self._in_order = in_order
        self._budget = ByteBudget(max_in_flight_bytes, batch_size_bytes)
        # The streams that have not ended; the first one gets the next task.
        self._turn = deque(range(num_streams))
        self._turn.rotate(-turn)
        self._timeouts: Timeouts[W] = Timeouts(task_timeout)
        self._workers: dict[W, int] = {}
        self._owners: dict[int, W] = {}
        self._tasks: dict[int, _Task] = {}  # undelivered, in the order of delivery
        self._waiting: list[int] = []  # those of them to be sent; sorted
        self._num_added = 0
        self._num_undelivered: Counter[int] = Counter()  # by stream
        self._answered: deque[int] = deque()  # in the order of the answers; unused when in_order

    # Workers

    def worker_joined(self, worker: W, now: float = 0.0, host: Hashable = None, place: int = 0) -> None:  # noqa: ARG002
        """From now on this worker serves the stream of its place; where it runs makes no difference."""
        stream = place
        if worker in self._workers or stream in self._owners:
            raise LocalProtocolError(f"{worker!r} cannot take stream {stream}: one of them is taken")
        self._workers[worker] = stream
        self._owners[stream] = worker

    def worker_draining(self, worker: W) -> None:
        """Its stream has no other worker: it answers what it can, and what it cannot goes to the next one."""

    def needs(self, place: int) -> bool:
        """Whether the stream of this place has not ended."""
        return place in self._turn

    def resize(self, num_workers: int) -> None:
        """The number of streams never changes."""

    def worker_left(self, worker: W, now: float) -> list[int]:  # noqa: ARG002  as for the scheduler
        """A worker is gone; returns the numbers of its unanswered tasks, which wait for another worker."""
        stream = self._get(worker)
        del self._workers[worker], self._owners[stream]
        self._timeouts.end(worker)
        lost = [number for number, task in self._tasks.items() if self._is_in_flight(task, stream)]
        for number in lost:
            self._tasks[number].is_sent = False
            bisect.insort(self._waiting, number)
            self._budget.num_in_flight -= 1
        return lost

    def blame(self, number: int) -> bool:
        """A worker died at work on this task, which waits for another one now.

        Returns:
            Whether that was one too many: the task counts as answered, what is delivered for it is an error, and its
            stream ends with it, as nobody gets past it.
        """
        task = self._tasks[number]
        task.num_deaths += 1
        if task.num_deaths < self._max_retries:
            return False
        self._drop_from(task.stream, number + 1)
        task.size_bytes = 0
        self._waiting.remove(number)
        if not self._in_order:
            self._answered.append(number)
        return True

    def in_flight(self, worker: W) -> list[int]:
        """Tasks that a worker has not answered, oldest first."""
        stream = self._get(worker)
        return [number for number, task in self._tasks.items() if self._is_in_flight(task, stream)]

    def running(self, worker: W) -> int | None:
        """The task that a worker is at work on, to be blamed for its death; None if there is none."""
        return self._first_in_flight(self._get(worker))

    def timed_out(self, now: float) -> list[tuple[W, int]]:
        """As for the scheduler: the workers whose running task is over its time, each once, with the number of it."""
        expired = []
        for worker in self._timeouts.expire(now):
            number = self.running(worker)
            if number is not None:  # or else its stream has ended
                expired.append((worker, number))
        return expired

    def due(self, now: float) -> float | None:  # noqa: ARG002  as for the scheduler
        """When to ask :meth:`timed_out` if nothing happens before; None for never."""
        return None if self._timeouts.due == math.inf else self._timeouts.due

    # Tasks, from the input to a stream

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` is allowed: there is a stream left, and room in the window."""
        return len(self._tasks) < len(self._turn) * self._prefetch_factor

    def add_task(self, payload: Any) -> int:
        """Add a task for the stream whose turn it is; returns its number.

        Out of order, a stream that has all of its share of the window is passed over, as by torch's loader: the
        others do not wait for a slow one.
        """
        if not self.wants_input:
            raise LocalProtocolError(f"no task can be added: {len(self._tasks)} tasks for {len(self._turn)} streams")
        number = self._num_added
        self._num_added += 1
        stream = self._turn[0]
        if not self._in_order:
            stream = next(stream for stream in self._turn if self._num_undelivered[stream] < self._prefetch_factor)
        self._tasks[number] = _Task(payload, stream)
        self._num_undelivered[stream] += 1
        self._waiting.append(number)
        self._turn.remove(stream)
        self._turn.append(stream)
        return number

    def end_of_input(self) -> None:
        """Streams end by themselves."""

    def payload(self, number: int) -> Any:
        """What was added under ``number``, until it is delivered or dropped."""
        return self._tasks[number].payload

    def stream_of(self, number: int) -> int:
        """The stream that an undelivered task belongs to."""
        return self._tasks[number].stream

    def assign(self, now: float) -> tuple[W, int] | None:
        """Send the lowest task that can be sent; returns the worker and the number, None if there is none."""
        for place, number in enumerate(self._waiting):
            task = self._tasks[number]
            if task.stream not in self._owners:
                continue
            # What the consumer waits for must never be held back, or nothing would ever free a byte.
            needed_next = (
                number == next(iter(self._tasks))
                if self._in_order
                else not (self._budget.num_in_flight or self._answered)
            )
            if not (needed_next or self._budget.has_room):
                return None
            worker = self._owners[task.stream]
            if self._timeouts.is_used and self._first_in_flight(task.stream) is None:
                self._timeouts.begin(worker, now)
            task.is_sent = True
            del self._waiting[place]
            self._budget.num_in_flight += 1
            return worker, number
        return None

    # Answers, from a worker to the consumer

    def replied(
        self,
        worker: W,
        number: int,
        *,
        size_bytes: int,
        task_seconds: float | None = None,  # noqa: ARG002  a stream cannot be given to a faster worker
        now: float = 0.0,
    ) -> bool:
        """A worker answered a task with a batch, or with an exception.

        Args:
            worker: Whoever answered; one that left is no error.
            number: The task.
            size_bytes: What the answer occupies in this process.
            task_seconds: As for map-style datasets.
            now: Time of the answer, which only a task timeout needs.

        Returns:
            False if the task is not in flight at that worker (any more): ignore the answer.
        """
        task = self._tasks.get(number)
        if task is None or not self._is_in_flight(task, self._workers.get(worker)):
            return False
        task.size_bytes = size_bytes
        self._budget.num_in_flight -= 1
        self._budget.answered(size_bytes)
        if not self._in_order:
            self._answered.append(number)
        if self._timeouts.is_used:
            self._begin_next(worker, now)
        return True

    def retry(self, worker: W, number: int, *, delay: float, now: float) -> None:
        """Nothing is tried again: a stream that has raised an exception is past the place, or at its end."""

    def losers(self, number: int) -> list[W]:  # noqa: ARG002  as for map-style datasets
        """No task has a second copy."""
        return []

    def ended(self, worker: W, number: int, now: float = 0.0) -> bool:  # noqa: ARG002  every event carries its time
        """A worker answered that its stream was at its end before this task; returns False as :meth:`replied` does."""
        task = self._tasks.get(number)
        if task is None or not self._is_in_flight(task, self._workers.get(worker)):
            return False
        self._drop_from(task.stream, number)
        self._timeouts.end(worker)
        return True

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`pop_deliverable` gives a task now."""
        if not self._in_order:
            return bool(self._answered)
        for task in self._tasks.values():
            return task.size_bytes is not None
        return False

    def pop_deliverable(self) -> int | None:
        """Take the next task to deliver out of the table; None while it is not answered."""
        if not self.has_deliverable:
            return None
        number = next(iter(self._tasks)) if self._in_order else self._answered.popleft()
        task = self._tasks.pop(number)
        self._num_undelivered[task.stream] -= 1
        self._budget.delivered(task.size_bytes or 0)
        return number

    @property
    def finished(self) -> bool:
        """Whether all streams have ended and every batch is delivered."""
        return not self._turn and not self._tasks

    @property
    def batch_size_bytes(self) -> float:
        """Estimated size of a batch, 0 before the first answer."""
        return self._budget.batch_size_bytes

    # Helpers

    def _drop_from(self, stream: int, first: int) -> None:
        """The stream has ended before task ``first``."""
        for number in [number for number, task in self._tasks.items() if task.stream == stream and number >= first]:
            self._num_undelivered[stream] -= 1
            if self._tasks.pop(number).is_sent:
                self._budget.num_in_flight -= 1
            else:
                self._waiting.remove(number)
        self._turn.remove(stream)

    def _begin_next(self, worker: W, now: float) -> None:
        """The worker has answered, and begins with what is next in its queue."""
        if self._first_in_flight(self._workers[worker]) is None:
            self._timeouts.end(worker)
        else:
            self._timeouts.begin(worker, now)

    def _first_in_flight(self, stream: int) -> int | None:
        return next((number for number, task in self._tasks.items() if self._is_in_flight(task, stream)), None)

    def _get(self, worker: W) -> int:
        stream = self._workers.get(worker)
        if stream is None:
            raise LocalProtocolError(f"{worker!r} has not joined, or has left")
        return stream

    def _is_in_flight(self, task: _Task, stream: int | None) -> bool:
        return task.stream == stream and task.is_sent and task.size_bytes is None
