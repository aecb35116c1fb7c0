"""Assignment of an iterable-style dataset's tasks to streams, and the order of delivery. Pure.

A stream is what one worker iterates over. Tasks are dealt to the streams in turn and delivered in that order, as by
torch's loader, so the order of the batches depends on the number of streams alone. A stream that ends leaves the turn,
and its pending tasks are dropped.

Streams have neither second copies nor retries, unlike :class:`~rpcdataloader.plan.batches.BatchTable`: a second copy
would come from another stream, and an iterator that has raised an exception has ended, or is past the place. So any
exception is an answer. The number of streams is fixed, because the order of the batches depends on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Entry, Table
from rpcdataloader.plan.workers import WorkerPace


class StreamTable(Table):
    """The tasks of one pass over an iterable-style dataset; see :class:`~rpcdataloader.plan.table.Table`.

    Args:
        options: ``num_workers`` is the number of streams, each served by one worker. At most ``prefetch_factor`` tasks
            are undelivered per stream that has not ended.
        batch_size_bytes: Initial estimate.
        turn: Stream whose batch comes first.
    """

    _measures_speed = False  # a stream cannot be given to a faster worker

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0, turn: int = 0) -> None:
        super().__init__(options, batch_size_bytes)
        # Streams that have not ended; the first one gets the next task.
        self._turn: deque[int | None] = deque(range(options.num_workers))
        self._turn.rotate(-turn)
        self._owners: dict[int | None, WorkerPace] = {}
        self._num_undelivered: Counter[int | None] = Counter()  # by stream

    def worker_joined(self, worker: int, now: float = 0.0, host: Hashable = None, place: int = 0) -> None:
        if place in self._owners:
            raise LocalProtocolError(f"worker {worker} cannot take stream {place}, which has a worker")
        super().worker_joined(worker, now, host, place)
        self._owners[place] = self._workers[worker]

    def worker_left(self, worker: int, now: float) -> list[int]:
        lost = super().worker_left(worker, now)
        self._owners = {stream: owner for stream, owner in self._owners.items() if owner.id != worker}
        return lost

    def _queue_changed(self, record: WorkerPace) -> None:
        """Do nothing: workers are not chosen."""

    def needs(self, place: int) -> bool:
        return place in self._turn

    def resize(self, num_workers: int) -> None:
        """Change nothing: the number of streams is fixed."""

    def running(self, worker: int, said: int | None = None) -> int | None:  # noqa: ARG002  all before it is needed
        return super().running(worker)

    def _condemn(self, task: Entry) -> None:
        """The stream of a condemned task ends with it: no worker gets past the task."""
        self._end_stream(task.stream, task.number + 1)
        super()._condemn(task)

    def add_task(self, payload: Any) -> int | None:
        """See :meth:`Table.add_task`; the task is for the stream whose turn it is.

        Out of order, a stream with a full share of the window is passed over, as by torch's loader: other streams do
        not wait for a slow one.
        """
        number = super().add_task(payload)
        if number is None:
            return None
        stream = self._turn[0]
        if not self._in_order:
            stream = next(stream for stream in self._turn if self._num_undelivered[stream] < self._prefetch_factor)
        self.tasks[number].stream = stream
        self._num_undelivered[stream] += 1
        self._turn.remove(stream)
        self._turn.append(stream)
        return number

    def end_of_input(self) -> None:
        """Do nothing: streams report their own ends."""

    def assign(self, now: float) -> tuple[int, int] | None:
        """See :meth:`Table.assign`; it is the lowest task whose stream has a worker."""
        for number in self._waiting:
            task = self.tasks[number]
            if (owner := self._owners.get(task.stream)) is not None:
                if not self._may_send(number):
                    return None
                self._waiting.remove(number)
                self._send(owner, task, now)
                return owner.id, number
        return None

    def ended(self, worker: int, number: int, now: float = 0.0) -> bool:
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return False
        self._end_stream(self.tasks[number].stream, number)
        self._head_changed(record, now)
        return True

    def pop_deliverable(self) -> Entry | None:
        task = super().pop_deliverable()
        if task is not None:
            self._num_undelivered[task.stream] -= 1
        return task

    def _end_stream(self, stream: int | None, first: int) -> None:
        """End a stream before task ``first``."""
        for number in [number for number, task in self.tasks.items() if task.stream == stream and number >= first]:
            self._num_undelivered[stream] -= 1
            if holders := self.tasks.pop(number).holders:
                del holders[0].in_flight[number]
                self._num_in_flight -= 1
            else:
                self._waiting.remove(number)
        self._turn.remove(stream)
        self.window = self._wanted_window = len(self._turn) * self._prefetch_factor
        self._ended = not self._turn
