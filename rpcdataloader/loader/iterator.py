"""One pass over a loader: drives the task table over the workers.

The consumer's thread draws from the sampler, as torch's does, and delivers; receiver threads report replies and losses
and hand out what is waiting. One condition guards the table and everything beside it. Policy is in the scheduler, and
which workers there are is the crew's business.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rpcdataloader.client.datasets import RemoteDataset, dumps_named
from rpcdataloader.client.exchange import reference_of
from rpcdataloader.client.node import Node
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.worker import Worker
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RPCError, RPCTimeoutError
from rpcdataloader.loader import remote
from rpcdataloader.loader.answers import Answer, Failure, decode
from rpcdataloader.loader.bad_samples import Reduced, account
from rpcdataloader.loader.copying import Copies, make_carrier
from rpcdataloader.loader.crew import Crew, Opening
from rpcdataloader.loader.passes import Pass, begin_epoch, begin_pass, loader_spec, undone_afterwards, warn_if_longer
from rpcdataloader.loader.placement import Placement
from rpcdataloader.loader.progress import Progress
from rpcdataloader.loader.ranks import label, of_rank
from rpcdataloader.loader.retries import Sent, end_late_workers, retry
from rpcdataloader.loader.scheduler import Scheduler
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.stream_state import StreamState
from rpcdataloader.loader.streams import StreamTable
from rpcdataloader.loader.tasks import Task, describe, load_request
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.movable import Movable
from rpcdataloader.wire.pickling import dumps, result_of
from rpcdataloader.wire.slabs import Allocator, pinned_allocator


class RemoteIterator:
    """What ``iter(loader)`` returns when workers load. Dropping it ends its workers.

    Args:
        placement: Of the workers; for an iterable-style dataset, of the streams.
        saved: The state of the pass to go on with.
        reported_length: What ``len`` of the loader has said of an iterable-style dataset.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
    ) -> None:
        self._run = _Run(settings, dataset, placement, saved)
        self._name = dataset.name
        self._reported_length = reported_length
        self._sampler = settings.sampler
        self._max_skipped = settings.max_skipped
        weakref.finalize(self, get_client().janitor.leave, self._run.close).atexit = False

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The sampler is at its end, and everything was delivered.
            RuntimeError: No batch within the loader's timeout.
            ConnectionLostError: No worker is left and none came back in time, or a batch has ended too many of them.
            Exception: What the dataset, the collate function or the init function raised on a worker.
            BadSamplesError: More samples were skipped than the loader allows.
        """
        while type(batch := self._run.next()) is Reduced:
            account(batch, self.progress, self._max_skipped)
            if not batch.is_empty:
                batch = batch.batch
                break
        if self._reported_length is not None:
            warn_if_longer(self.progress.num_yielded, self._reported_length, self._name)
        return batch

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def progress(self) -> Progress:
        """How far this pass has come; changes with it."""
        return self._run.progress

    @property
    def is_usable(self) -> bool:
        """Whether :meth:`reset` is possible."""
        return self._run.is_usable

    def add_nodes(self, nodes: Sequence[Node]) -> None:
        """Let more nodes help from now on."""
        self._run.crew.add(nodes)

    def remove_nodes(self, nodes: Sequence[Node]) -> None:
        """Ask no more of these nodes."""
        self._run.crew.remove(nodes)

    def reset(self, reported_length: int | None = None) -> None:
        """Begin another epoch with the same workers."""
        self._reported_length = reported_length
        self._run.begin_epoch()


# Which stream a batch is of, and how far that has come with it; None instead of an exception's.
_StreamAfter = tuple[int, StreamState | None]

# With what is copied to the device, if there is one; or, of the batch that comes next, with the copies.
_Answered = tuple[Any, Task, _StreamAfter | None, Movable | None]
_Ahead = tuple[Any, Task, _StreamAfter | None, Copies | None]


class _Run:
    """The state behind an iterator, referred to by its workers, so that the iterator itself can be collected."""

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._settings = settings
        self._dataset = dataset  # held for as long as there are workers
        self._client = get_client()
        self._num_workers = self._wanted_workers = len(placement.homes)
        self._pid = os.getpid()
        pinned = pinned_allocator() if settings.pin_memory else None
        self._allocator: Allocator = pinned or self._client.allocator
        self._carrier = None if settings.device is None else make_carrier(settings.device, self._allocator)
        if self._carrier is not None:
            self._allocator = self._carrier.allocator
        self._decode = functools.partial(
            decode,
            allocator=self._allocator,
            iterable=settings.iterable,
            pins=pinned is not None,
            moves=self._carrier is not None,
        )
        with undone_afterwards(saved):
            self._pass = begin_pass(settings, saved)
            self._condition = threading.Condition()
            # Guarded by the condition:
            self._streams: list[StreamState] = []  # after the last answer of each
            self._begin_streams()
            self._table = self._new_table(batch_size_bytes=0.0)
            self._results: dict[int, _Answered] = {}  # answered, and not delivered
            self._ahead: _Ahead | None = None  # what is delivered next, on its way to the device
            self._drawn: Task | None = None  # from the sampler, and not in the table yet; the consumer's own
            self._sent: dict[tuple[Worker, int], Sent] = {}  # what was sent and not answered
            self._interrupted: list[Task] = []  # what the last one that was lost was at work on
            self._wakes_at = -math.inf  # when the consumer, if it waits, looks again without being told
            self._error: BaseException | None = None
            self._closed = False
            self.crew = Crew(
                self,
                dataset,
                placement,
                self._condition,
                needs_all=settings.iterable,
                max_deaths=settings.max_retries * self._num_workers,
                reconnect_timeout=settings.reconnect_timeout,
            )
            self._draw()
        try:
            self.crew.start()
        except BaseException:
            self.close()
            raise

    @property
    def progress(self) -> Progress:
        return self._pass.progress

    def _begin_streams(self) -> None:
        if self._settings.iterable and not self.progress.streams:
            self.progress.streams = [StreamState()] * self._num_workers
        self._streams = list(self.progress.streams)

    def _new_table(self, batch_size_bytes: float) -> Scheduler[Worker] | StreamTable[Worker]:
        settings = self._settings
        options: dict[str, Any] = {
            "prefetch_factor": settings.prefetch_factor,
            "in_order": settings.in_order,
            "max_in_flight_bytes": settings.max_in_flight_bytes,
            "batch_size_bytes": batch_size_bytes,
            "max_retries": settings.max_retries,
            "task_timeout": settings.task_timeout,
        }
        if settings.iterable:
            return StreamTable(num_streams=self._num_workers, turn=self.progress.turn, **options)
        return Scheduler(num_workers=self._wanted_workers, hedging=True, **options)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        """The persistent id of the dataset, also where a function of the user holds it, as a bound method does."""
        return reference_of(self._dataset.ref if value is self._settings.dataset else value)

    # --- the consumer's thread

    def next(self) -> Any:
        if os.getpid() != self._pid:
            raise LocalProtocolError(f"this iterator belongs to process {self._pid}, of which this one is a fork")
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._condition:
                taken = self._wait(deadline)
                if taken is not None:
                    result, task, stream, copies = taken
                    del taken
                    break
            self._end_late_workers()
            self._draw()
        self._record(task, stream)
        self._draw()
        if copies is not None:
            copies.wait()
        if isinstance(result, Failure):
            try:
                raise self._explained(result.error, task)
            finally:
                del result  # the traceback refers to this frame, and so must nothing else in it refer to the error
        return result

    def _wait(self, deadline: float | None) -> _Ahead | None:
        """Wait for the next batch; None when there is something else to do."""
        while True:
            if self._error is not None:
                self.close()
                raise of_rank(self._error.with_traceback(None), self._settings.partition)
            taken = self._pop() if self._carrier is None else self._pop_ahead()
            if taken is not None:
                return taken
            if self._table.finished:
                self.progress.finished = True
                if not self._settings.persistent_workers:
                    self.close()
                raise StopIteration
            if self._table.wants_input:
                # A stream has ended, and left its place to the others.
                return None
            now = time.monotonic()
            due = self._table.due(now)
            if deadline is not None and deadline <= now:
                # torch's exception and text, which scripts may look for.
                rank = label(self._settings.partition)
                raise RuntimeError(f"{rank}DataLoader timed out after {self._settings.timeout} seconds")
            without_workers = self.crew.time_left()
            if without_workers is not None and without_workers <= 0:
                self._error = _with_batch(self.crew.verdict(), self._interrupted)
                continue
            times = [moment for moment in (due, deadline) if moment is not None]
            if without_workers is not None:
                times.append(now + without_workers)
            self._wakes_at = min(times, default=math.inf)
            self._condition.wait(self._wakes_at - now if times else None)
            self._wakes_at = -math.inf
            if due is not None and due <= time.monotonic():
                return None

    def _pop(self) -> Any:
        """What is delivered next, if it is there; with the condition."""
        number = self._table.pop_deliverable()
        return None if number is None else self._results.pop(number)

    def _pop_ahead(self) -> _Ahead | None:
        """The same, on its way to the device; what comes after it follows."""
        self._copy_ahead()
        taken, self._ahead = self._ahead, None
        if taken is not None:
            self._copy_ahead()
        return taken

    def _end_late_workers(self) -> None:
        """End the workers that are at a task for too long; it is given to others."""
        with self._condition:
            late = [
                # Not the table's task: another worker may have answered it, and it may be delivered.
                (worker, self._sent[worker, number].task)
                for worker, number in self._table.timed_out(time.monotonic())
            ]
        if late:
            assert self._settings.task_timeout is not None  # or nobody would be late
            end_late_workers(late, self._settings.task_timeout)

    def _explained(self, error: BaseException, task: Task) -> BaseException:
        """The same error, naming the rank; with the last stack, if it is that of a task that took too long."""
        if task.stack and isinstance(error, ConnectionLostError):
            error = RPCTimeoutError(f"{error}\n{task.stack}")
        return of_rank(error, self._settings.partition)

    def _draw(self) -> None:
        """Fill the window from the sampler, which is user code and so runs outside of the lock."""
        drawing = True
        while drawing:
            if self._drawn is None and self._table.wants_input:
                self._drawn = self._next_task()
            with self._condition:
                # A stream that has ended meanwhile may have left less room.
                if self._drawn is not None and self._table.wants_input:
                    self._table.add_task(self._drawn)
                    self._drawn = None
                drawing = self._table.wants_input
                assignments = self._assign()
            self._send(assignments)

    def _next_task(self) -> Task | None:
        """The next task of the sampler; None at its end, which the table is told."""
        source = self._pass.source
        try:
            indices, position, number = next(source)
        except StopIteration:
            if isinstance(self._table, Scheduler):  # that of an iterable-style dataset never ends
                with self._condition:
                    self._table.end_of_input()
            return None
        request = last_request = load_request(indices, position, number)
        if self._settings.skips and self._settings.retry_on:
            last_request = load_request(indices, position, number, last_try=True)
        return Task(indices, number, source.num_samples(indices), source.sampler_state, request, last_request)

    @property
    def is_usable(self) -> bool:
        if os.getpid() != self._pid:
            return False
        with self._condition:
            return self._error is None and not self._closed

    def begin_epoch(self) -> None:
        begun = begin_epoch(self._settings, self.progress.base_seed, self.progress.epoch + 1)
        with self._condition:
            # Requests of an epoch that was left in the middle; their answers are ignored.
            for worker in self.crew:
                worker.connection.cancel_all()
            self._results.clear()
            self._drawn = self._ahead = None
            self._pass = begun
            self._begin_streams()
            self._sent.clear()
            self._table = self._new_table(self._table.batch_size_bytes)
            args = self.progress.epoch, begun.order.first, begun.order.pipe_seed
            call = Call(remote.start_epoch, args, {}, ordered=True)
            starting = dumps(call.fields())
            for worker in self.crew:
                # Fails when the worker was lost in between, which is about to be reported.
                with contextlib.suppress(RPCError):
                    complete = functools.partial(self.crew.opened, worker)
                    worker.submit(starting.payload, starting.buffers, complete)
            places = self.crew.begin_epoch()
        self.crew.fill(places)
        self._draw()

    def close(self) -> None:
        """End the workers; idempotent."""
        with self._condition:
            self._closed = True
            self._results.clear()
            self._ahead = None
            workers = self.crew.close()
        for worker in workers:
            worker.close()
        self.crew.wake()

    # --- the crew, with the condition

    def joined(self, worker: Worker, worker_id: int) -> None:
        if isinstance(self._table, StreamTable):
            self._table.worker_joined(worker, worker_id)
        else:
            self._table.worker_joined(worker, time.monotonic(), host=worker.session.name)

    def leaving(self, worker: Worker) -> None:
        if isinstance(self._table, Scheduler):
            self._table.worker_draining(worker)

    def left(self, worker: Worker, error: RPCError, *, died: bool) -> None:
        number = self._table.running(worker)
        self._interrupted = [] if number is None else [self._table.payload(number)]
        for lost in self._table.in_flight(worker):
            self._sent.pop((worker, lost), None)
        self._table.worker_left(worker, time.monotonic())
        if died and number is not None:
            self._blame(number, self._interrupted[0], error)

    def needs(self, worker_id: int) -> bool:
        return not (isinstance(self._table, StreamTable) and self._table.has_ended(worker_id))

    def resized(self, num_workers: int) -> None:
        self._wanted_workers = max(1, num_workers)
        if isinstance(self._table, Scheduler):
            self._table.resize(self._wanted_workers)

    def failed(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._condition.notify_all()

    def is_current(self, opening: Opening) -> bool:
        return opening.epoch is self._pass

    def _blame(self, number: int, task: Task, error: RPCError) -> None:
        """The batch that a worker was loading when it died may be the reason; with the condition."""
        task.killed.append(str(error))
        if self._table.blame(number):
            text = f"{describe(task)} has ended {len(task.killed)} workers in a row: {'; '.join(task.killed)}"
            stream = (self._table.stream_of(number), None) if isinstance(self._table, StreamTable) else None
            self._results[number] = Failure(ConnectionLostError(text)), task, stream, None

    # --- the crew, without the condition

    def opening(self, worker_id: int) -> Opening:
        settings, begun = self._settings, self._pass
        stream = self._streams[worker_id] if self._streams else None
        # Of a worker that has joined later, the number may be a higher one.
        spec = loader_spec(settings, begun, worker_id, max(self._num_workers, worker_id + 1), stream)
        call = Call(remote.open_loader, (self._dataset.ref, spec), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        return Opening(dumps_named(call.fields(), parts, persistent_id=self._reference_of), begun)

    def opened(self, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            return
        try:
            result_of(reply, self._allocator)
        except BaseException as exc:
            with self._condition:
                self.failed(exc)

    def changed(self) -> None:
        with self._condition:
            assignments = self._assign()
            self._condition.notify_all()
        self._send(assignments)

    # --- receiver threads

    def _replied(self, worker: Worker, begun: Pass, number: int, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            # The worker is lost, which is reported once for all of its requests.
            return
        # Not a variable here: the traceback of an exception refers to this frame, and would keep the whole pass.
        self._take(worker, begun, number, self._decode(reply))

    def _take(self, worker: Worker, begun: Pass, number: int, answer: Answer) -> None:
        if type(answer.result) is Reduced:
            answer.result.where = worker.name
        cancelled: list[tuple[Worker, Sent]] = []
        with self._condition:
            if begun is not self._pass or self._closed:
                return
            sent = self._sent.pop((worker, number), None)
            if isinstance(self._table, StreamTable):
                self._stream_replied(self._table, worker, number, answer)
            elif not self._retried(self._table, sent, answer.result):
                cancelled = self._task_replied(self._table, worker, number, answer)
            if self._carrier is not None:
                self._copy_ahead()
            self.crew.answered(worker)
            assignments = self._assign()
            # Waking the consumer for a batch that is not its turn costs two changes of thread.
            is_news = self._table.has_deliverable or self._ahead is not None
            if is_news or self._table.finished or self._table.wants_input or self._is_due_earlier():
                self._condition.notify()
        self._send(assignments)
        for other, sent in cancelled:
            other.connection.cancel(sent.request_id)

    def _is_due_earlier(self) -> bool:
        """Whether the consumer waits, and too long for what the table will have to do."""
        if self._wakes_at < 0:
            return False
        due = self._table.due(time.monotonic())
        return due is not None and due < self._wakes_at

    def _retried(self, table: Scheduler[Worker], sent: Sent | None, result: Any) -> bool:
        """Whether the answer is an exception that may pass, so that the task is tried again."""
        if not isinstance(result, Failure) or not isinstance(result.error, self._settings.retry_on) or sent is None:
            return False
        return retry(table, sent, result.error, self._settings.max_retries)

    def _task_replied(
        self, table: Scheduler[Worker], worker: Worker, number: int, answer: Answer
    ) -> list[tuple[Worker, Sent]]:
        """Take the answer; returns the copies of the task that nobody waits for any more."""
        now = time.monotonic()
        if not table.replied(worker, number, size_bytes=answer.size_bytes, task_seconds=answer.seconds, now=now):
            return []
        self._results[number] = answer.result, table.payload(number), None, answer.movable
        return [(other, sent) for other in table.losers(number) if (sent := self._sent.get((other, number)))]

    def _stream_replied(self, table: StreamTable[Worker], worker: Worker, number: int, answer: Answer) -> None:
        state = answer.stream
        if state is None and not isinstance(answer.result, Failure):
            table.ended(worker, number)
        elif table.replied(worker, number, size_bytes=answer.size_bytes, now=time.monotonic()):
            stream = table.stream_of(number)
            if state is not None:
                self._streams[stream] = state
            self._results[number] = answer.result, table.payload(number), (stream, state), answer.movable

    def _record(self, task: Task, stream: _StreamAfter | None) -> None:
        """A batch was handed to the consumer, or an exception in its place."""
        if stream is None:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)
        else:
            self.progress.stream_delivered(*stream)

    # --- any thread

    def _copy_ahead(self) -> None:
        """Send the batch that is delivered next to the device, if it has come and none is on its way; with the
        condition, so that they go in order."""
        if self._ahead is not None or (answered := self._pop()) is None:
            return
        result, task, stream, movable = answered
        copies = None
        if movable is not None and self._carrier is not None:
            try:
                copies = self._carrier.carry(movable)
            except BaseException as exc:
                # What the frames refer to is a batch.
                result = Failure(exc.with_traceback(None))
        self._ahead = result, task, stream, copies

    def _assign(self) -> list[Sent]:
        """Give waiting tasks to the workers that may take one; with the condition."""
        assignments: list[Sent] = []
        if self._closed:
            return assignments
        now = time.monotonic()
        while (assigned := self._table.assign(now)) is not None:
            worker, number = assigned
            task = self._table.payload(number)
            sent = Sent(worker, self._pass, number, task, task.request)
            self._sent[assigned] = sent
            assignments.append(sent)
        return assignments

    def _send(self, assignments: Sequence[Sent]) -> None:
        """Send what was assigned; without the condition, so that no thread waits for another one's send."""
        for sent in assignments:
            complete = functools.partial(self._replied, sent.worker, sent.begun, sent.number)
            try:
                sent.request_id = sent.worker.submit(sent.request, [], complete, self._allocator, cancellable=True)
            except RPCError:
                # The worker was lost in between, which is about to be reported, and will put the task back.
                continue


def _with_batch(error: BaseException, tasks: Sequence[Task]) -> BaseException:
    """The same error, naming the batch that the last worker was at."""
    if not tasks or not isinstance(error, ConnectionLostError):
        return error
    return type(error)(f"{error}; it was loading {describe(tasks[0])}")
