"""One pass over a loader: drives the task table over the workers.

The consumer's thread draws from the sampler, as torch's does, and delivers; receiver threads report replies and losses
and hand out what is waiting. One condition guards the table and everything beside it. Policy is in the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.pin_memory

from rpcdataloader.client.datasets import RemoteDataset, dumps_named
from rpcdataloader.client.exchange import reference_of, result_of
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.session import Session
from rpcdataloader.client.sharing import Partition
from rpcdataloader.client.worker import Worker
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError
from rpcdataloader.loader import remote
from rpcdataloader.loader.scheduler import Scheduler
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import NO_TENSORS, Encoded, dumps
from rpcdataloader.wire.slabs import Allocator, pinned_allocator

logger = logging.getLogger("rpcdataloader.loader")

# How many indices of a batch an error message shows.
MAX_SHOWN_INDICES = 16


@dataclass(frozen=True, slots=True)
class PassSettings:
    """What an iterator takes from its loader.

    Attributes:
        sampler: The batch sampler or, without automatic batching, the sampler.
        generator: Where the base seed is drawn; None for torch's default.
        timeout: Seconds to wait for a batch; 0 for no limit.
        partition: This process among the trainers, for the seeds.
    """

    sampler: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    generator: torch.Generator | None
    timeout: float
    prefetch_factor: int
    in_order: bool
    max_in_flight_bytes: int
    pin_memory: bool
    persistent_workers: bool
    partition: Partition


@dataclass(slots=True)
class Task:
    """A batch to load: what the sampler gave, and the request made of it."""

    indices: Any
    request: bytes


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a pass, at the moment and in the way torch's loader does, so that both leave the same state."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class TaskSource:
    """Tasks from a sampler, numbered by batch and by the position of their first sample in the epoch."""

    def __init__(self, settings: PassSettings, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._auto_collation = settings.auto_collation
        self._number = 0
        self._position = 0

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Indices, position, batch number.

        Raises:
            StopIteration: The sampler is at its end.
        """
        indices = next(self._samples)
        if self._auto_collation and not isinstance(indices, (list, tuple)) and isinstance(indices, Iterable):
            # A sampler may yield tensors, arrays or generators; torch only iterates over them.
            indices = list(indices)
        position, number = self._position, self._number
        # What is no batch at all is an error where the batch is loaded.
        self._position += len(indices) if self._auto_collation and isinstance(indices, (list, tuple)) else 1
        self._number += 1
        return indices, position, number


class RemoteIterator:
    """What ``iter(loader)`` returns when workers load. Dropping it ends its workers."""

    def __init__(self, settings: PassSettings, dataset: RemoteDataset, sessions: Sequence[Session]) -> None:
        self._run = _Run(settings, dataset, sessions)
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
        return self._run.next()

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def is_usable(self) -> bool:
        """Whether :meth:`reset` is possible: no worker was lost."""
        return self._run.is_usable

    def reset(self) -> None:
        """Begin another epoch with the same workers."""
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

    def __init__(self, settings: PassSettings, dataset: RemoteDataset, sessions: Sequence[Session]) -> None:
        self._settings = settings
        self._dataset = dataset  # held for as long as there are workers
        self._num_workers = len(sessions)
        self._pid = os.getpid()
        pinned = pinned_allocator() if settings.pin_memory else None
        self._pins = pinned is not None
        self._allocator: Allocator = pinned or get_client().allocator
        samples = iter(settings.sampler)
        self._base_seed = draw_base_seed(settings.generator)
        self._epoch = 0
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._scheduler: Scheduler[Worker] = self._new_scheduler(batch_size_bytes=0.0)
        self._results: dict[int, Any] = {}
        self._alive: set[Worker] = set()
        self._ready: set[Worker] = set()
        self._draining: set[Worker] = set()
        self._num_refused = 0  # by nodes that have no room
        self._error: BaseException | None = None
        self._closed = False
        self._source = TaskSource(settings, samples)
        self._draw()
        try:
            self._open(dataset, sessions)
        except BaseException:
            self.close()
            raise

    def _new_scheduler(self, batch_size_bytes: float) -> Scheduler[Worker]:
        return Scheduler(
            num_workers=self._num_workers,
            prefetch_factor=self._settings.prefetch_factor,
            in_order=self._settings.in_order,
            max_in_flight_bytes=self._settings.max_in_flight_bytes,
            batch_size_bytes=batch_size_bytes,
        )

    def _open(self, dataset: RemoteDataset, sessions: Sequence[Session]) -> None:
        openings = [self._opening(dataset, worker_id) for worker_id in range(len(sessions))]
        for session, opening in zip(sessions, openings, strict=True):
            # Under the condition, so that the worker is ready only after its first request is on the way.
            with self._condition:
                worker = dataset.open_worker(session, self, self._is_alone)
                self._alive.add(worker)
                worker.submit(opening.payload, opening.buffers, self._opened)

    def _opening(self, dataset: RemoteDataset, worker_id: int) -> Encoded:
        """The first request to a worker; pickled before any is asked for, so that what cannot be is found early."""
        settings = self._settings
        spec = remote.LoaderSpec(
            collate_fn=settings.collate_fn,
            worker_init_fn=settings.worker_init_fn,
            auto_collation=settings.auto_collation,
            base_seed=self._base_seed,
            epoch=self._epoch,
            rank=settings.partition.rank,
            world_size=settings.partition.world_size,
            worker_id=worker_id,
            num_workers=self._num_workers,
        )
        call = Call(remote.open_loader, (dataset.ref, spec), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        return dumps_named(call.fields(), parts, persistent_id=reference_of)

    # --- the consumer's thread

    def next(self) -> Any:
        if os.getpid() != self._pid:
            raise LocalProtocolError(f"this iterator belongs to process {self._pid}, of which this one is a fork")
        with self._condition:
            number = self._wait()
            result = self._results.pop(number)
        self._draw()
        if isinstance(result, _Failure):
            raise result.error
        return result

    def _wait(self) -> int:
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._error is not None:
                self.close()
                raise self._error
            number = self._scheduler.pop_deliverable()
            if number is not None:
                return number
            if self._scheduler.finished:
                if not self._settings.persistent_workers:
                    self.close()
                raise StopIteration
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
            if self._scheduler.wants_input:
                task = self._next_task()
            with self._condition:
                if task is not None:
                    self._scheduler.add_task(task)
                drawing = self._scheduler.wants_input
                assignments = self._assign()
            self._send(assignments)

    def _next_task(self) -> Task | None:
        """The next task of the sampler; None at its end, which the table is told."""
        try:
            indices, position, number = next(self._source)
        except StopIteration:
            with self._condition:
                self._scheduler.end_of_input()
            return None
        return Task(indices, _load_request(indices, position, number))

    @property
    def is_usable(self) -> bool:
        if os.getpid() != self._pid:
            return False
        with self._condition:
            complete = len(self._alive) + self._num_refused == self._num_workers
            return self._error is None and not self._closed and complete

    def begin_epoch(self) -> None:
        samples = iter(self._settings.sampler)
        with self._condition:
            # Requests of an epoch that was left in the middle; their answers are ignored.
            for worker in self._alive:
                worker.connection.cancel_all()
            self._results.clear()
            self._epoch += 1
            self._source = TaskSource(self._settings, samples)
            self._scheduler = self._new_scheduler(self._scheduler.batch_size_bytes)
            starting = dumps(Call(remote.start_epoch, (self._epoch,), {}, ordered=True).fields())
            for worker in self._alive:
                # Fails when the worker was lost in between, which is about to be reported.
                with contextlib.suppress(RPCError):
                    worker.submit(starting.payload, starting.buffers, self._opened)
            for worker in self._ready:
                self._scheduler.worker_joined(worker, time.monotonic())
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
                self._scheduler.worker_joined(worker, time.monotonic())
            assignments = self._assign()
        self._send(assignments)

    def worker_draining(self, worker: Worker) -> None:
        with self._condition:
            if worker in self._ready:
                self._draining.add(worker)
                self._scheduler.worker_draining(worker)

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        with self._condition:
            self._alive.discard(worker)
            if self._closed:
                return
            lost: list[int] = []
            tasks: list[Any] = []
            if worker in self._ready:
                self._ready.discard(worker)
                tasks = [self._scheduler.payload(number) for number in self._scheduler.in_flight(worker)]
                lost = self._scheduler.worker_left(worker, time.monotonic())
            if worker in self._draining and self._alive:
                # It said goodbye and answered what it had begun; the rest goes to others.
                logger.info("%s has drained; %d batches go to other workers", worker.name, len(lost))
            elif isinstance(error, ConnectError) and self._alive:
                self._num_refused += 1
                logger.warning("going on with %d workers: %s", len(self._alive), error)
            elif worker in self._draining and self._error is None:
                node = worker.session.name
                self._error = ConnectionLostError(f"{node} is shutting down, and no other worker is left")
            elif self._error is None:
                self._error = _with_batch(error, lost, tasks)
            self._condition.notify_all()
            assignments = self._assign()
        self._send(assignments)

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

    def _replied(self, worker: Worker, epoch: int, number: int, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            # The worker is lost, which is reported once for all of its requests.
            return
        seconds = 0.0
        try:
            timings, result = result_of(reply, self._allocator)
            seconds = sum(timings)
            if self._pins:
                # What came in band, and batch types with a pin_memory method of their own. What is pinned stays.
                result = pin(result)
        except BaseException as exc:
            result = _Failure(exc)
        size_bytes = len(reply.payload) + sum(block.view.nbytes for block in reply.blocks)
        with self._condition:
            if epoch != self._epoch or self._closed:
                return
            now = time.monotonic()
            if self._scheduler.replied(worker, number, size_bytes=size_bytes, task_seconds=seconds, now=now):
                self._results[number] = result
            assignments = self._assign()
            # Waking the consumer for a batch that is not its turn costs two changes of thread.
            if self._scheduler.has_deliverable:
                self._condition.notify()
        self._send(assignments)

    def _is_alone(self) -> bool:
        """Whether no worker is there yet: then a busy node is worth waiting for."""
        with self._condition:
            return not self._ready and not self._closed

    # --- any thread

    def _assign(self) -> list[tuple[Worker, int, int, Task]]:
        """Give waiting tasks to the workers that may take one; with the condition."""
        assignments: list[tuple[Worker, int, int, Task]] = []
        if self._closed:
            return assignments
        now = time.monotonic()
        while (number := self._scheduler.next_requeued()) is not None:
            worker = self._scheduler.choose_worker(now)
            if worker is None:
                break
            self._scheduler.dispatch(number, worker, now)
            assignments.append((worker, self._epoch, number, self._scheduler.payload(number)))
        return assignments

    def _send(self, assignments: Sequence[tuple[Worker, int, int, Task]]) -> None:
        """Send what was assigned; without the condition, so that no thread waits for another one's send."""
        for worker, epoch, number, task in assignments:
            complete = functools.partial(self._replied, worker, epoch, number)
            try:
                worker.submit(task.request, [], complete, self._allocator, cancellable=True)
            except RPCError:
                # The worker was lost in between, which is about to be reported, and will put the task back.
                continue


def _pickle_part(value: Any) -> bytes:
    """A pickle without its first and last opcodes, PROTO and STOP, to be joined to others.

    Protocol 3 is the last one without frames, whose lengths would become wrong.
    """
    return pickle.dumps(value, protocol=3)[2:-1]


# Around the arguments of a call of remote.load. Pickling it each time takes longer than all the rest: the pickler
# imports a function to see whether it is the one of that name.
_LOAD, _, *_OPTIONS = Call(remote.load, (), {}, ordered=True).fields()
_BEFORE_ARGS = pickle.PROTO + b"\x03" + pickle.MARK + _pickle_part(_LOAD)
_AFTER_ARGS = b"".join(map(_pickle_part, _OPTIONS)) + pickle.TUPLE + pickle.STOP + NO_TENSORS


def _load_request(indices: Any, position: int, number: int) -> bytes:
    args = (indices, position, number)
    try:
        pickled = _pickle_part(args)
        # Not of a class of the training script, which has to be sent along.
        if b"_main__" not in pickled:
            return _BEFORE_ARGS + pickled + _AFTER_ARGS
    except Exception:
        logger.debug("not for the plain pickler: %r", indices, exc_info=True)
    encoded = dumps(Call(remote.load, args, {}, ordered=True).fields(), name="indices")
    if encoded.buffers:
        raise ValueError("the sampler yields large tensors or arrays; yield lists of indices")
    return encoded.payload


def _with_batch(error: RPCError, lost: Sequence[int], tasks: Sequence[Task]) -> RPCError:
    """The same error, naming the batch that the worker was at."""
    if not lost:
        return error
    indices = tasks[0].indices
    shown = str(indices)
    if isinstance(indices, (list, tuple)) and len(indices) > MAX_SHOWN_INDICES:
        shown = f"[{', '.join(map(str, indices[:MAX_SHOWN_INDICES]))}, ... {len(indices)} in all]"
    return type(error)(f"{error}; it was loading batch {lost[0]} (indices {shown})")
