"""A seat, which is one worker of a pass: its tasks, and its answers, decoded in the thread that receives them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rpcdataloader.client.connection import Request
from rpcdataloader.client.worker import RemoteWorker, WorkerOwner
from rpcdataloader.diagnosis.records import Probe
from rpcdataloader.errors import ConnectError, ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.samples import Skipped, join_skipped, stopped
from rpcdataloader.host.locks import Lock
from rpcdataloader.loader.copying import Carrier, DeviceCopies, find_busy_gpu, make_carrier, pin
from rpcdataloader.loader.joining import join
from rpcdataloader.loader.passes import Pass
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Task, describe_end
from rpcdataloader.plan.actions import Load
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.table import Entry
from rpcdataloader.wire.exceptions import take_state
from rpcdataloader.wire.frames import Flag, Message, MessageType
from rpcdataloader.wire.messages import STAGES_BYTES, Stages
from rpcdataloader.wire.pickling import Encoded, result_of
from rpcdataloader.wire.slabs import Allocator, PinnedAllocator, pinned_allocator
from rpcdataloader.wire.tensors import Movable

if TYPE_CHECKING:
    from rpcdataloader.loader.driver import Driver

logger = logging.getLogger("rpcdataloader.loader")


@dataclass(slots=True)
class Answer:
    """A worker's answer to a task."""

    result: Any = None  # batch
    lacks: Skipped | None = None  # what the batch lacks because of exceptions of the dataset
    where: str = "this process"  # process that loaded such a batch, in words
    size_bytes: int = 0
    error: BaseException | None = None  # exception in place of a batch
    timings: tuple[float, float] | None = None  # seconds to fetch and to collate; None for an exception
    arrived: float = 0.0  # time of the first bytes of the reply, and
    received: float = 0.0  # of the last, if they were waited for; otherwise 0
    stream: StreamState | None = None  # progress of the worker's stream; None without one, or at its end
    movable: Movable | None = None
    copies: DeviceCopies | None = None
    worker: int = -1
    num_workers: int = 1  # that have made the batch
    probe: Probe | None = None


class BatchDecoder:
    """Turns replies into batches, in the memory that the user has chosen.

    Args:
        allocator: Memory for blocks, where the user has chosen none.

    Attributes:
        allocator: Memory for the blocks of batches.
        carrier: The way to a device; None without one.
        is_device_busy: Function that tells whether the device has work that hides a wait; None without a device.
    """

    def __init__(self, settings: PassSettings, allocator: Allocator) -> None:
        pinned = pinned_allocator() if settings.pin_memory else None
        self.allocator: Allocator = pinned or allocator
        self._pins = pinned is not None
        self.carrier: Carrier | None = None
        self.is_device_busy: Callable[[], bool] | None = find_busy_gpu()
        if settings.device is not None:
            self.carrier = make_carrier(settings.device, self.allocator)
            self.allocator, self.is_device_busy = self.carrier.allocator, self.carrier.is_device_busy

    def decode(self, reply: Message) -> Answer:
        """Turn a reply into a batch."""
        answer = Answer(size_bytes=len(reply.payload))
        for block in reply.blocks:
            answer.size_bytes += block.view.nbytes
        if reply.arrival is not None and not reply.arrival.was_here:
            answer.arrived, answer.received = reply.arrival.at, time.monotonic()
        movable = None if self.carrier is None else Movable()
        try:
            answer.timings, result, answer.lacks, answer.stream = result_of(reply, self.allocator, movable)
            if self._pins:
                # In-band data, and batch types with a pin_memory method of their own. Pinned data stays.
                result = pin(result)
            answer.result, answer.movable = result, movable
        except StopIteration as exc:
            error = stopped("receiving a batch")
            error.__cause__ = exc
            return Answer(size_bytes=answer.size_bytes, error=error)
        except BaseException as exc:
            # A new exception: the traceback refers to this frame, and would keep the referents of the exception.
            return Answer(size_bytes=answer.size_bytes, error=exc, stream=answer.stream or take_state(exc))
        return answer

    def join(self, answers: Sequence[Answer]) -> Answer | None:
        """Join the answers to the parts of a batch, in their order; None if it has to be made as a whole."""
        last = answers[-1]
        joined = Answer(worker=last.worker, num_workers=len({each.worker for each in answers}), probe=last.probe)
        joined.size_bytes = sum(each.size_bytes for each in answers)
        # As for a whole batch, the first sample that raises decides.
        joined.error = next((each.error for each in answers if each.error is not None), None)
        if joined.error is not None:
            return joined
        if joined.probe is not None:
            joined.probe.size_bytes = joined.size_bytes
        if lacking := [each.lacks for each in answers if each.lacks is not None]:
            joined.where = next(each.where for each in answers if each.lacks is not None)
            joined.lacks = join_skipped(lacking, is_whole=all(map(_is_empty, answers)))
        parts = [each.result for each in answers if not _is_empty(each)]
        joined.movable = None if self.carrier is None else Movable()
        try:
            if parts:
                pinned = self.allocator if isinstance(self.allocator, PinnedAllocator) else None
                result = join(parts, pinned, joined.movable)
                joined.result = pin(result) if self._pins else result
        except Exception:
            logger.debug("the parts of a batch do not fit together", exc_info=True)
            return None
        return joined

    def check(self, reply: Message) -> Any:
        """Return the result of a reply that has no batch, or raise its exception."""
        return result_of(reply, self.allocator)


def _is_empty(answer: Answer) -> bool:
    """Whether all samples were skipped."""
    return answer.lacks is not None and answer.lacks.is_whole


@dataclass(slots=True)
class Sent:
    """A copy of a task that was sent to a worker."""

    task: Task
    number: float
    begun: Pass
    request_id: int = 0  # id on its connection; 0 while it is being sent
    probe: Probe | None = None


_Event = TypeVar("_Event", bound=Callable[..., None])


def _ends_pass(handle: _Event) -> _Event:
    """Let an exception of a function that a receiver thread calls end the pass, whose consumer would wait for ever."""

    @functools.wraps(handle)
    def checked(self: Seat, *args: Any) -> None:
        try:
            handle(self, *args)
        except RemoteProtocolError:
            raise  # the peer's, which ends the connection
        except BaseException as exc:
            logger.exception("%s: an event was not handled", self.worker.name)
            self._driver.fail(exc.with_traceback(None))

    return checked  # type: ignore[return-value]  # of the same arguments


class Seat(WorkerOwner):
    """A worker of a pass. The worker's receiver thread reports events to it.

    Attributes:
        opened_for: The epoch of its very first request.
        sent: Unanswered copies, by the number of the task.
    """

    sends_now = True

    def __init__(self, driver: Driver, number: int, opened_for: Pass) -> None:
        self.number = number
        self.opened_for = opened_for
        self.worker: RemoteWorker  # set once it was requested
        self.sent: dict[float, Sent] = {}
        # In the order of the engine's decisions, whichever thread carries them out: a stream's tasks keep their order.
        self._queue: deque[Sent] = deque()  # to send
        self._is_at_work = False  # since it has answered the first request of this epoch
        self._sending = Lock()  # held while the queue is emptied
        self._driver = driver
        self._decoder = driver.decoder
        self.purpose = driver.executor.name
        self._decode = driver.decoder.decode

    def enqueue(self, load: Load, begun: Pass) -> None:
        """Queue a task; with the pass's condition, so that the order is that of the decisions."""
        sent = Sent(load.payload, load.number, begun)
        if (drawn := sent.task.probe) is not None:
            sent.probe = Probe(drawn.number, drawn.draw, drawn.added, self._driver.now())
        self._queue.append(sent)

    def send(self) -> None:
        """Send the queued tasks; without the condition."""
        with self._sending:
            while self._queue:
                sent = self._queue.popleft()
                self.sent[sent.number] = sent
                request = Request(functools.partial(self._replied, sent), self._decoder.allocator, is_task=True)
                if (probe := sent.probe) is not None:
                    request.flags, probe.sent = Flag.MEASURED, self._driver.now()
                try:
                    sent.request_id = self.worker.connection.submit(MessageType.LOAD, sent.task.request, request)
                except RPCError:
                    continue  # the worker was just lost, which is about to be reported, and puts the task back
                if probe is not None:
                    probe.sent = self._driver.now()

    def restart(self, starting: Encoded) -> None:
        """Tell the worker that another epoch begins, in place of its queued tasks of the last one."""
        # Fails if the worker was just lost, which is about to be reported.
        with self._sending, contextlib.suppress(RPCError):
            self._queue.clear()
            self.sent.clear()
            self._is_at_work = False
            self.worker.connection.cancel_all()
            self.worker.submit(starting, self.started)

    @_ends_pass
    def started(self, reply: Message | RPCError) -> None:
        """Handle the answer to an epoch's first request, perhaps an exception of user code."""
        if not isinstance(reply, Message):
            return
        try:
            init, built = self._decoder.check(reply) or (0.0, None)
        except BaseException as exc:
            error = exc.with_traceback(None)
            self._driver.feed(lambda engine, _now: engine.worker_failed(self.number, error))
        else:
            self._is_at_work = True
            if built is not None:
                self._driver.compare(self.worker.name, built)
            if not (start := self._driver.recorder.start).opened:
                start.opened, start.init = self._driver.now(), init
            self._driver.feed(lambda engine, now: engine.worker_at_work(self.number, now))

    @_ends_pass
    def _replied(self, sent: Sent, reply: Message | RPCError) -> None:
        if isinstance(reply, Message):
            if reply.flags:
                note_reply(sent.probe, reply)
            # Not a variable here: the traceback of an exception refers to this frame, and would keep the whole pass.
            self._answered(sent, self._decode(reply))
        # Otherwise the worker is lost, which is reported once for all of its requests.

    def _answered(self, sent: Sent, answer: Answer) -> None:
        driver = self._driver
        if answer.lacks is not None:
            answer.where = self.worker.name
        with driver.condition:
            if sent.begun is not driver.begun or driver.is_closed:
                return
            # Only now: numbers restart in another epoch.
            self.sent.pop(sent.number, None)
            now = driver.now()
            batch = self._tell_engine(sent, answer, now)
            answers = [] if batch is None else [part.answer for part in batch.parts]
            if (carrier := self._decoder.carrier) is not None:
                driver.send_ahead(carrier)
            todo = driver.act(now)
            if driver.sleeps_until != -math.inf:
                driver.wake()
        if driver.follower is not None:
            driver.follower()
        if todo is not None:
            driver.carry_out(todo)
        if batch is not None:
            driver.joined(batch, sent.begun, self._decoder.join(answers))

    def _tell_engine(self, sent: Sent, answer: Answer, now: float) -> Entry | None:
        """Report an answer; returns the batch of which it is the last part."""
        driver, engine = self._driver, self._driver.engine
        worker, number, settings = self.number, sent.number, self._driver.settings
        spent = None
        if (timings := answer.timings) is not None:
            spent = sum(timings)
            answer.worker = worker
            # Not the end of a stream, and not a part of a batch.
            if answer.stream is not None or not (settings.iterable or sent.task.whole):
                driver.recorder.tasks[worker].append(spent)
            if answer.arrived:
                driver.recorder.received(answer.arrived, answer.received)
            if sent.probe is not None:
                note_answer(sent.probe, timings, answer.size_bytes, now)
                answer.probe = sent.probe
        if answer.error is None and settings.iterable and answer.stream is None:
            # With drop_last, samples may be left that another loader would give.
            ended = None if settings.drop_last else engine.table.find(number)
            if ended is not None and ended.stream is not None:
                driver.begun.progress.ends[ended.stream] = driver.streams[ended.stream]
            engine.stream_ended(worker, number, now)
            return None
        num_missing = 0 if answer.lacks is None else answer.lacks.num_samples
        failed = answer.error is not None or 2 * num_missing > sent.task.num_samples
        task = engine.answered(
            worker, number, size_bytes=answer.size_bytes, task_seconds=spent, now=now, has_failed=failed, answer=answer
        )
        if task is not None and task.stream is not None and answer.stream is not None:
            driver.streams[task.stream] = answer.stream
        # With the condition: two threads may have the last two parts.
        return task.whole if task is not None and task.whole is not None and task.whole.has_all_parts else None

    @_ends_pass
    def worker_ready(self, worker: RemoteWorker) -> None:  # noqa: ARG002  the only one
        start = self._driver.recorder.start
        start.ready = start.ready or self._driver.now()
        self._driver.feed(lambda engine, now: engine.worker_ready(self.number, now))

    @_ends_pass
    def worker_draining(self, worker: RemoteWorker) -> None:  # noqa: ARG002
        self._driver.feed(lambda engine, _now: engine.worker_draining(self.number))

    @_ends_pass
    def worker_lost(self, worker: RemoteWorker, error: RPCError) -> None:
        task = None
        if (exited := worker.exited) is not None and self._is_at_work:  # at a task of this epoch
            unanswered = [sent for sent in list(self.sent.values()) if sent.task.number == exited.batch]
            # Of two parts of a batch that with the sample, or the first one.
            at_sample = (sent for sent in unanswered if 0 <= exited.sample - sent.task.position < sent.task.num_samples)
            if (sent := next(at_sample, next(iter(unanswered), None))) is not None:
                error = ConnectionLostError(f"{error} {describe_end(sent.task, exited.sample)}")
                task = sent.number
        loss = Loss(
            error,
            node_is_up=worker.session.is_ready,
            came=not isinstance(error, ConnectError),
            refusal=worker.refusal,
            has_retired=worker.retired,
            by_itself=exited is not None and exited.by_itself,
            task=task,
        )
        self._driver.lost(self.number, loss)


def note_reply(probe: Probe | None, reply: Message) -> None:
    """Take the measurements off a reply's payload.

    Raises:
        RemoteProtocolError: The worker has measured without a request, or sent something else.
    """
    if not reply.flags & Flag.MEASURED:
        return  # an exception
    if probe is None:
        raise RemoteProtocolError("the worker measured a batch without a request for it")
    start = len(reply.payload) - STAGES_BYTES
    probe.stages = Stages.unpack(reply.payload[max(0, start) :])
    reply.payload = reply.payload[:start]
    probe.received = probe.arrived = time.monotonic()
    cpu = time.thread_time()
    if (arrival := reply.arrival) is not None:
        probe.arrived, probe.receive_cpu = arrival.at, cpu - arrival.cpu
        if arrival.was_here:
            probe.lock = max(0.0, probe.received - probe.arrived - probe.receive_cpu)
    probe.decode_cpu = -cpu  # until it is decoded


def note_answer(probe: Probe, timings: tuple[float, float], size_bytes: int, now: float) -> None:
    """Record that the batch of a measured reply is decoded, in the thread that has received it."""
    probe.size_bytes = size_bytes
    if probe.stages is None:
        return
    probe.answered = now
    probe.decode_cpu += time.thread_time()
    probe.lock += max(0.0, now - probe.received - probe.decode_cpu)
    probe.stages = probe.stages.with_timings(timings)
