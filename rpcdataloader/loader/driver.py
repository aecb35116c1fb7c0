"""One pass over a loader: feeds the engine what happens, and carries out what it wants done.

The consumer's thread draws from the sampler, as torch's does, and delivers. Receiver threads report answers and losses;
threads that look for a node report what came of it. One condition guards the engine and everything beside it. Whoever
has fed the engine carries out its actions without the condition, so that no thread waits for another one's send.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcdataloader.client.datasets import RemoteDataset, dumps_named
from rpcdataloader.client.exchange import reference_of, result_of
from rpcdataloader.client.node import Node
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.watcher import Watch
from rpcdataloader.client.worker import Worker
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
    RPCError,
    RPCTimeoutError,
)
from rpcdataloader.loader import remote
from rpcdataloader.loader.answers import Answer, Failure, decode
from rpcdataloader.loader.bad_samples import Reduced
from rpcdataloader.loader.copying import Copies, make_carrier
from rpcdataloader.loader.passes import Pass, begin_epoch, begin_pass, loader_spec, undone_afterwards
from rpcdataloader.loader.placement import Placement
from rpcdataloader.loader.progress import Progress
from rpcdataloader.loader.ranks import of_rank
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.stream_state import StreamState
from rpcdataloader.loader.tasks import Task, describe, load_request
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Load, Open, Restart, Say, Seek
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.options import PlanOptions
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.frames import BlockBytes, Message
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.movable import Movable
from rpcdataloader.wire.pickling import dumps
from rpcdataloader.wire.slabs import Allocator, pinned_allocator

logger = logging.getLogger("rpcdataloader.loader")

# Which stream a batch is of, and how far that has come with it; None instead of an exception's.
_StreamAfter = tuple[int, StreamState | None]

# With what is copied to the device, if there is one; or, of the batch that comes next, with the copies.
_Answered = tuple[Any, Task, _StreamAfter | None, Movable | None]
_Ahead = tuple[Any, Task, _StreamAfter | None, Copies | None]


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first request to a worker, and the epoch that it was made for."""

    payload: bytes
    buffers: Sequence[BlockBytes]
    begun: Pass


@dataclass(slots=True)
class _Sent:
    """A copy of a task that was sent to a worker; ``request_id`` of its connection, 0 while it is being sent."""

    task: Task
    request_id: int = 0


class Seat:
    """A worker of this pass, and what was sent to it; told by the worker's receiver thread what happens to it."""

    def __init__(self, driver: Driver, number: int) -> None:
        self.number = number
        self.worker: Worker  # as soon as it was asked for
        self.sent: dict[int, _Sent] = {}  # and not answered, by task
        self._driver = driver

    def worker_ready(self, worker: Worker) -> None:  # noqa: ARG002  there is one
        self._driver.feed(lambda engine, now: engine.worker_ready(self.number, now))

    def worker_draining(self, worker: Worker) -> None:  # noqa: ARG002
        self._driver.feed(lambda engine, _now: engine.worker_draining(self.number))

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        self._driver.lost(self, worker, error)

    def started(self, reply: Message | RPCError) -> None:
        """The worker has answered the first request of an epoch."""
        self._driver.started(self, reply)


class Driver:
    """The state behind an iterator, referred to by its workers, so that the iterator itself can be collected.

    Args:
        placement: Of the workers; for an iterable-style dataset, of the streams.
        saved: The state of the pass to go on with.
    """

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
        self._num_streams = len(placement.homes)
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
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._sought: set[Node] = set()  # whose waits are ended at the end
        self._drawn: Task | None = None  # from the sampler, and not in the table yet; the consumer's own
        self._condition = threading.Condition()
        with undone_afterwards(saved):
            # Guarded by the condition:
            self._pass = begin_pass(settings, saved)
            self._streams: list[StreamState] = []  # after the last answer of each
            self._begin_streams()
            self._engine: Engine[Node] = Engine(
                _plan_options(settings, placement),
                placement.homes,
                placement.others,
                describe=describe,
                turn=self.progress.turn,
            )
            self.seats: dict[int, Seat] = {}
            self._unwanted: set[int] = set()  # workers that were to be closed before they were asked for
            self._results: dict[int, _Answered] = {}  # answered, and not delivered
            self._ahead: _Ahead | None = None  # what is delivered next, on its way to the device
            self._wakes_at = -math.inf  # when the consumer, if it waits, looks again without being told
            self._draw(acts=False)
        try:
            self._start(placement)
        except BaseException:
            self.close()
            raise

    @property
    def progress(self) -> Progress:
        """How far the pass has come; changes with it."""
        return self._pass.progress

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin."""
        if os.getpid() != self._pid:
            return False
        with self._condition:
            return self._engine.failure is None and not self._closed.is_set()

    def _begin_streams(self) -> None:
        if self._settings.iterable and not self.progress.streams:
            self.progress.streams = [StreamState()] * self._num_streams
        self._streams = list(self.progress.streams)

    def _start(self, placement: Placement) -> None:
        """Open the first workers.

        Raises:
            SerializationError: What the loader sends them cannot be pickled.
        """
        with self._condition:
            for node in dict.fromkeys(placement.homes):
                session = node.session()
                if session.is_ready and self._dataset.is_on(session):
                    self._engine.node_up(node, session)
                else:
                    self._engine.node_missing(node, ConnectionLostError("it is not there"))
            if placement.register is not None:
                self._engine.expect_more()
            actions = self._engine.act(time.monotonic())
        # All before the first is asked for, so that what cannot be pickled is found early.
        openings = {action.place: self._opening(action.place) for action in actions if isinstance(action, Open)}
        self._carry_out(actions, self._pass, openings)
        if placement.register is not None:
            known = [node.address for node in (*placement.homes, *placement.others)]
            self._watch = self._client.watch(placement.register, known, self._register_changed)

    # --- the consumer's thread

    def next(self) -> Any:
        """The next batch; see ``RemoteIterator.__next__``."""
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
            self._draw()
        if stream is None:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)
        else:
            self.progress.stream_delivered(*stream)
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
        engine = self._engine
        while True:
            if engine.failure is not None:
                self.close()
                raise of_rank(engine.failure.with_traceback(None), self._settings.partition)
            taken = self._pop() if self._carrier is None else self._pop_ahead()
            if taken is not None:
                return taken
            if engine.is_finished:
                self.progress.finished = True
                if not self._settings.persistent_workers:
                    self.close()
                raise StopIteration
            if engine.wants_input:
                # A stream has ended, and left its place to the others.
                return None
            now = time.monotonic()
            if deadline is not None and deadline <= now:
                # torch's exception and text, which scripts may look for.
                label = self._settings.partition.label
                raise RuntimeError(f"{label}DataLoader timed out after {self._settings.timeout} seconds")
            due = engine.due(now)
            times = [moment for moment in (due, deadline) if moment is not None]
            self._wakes_at = min(times, default=math.inf)
            self._condition.wait(self._wakes_at - now if times else None)
            self._wakes_at = -math.inf
            now = time.monotonic()
            if due is not None and due <= now:
                engine.tick(now)
                return None

    def _pop(self) -> Any:
        """What is delivered next, if it is there; with the condition."""
        delivery = self._engine.deliver()
        if delivery is None:
            return None
        condemned = delivery.condemned
        if condemned is None:
            return self._results.pop(delivery.number)
        stream = None if condemned.stream is None else (condemned.stream, None)
        return Failure(ConnectionLostError(condemned.text)), condemned.payload, stream, None

    def _pop_ahead(self) -> _Ahead | None:
        """The same, on its way to the device; what comes after it follows."""
        self._copy_ahead()
        taken, self._ahead = self._ahead, None
        if taken is not None:
            self._copy_ahead()
        return taken

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

    def _explained(self, error: BaseException, task: Task) -> BaseException:
        """The same error, naming the rank; with the last stack, if it is that of a task that took too long."""
        if task.stack and isinstance(error, ConnectionLostError):
            error = RPCTimeoutError(f"{error}\n{task.stack}")
        return of_rank(error, self._settings.partition)

    def _draw(self, *, acts: bool = True) -> None:
        """Fill the window from the sampler, which is user code and so runs outside of the lock."""
        drawing = True
        while drawing:
            if self._drawn is None and self._engine.wants_input:
                self._drawn = self._next_task()
            with self._condition:
                # A stream that has ended meanwhile may have left less room.
                if self._drawn is not None and self._engine.wants_input:
                    self._engine.add_task(self._drawn)
                    self._drawn = None
                drawing = self._engine.wants_input
                actions, begun = self._act() if acts else (), self._pass
            self._carry_out(actions, begun)

    def _next_task(self) -> Task | None:
        """The next task of the sampler; None at its end, which the engine is told."""
        source = self._pass.source
        try:
            indices, position, number = next(source)
        except StopIteration:
            with self._condition:
                self._engine.end_of_input()
            return None
        request = last_request = load_request(indices, position, number)
        if self._settings.marks_last_try:
            last_request = load_request(indices, position, number, last_try=True)
        return Task(indices, number, source.num_samples(indices), source.sampler_state, request, last_request)

    def begin_epoch(self) -> None:
        """Begin another epoch with the same workers."""
        begun = begin_epoch(self._settings, self.progress.base_seed, self.progress.epoch + 1)
        with self._condition:
            self._results.clear()
            self._drawn = self._ahead = None
            self._pass = begun
            self._begin_streams()
            self._engine.begin_epoch(time.monotonic(), self.progress.turn)
            actions = self._engine.act(time.monotonic())
        self._carry_out(actions, begun)
        self._draw()

    def close(self) -> None:
        """End the workers; idempotent."""
        with self._condition:
            self._closed.set()
            self._results.clear()
            self._ahead = None
            self._condition.notify_all()
            workers = [seat.worker for seat in self.seats.values()]
        if self._watch is not None:
            self._watch.close()
        for worker in workers:
            worker.close()
        for node in list(self._sought):
            node.wake()

    # --- any thread: what happens

    def feed(self, event: Callable[[Engine[Node], float], None]) -> None:
        """Tell the engine what has happened, and do what it wants."""
        with self._condition:
            if self._closed.is_set():
                return
            event(self._engine, time.monotonic())
            actions, begun = self._act(), self._pass
            self._condition.notify_all()
        self._carry_out(actions, begun)

    def add_nodes(self, nodes: Iterable[Node]) -> None:
        """Let more nodes help from now on; returns at once."""
        found = list(nodes)
        self.feed(lambda engine, _now: engine.add_nodes(found))

    def remove_nodes(self, nodes: Iterable[Node]) -> None:
        """Ask no more of these nodes: their workers answer what they have, and end."""
        found = list(nodes)
        self.feed(lambda engine, now: engine.remove_nodes(found, now))

    def _register_changed(self, added: Sequence[Address], removed: Sequence[Address]) -> None:
        # A server that was started again is in both.
        self.remove_nodes(self._client.node(address, is_registered=True) for address in removed if address not in added)
        self.add_nodes(self._client.node(address, is_registered=True) for address in added)

    def started(self, seat: Seat, reply: Message | RPCError) -> None:
        """A worker has answered the first request of an epoch; what the user's code raised there ends the pass."""
        if not isinstance(reply, Message):
            return
        try:
            result_of(reply, self._allocator)
        except BaseException as exc:
            self._fail(exc)
        self.feed(lambda engine, _now: engine.worker_at_work(seat.number))

    def lost(self, seat: Seat, worker: Worker, error: RPCError) -> None:
        """A worker has ended, or never came to be."""
        with self._condition:
            self.seats.pop(seat.number, None)
        if self._client.is_closed:
            self._fail(error)
            return
        loss = Loss(
            error,
            node_is_up=worker.session.is_ready,
            came=not isinstance(error, ConnectError),
            was_refused=worker.was_refused,
            has_retired=worker.retired,
        )
        self.feed(lambda engine, now: engine.worker_lost(seat.number, loss, now))

    def _replied(self, seat: Seat, begun: Pass, number: int, reply: Message | RPCError) -> None:
        if not isinstance(reply, Message):
            # The worker is lost, which is reported once for all of its requests.
            return
        # Not a variable here: the traceback of an exception refers to this frame, and would keep the whole pass.
        self._take(seat, begun, number, self._decode(reply))

    def _take(self, seat: Seat, begun: Pass, number: int, answer: Answer) -> None:
        if type(answer.result) is Reduced:
            answer.result.where = seat.worker.name
        with self._condition:
            if begun is not self._pass or self._closed.is_set():
                return
            seat.sent.pop(number, None)
            self._answer(self._engine, seat.number, number, answer)
            if self._carrier is not None:
                self._copy_ahead()
            actions = self._act()
            # Waking the consumer for a batch that is not its turn costs two changes of thread.
            engine = self._engine
            is_news = engine.has_deliverable or self._ahead is not None
            if is_news or engine.is_finished or engine.wants_input or self._is_due_earlier():
                self._condition.notify()
        self._carry_out(actions, begun)

    def _answer(self, engine: Engine[Node], worker: int, number: int, answer: Answer) -> None:
        """Give an answer to the engine, and keep it if it counts; with the condition."""
        now = time.monotonic()
        error = answer.result.error if type(answer.result) is Failure else None
        if self._settings.iterable and answer.stream is None and error is None:
            engine.stream_ended(worker, number, now)
            return
        may_pass = error is not None and isinstance(error, self._settings.retry_on)
        if error is not None and may_pass and engine.failed(worker, number, error, now):
            return
        if engine.answered(worker, number, size_bytes=answer.size_bytes, task_seconds=answer.seconds, now=now):
            stream = engine.stream_of(number)
            if stream is not None and answer.stream is not None:
                self._streams[stream] = answer.stream
            after = None if stream is None else (stream, answer.stream)
            self._results[number] = answer.result, engine.payload(number), after, answer.movable

    def _is_due_earlier(self) -> bool:
        """Whether the consumer waits, and too long for what the engine will have to do."""
        if self._wakes_at < 0:
            return False
        due = self._engine.due(time.monotonic())
        return due is not None and due < self._wakes_at

    def _fail(self, error: BaseException) -> None:
        """The pass cannot go on."""
        with self._condition:
            if self._engine.failure is None and not self._closed.is_set():
                self._engine.failure = error
            self._condition.notify_all()

    # --- any thread: what is to be done

    def _act(self) -> Sequence[Action]:
        """What the engine wants done; with the condition."""
        return () if self._closed.is_set() else self._engine.act(time.monotonic())

    def _carry_out(
        self, actions: Sequence[Action], begun: Pass, openings: Mapping[int, _Opening] | None = None
    ) -> None:
        """Do what the engine wants; without the condition.

        Args:
            actions: In this order.
            begun: The pass that they are of.
            openings: First requests that are made already, by place.
        """
        ends: list[End] = []
        for action in actions:
            if type(action) is Load:
                self._load(action, begun)
            elif isinstance(action, Cancel):
                self._cancel(action)
            elif isinstance(action, Open):
                self._open(action, None if openings is None else openings[action.place])
            elif isinstance(action, Close):
                self._close(action.worker)
            elif isinstance(action, Restart):
                self._restart(action.worker, begun)
            elif isinstance(action, Seek):
                self._sought.add(action.node)
                seek = functools.partial(self._seek, action.node, action.delay)
                self._client.start_thread(f"rpcdl-seek {action.node}", seek, self._closed)
            elif isinstance(action, End):
                ends.append(action)
            elif isinstance(action, Say):
                logger.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.text)
        if ends:
            self._end(ends)

    def _load(self, action: Load, begun: Pass) -> None:
        seat = self.seats.get(action.worker)
        if seat is None:
            return  # the worker was lost in between
        number, task = action.number, action.payload
        complete = functools.partial(self._replied, seat, begun, number)
        seat.sent[number] = sent = _Sent(task)
        # Fails where the worker was lost in between, which is about to be reported, and will put the task back.
        with contextlib.suppress(RPCError):
            request = task.last_request if action.is_last else task.request
            sent.request_id = seat.worker.submit(request, [], complete, self._allocator, cancellable=True)

    def _cancel(self, action: Cancel) -> None:
        seat = self.seats.get(action.worker)
        if seat is not None and (sent := seat.sent.get(action.number)):
            seat.worker.connection.cancel(sent.request_id)

    def _close(self, number: int) -> None:
        with self._condition:
            seat = self.seats.get(number)
            if seat is None:
                self._unwanted.add(number)
        if seat is not None:
            seat.worker.close()

    def _restart(self, number: int, begun: Pass) -> None:
        seat = self.seats.get(number)
        if seat is None:
            return
        seat.worker.connection.cancel_all()
        seat.sent.clear()
        args = begun.progress.epoch, begun.order.first, begun.order.pipe_seed
        starting = dumps(Call(remote.start_epoch, args, {}, ordered=True).fields())
        # Fails where the worker was lost in between, which is about to be reported.
        with contextlib.suppress(RPCError):
            seat.worker.submit(starting.payload, starting.buffers, seat.started)

    def _open(self, action: Open[Node], opening: _Opening | None) -> None:
        """Ask for a worker, if its node is still there."""
        while True:
            if opening is None:
                try:
                    opening = self._opening(action.place)
                except BaseException as exc:
                    self._fail(exc)
                    return
            with self._condition:
                if self._closed.is_set():
                    return
                if opening.begun is self._pass:
                    error = self._ask(action, opening)
                    break
            opening = None  # another epoch has begun meanwhile
        if error is not None:
            self.feed(lambda engine, _now: engine.open_failed(action.worker, error))

    def _ask(self, action: Open[Node], opening: _Opening) -> RPCError | None:
        """Ask for a worker; returns why it cannot be had.

        With the condition, so that it is ready only after its first request is on the way.
        """
        try:
            session = action.node.session()
        except RPCError as exc:  # an embedded pool that does not start again
            return exc
        if action.worker in self._unwanted or not session.is_ready or not self._dataset.is_on(session):
            self._unwanted.discard(action.worker)
            return ConnectionLostError("it is not there any more")
        seat = Seat(self, action.worker)
        keep_waiting = self._is_open if action.is_promised else self._is_alone
        seat.worker = self._dataset.open_worker(session, seat, keep_waiting)
        self.seats[action.worker] = seat
        # Fails where it is lost already, which is about to be reported.
        with contextlib.suppress(RPCError):
            seat.worker.submit(opening.payload, opening.buffers, seat.started)
        return None

    def _is_open(self) -> bool:
        return not self._closed.is_set()

    def _is_alone(self) -> bool:
        """Whether no worker is there yet: then a busy node is worth waiting for."""
        with self._condition:
            return not self._engine.num_workers and not self._closed.is_set()

    def _opening(self, place: int) -> _Opening:
        """The first request to a worker, in which there is what is the user's to pickle."""
        settings, begun = self._settings, self._pass
        stream = self._streams[place] if self._streams else None
        # Of a worker that has joined later, the number may be a higher one.
        spec = loader_spec(settings, begun, place, max(self._num_streams, place + 1), stream)
        call = Call(remote.open_loader, (self._dataset.ref, spec), {}, ordered=True)
        parts = {"collate_fn": settings.collate_fn, "worker_init_fn": settings.worker_init_fn}
        encoded = dumps_named(call.fields(), parts, persistent_id=self._reference_of)
        return _Opening(encoded.payload, encoded.buffers, begun)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        """The persistent id of the dataset, also where a function of the user holds it, as a bound method does."""
        return reference_of(self._dataset.ref if value is self._settings.dataset else value)

    def _end(self, ends: Sequence[End]) -> None:
        """End workers that are at a task for too long, and note in the tasks where they were."""
        with self._condition:
            late = [
                # Not the engine's task: another worker may have answered it, and it may be delivered.
                (seat.worker, sent.task)
                for end in ends
                if (seat := self.seats.get(end.worker)) is not None and (sent := seat.sent.get(end.number)) is not None
            ]
        limit = self._settings.task_timeout
        endings = [
            worker.session.end_worker(worker.number, f"{describe(task)} took longer than {limit:g} s")
            for worker, task in late
        ]
        for (worker, task), wait in zip(late, endings, strict=True):
            task.stack = wait()
            logger.warning(
                "%s took longer than %g s (task_timeout) on %s, which was here:\n%s",
                describe(task),
                limit,
                worker.name,
                task.stack,
            )

    def _seek(self, node: Node, delay: float) -> None:
        """Connect to a node, and build the dataset there; in a thread of its own."""
        if self._closed.wait(delay):
            return
        try:
            session = node.session()
            session.wait(lambda: not self._closed.is_set())
            session.follow_rank()
            self._dataset.build_on([session])
            num_offered = node.num_workers()
        except (ConnectError, ConnectionLostError, RemoteProtocolError, AuthenticationError) as exc:
            failure, is_foreign = exc, isinstance(exc, (RemoteProtocolError, AuthenticationError))
            self.feed(lambda engine, _now: engine.node_failed(node, failure, is_foreign=is_foreign))
        except BaseException as exc:
            reason = exc
            self.feed(lambda engine, _now: engine.node_hopeless(node, reason))
        else:
            self.feed(lambda engine, _now: engine.node_up(node, session, num_offered))


def _plan_options(settings: PassSettings, placement: Placement) -> PlanOptions:
    return PlanOptions(
        num_workers=len(placement.homes),
        is_iterable=settings.iterable,
        prefetch_factor=settings.prefetch_factor,
        in_order=settings.in_order,
        max_in_flight_bytes=settings.max_in_flight_bytes,
        max_retries=settings.max_retries,
        task_timeout=settings.task_timeout,
        reconnect_timeout=settings.reconnect_timeout,
        marks_last_try=settings.marks_last_try,
        label=settings.partition.label,
        rank=placement.partition.rank,
        world_size=placement.partition.world_size,
        num_offered=placement.num_offered,
        max_workers=placement.max_workers,
    )
