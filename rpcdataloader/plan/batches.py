"""Assignment of a map-style dataset's batches to workers. Pure.

If the batch that the consumer needs next is a straggler (see :mod:`rpcdataloader.plan.workers`), a backup task is sent:
a second copy, at another worker. The first answer counts, even if it is an exception. The other copy occupies its
worker until that has answered or left.
"""

from __future__ import annotations

import math

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Entry, Table
from rpcdataloader.plan.workers import Ranking, WorkerPace, choose, choose_second, keep_until

# At most one batch per this many workers has a second copy, and one in any case. A file system that stalls for all
# workers must not get every request twice.
_WORKERS_PER_HEDGE = 16


class BatchTable(Table):
    """The tasks of one pass over a map-style dataset; see :class:`~rpcdataloader.plan.table.Table`.

    Args:
        options: Limits. At most ``num_workers * prefetch_factor`` tasks are undelivered at any time: the sampler is
            consumed as far ahead as by torch's loader. :meth:`resize` changes that; joining and leaving workers do not.
            At most ``prefetch_factor`` tasks are in flight per worker, besides second copies.
        batch_size_bytes: Initial estimate.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0) -> None:
        super().__init__(options, batch_size_bytes)
        # Workers that are not draining: those with room for a task, and full ones.
        self._open, self._full = Ranking(), Ranking()
        self._kept_until = math.inf  # time until which a task is kept for a full worker, though another has room

    def _queue_changed(self, record: WorkerPace) -> None:
        if not record.draining:
            (self._open if len(record.in_flight) < self._prefetch_factor else self._full).put(record)

    # Time

    def due(self, now: float) -> float | None:
        late_at = self._late_at()
        earliest = min(
            self._kept_until,
            late_at if late_at > now else math.inf,  # late already, and no worker can take a second copy
            next(iter(self._deadlines.values()), math.inf),
        )
        return None if earliest == math.inf else earliest

    # Tasks, from the sampler to a worker

    def assign(self, now: float) -> tuple[int, int] | None:
        """See :meth:`Table.assign`.

        It is the lowest waiting task, or else a second copy of a straggler. It goes to the worker that is expected to
        finish it first: without measurements, the one with the fewest tasks in flight.
        """
        self._kept_until = math.inf
        if self._waiting and self._open and self._may_send(number := self._waiting[0]):
            record = choose(self._open, now)
            kept_until = keep_until(record, self._full, now) if self._full else now
            if kept_until <= now:
                del self._waiting[0]
                self._send(record, self.tasks[number], now)
                return record.id, number
            self._kept_until = kept_until
        return self._hedge(now) if self._late_at(or_doubled=True) <= now else None

    # Second copies

    def _late_at(self, *, or_doubled: bool = False) -> float:
        """Time at which the next needed task becomes a straggler; infinite if no second copy is possible then.

        Args:
            or_doubled: True to count a task with a second copy, too: then another straggler may get one.
        """
        if not self.tasks or (self.num_doubled and self.num_doubled >= len(self._workers) // _WORKERS_PER_HEDGE):
            return math.inf
        task: Entry | None
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
            # A second copy helps: one copy is in flight, and the task has killed no worker yet.
            is_alone = task.size_bytes is None and len(task.holders) == 1 and not task.num_deaths
            if is_alone and task.holders[0].since + self._pace.late_seconds <= now:
                record = choose_second(self._workers.values(), task.holders[0], now)
                if record is None:
                    return None
                self._send(record, task, now)
                self.num_doubled += 1
                return record.id, task.number
        return None
