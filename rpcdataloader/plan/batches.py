"""The task table of one pass over a loader: which batch is where, who gets the next one, which may be delivered.

Pure: events go in, decisions come out, time is passed in, and the caller holds one lock around every call. The
invariant: each task that was added and not delivered is in exactly one of three places, waiting for a worker, in
flight at one or two workers, or answered. Delivered tasks leave nothing behind but copies that nobody waits for, until
their workers have answered these too, so an event costs the same in the millionth batch as in the first.

The driver's loop, whenever something has changed, and when :meth:`BatchTable.due` says so::

    for worker, number in scheduler.timed_out(now):
        kill(worker)  # to be reported with worker_left, and blame for the number
    while scheduler.wants_input:
        scheduler.add_task(next(sampler))
    while (assigned := scheduler.assign(now)) is not None:
        worker, number = assigned
        send(worker, scheduler.payload(number))

When an answer has come::

    if scheduler.replied(worker, number, ...):
        for other in scheduler.losers(number):
            cancel(other, number)  # its answer goes to replied, too, whatever it is

A batch that everybody waits for may be at two workers. The second copy is sent when the batch is late by far, for
which see :mod:`rpcdataloader.plan.pace`; the first answer counts, be it an exception. The other copy occupies its
worker until that has answered or left.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.budget import ByteBudget
from rpcdataloader.plan.choosing import choose, choose_second, keep_until
from rpcdataloader.plan.pace import Pace, WorkerPace
from rpcdataloader.plan.ranking import Ranking
from rpcdataloader.plan.timeouts import Timeouts

W = TypeVar("W", bound=Hashable)

# One batch is in flight twice for so many workers, at most, and one in any case. A file system that stalls for all
# workers must not be asked for everything once more.
_WORKERS_PER_HEDGE = 16


@dataclass(slots=True)
class _Task(Generic[W]):
    payload: Any
    holders: list[WorkerPace[W]] = field(default_factory=list)  # workers with a copy, the first one first
    failed_at: WorkerPace[W] | None = None  # where it is not to be tried again, if there is another place
    size_bytes: int | None = None  # of the reply; None until it is there
    num_deaths: int = 0  # of workers that were at work on it

    @property
    def may_be_doubled(self) -> bool:
        """Whether a second copy helps: one is in flight, and the task has killed no worker yet."""
        return self.size_bytes is None and len(self.holders) == 1 and not self.num_deaths


class BatchTable(Generic[W]):
    """Decide which worker gets which task, and in which order the answers are delivered.

    Args:
        num_workers: With ``prefetch_factor``, the size of the window: ``num_workers * prefetch_factor`` tasks at most
            are undelivered at any time, so that the sampler is consumed as far ahead as by torch's loader. It
            follows :meth:`resize`, not the workers that join or leave.
        prefetch_factor: Tasks in flight per worker at most, second copies not counted.
        in_order: Deliver by number; otherwise in the order of the answers.
        max_in_flight_bytes: Answered and not delivered bytes, plus the estimated bytes of what is in flight, stay
            below it; the task that is next to be delivered is always allowed. Nothing is known before the first answer,
            so only the window limits the first tasks, as in torch's loader.
        batch_size_bytes: Estimate to start with, for example that of the epoch before.
        max_retries: A task at which so many workers died is not given to another one.
        hedging: Send what everybody waits for, if it is late by far, to a second worker too.
        task_timeout: Seconds that a task may run at a worker; None for any time.

    Raises:
        ValueError: An argument is out of its range.
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
        hedging: bool = False,
        task_timeout: float | None = None,
    ) -> None:
        for name, value in (
            ("num_workers", num_workers),
            ("prefetch_factor", prefetch_factor),
            ("max_in_flight_bytes", max_in_flight_bytes),
            ("max_retries", max_retries),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self._window = self._wanted_window = num_workers * prefetch_factor
        self._prefetch_factor = prefetch_factor
        self._max_retries = max_retries
        self._in_order = in_order
        self._hedging = hedging
        self._budget = ByteBudget(max_in_flight_bytes, batch_size_bytes)
        self._pace = Pace(self._window)
        self._timeouts: Timeouts[W] = Timeouts(task_timeout)

        self._tasks: dict[int, _Task[W]] = {}  # every undelivered task, in the order of the numbers
        self._num_added = 0
        self._ended = False
        self._waiting: list[int] = []  # sorted
        self._pausing: list[tuple[float, int]] = []  # heap of tasks that wait from a moment on
        self._num_hedged = 0  # tasks in flight at two workers
        self._answered: deque[int] = deque()  # in the order of the answers; unused when in_order
        self._next_delivery = 0  # used when in_order

        self._workers: dict[W, WorkerPace[W]] = {}
        # Those that are not draining: the ones that may be given a task, and the ones that are full.
        self._open: Ranking[W] = Ranking()
        self._full: Ranking[W] = Ranking()
        self._num_joined = 0
        self._kept_until = math.inf  # until when a task is kept for a worker that is full, though another has room

    # Workers

    def worker_joined(self, worker: W, now: float, host: Hashable = None, place: int = 0) -> None:  # noqa: ARG002
        """A worker may be given tasks from now on. One that left may join again, with nothing remembered of it.

        Args:
            worker: Names it.
            now: Time of the event.
            host: Where it runs, for second copies and retries, which prefer another one; None if that is not known.
            place: Without meaning here: any worker may load any task.
        """
        if worker in self._workers:
            raise LocalProtocolError(f"{worker!r} has joined already")
        record = WorkerPace(worker, host, self._num_joined, self._pace, since=now)
        self._workers[worker] = record
        self._num_joined += 1
        self._rank(record)

    def worker_draining(self, worker: W) -> None:
        """A worker gets no new tasks; it still answers those that it has."""
        record = self._get(worker)
        record.draining = True
        self._unrank(record)

    def worker_left(self, worker: W, now: float) -> list[int]:  # noqa: ARG002  every event carries its time
        """A worker is gone; returns the numbers of the tasks that wait for another one now, oldest first.

        These are what it has not answered, without what another worker has answered or still has.
        """
        record = self._get(worker)
        del self._workers[worker]
        self._unrank(record)
        self._timeouts.end(worker)
        self._budget.num_in_flight -= len(record.in_flight)
        lost = []
        for number in record.in_flight:
            task = self._drop_copy(record, number)
            if task is not None and not task.holders:
                bisect.insort(self._waiting, number)
                lost.append(number)
        return lost

    def blame(self, number: int) -> bool:
        """A worker died at work on this task, and has left.

        The death counts, but does not condemn the task while another worker has a copy, which may still be answered.
        If that one leaves without a word about the task, it is given out once more. From the first death on there is
        no second copy: a task that is late because it kills its workers would always have one somewhere.

        Returns:
            Whether that was one too many: the task counts as answered, and what is delivered for it is an error.
        """
        task = self._tasks.get(number)
        if task is None or task.size_bytes is not None:
            return False  # answered by another worker
        task.num_deaths += 1
        if task.num_deaths < self._max_retries or task.holders:
            return False
        self._waiting.remove(number)
        task.size_bytes = 0
        if not self._in_order:
            self._answered.append(number)
        return True

    def needs(self, place: int) -> bool:  # noqa: ARG002  a place is as good as any other
        """Whether a worker is missed where there is none: always."""
        return True

    def in_flight(self, worker: W) -> list[int]:
        """Tasks that a worker has not answered, oldest first; another worker may have answered and delivered them."""
        return list(self._get(worker).in_flight)

    def running(self, worker: W) -> int | None:
        """The task that a worker is at work on, to be blamed for its death; None if nobody waits for that one."""
        number = next(iter(self._get(worker).in_flight), None)
        task = None if number is None else self._tasks.get(number)
        return None if task is None or task.size_bytes is not None else number

    def timed_out(self, now: float) -> list[tuple[W, int]]:
        """The workers whose running task is over its time, with the number of that, which may be answered elsewhere.

        Each is named once per task. The driver ends it, and reports that it left, and whom to :meth:`blame`.
        """
        return [(worker, next(iter(self._workers[worker].in_flight))) for worker in self._timeouts.expire(now)]

    def due(self, now: float) -> float | None:
        """When to ask again, :meth:`timed_out` and :meth:`assign`, if nothing happens before; None for never.

        Later than ``now``, if both have been asked at ``now`` and have nothing more to say.
        """
        hedge_at = self._hedge_at()
        earliest = min(
            self._kept_until,
            self._pausing[0][0] if self._pausing else math.inf,
            hedge_at if hedge_at > now else math.inf,  # late already: there is nobody to send it to
            self._timeouts.due,
        )
        return None if earliest == math.inf else earliest

    # Tasks, from the sampler to a worker

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` is allowed: the input has not ended and the window has room.

        Once true, it stays true until a task is added or delivered, or the input ends.
        """
        return not self._ended and len(self._tasks) < self._window

    def resize(self, num_workers: int) -> None:
        """From now on the window is that of so many workers.

        It grows at once. It shrinks when the next task is delivered, and what is undelivered by then stays: so
        whoever delivers and adds tasks can ask the sampler in between, without holding a lock.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self._wanted_window = num_workers * self._prefetch_factor
        self._window = max(self._window, self._wanted_window)

    def add_task(self, payload: Any) -> int:
        """Add the next task of the input; returns its number. ``payload`` is kept until the task is delivered."""
        if not self.wants_input:
            state = "the input has ended" if self._ended else f"{len(self._tasks)} tasks are not delivered yet"
            raise LocalProtocolError(f"no task can be added: {state}")
        number = self._num_added
        self._num_added += 1
        self._tasks[number] = _Task(payload)
        self._waiting.append(number)
        return number

    def end_of_input(self) -> None:
        """The sampler has no more tasks."""
        self._ended = True

    def payload(self, number: int) -> Any:
        """What was added under ``number``, until it is delivered."""
        return self._get_task(number).payload

    def stream_of(self, number: int) -> None:
        """There are no streams."""

    def assign(self, now: float) -> tuple[W, int] | None:
        """Send a task; returns the worker and the number, None while none may be sent.

        It is the lowest one that waits, or else a second copy of one that is late. It goes where it is expected to be
        finished first, which is where the fewest are in flight while nothing is known.
        """
        while self._pausing and self._pausing[0][0] <= now:
            bisect.insort(self._waiting, heapq.heappop(self._pausing)[1])
        self._kept_until = math.inf
        for number in self._waiting if self._open else ():
            if not self._may_send(number):
                break
            failed_at = self._tasks[number].failed_at
            record = choose(self._open, failed_at, now)
            others = self._full if failed_at is None else self._workers.values()
            kept_until = keep_until(record, others, failed_at, now)
            if kept_until <= now:
                self._waiting.remove(number)
                self._send(record, number, now)
                return record.id, number
            self._kept_until = min(self._kept_until, kept_until)
            if failed_at is None:
                break  # the same is true of all others; a task that has failed is more particular
        return self._hedge(now)

    # Answers, from a worker to the consumer

    def replied(self, worker: W, number: int, *, size_bytes: int, task_seconds: float | None, now: float) -> bool:
        """A worker answered a task.

        Args:
            worker: Whoever answered; one that left is no error.
            number: The task.
            size_bytes: What the answer occupies in this process.
            task_seconds: Working time, without the time that the task was queued or travelling; None if that says
                nothing about the worker's speed, as for an exception or a task that was cancelled.
            now: Time of the answer.

        Returns:
            False if the answer is to be ignored: the task is not in flight at that worker (any more), or another
            worker was faster.
        """
        if not (size_bytes >= 0 and (task_seconds is None or 0 <= task_seconds < math.inf)):
            raise LocalProtocolError(f"task {number} cannot have {size_bytes} bytes and {task_seconds} seconds")
        task = self._take_answer(worker, number, task_seconds, now)
        if task is None:
            return False
        task.size_bytes = size_bytes
        self._budget.answered(size_bytes)
        if not self._in_order:
            self._answered.append(number)
        return True

    def retry(self, worker: W, number: int, *, delay: float, now: float) -> bool:
        """A worker answered that it could not do a task, which is to be tried again: instead of :meth:`replied`.

        The task waits for another worker, on another host if possible. If it is in flight at another one already,
        that is the new attempt. Who calls this counts the attempts.

        Args:
            worker: Whoever answered; one that left is no error.
            number: The task.
            delay: Seconds until it may be given out again.
            now: Time of the answer.

        Returns:
            False as :meth:`replied` does.
        """
        if not 0 <= delay < math.inf:
            raise LocalProtocolError(f"task {number} cannot be tried again after {delay} seconds")
        record = self._workers.get(worker)
        task = self._take_answer(worker, number, None, now)
        if task is None:
            return False
        task.failed_at = record
        if not task.holders:
            heapq.heappush(self._pausing, (now + delay, number))
        return True

    def ended(self, worker: W, number: int, now: float) -> bool:
        """Only streams end."""
        raise LocalProtocolError(f"task {number} of {worker!r} is no task of a stream, and cannot be its end ({now})")

    def losers(self, number: int) -> list[W]:
        """The workers that have a copy of an answered task, which is not delivered yet: they may as well drop it."""
        task = self._get_task(number)
        return [] if task.size_bytes is None else [record.id for record in task.holders]

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
        self._window = self._wanted_window
        return number

    @property
    def finished(self) -> bool:
        """Whether the input has ended and every task is delivered."""
        return self._ended and not self._tasks

    @property
    def batch_size_bytes(self) -> float:
        """Estimated size of a batch, 0 before the first answer."""
        return self._budget.batch_size_bytes

    # Helpers: workers

    def _rank(self, record: WorkerPace[W]) -> None:
        """A worker has joined, or what it has in flight or takes for it has changed."""
        if len(record.in_flight) < self._prefetch_factor:
            self._full.discard(record)
            self._open.put(record)
        else:
            self._open.discard(record)
            self._full.put(record)

    def _unrank(self, record: WorkerPace[W]) -> None:
        self._open.discard(record)
        self._full.discard(record)

    # Helpers: copies

    def _get(self, worker: W) -> WorkerPace[W]:
        record = self._workers.get(worker)
        if record is None:
            raise LocalProtocolError(f"{worker!r} has not joined, or has left")
        return record

    def _get_task(self, number: int) -> _Task[W]:
        task = self._tasks.get(number)
        if task is None:
            raise LocalProtocolError(f"task {number} was never added or is delivered already")
        return task

    def _send(self, record: WorkerPace[W], number: int, now: float) -> None:
        """A copy goes to the worker."""
        if not record.in_flight:
            self._timeouts.begin(record.id, now)
        record.sent(number, now)
        self._tasks[number].holders.append(record)
        self._budget.num_in_flight += 1
        self._rank(record)

    def _drop_copy(self, record: WorkerPace[W], number: int) -> _Task[W] | None:
        """A copy is in flight no more; returns its task, None if another worker has answered that."""
        task = self._tasks.get(number)
        if task is None:
            return None
        if len(task.holders) > 1:
            self._num_hedged -= 1
        task.holders.remove(record)
        return task if task.size_bytes is None else None

    def _take_answer(self, worker: W, number: int, task_seconds: float | None, now: float) -> _Task[W] | None:
        """Note that a worker has answered; returns the task, None if the answer is to be ignored."""
        if not 0 <= number < self._num_added:
            raise LocalProtocolError(f"task {number} was never added")
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return None
        if record.answered(number, task_seconds, now):
            if record.in_flight:
                self._timeouts.begin(worker, now)
            else:
                self._timeouts.end(worker)
        if not record.draining:
            self._rank(record)
        self._budget.num_in_flight -= 1
        return self._drop_copy(record, number)

    # Helpers: sending

    def _may_send(self, number: int) -> bool:
        """Whether the bytes allow a task that waits."""
        # What the consumer waits for must never be held back, or nothing would ever free a byte. Copies that nobody
        # waits for any more do not count here, as their workers may hang.
        if self._in_order:
            needed_next = number == self._next_delivery
        else:
            needed_next = len(self._tasks) == len(self._waiting) + len(self._pausing)
        return needed_next or self._budget.has_room

    # Helpers: second copies

    def _awaited(self) -> _Task[W] | None:
        """The task that everybody waits for, if it is in flight."""
        if self._in_order:
            task = self._tasks.get(self._next_delivery)
            return task if task is not None and task.holders and task.size_bytes is None else None
        if self._answered:
            return None
        return next((task for task in self._tasks.values() if task.holders), None)

    @property
    def _may_hedge(self) -> bool:
        return self._hedging and self._num_hedged < max(1, len(self._workers) // _WORKERS_PER_HEDGE)

    def _late_at(self, task: _Task[W]) -> float:
        """When a task in flight is late by far. If it is behind another one, its worker hangs at that."""
        return task.holders[0].since + self._pace.late_seconds

    def _hedge_at(self) -> float:
        """When there will be a reason for a second copy, as far as time alone can make one."""
        task = self._awaited() if self._may_hedge else None
        return self._late_at(task) if task is not None and task.may_be_doubled else math.inf

    def _hedge(self, now: float) -> tuple[W, int] | None:
        """Send a second copy of a late task, the oldest first, while what everybody waits for is one of these."""
        awaited = self._awaited() if self._may_hedge else None
        if awaited is None or awaited.num_deaths or now < self._late_at(awaited):
            return None
        for number, task in self._tasks.items():
            if task.may_be_doubled and self._late_at(task) <= now:
                record = choose_second(self._workers.values(), task.holders[0], now)
                if record is None:
                    return None
                self._send(record, number, now)
                self._num_hedged += 1
                return record.id, number
        return None
