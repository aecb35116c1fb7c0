"""Assignment of an iterable-style dataset's tasks to streams, and the order of delivery. Pure.

A stream is what one worker iterates over. Tasks are dealt to the streams in turn and delivered in that order, as by
torch's loader, so the order of the batches depends on the number of streams alone. A stream that ends leaves the turn,
and its pending tasks are dropped.

Streams have neither second copies nor retries, unlike :class:`~rpcdataloader.plan.batches.BatchTable`: a second copy
would come from another stream, and an iterator that has raised an exception has ended, or is past the place. So any
exception is an answer. The number of streams is fixed, because the order of the batches depends on it.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Entry, Table


@dataclass(slots=True)
class _StreamEntry(Entry):
    is_sent: bool = False


class StreamTable(Table[_StreamEntry]):
    """The tasks of one pass over an iterable-style dataset; see :class:`~rpcdataloader.plan.table.Table`.

    Args:
        options: ``num_workers`` is the number of streams, each served by one worker. At most ``prefetch_factor`` tasks
            are undelivered per stream that has not ended.
        batch_size_bytes: Initial estimate.
        turn: Stream whose batch comes first.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0, turn: int = 0) -> None:
        super().__init__(options, batch_size_bytes)
        # Streams that have not ended; the first one gets the next task.
        self._turn = deque(range(options.num_workers))
        self._turn.rotate(-turn)
        self._workers: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._waiting: list[int] = []  # unsent tasks, sorted
        self._num_undelivered: Counter[int] = Counter()  # by stream

    # Workers

    def worker_joined(self, worker: int, now: float = 0.0, host: Hashable = None, place: int = 0) -> None:  # noqa: ARG002
        stream = place
        if worker in self._workers or stream in self._owners:
            raise LocalProtocolError(f"worker {worker} cannot take stream {stream}: one of them is taken")
        self._workers[worker] = stream
        self._owners[stream] = worker

    def worker_draining(self, worker: int) -> None:
        """Wait for the worker's answers: its stream has no other worker, and unanswered tasks go to the next one."""

    def worker_left(self, worker: int, now: float) -> list[int]:  # noqa: ARG002  every event carries its time
        stream = self._get(worker)
        del self._workers[worker], self._owners[stream]
        if self._timeouts is not None:
            self._timeouts.end(worker)
        lost = [number for number, task in self.tasks.items() if _is_in_flight(task, stream)]
        for number in lost:
            self.tasks[number].is_sent = False
            bisect.insort(self._waiting, number)
            self._num_in_flight -= 1
        return lost

    def needs(self, place: int) -> bool:
        return place in self._turn

    def resize(self, num_workers: int) -> None:
        """Change nothing: the number of streams is fixed."""

    def in_flight(self, worker: int) -> list[int]:
        stream = self._get(worker)
        return [number for number, task in self.tasks.items() if _is_in_flight(task, stream)]

    def running(self, worker: int, said: int | None = None) -> int | None:  # noqa: ARG002  all before it is needed
        return self._first_in_flight(self._get(worker))

    def blame(self, number: int, *, is_too_many: bool) -> bool:
        """See :meth:`Table.blame`. The stream of a condemned task ends with it: no worker gets past the task."""
        task = self.tasks[number]
        task.num_deaths += 1
        if not is_too_many:
            return False
        self._drop_from(_stream(task), number + 1)
        self._waiting.remove(number)
        self._condemn(task)
        return True

    def holder(self, task: _StreamEntry) -> int | None:
        return self._owners.get(_stream(task)) if task.is_sent else None

    # Time

    def due(self, now: float) -> float | None:  # noqa: ARG002  every event carries its time
        return None if self._timeouts is None else self._timeouts.due

    # Tasks, from the input to a stream

    def add_task(self, payload: Any) -> int | None:
        """See :meth:`Table.add_task`; the task is for the stream whose turn it is.

        Out of order, a stream with a full share of the window is passed over, as by torch's loader: other streams do
        not wait for a slow one.
        """
        if not self.wants_input:
            return None
        number = self._num_added
        self._num_added += 1
        stream = self._turn[0]
        if not self._in_order:
            stream = next(stream for stream in self._turn if self._num_undelivered[stream] < self._prefetch_factor)
        self.tasks[number] = _StreamEntry(number, payload, stream=stream)
        self._num_undelivered[stream] += 1
        self._waiting.append(number)
        self._turn.remove(stream)
        self._turn.append(stream)
        return number

    def end_of_input(self) -> None:
        """Do nothing: streams report their own ends."""

    def assign(self, now: float) -> tuple[int, int] | None:
        """See :meth:`Table.assign`; it is the lowest task whose stream has a worker."""
        for place, number in enumerate(self._waiting):
            task = self.tasks[number]
            worker = self._owners.get(_stream(task))
            if worker is None:
                continue
            # The task that the consumer needs next is always allowed, or no byte would ever be freed.
            if self._in_order:
                is_next = number == next(iter(self.tasks))
            else:
                is_next = not (self._num_in_flight or self._answered)
            if not (is_next or self._has_room()):
                return None
            if self._timeouts is not None and self._first_in_flight(_stream(task)) is None:
                self._timeouts.begin(worker, now)
            task.is_sent = True
            del self._waiting[place]
            self._num_in_flight += 1
            return worker, number
        return None

    # Answers, from a worker to the consumer

    def replied(
        self,
        worker: int,
        number: int,
        *,
        size_bytes: int,
        task_seconds: float | None = None,  # noqa: ARG002  a stream cannot be given to a faster worker
        now: float = 0.0,
        answer: Any = None,
    ) -> bool:
        task = self.tasks.get(number)
        if task is None or not _is_in_flight(task, self._workers.get(worker)):
            return False
        self._num_in_flight -= 1
        self._settle(task, size_bytes, answer)
        if self._timeouts is not None:
            # It begins with the next task in its queue.
            if self._first_in_flight(_stream(task)) is None:
                self._timeouts.end(worker)
            else:
                self._timeouts.begin(worker, now)
        return True

    def retry(self, worker: int, number: int, *, delay: float, now: float) -> None:
        """Retry nothing: a stream that has raised an exception is past the place, or at its end."""

    def ended(self, worker: int, number: int, now: float = 0.0) -> bool:  # noqa: ARG002  every event carries its time
        task = self.tasks.get(number)
        if task is None or not _is_in_flight(task, self._workers.get(worker)):
            return False
        self._drop_from(_stream(task), number)
        if self._timeouts is not None:
            self._timeouts.end(worker)
        return True

    def losers(self, number: int) -> list[int]:  # noqa: ARG002
        """No task has a second copy."""
        return []

    def pop_deliverable(self) -> _StreamEntry | None:
        task = super().pop_deliverable()
        if task is not None:
            self._num_undelivered[_stream(task)] -= 1
        return task

    # Helpers

    def _drop_from(self, stream: int, first: int) -> None:
        """End a stream before task ``first``."""
        for number in [number for number, task in self.tasks.items() if task.stream == stream and number >= first]:
            self._num_undelivered[stream] -= 1
            if self.tasks.pop(number).is_sent:
                self._num_in_flight -= 1
            else:
                self._waiting.remove(number)
        self._turn.remove(stream)
        self.window = self._wanted_window = len(self._turn) * self._prefetch_factor
        self._ended = not self._turn

    def _first_in_flight(self, stream: int) -> int | None:
        return next((number for number, task in self.tasks.items() if _is_in_flight(task, stream)), None)

    def _get(self, worker: int) -> int:
        stream = self._workers.get(worker)
        if stream is None:
            raise LocalProtocolError(f"worker {worker} has not joined, or has left")
        return stream


def _stream(task: _StreamEntry) -> int:
    assert task.stream is not None
    return task.stream


def _is_in_flight(task: _StreamEntry, stream: int | None) -> bool:
    return task.stream == stream and task.is_sent and task.size_bytes is None
