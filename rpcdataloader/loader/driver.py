"""One pass over a loader: feeds the engine what happens, and carries out what it wants done.

The consumer's thread draws from the sampler, as torch's does, and delivers. Receiver threads report answers and losses;
threads that look for a node report what came of it. One condition guards the engine and everything beside it. Whoever
has fed the engine carries out its actions without the condition, so that no thread waits for another one's send.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.node import Node
from rpcdataloader.client.watcher import Watch
from rpcdataloader.client.worker import RemoteWorker
from rpcdataloader.diagnosis.recorder import Recorder
from rpcdataloader.diagnosis.records import Records, Setup
from rpcdataloader.diagnosis.verdict import Diagnosis, diagnose
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RPCError, RPCTimeoutError
from rpcdataloader.fetch.bad_samples import Reduced
from rpcdataloader.fetch.stream_state import StreamState
from rpcdataloader.loader.ahead import Ahead
from rpcdataloader.loader.copying import find_busy_gpu, make_carrier
from rpcdataloader.loader.executor import Executor
from rpcdataloader.loader.measuring import note_answer
from rpcdataloader.loader.passes import Pass, begin_epoch, begin_pass, undone_afterwards
from rpcdataloader.loader.placement import Placement, plan_options
from rpcdataloader.loader.ranks import of_rank
from rpcdataloader.loader.seat import Answer, Failure, Seat, Sent, decode
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Progress, Task, describe
from rpcdataloader.plan.actions import Action, Load, Open
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.pickling import result_of
from rpcdataloader.wire.slabs import Allocator, pinned_allocator

logger = logging.getLogger("rpcdataloader.loader")

# A loop that waits for a larger share of its time is told why when the pass ends.
_TOLD_SHARE = 0.05

# Seconds. Whether a shorter wait was hidden by what the device had to do does not matter.
_LEAST_HIDDEN = 1e-4


class Driver:
    """The state behind an iterator, referred to by its workers, so that the iterator itself can be collected.

    Args:
        placement: Of the workers; for an iterable-style dataset, of the streams.
        saved: The state of the pass to go on with.
        before: What is known of the pass before.

    Attributes:
        begun: The pass of this epoch; another object in the next one.
        num_streams: Workers that the pass has begun with.
        recorder: Takes notes of the pass.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        saved: Mapping[str, Any] | None,
        before: Records | None = None,
    ) -> None:
        self.recorder = Recorder(threading.Lock(), time.monotonic(), before)
        self._settings = settings
        self._dataset = dataset
        self._client = get_client()
        self.num_streams = len(placement.homes)
        self._pid = os.getpid()
        pinned = pinned_allocator() if settings.pin_memory else None
        self._allocator: Allocator = pinned or self._client.allocator
        carrier = None if settings.device is None else make_carrier(settings.device, self._allocator)
        if carrier is not None:
            self._allocator = carrier.allocator
        # Whether a wait is hidden by what the device has to do; None without one.
        self._is_device_busy = find_busy_gpu() if carrier is None else carrier.is_device_busy
        answering = functools.partial(
            decode,
            allocator=self._allocator,
            iterable=settings.iterable,
            pins=pinned is not None,
            moves=carrier is not None,
        )
        self._closed = threading.Event()
        self._watch: Watch | None = None
        # The consumer's own:
        self._drawn: Task | None = None  # from the sampler, and not in the table yet
        self._blocked = self._ready = 0.0  # seconds that it slept for this batch, and of these with a later one here
        self._is_told = False  # why the loop has waited in this pass
        self._condition = threading.Condition()
        self._executor = Executor(self, settings, dataset, self._allocator, answering, self._condition, self._closed)
        with undone_afterwards(saved):
            # Guarded by the condition:
            self.begun = begin_pass(settings, saved, makes_requests=True)
            self._streams: list[StreamState] = []  # after the last answer of each
            self._begin_streams()
            self._engine: Engine[Node] = Engine(
                plan_options(settings, placement),
                placement.homes,
                placement.others,
                describe=describe,
                turn=self.progress.turn,
            )
            self._ahead = None if carrier is None else Ahead(self._engine, carrier)
            self._wakes_at = -math.inf  # when the consumer, if it waits, looks again without being told
            self._waits_since: float | None = None  # and since when it waits
            self._is_changed = True  # workers, since they were noted
            self._later_since = math.inf  # since when there was a later batch meanwhile
            self._advance(wants_input=True, acts=False)
        try:
            self._start(placement)
        except BaseException:
            self.close()
            raise

    @property
    def progress(self) -> Progress:
        """How far the pass has come; changes with it."""
        return self.begun.progress

    @property
    def is_usable(self) -> bool:
        """Whether another epoch can begin."""
        if os.getpid() != self._pid:
            return False
        with self._condition:
            return self._engine.failure is None and not self._closed.is_set()

    def _begin_streams(self) -> None:
        if self._settings.iterable and not self.progress.streams:
            self.progress.streams = [StreamState()] * self.num_streams
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
            todo = self._act()
        if todo is not None:
            # All before the first is asked for, so that what cannot be pickled is found early.
            places = [action.place for action in todo.actions if isinstance(action, Open)]
            openings = {place: self._executor.opening(place) for place in places}
            self._executor.carry_out(todo.actions, todo.begun, openings)
        if placement.register is not None:
            known = [node.address for node in (*placement.homes, *placement.others)]
            self._watch = self._client.watch(placement.register, known, self._register_changed)

    # --- the consumer's thread

    def next(self) -> Any:
        """The next batch; see ``RemoteIterator.__next__``."""
        if os.getpid() != self._pid:
            raise LocalProtocolError(f"this iterator belongs to process {self._pid}, of which this one is a fork")
        began = time.monotonic()
        timeout = self._settings.timeout or None
        deadline = None if timeout is None else began + timeout
        drawn = 0.0
        while True:
            with self._condition:
                delivery = None
                if self._engine.failure is None:  # what has failed has brought errors that say less
                    delivery = self._engine.deliver() if self._ahead is None else self._ahead.take()
                if delivery is None:
                    self._wait(deadline)
                wants_input = self._engine.wants_input
            if delivery is not None:
                break
            drawn += self._advance(wants_input)
        task, answer, stream = delivery.payload, delivery.answer, delivery.stream
        if delivery.condemned is not None:
            answer = Answer(Failure(ConnectionLostError(delivery.condemned)))
        if stream is None:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)
        else:
            self.progress.stream_delivered(stream, answer.stream)
        drawn += self._advance(wants_input)
        now = time.monotonic()
        note = now, now - began, self._blocked, self._ready, drawn, answer.worker
        if self._blocked:
            # Asked before the stream waits for the copies of this batch.
            is_busy = self._is_device_busy
            if is_busy is not None and self._blocked >= _LEAST_HIDDEN and is_busy():
                note = now, 0.0, 0.0, 0.0, 0.0, answer.worker
            self._blocked = self._ready = 0.0
        if answer.probe is None:
            self.recorder.deliveries.append(note)
        else:
            if self._is_changed:
                with self._condition:
                    self._note_setup()
            self.recorder.probed(answer.probe, note)
        if answer.copies is not None:
            answer.copies.wait()
        if type(answer.result) is Failure:
            self.recorder.add_up()  # where every batch fails, no probe does
            try:
                raise self._explained(answer.result.error, task)
            finally:
                del delivery, answer  # the traceback refers to this frame, which must not refer to the error
        return answer.result

    def _wait(self, deadline: float | None) -> None:
        """Wait until the next batch may be there, or there is something else to do.

        Raises:
            StopIteration: Everything is delivered.
            RuntimeError: The deadline is over.
            BaseException: The pass cannot go on.
        """
        engine = self._engine
        if engine.failure is not None:
            self.close()
            raise of_rank(engine.failure.with_traceback(None), self._settings.partition)
        if engine.is_finished:
            self.progress.finished = True
            if not self._settings.persistent_workers:
                self.close()
            raise StopIteration
        if engine.wants_input:
            return  # a stream has ended, and left its place to the others
        now = time.monotonic()
        if deadline is not None and deadline <= now:
            # torch's exception and text, which scripts may look for.
            label = self._settings.partition.label
            raise RuntimeError(f"{label}DataLoader timed out after {self._settings.timeout} seconds")
        engine.consumer_waits(now)
        due = engine.due(now)
        self._wakes_at = min(
            math.inf if due is None else due,
            math.inf if deadline is None else deadline,
        )
        self._waits_since = now
        self._later_since = now if engine.holds_answers else math.inf
        self._condition.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
        self._wakes_at = -math.inf
        now = time.monotonic()
        self._blocked += now - self._waits_since
        self._ready += max(0.0, now - self._later_since)
        self._waits_since = None
        if due is not None and due <= now:
            engine.tick(now)

    def _explained(self, error: BaseException, task: Task) -> BaseException:
        """The same error, naming the rank; with the last stack, if it is that of a task that took too long."""
        if task.stack and isinstance(error, ConnectionLostError):
            error = RPCTimeoutError(f"{error}\n{task.stack}")
        return of_rank(error, self._settings.partition)

    def _advance(self, wants_input: bool, *, acts: bool = True) -> float:
        """Fill the window from the sampler, which is user code and so runs outside of the lock, and do what follows.

        Returns:
            Seconds in the sampler.
        """
        seconds = 0.0
        while True:
            if wants_input and self._drawn is None:
                began = time.monotonic()
                self._drawn = next(self.begun.source, None)
                ended = time.monotonic()
                seconds += ended - began
                if ended >= self.recorder.next_probe and self._drawn is not None:
                    self._drawn.probe = self.recorder.probe(ended, ended - began)
            with self._condition:
                if wants_input:
                    if self._drawn is None:
                        self._engine.end_of_input()
                    elif self._engine.add_task(self._drawn) is not None:
                        self._drawn = None
                    # Otherwise a stream that has ended meanwhile has left less room.
                    wants_input = self._engine.wants_input
                todo = self._act() if acts else None
            if todo is not None:
                self._carry_out(todo)
            if not wants_input:
                return seconds

    def begin_epoch(self) -> None:
        """Begin another epoch with the same workers."""
        begun = begin_epoch(self._settings, self.progress.base_seed, self.progress.epoch + 1, makes_requests=True)
        with self._condition:
            self._drawn = None
            self._blocked = self._ready = 0.0
            self._is_told = False
            if self._ahead is not None:
                self._ahead.delivery = None
            self.begun = begun
            self.recorder.begin(time.monotonic())
            self._begin_streams()
            self._engine.begin_epoch(time.monotonic(), self.progress.turn)
            todo = self._act()
        if todo is not None:
            self._carry_out(todo)
        self._advance(wants_input=True)

    def close(self) -> None:
        """End the workers; idempotent."""
        with self._condition:
            self._note_setup()
            self._closed.set()
            self._engine.forget_tasks()
            if self._ahead is not None:
                self._ahead.delivery = None
            self._condition.notify_all()
        if self._watch is not None:
            self._watch.close()
        self._executor.close()

    # --- any thread: what happens

    def feed(self, event: Callable[[Engine[Node], float], None]) -> None:
        """Tell the engine what has happened, and do what it wants."""
        with self._condition:
            if self._closed.is_set():
                return
            event(self._engine, time.monotonic())
            todo = self._act()
            self._is_changed = True
            self._condition.notify_all()
        if todo is not None:
            self._carry_out(todo)

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
            self.fail(exc)
        self.feed(lambda engine, _now: engine.worker_at_work(seat.number))

    def lost(self, seat: Seat, loss: Loss) -> None:
        """A worker has ended, or never came to be."""
        with self._condition:
            self._executor.seats.pop(seat.number, None)
        if self._client.is_closed:
            self.fail(loss.error)
            return
        self.feed(lambda engine, now: engine.worker_lost(seat.number, loss, now))

    def answered(self, seat: Seat, sent: Sent, answer: Answer) -> None:
        """A worker has answered a task."""
        if type(answer.result) is Reduced:
            answer.result.where = seat.worker.name
        with self._condition:
            if sent.begun is not self.begun or self._closed.is_set():
                return
            # Not before: the numbers of another epoch begin anew.
            seat.sent.pop(sent.number, None)
            self._tell_engine(seat.number, sent, answer)
            if self._ahead is not None:
                self._ahead.send()
            todo = self._act()
            if self._wakes_at >= 0:
                if self._has_news():
                    self._condition.notify()
                elif self._later_since == math.inf:
                    self._later_since = time.monotonic()
        if todo is not None:
            self._carry_out(todo)

    def _tell_engine(self, worker: int, sent: Sent, answer: Answer) -> None:
        engine, now, number = self._engine, time.monotonic(), sent.number
        seconds = None
        if (timings := answer.timings) is not None:
            seconds = sum(timings)
            answer.worker = worker
            self.recorder.answers.append((worker, seconds, answer.size_bytes, answer.arrived, answer.received))
            if sent.probe is not None:
                note_answer(sent.probe, timings, now)
                answer.probe = sent.probe
        if type(answer.result) is Failure:
            error = answer.result.error
            if isinstance(error, self._settings.retry_on) and engine.failed(worker, number, error, now):
                return
        elif self._settings.iterable and answer.stream is None:
            engine.stream_ended(worker, number, now)
            return
        stream = engine.stream_of(number) if self._settings.iterable else None
        counts = engine.answered(
            worker, number, size_bytes=answer.size_bytes, task_seconds=seconds, now=now, answer=answer
        )
        if counts and stream is not None and answer.stream is not None:
            self._streams[stream] = answer.stream

    def _has_news(self) -> bool:
        """Whether the consumer, who waits, has something to do: waking it in vain costs two changes of thread."""
        engine = self._engine
        if engine.has_deliverable or engine.is_finished or engine.wants_input:
            return True
        if self._ahead is not None and self._ahead.delivery is not None:
            return True
        # It waits too long for what the engine will have to do.
        due = engine.due(time.monotonic())
        return due is not None and due < self._wakes_at

    def fail(self, error: BaseException) -> None:
        """The pass cannot go on."""
        with self._condition:
            if self._engine.failure is None and not self._closed.is_set():
                self._engine.failure = error
            self._condition.notify_all()

    # --- any thread: what is asked

    def diagnosis(self) -> Diagnosis:
        """Why the loop waits."""
        with self._condition:
            self._note_setup()
            since = self._waits_since
        return diagnose(self.recorder.snapshot(0.0 if since is None else time.monotonic() - since))

    def tell(self) -> None:
        """Log, once at the end of a pass, why the loop has waited, if it has; in the consumer's thread."""
        if not self._is_told:
            self._is_told = True
            diagnosis = self.diagnosis()
            if diagnosis.wait_share >= _TOLD_SHARE:
                logger.info("%s%s", self._settings.partition.label, diagnosis.text)

    def _note_setup(self) -> None:
        """Note the workers and limits of the pass, with the condition; those that it had are kept when it is over."""
        if self._closed.is_set():
            return
        engine, seats = self._engine, self._executor.seats
        self._is_changed = False
        workers = {number: str(node) for number, node in engine.workers.items()}
        if workers:
            names = {number: seats[number].worker.name for number in workers if number in seats}
            settings = self._settings
            self.recorder.setup = Setup(
                workers, engine.window, settings.prefetch_factor, settings.max_in_flight_bytes, names
            )

    @property
    def workers(self) -> list[RemoteWorker]:
        """The workers that were asked for, and are not lost."""
        return [seat.worker for seat in list(self._executor.seats.values())]

    def stream_at(self, place: int) -> StreamState | None:
        """How far the stream of a place has come; None where there are no streams."""
        return self._streams[place] if self._streams else None

    def is_open(self) -> bool:
        """Whether the pass is not over."""
        return not self._closed.is_set()

    def is_alone(self) -> bool:
        """Whether no worker is there yet: then a busy node is worth waiting for."""
        with self._condition:
            return not self._engine.num_workers and not self._closed.is_set()

    def _act(self) -> _ToDo | None:
        """What the engine wants done, if anything; with the condition, so tasks are queued as they were decided."""
        actions = self._engine.act(time.monotonic())
        if not actions or self._closed.is_set():
            return None
        todo = _ToDo([], [], self.begun)
        for action in actions:
            if type(action) is not Load:
                todo.actions.append(action)
            elif (seat := self._executor.seats.get(action.worker)) is not None:  # or else it was lost in between
                seat.enqueue(action, self.begun)
                todo.seats.append(seat)
        return todo

    def _carry_out(self, todo: _ToDo) -> None:
        """Do what is to be done; without the condition."""
        if todo.actions:
            self._executor.carry_out(todo.actions, todo.begun)
        for seat in todo.seats:
            seat.send()


class _ToDo(NamedTuple):
    """Workers that tasks are sent to come last: what is opened, restarted or cancelled is decided before."""

    actions: list[Action]
    seats: list[Seat]
    begun: Pass
