"""Assignment of a map-style dataset's batches to workers. Pure.

Each undelivered task is in one of three states: waiting for a worker, in flight at one or two workers, or answered.

If the batch that the consumer needs next is a straggler (see :mod:`rpcdataloader.plan.workers`), a backup task is sent:
a second copy, at another worker. The first answer counts, even if it is an exception. The other copy occupies its
worker until that has answered or left.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Entry, Table
from rpcdataloader.plan.workers import Pace, Ranking, WorkerPace, choose, choose_second, keep_until

# At most one batch per this many workers has a second copy, and one in any case. A file system that stalls for all
# workers must not get every request twice.
_WORKERS_PER_HEDGE = 16


@dataclass(slots=True)
class _BatchEntry(Entry):
    holders: list[WorkerPace] = field(default_factory=list)  # workers with a copy, oldest first
    failed_at: WorkerPace | None = None  # worker that the retry avoids, if possible

    @property
    def may_be_doubled(self) -> bool:
        """Whether a second copy helps: one copy is in flight, and the task has killed no worker yet."""
        return self.size_bytes is None and len(self.holders) == 1 and not self.num_deaths


class BatchTable(Table[_BatchEntry]):
    """The tasks of one pass over a map-style dataset; see :class:`~rpcdataloader.plan.table.Table`.

    Args:
        options: Limits. At most ``num_workers * prefetch_factor`` tasks are undelivered at any time: the sampler is
            consumed as far ahead as by torch's loader. :meth:`resize` changes that; joining and leaving workers do not.
            At most ``prefetch_factor`` tasks are in flight per worker, besides second copies.
        batch_size_bytes: Initial estimate.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0) -> None:
        super().__init__(options, batch_size_bytes)
        self._pace = Pace(self.window)
        self._waiting: list[int] = []  # sorted
        self._pausing: list[tuple[float, int]] = []  # heap of tasks that pause until a time
        self._workers: dict[int, WorkerPace] = {}
        # Workers that are not draining: those with room for a task, and full ones.
        self._open, self._full = Ranking(), Ranking()
        self._num_joined = 0
        self._kept_until = math.inf  # time until which a task is kept for a full worker, though another has room

    # Workers

    def worker_joined(self, worker: int, now: float, host: Hashable = None, place: int = 0) -> None:  # noqa: ARG002
        if worker in self._workers:
            raise LocalProtocolError(f"worker {worker} has joined already")
        record = WorkerPace(worker, host, self._num_joined, self._pace, since=now)
        self._workers[worker] = record
        self._num_joined += 1
        self._open.put(record)

    def worker_draining(self, worker: int) -> None:
        record = self._get(worker)
        record.draining = True
        record.leave_ranking()

    def worker_left(self, worker: int, now: float) -> list[int]:  # noqa: ARG002  every event carries its time
        record = self._get(worker)
        del self._workers[worker]
        record.leave_ranking()
        if self._timeouts is not None:
            self._timeouts.end(worker)
        self._num_in_flight -= len(record.in_flight)
        lost = []
        for number in record.in_flight:
            task = self._drop_copy(record, number)
            if task is not None and not task.holders:
                bisect.insort(self._waiting, number)
                lost.append(number)
        return lost

    def blame(self, number: int, *, is_too_many: bool) -> bool:
        """See :meth:`Table.blame`.

        The death counts, but does not condemn the task while another worker has a copy, which may still be answered. If
        that worker leaves without reporting the task, the task is assigned once more. After the first death there are
        no second copies: a task that is late because it kills its workers would always have one somewhere.
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

    def needs(self, place: int) -> bool:  # noqa: ARG002  all places are equal
        return True

    def resize(self, num_workers: int) -> None:
        """See :meth:`Table.resize`.

        The window grows at once. It shrinks with the next delivery, without dropping tasks: so the driver can ask the
            sampler in between, without holding a lock.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        self._wanted_window = num_workers * self._prefetch_factor
        self.window = max(self.window, self._wanted_window)

    def in_flight(self, worker: int) -> list[int]:
        return list(self._get(worker).in_flight)

    def running(self, worker: int, said: int | None = None) -> int | None:
        in_flight = self._get(worker).in_flight
        number = said if said in in_flight else next(iter(in_flight), None)
        task = None if number is None else self.tasks.get(number)
        return None if task is None or task.size_bytes is not None else number

    def holder(self, task: _BatchEntry) -> int | None:
        return task.holders[0].id if task.holders else None

    # Time

    def due(self, now: float) -> float | None:
        late_at = self._late_at()
        earliest = min(
            self._kept_until,
            self._pausing[0][0] if self._pausing else math.inf,
            late_at if late_at > now else math.inf,  # late already, and no worker can take a second copy
            math.inf if self._timeouts is None or self._timeouts.due is None else self._timeouts.due,
        )
        return None if earliest == math.inf else earliest

    # Tasks, from the sampler to a worker

    def add_task(self, payload: Any) -> int | None:
        if self._ended or len(self.tasks) >= self.window:
            return None
        number = self._num_added
        self._num_added += 1
        self.tasks[number] = _BatchEntry(number, payload)
        self._waiting.append(number)
        return number

    def assign(self, now: float) -> tuple[int, int] | None:
        """See :meth:`Table.assign`.

        It is the lowest waiting task, or else a second copy of a straggler. It goes to the worker that is expected to
        finish it first: without measurements, the one with the fewest tasks in flight.
        """
        while self._pausing and self._pausing[0][0] <= now:
            bisect.insort(self._waiting, heapq.heappop(self._pausing)[1])
        self._kept_until = math.inf
        if self._waiting and self._open:
            for number in self._waiting:
                task = self.tasks[number]
                # The task that the consumer needs next is always allowed, or no byte would ever be freed. Copies of
                # delivered tasks do not count here, as their workers may hang.
                if self._in_order:
                    is_next = number == next(iter(self.tasks))
                else:
                    is_next = len(self.tasks) == len(self._waiting) + len(self._pausing)
                if not (is_next or self._has_room()):
                    break
                record = choose(self._open, task.failed_at, now)
                others = self._full if task.failed_at is None else self._workers.values()
                kept_until = keep_until(record, others, task.failed_at, now) if others else now
                if kept_until <= now:
                    self._waiting.remove(number)
                    self._send(record, task, now)
                    return record.id, number
                self._kept_until = min(self._kept_until, kept_until)
                if task.failed_at is None:
                    break  # the same holds for all others; only a failed task is more particular
        return self._hedge(now) if self._late_at(or_doubled=True) <= now else None

    def _send(self, record: WorkerPace, task: _BatchEntry, now: float) -> None:
        """Note that a copy goes to the worker."""
        if self._timeouts is not None and not record.in_flight:
            self._timeouts.begin(record.id, now)
        record.sent(task.number, now)
        task.holders.append(record)
        self._num_in_flight += 1
        (self._open if len(record.in_flight) < self._prefetch_factor else self._full).put(record)

    # Answers, from a worker to the consumer

    def replied(
        self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float, answer: Any = None
    ) -> bool:
        if not (size_bytes >= 0 and (task_seconds is None or 0 <= task_seconds < math.inf)):
            raise LocalProtocolError(f"task {number} cannot have {size_bytes} bytes and {task_seconds} seconds")
        task = self._take_answer(worker, number, task_seconds, now)
        if task is None:
            return False
        self._settle(task, size_bytes, answer)
        return True

    def retry(self, worker: int, number: int, *, delay: float, now: float) -> bool:
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

    def ended(self, worker: int, number: int, now: float) -> bool:  # noqa: ARG002
        raise LocalProtocolError(f"task {number} of worker {worker} is no task of a stream, and cannot be its end")

    def _take_answer(self, worker: int, number: int, task_seconds: float | None, now: float) -> _BatchEntry | None:
        """Note a worker's answer; returns the task, None if the answer is to be ignored."""
        if not 0 <= number < self._num_added:
            raise LocalProtocolError(f"task {number} was never added")
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return None
        if record.answered(number, task_seconds, now) and self._timeouts is not None:
            if record.in_flight:
                self._timeouts.begin(worker, now)
            else:
                self._timeouts.end(worker)
        if not record.draining:
            (self._open if len(record.in_flight) < self._prefetch_factor else self._full).put(record)
        self._num_in_flight -= 1
        return self._drop_copy(record, number)

    def _drop_copy(self, record: WorkerPace, number: int) -> _BatchEntry | None:
        """Note that a copy is no longer in flight; returns its task, None if another worker has answered that."""
        task = self.tasks.get(number)
        if task is None:
            return None
        if len(task.holders) > 1:
            self.num_doubled -= 1
        task.holders.remove(record)
        return task if task.size_bytes is None else None

    def losers(self, number: int) -> list[int]:
        task = self.tasks[number]
        return [] if task.size_bytes is None else [record.id for record in task.holders]

    # Second copies

    def _late_at(self, *, or_doubled: bool = False) -> float:
        """Time at which the next needed task becomes a straggler; infinite if no second copy is possible then.

        Args:
            or_doubled: True to count a task with a second copy, too: then another straggler may get one.
        """
        if not self.tasks or self.num_doubled >= max(1, len(self._workers) // _WORKERS_PER_HEDGE):
            return math.inf
        task: _BatchEntry | None
        if self._in_order:
            task = self.tasks[next(iter(self.tasks))]
        elif self._answered:
            return math.inf
        else:
            task = next((task for task in self.tasks.values() if task.holders), None)
        if task is None or not task.holders or task.size_bytes is not None or task.num_deaths:
            return math.inf
        if len(task.holders) > 1 and not or_doubled:
            return math.inf
        # A task behind another one has a worker that hangs at the first.
        return task.holders[0].since + self._pace.late_seconds

    def _hedge(self, now: float) -> tuple[int, int] | None:
        """Send a second copy of a straggler, the oldest first."""
        for task in self.tasks.values():
            if task.may_be_doubled and task.holders[0].since + self._pace.late_seconds <= now:
                record = choose_second(self._workers.values(), task.holders[0], now)
                if record is None:
                    return None
                self._send(record, task, now)
                self.num_doubled += 1
                return record.id, task.number
        return None

    def _get(self, worker: int) -> WorkerPace:
        record = self._workers.get(worker)
        if record is None:
            raise LocalProtocolError(f"worker {worker} has not joined, or has left")
        return record
