"""One pass over a loader: the engine, its condition, and the execution of its decisions.

Three sides feed the engine: the consumer (:mod:`~rpcdataloader.loader.iterator`) adds tasks from the sampler, and
delivers; the receiver threads of workers (:mod:`~rpcdataloader.loader.seat`) report answers and losses; threads that
look for a node (:mod:`~rpcdataloader.loader.executor`) report the result. Each holds the condition for that, and
carries out the engine's actions without it, so that no thread waits for another one's send.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.discovery import Joined
from rpcdataloader.client.node import Node
from rpcdataloader.client.register import RegisterWatcher
from rpcdataloader.client.worker import RemoteWorker
from rpcdataloader.diagnosis.records import Recorder, Setup
from rpcdataloader.diagnosis.verdict import Diagnosis, diagnose
from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.host.changes import Change
from rpcdataloader.loader.copying import Carrier, find_busy_gpu, make_carrier
from rpcdataloader.loader.executor import Executor
from rpcdataloader.loader.passes import Pass, begin_pass
from rpcdataloader.loader.placement import Placement, plan_options
from rpcdataloader.loader.seat import Seat, decode
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Progress, describe
from rpcdataloader.plan.actions import Action, Load
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.table import Entry
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.slabs import Allocator, pinned_allocator

logger = logging.getLogger("rpcdataloader.loader")

_failures = itertools.count()  # of diagnoses that were to be logged


class ToDo(NamedTuple):
    """Pending decisions of the engine."""

    actions: list[Action]  # all actions but those to send a task
    # Workers that tasks are sent to. They come last: opening, restarting and cancelling are decided before.
    seats: list[Seat]
    begun: Pass


class Driver:
    """The state behind an iterator. Workers refer to it and not to the iterator, which can so be collected.

    Args:
        placement: Nodes of the workers; for an iterable-style dataset, of the streams.

    Attributes:
        pid: Process that began the pass; its forks must not continue it.
        condition: Lock for ``closed`` and the attributes that follow.
        ahead: The batch that is on its way to a device; None without a device.
        num_streams: Number of workers at the beginning of the pass.
        changes: Changes to the dataset that workers of the previous epoch lack.
        streams: State of each stream after its last answer.
        allocator: Memory for the blocks of batches.
        decode: Function that turns a reply into an answer.
        is_device_busy: Function that tells whether the device has work that hides a wait; None without a device.
        sleeps_until: Time at which the waiting consumer looks again on its own; before all times while it is awake.
        sleeps_since: Time at which it fell asleep.
        later_since: Time since which a later batch is here while it sleeps.
        name: Name of the dataset.
        is_given_up: True if its idle workers ended for another loader.
        has_changed: True if the workers are others than those in the records.
        is_told: True once the reason for this pass's wait is logged; set before, nothing is logged.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: RemoteDataset,
        placement: Placement,
        saved: Mapping[str, Any] | None,
        recorder: Recorder,
    ) -> None:
        self.settings = settings
        self.num_streams = len(placement.homes)
        self.recorder = recorder
        self._dataset = dataset
        self.name = dataset.name
        self.is_given_up = False
        self._client = get_client()
        self.pid = os.getpid()
        pinned = pinned_allocator() if settings.pin_memory else None
        self.allocator: Allocator = pinned or self._client.allocator
        carrier = None if settings.device is None else make_carrier(settings.device, self.allocator)
        if carrier is not None:
            self.allocator = carrier.allocator
        self.is_device_busy = find_busy_gpu() if carrier is None else carrier.is_device_busy
        self.decode = functools.partial(
            decode,
            allocator=self.allocator,
            iterable=settings.iterable,
            pins=pinned is not None,
            moves=carrier is not None,
        )
        self.closed = threading.Event()
        self._watcher: RegisterWatcher | None = None
        self._named = [node.address for node in (*placement.homes, *placement.others, *placement.missing)]
        self.condition = threading.Condition()
        self._executor = Executor(self, dataset)
        self.begun = begin_pass(settings, saved, self.num_streams, makes_requests=True)
        self.changes: Sequence[Change] = ()
        self._last_change = 0
        self.streams = list(self.progress.streams)
        self.engine: Engine[Node] = Engine(
            plan_options(settings, placement),
            placement.homes,
            placement.others,
            describe=describe,
            turn=self.progress.turn,
        )
        self.ahead = None if carrier is None else Ahead(self.engine, carrier)
        self.sleeps_until, self.sleeps_since, self.later_since = -math.inf, 0.0, math.inf
        self.has_changed = True
        self.is_told = False

    @property
    def progress(self) -> Progress:
        """The progress of the pass; changes with it."""
        return self.begun.progress

    def rest(self) -> None:
        """The pass is over, and its workers wait for the next one."""
        self.tell()
        self._client.idle.put(self)

    def is_usable(self) -> bool:
        """Whether another epoch can begin; from now on, its workers are not idle."""
        if os.getpid() != self.pid or not self._client.idle.take(self):
            return False
        with self.condition:
            # The workers of streams from other ranks have taken on the ranks of these.
            return self.engine.failure is None and not self.closed.is_set() and not self.progress.identities

    def start(self, placement: Placement) -> None:
        """Open the first workers.

        Raises:
            SerializationError: Objects of the loader cannot be pickled.
        """
        with self.condition:
            for node in dict.fromkeys(placement.homes):
                session = node.current
                if session is not None and self._dataset.is_on(session):
                    self.engine.crew.node_up(node, session)
                else:
                    self.engine.crew.node_missing(node, ConnectionLostError("it is not reachable"))
            if placement.register is not None:
                self.engine.crew.roster.expects_more = True
            todo = self.act(time.monotonic())
        if todo is not None:
            self._executor.prepare(todo.actions)
            self.carry_out(todo)
        if placement.register is not None:
            self._watcher = self._client.watcher(placement.register)
            self._watcher.watch(self._named, self._register_changed)
        self.feed(lambda engine, _now: engine.crew.add_nodes(placement.missing))

    def follow(self, where: Joined) -> None:
        """Follow the node servers from now on, as they come and go; returns at once."""
        with self.condition:
            if self.closed.is_set():
                return
            if where.places:
                self.engine.crew.roster.expects_more = True
        known = self._named if self._watcher is None else self._watcher.end(self._register_changed)
        self._watcher = self._client.watcher(where)
        self._watcher.watch(known, self._register_changed)

    def begin_epoch(self) -> None:
        """Begin another epoch with the same workers."""
        self.tell()
        before = self.progress.base_seed, self.progress.epoch
        begun = begin_pass(self.settings, None, self.num_streams, before=before, makes_requests=True)
        self._settle()
        with self.condition:
            if self.ahead is not None:
                self.ahead.delivery = None
            self.begun = begun
            now = time.monotonic()
            self.recorder.begin(now)
            self.is_told = False
            self.streams = list(self.progress.streams)
            self.engine.begin_epoch(now, self.progress.turn)
            todo = self.act(now)
        if todo is not None:
            self.carry_out(todo)

    def _settle(self) -> None:
        """Make the changes to the dataset in the sessions of the workers, and find those that the workers lack."""
        self._dataset.settle()
        self.changes = self._dataset.changes_after(self._last_change)
        if self.changes:
            self._last_change = self.changes[-1].number
            with contextlib.suppress(ConnectionLostError):  # noticed later
                self._dataset.build_on({worker.session for worker in self.workers if worker.session.is_ready})

    def close(self) -> None:
        """End the workers, and tell why the loop has waited; idempotent."""
        with self.condition:
            self.note_setup()
            self.closed.set()
            self.engine.table.forget()
            if self.ahead is not None:
                self.ahead.delivery = None
            self.condition.notify_all()
        if self._watcher is not None:
            self._watcher.end(self._register_changed)
        self._executor.close()
        self.tell()

    # Events

    def feed(self, event: Callable[[Engine[Node], float], None]) -> None:
        """Report an event to the engine, and carry out its decisions."""
        with self.condition:
            if self.closed.is_set():
                return
            now = time.monotonic()
            event(self.engine, now)
            todo = self.act(now)
            self.has_changed = True
            self.condition.notify_all()
        if todo is not None:
            self.carry_out(todo)

    def fail(self, error: BaseException) -> None:
        """End the pass with an error."""
        with self.condition:
            if self.engine.failure is None and not self.closed.is_set():
                self.engine.failure = error
            self.condition.notify_all()

    def lost(self, number: int, loss: Loss) -> None:
        """Report that a worker has ended, or could not be started."""
        with self.condition:
            self._executor.seats.pop(number, None)
        if self._client.is_closed:
            self.fail(loss.error)
        else:
            self.feed(lambda engine, now: engine.worker_lost(number, loss, now))

    def _register_changed(self, added: Sequence[Address], removed: Sequence[Address]) -> None:
        # A restarted server is in both.
        gone = [self._client.node(address, is_registered=True) for address in removed if address not in added]
        self.feed(lambda engine, now: engine.remove_nodes(gone, now))
        come = [self._client.node(address, is_registered=True) for address in added]
        self.feed(lambda engine, _now: engine.crew.add_nodes(come))

    # Actions

    def act(self, now: float) -> ToDo | None:
        """Take the engine's decisions, if any; with the condition, so that tasks are queued in their order."""
        actions = self.engine.act(now)
        if not actions or self.closed.is_set():
            return None
        todo = ToDo([], [], self.begun)
        for action in actions:
            if type(action) is not Load:
                todo.actions.append(action)
            elif (seat := self._executor.seats.get(action.worker)) is not None:  # else it was lost in between
                seat.enqueue(action, self.begun)
                todo.seats.append(seat)
        return todo

    def carry_out(self, todo: ToDo) -> None:
        """Carry out decisions; without the condition."""
        if todo.actions:
            self._executor.carry_out(todo.actions, todo.begun)
        for seat in todo.seats:
            seat.send()

    def wake(self) -> None:
        """Wake the sleeping consumer if an answer gives it something to do; with the condition.

        A needless wake costs two changes of thread.
        """
        table = self.engine.table
        if (
            table.has_deliverable
            or table.finished
            or table.wants_input
            or (self.ahead is not None and self.ahead.delivery is not None)
            # The engine's next action may be due before the end of the sleep.
            or ((due := self.engine.due(time.monotonic())) is not None and due < self.sleeps_until)
        ):
            self.condition.notify()
        elif self.later_since == math.inf:
            self.later_since = time.monotonic()

    # Queries

    @property
    def workers(self) -> list[RemoteWorker]:
        """The requested workers that are not lost."""
        return [seat.worker for seat in list(self._executor.seats.values())]

    def is_open(self) -> bool:
        """Whether the pass is not over."""
        return not self.closed.is_set()

    def is_alone(self) -> bool:
        """Whether no worker has started yet: then a busy node is worth waiting for."""
        with self.condition:
            return not self.engine.num_workers and not self.closed.is_set()

    def diagnosis(self) -> Diagnosis:
        """The reason why the loop waits."""
        with self.condition:
            self.note_setup()
            waiting = time.monotonic() - self.sleeps_since if self.sleeps_until != -math.inf else 0.0
        return diagnose(self.recorder.snapshot(waiting))

    def tell(self) -> None:
        """Log, once per pass, why the loop has waited, if it has and the pass has not failed."""
        if self.is_told or self.engine.failure is not None:
            return
        self.is_told = True
        try:
            self.note_setup()
            records = self.recorder.records()
            # Of a pass that was left, the first window says nothing.
            if self.progress.finished or records.totals.batches > records.setup.window:
                diagnosis = diagnose(records)
                if diagnosis.bound != "none":
                    logger.info("%s%s", self.settings.partition.label, diagnosis.text)
        except Exception:  # which ends no training
            level = logging.DEBUG if next(_failures) else logging.WARNING
            logger.log(level, "cannot say why the loop has waited; training goes on", exc_info=True)

    def note_setup(self) -> None:
        """Record the workers and limits of the pass; a pass that is over keeps its last ones."""
        with self.condition:
            self.has_changed = False
            workers = {number: str(node) for number, node in self.engine.workers.items()}
            if self.closed.is_set() or not workers:
                return
            seats, settings = self._executor.seats, self.settings
            names = {number: seats[number].worker.name for number in workers if number in seats}
            # The window of a table of streams shrinks with each that ends, whose worker stays.
            window = len(workers) * settings.prefetch_factor if settings.iterable else self.engine.table.window
            limits = window, settings.prefetch_factor, settings.max_in_flight_bytes
            self.recorder.setup = Setup(workers, *limits, names, settings.persistent_workers)


class Ahead:
    """The one batch on its way to a device, while the consumer has the previous one.

    All methods need the pass's condition, so they run one after the other.
    """

    def __init__(self, engine: Engine[Node], carrier: Carrier) -> None:
        self._engine = engine
        self._carrier = carrier
        self.delivery: Entry | None = None

    def take(self) -> Entry | None:
        """Return the next delivery, if it is here, and send the following one to the device."""
        self.send()
        delivery, self.delivery = self.delivery, None
        if delivery is not None:
            self.send()
        return delivery

    def send(self) -> None:
        """Send the next delivery's batch to the device, if it is here and none is on its way."""
        if self.delivery is not None or (delivery := self._engine.deliver()) is None:
            return
        self.delivery = delivery
        answer = delivery.answer
        if answer is not None and answer.movable is not None:
            try:
                answer.copies = self._carrier.carry(answer.movable, answer.probe is not None)
            except BaseException as exc:
                # The frames would keep a batch alive.
                answer.error = exc.with_traceback(None)
            answer.movable = None
