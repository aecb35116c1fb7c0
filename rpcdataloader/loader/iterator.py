"""One pass over a loader: drives the task table over the workers.

The consumer's thread draws from the sampler, as torch's does, and delivers; receiver threads report replies and losses
and hand out what is waiting. One condition guards the table and everything beside it. Policy is in the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils.data._utils.pin_memory

from rpcdataloader.client.datasets import RemoteDataset, dumps_named
from rpcdataloader.client.exchange import reference_of, result_of
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.session import Session
from rpcdataloader.client.worker import Worker
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError
from rpcdataloader.loader import remote
from rpcdataloader.loader.passes import (
    Pass,
    PassSettings,
    Progress,
    begin_epoch,
    begin_pass,
    loader_spec,
    undone_afterwards,
    warn_if_longer,
)
from rpcdataloader.loader.remote import StreamState
from rpcdataloader.loader.scheduler import Scheduler
from rpcdataloader.loader.streams import StreamTable
from rpcdataloader.loader.tasks import Task, describe, load_request
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import Encoded, dumps
from rpcdataloader.wire.slabs import Allocator, pinned_allocator

logger = logging.getLogger("rpcdataloader.loader")


class RemoteIterator:
    """What ``iter(loader)`` returns when workers load. Dropping it ends its workers.

    Args:
        sessions: Of each worker; for an iterable-style dataset, of each stream.
        saved: The state of the pass to go on with.
        reported_length: What ``len`` of the loader has said of an iterable-style dataset.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        sessions: Sequence[Session],
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
    ) -> None:
        self._run = _Run(settings, dataset, sessions, saved)
        self._name = dataset.name
        self._reported_length = reported_length
        self._sampler = settings.sampler
        weakref.finalize(self, get_client().janitor.leave, self._run.close).atexit = False

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: The sampler is at its end, and everything was delivered.
            RuntimeError: No batch within the loader's timeout.
            ConnectionLostError: A worker died, or there is none left.
            Exception: What the dataset, the collate function or the init function raised on a worker.
        """
        batch = self._run.next()
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
        """Whether :meth:`reset` is possible: no worker was lost."""
        return self._run.is_usable

    def reset(self, reported_length: int | None = None) -> None:
        """Begin another epoch with the same workers."""
        self._reported_length = reported_length
        self._run.begin_epoch()


def pin(batch: Any) -> Any:
    """Pin what is not pinned yet, the way torch's loader does."""
    return torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


class _Failure:
    """An exception that stands in for a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Run:
    """The state behind an iterator, referred to by its workers, so that the iterator itself can be collected."""

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        sessions: Sequence[Session],
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._settings = settings
        self._dataset = dataset  # held for as long as there are workers
        self._sessions = sessions
        self._client = get_client()
        self._num_workers = len(sessions)
        self._pid = os.getpid()
        pinned = pinned_allocator() if settings.pin_memory else None
        self._pins = pinned is not None
        self._allocator: Allocator = pinned or self._client.allocator
        with undone_afterwards(saved):
            self._pass = begin_pass(settings, saved)
            self._condition = threading.Condition()
            # Guarded by the condition:
            self._streams: list[StreamState] = []  # after the last answer of each
            self._begin_streams()
            self._table = self._new_table(batch_size_bytes=0.0)
            self._results: dict[int, Any] = {}
            self._alive: dict[Worker, int] = {}  # with the number that the dataset knows it by
            self._ready: set[Worker] = set()
            self._draining: set[Worker] = set()
            self._num_replacing = 0  # lost, and about to be in _alive again
            self._num_missing = 0  # refused by nodes that have no room, or lost with their node
            self._num_deaths = 0  # since the last answer
            self._killers: dict[int, list[str]] = {}  # for a task, how each worker that was at work on it has ended
            self._error: BaseException | None = None
            self._closed = False
            self._draw()
        try:
            self._open(dataset, sessions)
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
        }
        if settings.iterable:
            return StreamTable(num_streams=self._num_workers, turn=self.progress.turn, **options)
        return Scheduler(num_workers=self._num_workers, **options)

    def _open(self, dataset: RemoteDataset, sessions: Sequence[Session]) -> None:
        openings = [self._opening(dataset, worker_id) for worker_id in range(len(sessions))]
        for worker_id, (session, opening) in enumerate(zip(sessions, openings, strict=True)):
            # Under the condition, so that the worker is ready only after its first request is on the way.
            with self._condition:
                worker = dataset.open_worker(session, self, self._is_alone)
                self._alive[worker] = worker_id
                worker.submit(opening.payload, opening.buffers, self._opened)

    def _opening(self, dataset: RemoteDataset, worker_id: int) -> Encoded:
        """The first request to a worker; pickled before any is asked for, so that what cannot be is found early."""
        settings = self._settings
        stream = self._streams[worker_id] if self._streams else None
        spec = loader_spec(settings, self._pass, worker_id, self._num_workers, stream)
        call = Call(remote.open_loader, (dataset.ref, spec), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        return dumps_named(call.fields(), parts, persistent_id=self._reference_of)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        """The persistent id of the dataset, also where a function of the user holds it, as a bound method does."""
        return reference_of(self._dataset.ref if value is self._settings.dataset else value)

    # --- the consumer's thread

    def next(self) -> Any:
        if os.getpid() != self._pid:
            raise LocalProtocolError(f"this iterator belongs to process {self._pid}, of which this one is a fork")
        while True:
            with self._condition:
                number = self._wait()
                if number is not None:
                    result, record = self._results.pop(number)
                    break
            self._draw()
        record()
        self._draw()
        if isinstance(result, _Failure):
            try:
                raise result.error
            finally:
                del result  # the traceback refers to this frame
        return result

    def _wait(self) -> int | None:
        """Wait for the next batch and return its number; None when there is room for tasks instead."""
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._error is not None:
                self.close()
                raise self._error.with_traceback(None)
            number = self._table.pop_deliverable()
            if number is not None:
                return number
            if self._table.finished:
                self.progress.finished = True
                if not self._settings.persistent_workers:
                    self.close()
                raise StopIteration
            if self._table.wants_input:
                # A stream has ended, and left its place to the others.
                return None
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                # torch's exception and text, which scripts may look for.
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")
            self._condition.wait(remaining)

    def _draw(self) -> None:
        """Fill the window from the sampler, which is user code and so runs outside of the lock."""
        drawing = True
        while drawing:
            task = None
            # Only this thread adds tasks, so the answer cannot become wrong in between.
            if self._table.wants_input:
                task = self._next_task()
            with self._condition:
                if task is not None:
                    self._table.add_task(task)
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
        request = load_request(indices, position, number)
        return Task(indices, number, source.num_samples(indices), source.sampler_state, request)

    @property
    def is_usable(self) -> bool:
        if os.getpid() != self._pid:
            return False
        with self._condition:
            complete = len(self._alive) + self._num_replacing + self._num_missing == self._num_workers
            return self._error is None and not self._closed and complete

    def begin_epoch(self) -> None:
        begun = begin_epoch(self._settings, self.progress.base_seed, self.progress.epoch + 1)
        with self._condition:
            # Requests of an epoch that was left in the middle; their answers are ignored.
            for worker in self._alive:
                worker.connection.cancel_all()
            self._results.clear()
            self._pass = begun
            self._begin_streams()
            self._killers.clear()
            self._table = self._new_table(self._table.batch_size_bytes)
            args = self.progress.epoch, begun.order.first, begun.order.pipe_seed
            call = Call(remote.start_epoch, args, {}, ordered=True)
            starting = dumps(call.fields())
            for worker in self._alive:
                # Fails when the worker was lost in between, which is about to be reported.
                with contextlib.suppress(RPCError):
                    worker.submit(starting.payload, starting.buffers, self._opened)
            for worker in self._ready:
                self._join(worker)
        self._draw()

    def close(self) -> None:
        """End the workers; idempotent."""
        with self._condition:
            self._closed = True
            workers = list(self._alive)
            self._results.clear()
            self._condition.notify_all()
        for worker in workers:
            worker.close()

    # --- receiver threads

    def worker_ready(self, worker: Worker) -> None:
        with self._condition:
            if worker in self._alive and not self._closed:
                self._ready.add(worker)
                self._join(worker)
            assignments = self._assign()
        self._send(assignments)

    def _join(self, worker: Worker) -> None:
        """Let the worker have tasks; with the condition."""
        if isinstance(self._table, StreamTable):
            self._table.worker_joined(worker, self._alive[worker])
        else:
            self._table.worker_joined(worker, time.monotonic())

    def worker_draining(self, worker: Worker) -> None:
        with self._condition:
            if worker in self._ready:
                self._draining.add(worker)
                if isinstance(self._table, Scheduler):
                    self._table.worker_draining(worker)

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        with self._condition:
            worker_id = self._alive.pop(worker, None)
            if self._closed or worker_id is None:
                return
            if self._client.is_closed:
                self._error = self._error or error
                self._condition.notify_all()
                return
            # Its place is still there; without, it is as if it had died.
            retired = worker.retired and worker.session.is_usable and self._error is None
            needed = not isinstance(self._table, StreamTable) or not self._table.has_ended(worker_id)
            if not needed and not (retired and self._settings.persistent_workers):
                self._ready.discard(worker)
                return
            lost: list[int] = []
            tasks: list[Task] = []
            if worker in self._ready:
                self._ready.discard(worker)
                tasks = [self._table.payload(number) for number in self._table.in_flight(worker)]
                lost = self._table.worker_left(worker, time.monotonic())
            if worker in self._draining:
                error = ConnectionLostError(f"{worker.session.name} is shutting down")
            session = worker.session if retired else self._successor(worker, worker_id, error)
            if session is not None:
                self._num_replacing += 1
            if retired:
                logger.debug("%s has retired; another worker starts in its place", worker.name)
            elif session is not None:
                logger.warning("%s; another worker starts on %s", error, session.name)
                if lost and session is worker.session:
                    # A node that goes with all of its workers says nothing about this batch.
                    self._blame(lost[0], tasks[0], error)
            elif self._alive and not self._settings.iterable:
                self._num_missing += 1
                logger.warning("going on with %d workers: %s", len(self._alive), error)
            elif self._error is None:
                self._error = _with_batch(error, tasks)
            self._condition.notify_all()
            assignments = self._assign()
        self._send(assignments)
        if session is not None:
            self._replace(worker_id, session, retired)

    def _successor(self, worker: Worker, worker_id: int, error: RPCError) -> Session | None:
        """Where another worker takes the place of one that is lost; None for nowhere. With the condition."""
        refused = isinstance(error, ConnectError)  # it never came
        if self._error is not None or (refused and not self._settings.iterable):
            return None
        self._num_deaths += 1
        if self._num_deaths > self._settings.max_retries * self._num_workers:
            return None  # they die before they answer anything
        places = [worker.session, *self._sessions[worker_id:], *self._sessions[:worker_id]]
        usable = (place for place in places if place.is_usable and not (refused and place is worker.session))
        return next(usable, None)

    def _blame(self, number: int, task: Task, error: RPCError) -> None:
        """The batch that a worker was loading when it died may be the reason; with the condition."""
        killed = self._killers.setdefault(number, [])
        killed.append(str(error))
        if self._table.blame(number):
            ends = "; ".join(self._killers.pop(number))
            failure = _Failure(
                ConnectionLostError(f"{describe(task)} has ended {len(killed)} workers in a row: {ends}")
            )
            stream = (self._table.stream_of(number), None) if isinstance(self._table, StreamTable) else None
            self._results[number] = failure, functools.partial(self._record, task, stream)

    def _replace(self, worker_id: int, session: Session, retired: bool) -> None:
        # Whoever has taken the place of one that retired gives it back some day: nothing is lost by waiting for that.
        keep_waiting = (lambda: not self._closed) if retired else self._is_alone
        try:
            while True:
                begun = self._pass
                opening = self._opening(self._dataset, worker_id)
                with self._condition:
                    if self._closed:
                        return
                    if begun is not self._pass:
                        continue
                    worker = self._dataset.open_worker(session, self, keep_waiting)
                    self._alive[worker] = worker_id
                    self._num_replacing -= 1
                    # Fails when it is lost already, which is about to be reported.
                    with contextlib.suppress(RPCError):
                        worker.submit(opening.payload, opening.buffers, self._opened)
                    return
        except BaseException as exc:
            with self._condition:
                if self._error is None:
                    self._error = exc
                self._condition.notify_all()

    def _opened(self, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            return
        try:
            result_of(reply, self._allocator)
        except BaseException as exc:
            with self._condition:
                if self._error is None:
                    self._error = exc
                self._condition.notify_all()

    def _replied(self, worker: Worker, begun: Pass, number: int, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            # The worker is lost, which is reported once for all of its requests.
            return
        seconds = 0.0
        stream: StreamState | None = None
        try:
            timings, result = result_of(reply, self._allocator)
            seconds = sum(timings)
            if self._settings.iterable:
                result, stream = result
            if self._pins:
                # What came in band, and batch types with a pin_memory method of their own. What is pinned stays.
                result = pin(result)
        except BaseException as exc:
            result = _Failure(exc)
        size_bytes = len(reply.payload) + sum(block.view.nbytes for block in reply.blocks)
        with self._condition:
            if begun is not self._pass or self._closed:
                return
            self._num_deaths = 0
            if isinstance(self._table, StreamTable):
                self._stream_replied(self._table, worker, number, result, stream, size_bytes)
            else:
                now = time.monotonic()
                if self._table.replied(worker, number, size_bytes=size_bytes, task_seconds=seconds, now=now):
                    task = self._table.payload(number)
                    self._results[number] = result, functools.partial(self._record, task, None)
            assignments = self._assign()
            # Waking the consumer for a batch that is not its turn costs two changes of thread.
            if self._table.has_deliverable or self._table.finished or self._table.wants_input:
                self._condition.notify()
        self._send(assignments)

    def _stream_replied(
        self,
        table: StreamTable[Worker],
        worker: Worker,
        number: int,
        result: Any,
        state: StreamState | None,
        size_bytes: int,
    ) -> None:
        if state is None and not isinstance(result, _Failure):
            table.ended(worker, number)
        elif table.replied(worker, number, size_bytes=size_bytes):
            if state is not None:
                self._streams[table.stream_of(number)] = state
            task = self._table.payload(number)
            self._results[number] = result, functools.partial(self._record, task, (table.stream_of(number), state))

    def _record(self, task: Task, stream: tuple[int, StreamState | None] | None) -> None:
        """A batch was handed to the consumer, or an exception in its place."""
        if stream is None:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)
        else:
            self.progress.stream_delivered(*stream)

    def _is_alone(self) -> bool:
        """Whether no worker is there yet: then a busy node is worth waiting for."""
        with self._condition:
            return not self._ready and not self._closed

    # --- any thread

    def _assign(self) -> list[tuple[Worker, Pass, int, Task]]:
        """Give waiting tasks to the workers that may take one; with the condition."""
        assignments: list[tuple[Worker, Pass, int, Task]] = []
        if self._closed:
            return assignments
        now = time.monotonic()
        while (assigned := self._table.assign(now)) is not None:
            worker, number = assigned
            assignments.append((worker, self._pass, number, self._table.payload(number)))
        return assignments

    def _send(self, assignments: Sequence[tuple[Worker, Pass, int, Task]]) -> None:
        """Send what was assigned; without the condition, so that no thread waits for another one's send."""
        for worker, begun, number, task in assignments:
            complete = functools.partial(self._replied, worker, begun, number)
            try:
                worker.submit(task.request, [], complete, self._allocator, cancellable=True)
            except RPCError:
                # The worker was lost in between, which is about to be reported, and will put the task back.
                continue


def _with_batch(error: RPCError, tasks: Sequence[Task]) -> RPCError:
    """The same error, naming the batch that the worker was at."""
    return type(error)(f"{error}; it was loading {describe(tasks[0])}") if tasks else error
