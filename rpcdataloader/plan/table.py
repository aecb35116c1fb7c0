"""The undelivered tasks of one pass: where each is, who gets it, their order of delivery, their limit in bytes. Pure.

Each undelivered task is in one of three states: waiting for a worker, in flight at one or two workers, or answered.

A batch of a map-style dataset may go to any worker. If the one that the consumer needs next is a straggler (see
:mod:`rpcdataloader.plan.workers`), a *backup task* is sent: a copy, at another worker. The first answer counts,
even if it is an exception. The other copy occupies its worker until that has answered or left. Out of order, the
consumer needs a certain batch only once no other one is left to send.

While fewer batches are ready or under way than there could be, the next one is made in *parts*, by several workers (see
:mod:`rpcdataloader.plan.splitting`). A part is a task, with a number between that of its batch and the next one: it is
sent, answered, lost and doubled as a batch is. A worker has one part of a batch at a time, so that workers which come
later get the others. Once all of them are answered, the caller joins them, and says so. A batch is made again as a
whole if its parts do not fit together, or if one of them is to blame for a death.

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
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rpcdataloader.plan.actions import Load, PlanOptions
from rpcdataloader.plan.splitting import RAMP, choose_size, choose_workers
from rpcdataloader.plan.workers import FINISH, PATIENCE, Pace, WorkerPace, choose_backup, keep_until, take_turns

# The estimated size of a batch jumps up to the largest seen and sinks this fraction of the way towards smaller ones. A
# memory limit must hold when sizes vary, where an average is too low half of the time; without the sinking, one giant
# batch at the start would throttle the whole epoch.
_SIZE_DECAY = 1 / 16


# A batch in parts counts as this many in flight: the answers of all parts, and the batch that they are joined to.
_IN_PARTS = 2


Split = Callable[[Any, int, int], Any]


@dataclass(slots=True, eq=False)
class Entry:
    """A batch to load, or a part of one."""

    number: float
    payload: Any
    num_samples: int = 1
    answer: Any = None  # argument of :meth:`Table.replied`; None for a condemned task
    size_bytes: int | None = None  # bytes of the answer; None until it is here
    holders: list[WorkerPace] = field(default_factory=list)  # workers with an unanswered copy, oldest first
    killed: tuple[str, ...] = ()  # how each worker that died at work on it has ended
    stream: int | None = None  # stream that it belongs to; None without streams
    # Text of the error that is delivered in place of an answer, if the task has killed too many workers.
    condemned: str | None = None
    parts: tuple[Entry, ...] = ()  # its parts so far, in their order, until they are joined
    num_cut: int = 0  # samples of these
    whole: Entry | None = field(default=None, repr=False)  # the batch that this is a part of

    @property
    def has_all_parts(self) -> bool:
        """Whether it is in parts, and all of them are answered."""
        return self.num_cut == self.num_samples and all(part.size_bytes is not None for part in self.parts)


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
        batch_seconds: Time of a batch in the epoch before; None if unknown.
        split: Function that makes the payload of a part from that of a batch, the part's first sample and their
            number; it returns None if the batch cannot have parts. None if no batch is made in parts.

    Attributes:
        tasks: Undelivered batches by number, in the order of the numbers.
        batch_size_bytes: Estimated size of a batch, 0 before the first answer.
        superfluous: Copies of which no answer is needed any more, by worker and number; the caller cancels them.
        window: Limit on the number of undelivered tasks.
        answered_bytes: Bytes of undelivered answers.
    """

    def __init__(
        self,
        options: PlanOptions,
        batch_size_bytes: float = 0.0,
        turn: int = 0,
        *,
        batch_seconds: float | None = None,
        split: Split | None = None,
    ) -> None:
        self.tasks: dict[float, Entry] = {}
        self.batch_size_bytes = float(batch_size_bytes)
        self.answered_bytes = 0
        self._prefetch_factor = options.prefetch_factor
        self.window = self._wanted_window = options.num_workers * options.prefetch_factor
        self._num_added = 0
        self._ended = False
        self._waiting: list[float] = []  # sorted
        self._in_order = options.in_order
        self._answered: deque[Entry] = deque()  # in the order of the answers; unused with in_order
        self._max_bytes = options.max_in_flight_bytes
        self._max_deaths = options.max_retries
        self._num_in_flight = 0  # unanswered copies of batches; of one in parts, see _IN_PARTS
        # One at a time: a file system that stalls for all workers must not get every request twice.
        self._has_backup = False  # True while a task is in flight at two workers
        # Workers
        self._workers: dict[int, WorkerPace] = {}
        # Those that are not draining: with room for a task, and full ones of which something is known.
        self._roomy: dict[int, WorkerPace] = {}
        self._full: dict[int, WorkerPace] = {}
        self._gathers = not options.is_iterable  # until as many workers as are wanted have been there
        self._least_finish = math.inf  # not above the earliest expected finish of the full ones
        self._pace = Pace(self.window)
        self._kept_until = math.inf  # time until which a task is kept, though a worker has room
        self._num_failed = 0  # workers that have failed in their last task
        # Only the task at the head of a worker's queue has a deadline, from the time it came there: a task behind
        # another one is not running, and none is while the worker begins. The limit is the same for all, so deadlines
        # come in the order of the beginnings, which is that of the dictionary.
        self._task_timeout = options.task_timeout
        self._deadlines: dict[int, float] = {}
        # Parts
        self.superfluous: list[tuple[int, float]] = []
        self._split = None if options.is_iterable else split
        self._batch_seconds = batch_seconds
        self._parts: dict[float, Entry] = {}  # by number
        self._ramp_end = 0.0  # number of the batch from which on all are whole
        self._has_answer = self._nears_end = False
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
            self._gathers &= len(self._workers) < num_workers

    @property
    def _num_workers(self) -> int:
        """Number of workers that the pass wants."""
        return self._wanted_window // self._prefetch_factor

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` takes a task. Stays true until a task is added or delivered, or the input ends."""
        return not self._ended and len(self.tasks) < self.window

    def add_task(self, payload: Any, num_samples: int = 1, is_last: bool = False) -> int | None:
        """Add the next task of the input, for the stream whose turn it is; returns its number, None without room.

        ``is_last`` is a guess, and only decides on parts.

        Out of order, a stream with a full share of the window is passed over, as by torch's loader: other streams do
        not wait for a slow one.
        """
        if self._ended or len(self.tasks) >= self.window:
            return None
        number = self._num_added
        self._num_added += 1
        self._nears_end = is_last
        task = self.tasks[number] = Entry(number, payload, num_samples)
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
        """Note that the sampler has no more tasks; for streams, which end by themselves, after an exception in it."""
        self._ended = True

    def awaited(self) -> Entry | None:
        """The oldest unanswered task, or part of one; None if all are answered."""
        task = next((task for task in self.tasks.values() if task.size_bytes is None), None)
        return task and next((part for part in task.parts if part.size_bytes is None), task)

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
        self._parts.clear()
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
        self._gathers &= len(self._workers) < self._num_workers
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
        self._num_failed -= record.has_failed
        self._roomy.pop(worker, None)
        self._full.pop(worker, None)
        self._owners = {stream: owner for stream, owner in self._owners.items() if owner is not record}
        self._deadlines.pop(worker, None)
        self._num_in_flight -= sum(share == 1 for share in record.in_flight.values())
        for number in record.in_flight:
            task = self._drop_copy(record, number)
            if task is not None and not task.holders:
                bisect.insort(self._waiting, number)

    def needs(self, place: int) -> bool:
        """Whether this place misses a worker when it is vacant: its stream has not ended, if it has one."""
        return not self._has_streams or place in self._turn

    def find(self, number: float) -> Entry | None:
        """An undelivered batch, or a part of one, by its number."""
        return self.tasks.get(number) or self._parts.get(number)

    def in_flight(self, worker: int) -> list[float]:
        """Unanswered tasks of a worker, oldest first; another worker may have answered and delivered them."""
        return list(self._workers[worker].in_flight)

    def running(self, worker: int, said: float | None = None) -> Entry | None:
        """The task to blame for a worker's death; None if it is at no task that is still needed.

        ``said`` is its last task from its own record, as an earlier answer may be lost with it. Of a stream, all tasks
        before that are needed.
        """
        in_flight = self._workers[worker].in_flight
        number = said if said in in_flight and not self._has_streams else next(iter(in_flight), None)
        task = None if number is None else self.find(number)
        return None if task is None or task.size_bytes is not None else task

    def blame(self, task: Entry, end: str) -> Entry | None:
        """Note how a worker ended that died at work on this task, and has left.

        The death counts, but does not condemn the task while another worker has a copy, which may still be answered. If
        that worker leaves without reporting the task, the task is assigned once more. After the first death there are
        no backup tasks: a task that is late because it kills its workers would always have one somewhere. The batch of
        a part is made again as a whole, so its deaths are counted in one place.

        Returns:
            The task if it is condemned: it counts as answered, and an error is delivered in its place. Its stream ends
            with it, as no worker gets past the task.
        """
        task.killed += (end,)
        if task.whole is not None and not task.holders:
            task = self._make_whole(task.whole, task.killed)
        if len(task.killed) < self._max_deaths or task.holders:
            return None
        self._waiting.remove(task.number)
        if task.stream is not None:
            self._end_stream(task.stream, task.number + 1)
        self._note_answer(task, 0)
        return task

    # Time

    def timed_out(self, now: float) -> list[tuple[int, float]]:
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
        at = 0
        while at < len(self._waiting) and self._may_send(number := self._waiting[at]):
            task = self.tasks.get(number) or self._parts[number]
            record = self._owners.get(task.stream) if self._has_streams else self._choose(now, task.whole or task)
            given = None if record is None else self._cut(task, record)
            if record is not None and given is not None:
                if given is task or task.num_cut == task.num_samples:
                    del self._waiting[at]
                loads.append(self._send(record, given, now))
            elif self._has_streams:
                at += 1
            else:
                break
        late_at, straggler = self._find_straggler()
        if straggler is not None and late_at <= now:
            # Out of order only to a worker without a task, whose answer would do.
            workers = [one for one in self._workers.values() if self._in_order or not one.in_flight]
            if (record := choose_backup(workers, straggler.holders[0], now)) is not None:
                loads.append(self._send(record, straggler, now))
                self._has_backup = True
        return loads

    def _choose(self, now: float, batch: Entry) -> WorkerPace | None:
        """The worker that is expected to finish one more task first; None while that has no room for it."""
        roomy: Collection[WorkerPace] = self._roomy.values()
        if batch.parts:
            roomy = [worker for worker in roomy if not any(worker in part.holders for part in batch.parts)]
        if self._gathers:
            # As with torch, each worker gets a first task before any gets a second one: tasks may wait for each other.
            roomy = [worker for worker in roomy if worker.task_seconds is not None or not worker.in_flight]
        if self._num_failed and any(one.in_flight and not one.has_failed for one in self._workers.values()):
            rested = [worker for worker in roomy if not worker.has_failed or worker.rests_until <= now]
            if not rested:
                self._kept_until = min((worker.rests_until for worker in roomy), default=math.inf)
            roomy = rested
        if not roomy:
            return None
        best = min(roomy, key=FINISH)
        if now >= best.overdue_at():  # it comes last
            best = min((one for one in roomy if now < one.overdue_at()), key=FINISH, default=best)
        elif best.finish <= PATIENCE * self._least_finish:
            return take_turns(best, roomy)  # without a look at all of the others
        self._least_finish = min((worker.finish for worker in self._full.values()), default=math.inf)
        kept_until = keep_until(best, self._full.values(), now)
        if kept_until <= now:
            return take_turns(best, roomy)
        self._kept_until = kept_until
        return None

    def _may_send(self, number: float) -> bool:
        """Whether the bytes allow one more task: this one, which waits."""
        if number in self._parts or self.tasks[number].parts:  # counted with its batch
            return True
        if self.answered_bytes + (self._num_in_flight + 1) * self.batch_size_bytes <= self._max_bytes:
            return True
        # The task that the consumer needs next is always allowed, or no byte would ever be freed. Copies of delivered
        # tasks do not count here, as their workers may hang.
        if self._in_order:
            return number == next(iter(self.tasks))
        if not self._parts:
            return len(self.tasks) == len(self._waiting)
        has_batch = any(task.holders or task.size_bytes is not None for task in self.tasks.values())
        return not (has_batch or any(part.holders for part in self._parts.values()))

    def _send(self, record: WorkerPace, task: Entry, now: float) -> Load:
        """Note that a copy goes to the worker."""
        is_head = not record.in_flight
        whole = task.whole
        record.sent(task.number, now, 1.0 if whole is None else task.num_samples / whole.num_samples)
        task.holders.append(record)
        self._num_in_flight += whole is None
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

    # Parts

    def _cut(self, task: Entry, record: WorkerPace) -> Entry | None:
        """What a worker gets of a waiting task: all of it, or its next part; None if nothing for now."""
        if self._split is None or task.whole is not None or task.num_samples < 2:
            return task
        if not self._num_in_flight:
            self._ramp_end = task.number + RAMP * self._num_workers
        if task.number >= self._ramp_end and not (self._nears_end or task.parts):
            return task  # the steady state
        is_unknown = self.batch_seconds is None and not self._has_answer
        if is_unknown and record.in_flight and not task.parts and any(part.holders for part in self._parts.values()):
            return None  # the first answer tells how large parts have to be; idle workers do not wait for it
        size = self._size_of_part(task)
        if size == task.num_samples or (payload := self._split(task.payload, task.num_cut, size)) is None:
            return task
        part = Entry(task.number + (task.num_cut + 1) / (task.num_samples + 1), payload, size, whole=task)
        if not task.parts:
            self._num_in_flight += _IN_PARTS
        task.parts += (part,)
        task.num_cut += size
        self._parts[part.number] = part
        return part

    def _size_of_part(self, task: Entry) -> int:
        """The number of samples of a batch's next part; all of them if the batch is not made in parts."""
        num_samples, num_workers = task.num_samples, 1
        if task.killed:
            return num_samples
        num_left = int(bool(task.parts))  # batches of which nothing is under way, with this one
        num_left += sum(number in self.tasks and not self.tasks[number].parts for number in self._waiting)
        if task.number < self._ramp_end:
            num_workers = choose_workers(self._num_workers, len(self.tasks) - num_left)
        if self._nears_end:
            num_ready = sum(other.size_bytes is not None for other in self.tasks.values())
            num_workers = max(num_workers, self._num_workers // max(num_left, num_ready))
        size = choose_size(num_samples, num_workers, self.batch_seconds)
        if task.parts:
            return min(size, num_samples - task.num_cut)
        has_room = self.answered_bytes + (self._num_in_flight + _IN_PARTS) * self.batch_size_bytes <= self._max_bytes
        return size if has_room else num_samples

    @property
    def batch_seconds(self) -> float | None:
        """Time of a batch on one worker; None if unknown."""
        return self._pace.task_seconds or self._batch_seconds

    def joined(self, number: float, size_bytes: int, answer: Any) -> None:
        """Note that the answers of a batch's parts are joined."""
        task = self.tasks[number]
        self._drop_parts(task)
        task.answer = answer
        self._note_size(size_bytes)
        self._note_answer(task, size_bytes)

    def unfit(self) -> None:
        """Note that the parts of a batch do not fit together: it and all others are made as a whole."""
        for task in [task for task in self.tasks.values() if task.parts]:
            self._make_whole(task)
        self._split = None

    def _make_whole(self, task: Entry, killed: tuple[str, ...] = ()) -> Entry:
        """Let a batch in parts wait for a worker as a whole."""
        self._drop_parts(task)
        task.killed += killed
        bisect.insort(self._waiting, task.number)
        return task

    def _drop_parts(self, task: Entry) -> None:
        for part in task.parts:
            del self._parts[part.number]
            if part.size_bytes is None:
                if not part.holders:
                    self._waiting.remove(part.number)
                self._has_backup &= len(part.holders) < 2
                self.superfluous += [(holder.id, part.number) for holder in part.holders]
        if 0 < task.num_cut < task.num_samples:
            self._waiting.remove(task.number)
        task.parts, task.num_cut = (), 0
        self._num_in_flight -= _IN_PARTS

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
            task = next((task for task in self.tasks.values() if task.holders or task.parts), None)
        if task is not None and task.parts:
            task = next((part for part in task.parts if part.size_bytes is None), None)
        if task is None or not task.holders or task.size_bytes is not None or task.killed:
            return math.inf, None
        # A task behind another one has a worker that hangs at the first.
        return task.holders[0].since + self._pace.late_seconds, task

    # Answers, from a worker

    def replied(
        self,
        worker: int,
        number: float,
        size_bytes: int,
        task_seconds: float | None = None,
        now: float = 0.0,
        has_failed: bool = False,
        answer: Any = None,
    ) -> Entry | None:
        """Note a worker's answer to a task.

        Args:
            size_bytes: Bytes that the answer occupies in this process.
            task_seconds: Working time, without queueing and travelling; None if that says nothing about the worker's
                speed, as for an exception or a cancelled task.
            has_failed: True if the batch, or most of it, is missing: a worker that fails faster than others work must
                not get the tasks of all.
            answer: The answer, kept until the task is delivered.

        Returns:
            The task; None if the answer is to be ignored: the task is not in flight at that worker, or another worker
            was faster.
        """
        record = self._workers.get(worker)
        if record is None or number not in record.in_flight:
            return None
        if self._has_streams:
            task_seconds, has_failed = None, False  # a stream cannot be given to another worker
        self._has_answer = True
        self._num_in_flight -= record.in_flight[number] == 1
        self._num_failed += has_failed - record.has_failed
        if record.answered(number, task_seconds, now, has_failed) and self._task_timeout is not None:
            self._head_changed(record, now)
        if not record.draining and len(record.in_flight) < self._prefetch_factor:
            self._roomy[worker] = record
            self._full.pop(worker, None)
        elif not record.draining:
            self._note_full(record)
        task = self._drop_copy(record, number)
        if task is None:
            return None
        task.answer = answer
        if task.whole is not None:
            task.size_bytes = size_bytes
            return task
        self._note_size(size_bytes)
        self._note_answer(task, size_bytes)
        return task

    def _note_size(self, size_bytes: int) -> None:
        if size_bytes > self.batch_size_bytes:
            self.batch_size_bytes = float(size_bytes)
        else:
            self.batch_size_bytes += _SIZE_DECAY * (size_bytes - self.batch_size_bytes)

    def _note_answer(self, task: Entry, size_bytes: int) -> None:
        task.size_bytes = size_bytes
        self.answered_bytes += size_bytes
        if not self._in_order:
            self._answered.append(task)

    def _drop_copy(self, record: WorkerPace, number: float) -> Entry | None:
        """Note that a copy is no longer in flight; returns its task, None if another worker has answered that."""
        task = self.tasks.get(number) or self._parts.get(number)
        if task is None:
            return None
        if len(task.holders) > 1:
            self._has_backup = False
        task.holders.remove(record)
        return task if task.size_bytes is None else None

    def ended(self, worker: int, number: float, now: float = 0.0) -> None:
        """Note a worker's answer that its stream ended before this task; ignored as by :meth:`replied`."""
        record = self._workers.get(worker)
        if record is not None and number in record.in_flight:
            stream = self.tasks[number].stream
            assert stream is not None
            self._end_stream(stream, number)
            self._head_changed(record, now)

    def _end_stream(self, stream: int, first: float) -> None:
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
        self._ended = self._ended or not self._turn
