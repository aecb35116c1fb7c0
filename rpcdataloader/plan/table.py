"""The undelivered tasks of one pass: where each is, who gets it, their order of delivery, their limit in bytes. Pure.

Each undelivered task is in one of three states: waiting for a worker, in flight at one or two workers, or answered.

A batch of a map-style dataset may go to any worker. If the one that the consumer needs next is a straggler (see
:mod:`rpcdataloader.plan.workers`), a *backup task* is sent: a copy, at another worker. The first answer counts,
even if it is an exception. The other copy occupies its worker until that has answered or left. Out of order, the
consumer needs a certain batch only once no other one is left to send.

A batch of an iterable-style dataset belongs to a stream: what one worker iterates over. Tasks are dealt to the streams
in turn and delivered in that order, as by torch's loader, so the order of the batches depends on the number of streams
alone. A stream that ends leaves the turn, and its pending tasks are dropped. It has no backup tasks, as these would
come from another stream.

Workers are named by numbers. A delivered task leaves nothing behind but its backup task, until that is answered, so an
event costs the same in the millionth batch as in the first.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rpcdataloader.plan.actions import Load, PlanOptions
from rpcdataloader.plan.workers import FINISH, PATIENCE, Pace, WorkerPace, choose_backup, keep_until

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
    killed: tuple[str, ...] = ()  # how each worker that died at work on it has ended
    stream: int | None = None  # stream that it belongs to; None without streams
    # Text of the error that is delivered in place of an answer, if the task has killed too many workers.
    condemned: str | None = None


class Table:
    """The tasks of one pass, and the workers that have them.

    Args:
        options: Limits. At most ``num_workers * prefetch_factor`` tasks are undelivered: the sampler is consumed as
            far ahead as by torch's loader. :meth:`resize` changes that; joining and leaving workers do not. At most
            ``prefetch_factor`` tasks are in flight per worker, besides backup tasks. With streams, ``num_workers`` is
            their number, each served by one worker.

            ``max_in_flight_bytes`` limits the bytes of undelivered answers plus the estimated bytes of tasks in flight;
            the next task to be delivered is always allowed. Sizes are unknown before the first answer, so only the
            window limits the first tasks, as in torch's loader.
        batch_size_bytes: Initial estimate, for example that of the epoch before.
        turn: Stream whose batch comes first.

    Attributes:
        tasks: Undelivered tasks by number, in the order of the numbers.
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        window: Limit on the number of undelivered tasks.
        answered_bytes: Bytes of undelivered answers.
    """

    def __init__(self, options: PlanOptions, batch_size_bytes: float = 0.0, turn: int = 0) -> None:
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
        self._max_bytes = options.max_in_flight_bytes
        self._max_deaths = options.max_retries
        self._num_in_flight = 0  # unanswered copies
        # One at a time: a file system that stalls for all workers must not get every request twice.
        self._has_backup = False  # True while a task is in flight at two workers
        # Workers
        self._workers: dict[int, WorkerPace] = {}
        # Those that are not draining: with room for a task, and full ones of which something is known.
        self._roomy: dict[int, WorkerPace] = {}
        self._full: dict[int, WorkerPace] = {}
        self._least_finish = math.inf  # not above the earliest expected finish of the full ones
        self._pace = Pace(self.window)
        self._kept_until = math.inf  # time until which a task is kept for a full worker, though another has room
        # Only the task at the head of a worker's queue has a deadline, from the time it came there: a task behind
        # another one is not running, and none is while the worker begins. The limit is the same for all, so deadlines
        # come in the order of the beginnings, which is that of the dictionary.
        self._task_timeout = options.task_timeout
        self._deadlines: dict[int, float] = {}
        # Streams
        self._has_streams = options.is_iterable
        self._turn: deque[int] = deque()  # those that have not ended; the first one gets the next task
        self._owners: dict[int | None, WorkerPace] = {}
        self._num_undelivered: Counter[int | None] = Counter()  # by stream
        if self._has_streams:
            self._turn.extend(range(options.num_workers))
            self._turn.rotate(-turn)

    # The consumer

    def resize(self, num_workers: int) -> None:
        """Set the window to that of this number of workers; the number of streams is fixed.

        The window grows at once. It shrinks with the next delivery, without dropping tasks: so the driver can ask the
        sampler in between, without holding a lock.
        """
        if not self._has_streams:
            self._wanted_window = num_workers * self._prefetch_factor
            self.window = max(self.window, self._wanted_window)

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` takes a task. Stays true until a task is added or delivered, or the input ends."""
        return not self._ended and len(self.tasks) < self.window

    def add_task(self, payload: Any) -> int | None:
        """Add the next task of the input, for the stream whose turn it is; returns its number, None without room.

        Out of order, a stream with a full share of the window is passed over, as by torch's loader: other streams do
        not wait for a slow one.
        """
        if self._ended or len(self.tasks) >= self.window:
            return None
        number = self._num_added
        self._num_added += 1
        task = self.tasks[number] = Entry(number, payload)
        self._waiting.append(number)
        if self._has_streams:
            stream = self._turn[0]
            if not self._in_order:
                stream = next(stream for stream in self._turn if self._num_undelivered[stream] < self._prefetch_factor)
            task.stream = stream
            self._num_undelivered[stream] += 1
            self._turn.remove(stream)
            self._turn.append(stream)
        return number

    def end_of_input(self) -> None:
        """Note that the sampler has no more tasks; streams report their own ends."""
        self._ended = self._ended or not self._has_streams

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
        if task.stream is not None:
            self._num_undelivered[task.stream] -= 1
        return task

    def forget(self) -> None:
        """Drop all tasks."""
        self.tasks.clear()
        self._answered.clear()

    @property
    def finished(self) -> bool:
        """Whether the input has ended and everything is delivered."""
        return self._ended and not self.tasks

    # Workers

    def worker_joined(self, worker: int, now: float = 0.0, host: Hashable = None, place: int = 0) -> None:
        """Add a worker, whose tasks have no limit of time before :meth:`worker_began`.

        Args:
            host: Host of the worker, which backup tasks avoid; None if unknown.
            place: Place of the worker: the stream that it serves.
        """
        record = self._workers[worker] = self._roomy[worker] = WorkerPace(worker, host, self._pace, since=now)
        if self._has_streams:
            self._owners[place] = record

    def worker_began(self, worker: int, now: float) -> None:
        """Let the time of a worker's first task begin: it has made its dataset, and taken a stream's samples again."""
        record = self._workers[worker]
        record.has_begun = True
        self._head_changed(record, now)

    def worker_draining(self, worker: int) -> None:
        """Give a worker no new tasks if others can have them; it still answers those that it has."""
        self._workers[worker].draining = True
        self._roomy.pop(worker, None)
        self._full.pop(worker, None)

    def worker_left(self, worker: int) -> None:
        """Remove a worker; its unanswered tasks wait for another one now."""
        record = self._workers.pop(worker)
        self._roomy.pop(worker, None)
        self._full.pop(worker, None)
        self._owners = {stream: owner for stream, owner in self._owners.items() if owner is not record}
        self._deadlines.pop(worker, None)
        self._num_in_flight -= len(record.in_flight)
        for number in record.in_flight:
            task = self._drop_copy(record, number)
            if task is not None and not task.holders:
                bisect.insort(self._waiting, number)

    def needs(self, place: int) -> bool:
        """Whether this place misses a worker when it is vacant: its stream has not ended, if it has one."""
        return not self._has_streams or place in self._turn

    def in_flight(self, worker: int) -> list[int]:
        """Unanswered tasks of a worker, oldest first; another worker may have answered and delivered them."""
        return list(self._workers[worker].in_flight)

    def running(self, worker: int, said: int | None = None) -> int | None:
        """The task to blame for a worker's death; None if it is at no task that is still needed.

        ``said`` is its last task from its own record, as an earlier answer may be lost with it. Of a stream, all tasks
        before that are needed.
        """
        in_flight = self._workers[worker].in_flight
        number = said if said in in_flight and not self._has_streams else next(iter(in_flight), None)
        task = None if number is None else self.tasks.get(number)
        return None if task is None or task.size_bytes is not None else number

    def blame(self, number: int, end: str) -> bool:
        """Note how a worker ended that died at work on this task, and has left.

        The death counts, but does not condemn the task while another worker has a copy, which may still be answered. If
        that worker leaves without reporting the task, the task is assigned once more. After the first death there are
        no backup tasks: a task that is late because it kills its workers would always have one somewhere.

        Returns:
            True if the task is condemned: it counts as answered, and an error is delivered in its place. Its stream
            ends with it, as no worker gets past the task.
        """
        task = self.tasks[number]
        task.killed += (end,)
        if len(task.killed) < self._max_deaths or task.holders:
            return False
        self._waiting.remove(number)
        if task.stream is not None:
            self._end_stream(task.stream, number + 1)
        self._note_answer(task, 0)
        return True

    # Time

    def timed_out(self, now: float) -> list[tuple[int, int]]:
        """Workers whose running task exceeds its time, each once per task, with the number of the task.

        The driver ends such a worker, reports that it left, and passes the task to :meth:`blame`.
        """
        late = list(takewhile(lambda worker: self._deadlines[worker] <= now, self._deadlines))
        for worker in late:
            del self._deadlines[worker]
        return [(worker, next(iter(self._workers[worker].in_flight))) for worker in late]

    def due(self, now: float) -> float:
        """Time for the next :meth:`assign` and :meth:`timed_out` without further events; infinite for never.

        It is later than ``now``, if both were called at ``now`` and returned nothing more.
        """
        late_at, _straggler = self._find_straggler()
        return min(
            self._kept_until,
            late_at if late_at > now else math.inf,  # late already, and no worker can take a backup task
            next(iter(self._deadlines.values()), math.inf),
        )

    def _head_changed(self, record: WorkerPace, now: float) -> None:
        """Note that another task is at the head of a worker's queue, or none."""
        self._deadlines.pop(record.id, None)
        if record.in_flight and record.has_begun and self._task_timeout is not None:
            self._deadlines[record.id] = now + self._task_timeout

    # Tasks, to a worker

    def assign(self, now: float) -> list[Load]:
        """Send the tasks that workers may take, the lowest first, and the backup task of a straggler."""
        self._kept_until = math.inf
        loads: list[Load] = []
        for number in self._waiting[:]:
            if not self._may_send(number):
                break
            task = self.tasks[number]
            record = self._owners.get(task.stream) if self._has_streams else self._choose(now)
            if record is not None:
                self._waiting.remove(number)
                loads.append(self._send(record, task, now))
            elif not self._has_streams:
                break
        late_at, straggler = self._find_straggler()
        if straggler is not None and late_at <= now:
            # Out of order only to a worker without a task, whose answer would do.
            workers = [one for one in self._workers.values() if self._in_order or not one.in_flight]
            if (record := choose_backup(workers, straggler.holders[0], now)) is not None:
                loads.append(self._send(record, straggler, now))
                self._has_backup = True
        return loads

    def _choose(self, now: float) -> WorkerPace | None:
        """The worker that is expected to finish one more task first; None while that has no room for it."""
        if not self._roomy:
            return None
        best = min(self._roomy.values(), key=FINISH)
        if now >= best.overdue_at():  # it comes last
            best = min((one for one in self._roomy.values() if now < one.overdue_at()), key=FINISH, default=best)
        elif best.finish <= PATIENCE * self._least_finish:
            return best  # without a look at all of the others
        self._least_finish = min((worker.finish for worker in self._full.values()), default=math.inf)
        kept_until = keep_until(best, self._full.values(), now)
        if kept_until <= now:
            return best
        self._kept_until = kept_until
        return None

    def _may_send(self, number: int) -> bool:
        """Whether the bytes allow one more task: this one, which waits."""
        if self.answered_bytes + (self._num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes:
            return True
        # The task that the consumer needs next is always allowed, or no byte would ever be freed. Copies of delivered
        # tasks do not count here, as their workers may hang.
        if self._in_order:
            return number == next(iter(self.tasks))
        return len(self.tasks) == len(self._waiting)

    def _send(self, record: WorkerPace, task: Entry, now: float) -> Load:
        """Note that a copy goes to the worker."""
        is_head = not record.in_flight
        record.sent(task.number, now)
        task.holders.append(record)
        self._num_in_flight += 1
        if is_head and self._task_timeout is not None:
            self._head_changed(record, now)
        if len(record.in_flight) >= self._prefetch_factor:
            self._roomy.pop(record.id, None)
            self._note_full(record)
        return Load(record.id, task.number, task.payload)

    def _note_full(self, record: WorkerPace) -> None:
        if record.task_seconds is not None:
            self._full[record.id] = record
            self._least_finish = min(self._least_finish, record.finish)

    # The backup task

    def _find_straggler(self) -> tuple[float, Entry | None]:
        """The time at which the next needed task becomes a straggler, and that task; infinite if it gets no backup."""
        if self._has_backup or self._answered or not self.tasks:
            return math.inf, None
        task: Entry | None
        if self._in_order:
            task = self.tasks[next(iter(self.tasks))]
        elif self.wants_input or (self._waiting and self._may_send(self._waiting[0])):
            return math.inf, None  # others will be delivered
        else:
            task = next((task for task in self.tasks.values() if task.holders), None)
        if task is None or not task.holders or task.size_bytes is not None or task.killed:
            return math.inf, None
        # A task behind another one has a worker that hangs at the first.
        return task.holders[0].since + self._pace.late_seconds, task

    # Answers, from a worker

    def replied(
        self,
        worker: int,
        number: int,
        *,
        size_bytes: int,
        task_seconds: float | None = None,
        now: float = 0.0,
        answer: Any = None,
    ) -> Entry | None:
        """Note a worker's answer to a task.

        Args:
            size_bytes: Bytes that the answer occupies in this process.
            task_seconds: Working time, without queueing and travelling; None if that says nothing about the worker's
                speed, as for an exception or a cancelled task.
            answer: The answer, kept until the task is delivered.

        Returns:
            The task; None if the answer is to be ignored: the task is not in flight at that worker, or another worker
            was faster.
        """
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return None
        if self._has_streams:
            task_seconds = None  # a stream cannot be given to a faster worker
        if record.answered(number, task_seconds, now) and self._task_timeout is not None:
            self._head_changed(record, now)
        self._num_in_flight -= 1
        if not record.draining and len(record.in_flight) < self._prefetch_factor:
            self._roomy[worker] = record
            self._full.pop(worker, None)
        elif not record.draining:
            self._note_full(record)
        task = self._drop_copy(record, number)
        if task is None:
            return None
        task.answer = answer
        if size_bytes > self.batch_size_bytes:
            self.batch_size_bytes = float(size_bytes)
        else:
            self.batch_size_bytes += _SIZE_DECAY * (size_bytes - self.batch_size_bytes)
        self._note_answer(task, size_bytes)
        return task

    def _note_answer(self, task: Entry, size_bytes: int) -> None:
        task.size_bytes = size_bytes
        self.answered_bytes += size_bytes
        if not self._in_order:
            self._answered.append(task)

    def _drop_copy(self, record: WorkerPace, number: int) -> Entry | None:
        """Note that a copy is no longer in flight; returns its task, None if another worker has answered that."""
        task = self.tasks.get(number)
        if task is None:
            return None
        if len(task.holders) > 1:
            self._has_backup = False
        task.holders.remove(record)
        return task if task.size_bytes is None else None

    def ended(self, worker: int, number: int, now: float = 0.0) -> None:
        """Note a worker's answer that its stream ended before this task; ignored as by :meth:`replied`."""
        record = self._workers.get(worker)
        if record is not None and number in record.in_flight:
            stream = self.tasks[number].stream
            assert stream is not None
            self._end_stream(stream, number)
            self._head_changed(record, now)

    def _end_stream(self, stream: int, first: int) -> None:
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
