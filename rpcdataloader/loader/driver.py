"""One pass over a loader: what reaches the engine, and in which order its decisions are carried out.

Three sides feed the engine: the consumer (:mod:`~rpcdataloader.loader.iterator`) adds tasks from the sampler, and
delivers; the receiver threads of workers (:mod:`~rpcdataloader.loader.seat`) report answers and losses; the
:mod:`~rpcdataloader.loader.executor` reports nodes. Each holds the condition for that, and carries out the engine's
actions without it, so that no thread waits for another one's send.

Nothing here waits: threads, sockets and the clock are the executor's. ``tests/simulation`` has another executor, and
runs this module in a time of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler

from rpcdataloader.client.node import Node
from rpcdataloader.client.worker import RemoteWorker
from rpcdataloader.diagnosis.records import Recorder, Setup
from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.loader.copying import Carrier
from rpcdataloader.loader.executor import Executor, Opening
from rpcdataloader.loader.passes import Pass
from rpcdataloader.loader.sampler import Source
from rpcdataloader.loader.seat import Answer, BatchDecoder, Seat
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.waits import WantedWorkers, diagnose, tell
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Load, Open, ReportWait, Restart, Say, Seek
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.table import Entry
from rpcdataloader.wire.built import Built

if TYPE_CHECKING:
    from rpcdataloader.diagnosis.verdict import Diagnosis

logger = logging.getLogger("rpcdataloader.loader")


def shown(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call something, inside a range that torch's profiler shows if it is on."""
    if not profiler._is_profiler_enabled:
        return call(*args)
    with torch.profiler.record_function(name):
        return call(*args)


class ToDo(NamedTuple):
    """Pending decisions of the engine."""

    actions: list[Action]  # all actions but those to send a task
    # Workers that tasks are sent to. They come last: opening, restarting and cancelling are decided before.
    seats: list[Seat]
    begun: Pass


class Driver:
    """The state behind an iterator. Workers refer to it and not to the iterator, which can so be collected.

    Attributes:
        pid: Process that began the pass; its forks must not continue it.
        condition: Lock for the attributes that follow, on which the consumer waits.
        is_closed: True once the pass is over.
        is_complete: True once its last batch was delivered.
        begun: The present epoch.
        seats: Requested workers that are not lost, by number.
        ahead: The batch that is on its way to a device, while the consumer has the previous one.
        taken: The next batch, out of the engine, while the sampler is asked for what takes its place there.
        streams: State of each stream after its last answer; the progress has that after its last delivered batch.
        sleeps_until: Time at which the waiting consumer looks again on its own; before all times while it is awake.
        sleeps_since: Time at which it fell asleep.
        later_since: Time since which a later batch is here while it sleeps.
        has_changed: True if the workers are others than those in the records.
        wanted: Decides how many workers the loop wants; None for a pass that is no loader's.
        follower: Function to call, without the condition, after each event; None unless a pass draws from this one.
    """

    def __init__(
        self,
        settings: PassSettings,
        engine: Engine[Node],
        executor: Executor,
        begun: Pass,
        decoder: BatchDecoder,
        recorder: Recorder,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.executor = executor
        self.decoder = decoder
        self.recorder = recorder
        self.now = executor.now
        self.pid = os.getpid()
        self.condition = executor.condition
        self.is_closed = self.is_complete = False
        self.begun = begun
        self.streams = list(begun.progress.streams)
        self.seats: dict[int, Seat] = {}
        self._openings: dict[int, Opening] = {}  # ready first requests, by place
        self._carrier = decoder.carrier
        self.ahead: Entry | None = None
        self.taken: Entry | None = None
        self.sleeps_until = -math.inf
        self.sleeps_since = 0.0
        self.later_since = math.inf
        self._due = math.inf  # time of the engine's next action, as the consumer fell asleep
        self.has_changed = True
        self.wanted: WantedWorkers | None = None
        self.follower: Callable[[], None] | None = None

    def start(self, homes: Iterable[Node], missing: Sequence[Node], *, expects_more: bool) -> None:
        """Open the first workers; before anything else, as no node counts as up until then.

        Args:
            homes: Nodes of the workers, each once.
            missing: Nodes that are looked for, and join when they come.
            expects_more: True if other nodes may come, too.

        Raises:
            SerializationError: Objects of the loader cannot be pickled.
        """
        with self.condition:
            crew = self.engine.crew
            for node in homes:
                if (session := self.executor.session(node)) is None:
                    crew.node_missing(node, self.executor.reason(node))
                else:
                    crew.node_up(node, session)
            crew.roster.expects_more = expects_more
            crew.add_nodes(missing)
            todo = self.act(self.now())
        if todo is not None:
            # Before any is sent, so that pickling errors come early.
            opens = [action for action in todo.actions if isinstance(action, Open)]
            self._openings = {action.place: self._opening(action) for action in opens}
            self.carry_out(todo)

    def begin_epoch(self, begun: Pass) -> None:
        """Begin another epoch with the same workers."""
        self.executor.settle(self.workers)
        begun.progress.is_midway = True
        with self.condition:
            self.ahead, self.taken, self.is_complete = None, None, False
            # Before the pass, see :meth:`_opening`.
            self.streams = list(begun.progress.streams)
            self.begun = begun
            now = self.now()
            self.recorder.begin(now)
            self.engine.begin_epoch(now, self.begun.progress.turn)
            todo = self.act(now)
        if todo is not None:
            self.carry_out(todo)
        self.executor.settled()

    def close(self) -> None:
        """End the workers, and tell why the loop has waited; idempotent."""
        with self.condition:
            self.note_setup()
            self.is_closed = True
            self.engine.table.forget()
            self.ahead = None
            workers = self.workers
            self.condition.notify_all()
        self.executor.close(workers)
        self.tell()

    # Events

    def feed(self, event: Callable[[Engine[Node], float], None]) -> None:
        """Report an event to the engine, and carry out its decisions."""
        with self.condition:
            if self.is_closed:
                return
            now = self.now()
            event(self.engine, now)
            todo = self.act(now)
            self.has_changed = True
            self.condition.notify_all()
        if self.follower is not None:
            self.follower()
        if todo is not None:
            self.carry_out(todo)

    def joined(self, batch: Entry, begun: Pass, answer: Answer | None) -> None:
        """Report that the parts of a batch are joined; None if they do not fit together."""

        def note(engine: Engine[Node], _now: float) -> None:
            # Meanwhile another epoch may have begun, or the parts of another batch have not fitted.
            if begun is not self.begun or not batch.has_all_parts:
                return
            if answer is not None:
                engine.joined(batch.number, size_bytes=answer.size_bytes, answer=answer)
                if self._carrier is not None:
                    self.send_ahead(self._carrier)
                return
            engine.unfit()
            if self.wanted is not None:
                self.wanted.may_split = False

        self.feed(note)

    def fail(self, error: BaseException) -> None:
        """End the pass with an error."""
        with self.condition:
            if self.engine.failure is None and not self.is_closed:
                self.engine.failure = error.with_traceback(None)
            self.condition.notify_all()
        if self.follower is not None:
            self.follower()

    def compare(self, where: str, built: Built) -> None:
        """End the pass if a worker has built another dataset than others."""
        try:
            self.executor.compare(where, built)
        except ValueError as error:
            self.fail(error)

    def lost(self, number: int, loss: Loss) -> None:
        """Report that a worker has ended, or could not be started."""
        with self.condition:
            self.seats.pop(number, None)
        if self.executor.is_over:
            self.fail(loss.error)
        else:
            self.feed(lambda engine, _now: engine.worker_lost(number, loss))

    def nodes_changed(self, come: Sequence[Node], gone: Sequence[Node]) -> None:
        """Report that nodes were added, or removed; a restarted one is only added."""
        if gone:
            self.feed(lambda engine, _now: engine.remove_nodes(gone))
        if come:
            self.feed(lambda engine, _now: engine.crew.add_nodes(come))

    # The consumer

    def advance(self, wants_input: bool, began: float) -> None:
        """Fill the window from the sampler, outside of the lock as it is user code, and carry out what follows.

        Args:
            began: Time of the call of ``next``.
        """
        table, source = self.engine.table, self.begun.source
        while self.engine.failure is None:
            if wants_input:
                self._draw(began)
            with self.condition:
                if wants_input:
                    if (task := source.task) is None:
                        table.end_of_input()
                    elif table.add_task(task, task.num_samples, task.is_last) is not None:
                        source.task = None
                    # Otherwise a stream that has ended meanwhile has left less room.
                    wants_input = table.wants_input and self.may_draw()
                todo = self.act(self.now())
            if todo is not None:
                shown("RPCDataloader.send", self.carry_out, todo)
            if not wants_input:
                break

    def _draw(self, began: float) -> None:
        """Draw a task, unless the sampler is at its end; it may be a probe, or shown."""
        recorder, source, progress = self.recorder, self.begun.source, self.begun.progress
        since = self.now() if began >= recorder.next_probe else None
        progress.is_midway = False  # an exception of the sampler changes nothing here
        shown("RPCDataloader.draw", source.draw)
        progress.is_midway = True
        if since is not None and (task := source.task) is not None:
            now = self.now()
            task.probe = recorder.probe(now, now - since, task.number)

    def may_draw(self, *, has_batch: bool = False) -> bool:
        """Whether to draw from the sampler.

        Not while that waits for a stream, and a batch is here or under way; nor while there are too many raw samples.
        """
        is_ready, tasks = self.begun.source.is_ready, self.engine.table.tasks
        if is_ready is None:
            return True
        if not is_ready():
            return not (has_batch or tasks)
        # A few dozen tasks, and the batch that is taken: their requests keep the raw samples until they are delivered.
        kept = [*tasks.values(), *([] if self.taken is None else [self.taken])]
        sizes = [entry.payload.request.size_bytes for entry in kept]
        return not sizes or sum(sizes) + max(sizes) <= self.settings.max_in_flight_bytes // 2

    def take(self) -> Entry | None:
        """Return :attr:`taken`, or else the next delivery, if it is here; with the condition."""
        # A failure has caused errors that say less.
        if self.taken is None and self.engine.failure is None:
            if self._carrier is None:
                self.taken = self.engine.deliver()
            else:
                self.send_ahead(self._carrier)
                self.taken, self.ahead = self.ahead, None
                if self.taken is not None:
                    self.send_ahead(self._carrier)
        return self.taken if self.engine.failure is None else None

    def send_ahead(self, carrier: Carrier) -> None:
        """Send the next delivery's batch to the device, if it is here and none is on its way; with the condition."""
        if self.ahead is not None or (delivery := self.engine.deliver()) is None:
            return
        self.ahead, answer = delivery, delivery.answer
        if answer is not None and answer.movable is not None:
            try:
                answer.copies = carrier.carry(answer.movable, answer.probe is not None)
            except Exception as exc:
                # The frames would keep a batch alive.
                answer.error = exc.with_traceback(None)
            answer.movable = None

    def falls_asleep(self, now: float, deadline: float | None) -> float:
        """Note that the consumer waits for :attr:`condition`; with it. Returns the time of the end of its wait."""
        engine = self.engine
        engine.consumer_waits(now)
        self._due = engine.due(now)
        self.sleeps_until = self._due if deadline is None else min(self._due, deadline)
        self.sleeps_since = now
        self.later_since = now if engine.table.answered_bytes else math.inf
        return self.sleeps_until

    def wakes_up(self, now: float) -> float:
        """Note the end of that wait; with the condition.

        Returns:
            Seconds asleep while a later batch was here.
        """
        self.sleeps_until = -math.inf
        if self._due <= now:
            self.engine.tick(now)
        return max(0.0, now - self.later_since)

    def wake(self) -> None:
        """Wake the sleeping consumer if an answer gives it something to do; with the condition.

        A needless wake costs two changes of thread.
        """
        table = self.engine.table
        if (
            table.has_deliverable
            or table.finished
            or table.wants_input
            or self.ahead is not None
            # The engine's next action may be due before the end of the sleep.
            or self.engine.due(self.now()) < self.sleeps_until
        ):
            self.condition.notify_all()  # an interrupted wait leaves a waiter that is gone
        elif self.later_since == math.inf:
            self.later_since = self.now()

    def decide(self) -> None:
        """Decide, from time to time, how many workers the loop wants, and use no others."""
        wanted = self.wanted
        if wanted is None or not wanted.decide(self.now(), self.recorder, self._places):
            return
        roster = self.engine.crew.roster
        if wanted.most is not None and (wanted.most != roster.most or wanted.most > roster.num_used):
            if wanted.most != (before := roster.most or self.engine.num_workers):
                label = self.settings.partition.label
                logger.info("%swants %d workers for %s, after %d", label, wanted.most, self.executor.name, before)
            self.feed(lambda engine, _now: engine.crew.use(wanted.most))

    def _places(self) -> dict[int, int]:
        with self.condition:
            return {number: self.engine.crew.members[number].place for number in self.engine.workers}

    # Actions

    def act(self, now: float) -> ToDo | None:
        """Take the engine's decisions, if any; with the condition, so that tasks are queued in their order."""
        actions = self.engine.act(now)
        if not actions or self.is_closed:
            return None
        todo = ToDo([], [], self.begun)
        for action in actions:
            if type(action) is not Load:
                todo.actions.append(action)
            elif (seat := self.seats.get(action.worker)) is not None:  # else it was lost in between
                seat.enqueue(action, self.begun)
                todo.seats.append(seat)
        return todo

    def carry_out(self, todo: ToDo) -> None:
        """Carry out decisions; without the condition.

        Other threads may overtake this one: only the tasks of a worker keep their order.
        """
        ends: list[End] = []
        for action in todo.actions:
            match action:
                case Cancel():
                    seat = self.seats.get(action.worker)
                    if seat is not None and (sent := seat.sent.get(action.number)) and sent.begun is todo.begun:
                        seat.worker.connection.cancel(sent.request_id)
                case Open():
                    self._open(action)
                case Close():
                    if (seat := self.seats.get(action.worker)) is not None:  # otherwise lost, or not requested yet
                        seat.worker.close()
                case Restart():
                    # The consumer draws for this epoch when all workers know of it. One that another thread has opened
                    # since it began knows already: told again, its dataset would count another epoch.
                    seat = self.seats.get(action.worker)
                    if seat is not None and seat.opened_for is not todo.begun:
                        seat.restart(self.executor.restarting(todo.begun, seat.worker))
                case End():
                    ends.append(action)
                case Seek():
                    self.executor.seek(action.node, action.delay, self.feed)
                case ReportWait():
                    seat = None if action.worker is None else self.seats.get(action.worker)
                    self.executor.report_wait(action, None if seat is None else seat.worker)
                case Say():
                    self.executor.say(action)
        if ends:
            self._end(ends, todo.begun)
        for seat in todo.seats:
            seat.send()

    def _opening(self, action: Open) -> Opening:
        """Make the first request to a worker, for the present epoch."""
        # In this order: if another epoch begins in between, the request of the last one is not sent.
        begun, streams = self.begun, self.streams
        return self.executor.opening(begun, action.place, streams[action.place] if streams else None, action.node)

    def _open(self, action: Open) -> None:
        """Request a worker, if its node is still up."""
        opening = self._openings.pop(action.place, None)
        reason = ConnectionLostError("it is gone")
        while True:
            try:
                opening = opening or self._opening(action)
            except Exception as exc:
                self.fail(exc)
                return
            with self.condition:
                if self.is_closed:
                    return
                if opening.begun is self.begun:
                    member = self.engine.crew.members.get(action.worker)
                    is_wanted = member is not None and not member.is_closed
                    if is_wanted and (session := self.executor.session(action.node)) is not None:
                        # With the condition: the worker is ready only after its first request was sent.
                        seat = Seat(self, action.worker, opening.begun)
                        try:
                            seat.worker = self.executor.open(session, opening, seat, self.is_alone)
                        except ConnectionLostError as exc:
                            reason = exc.with_traceback(None)
                            break
                        self.seats[action.worker] = seat
                        # Fails if the worker is lost already, which is about to be reported.
                        with contextlib.suppress(RPCError):
                            seat.worker.submit(opening.request, seat.started)
                        return
                    break
            opening = None  # another epoch has begun
        self.feed(lambda engine, _now: engine.crew.open_failed(action.worker, reason))

    def _end(self, ends: Sequence[End], begun: Pass) -> None:
        """End workers that exceed a task's time limit, all at the same time."""
        with self.condition:
            late = [
                # Not the engine's task: another worker may have answered it, and it may be delivered.
                (seat.worker, sent.task.whole or sent.task)
                for end in ends
                if (seat := self.seats.get(end.worker)) is not None
                and (sent := seat.sent.get(end.number)) is not None
                and sent.begun is begun
            ]
            # With the condition: the consumer hears of these losses when the tasks have their stacks.
            self.executor.end(late)

    # Queries

    @property
    def workers(self) -> list[RemoteWorker]:
        """The requested workers that are not lost."""
        return [seat.worker for seat in list(self.seats.values())]

    def is_alone(self) -> bool:
        """Whether no worker has started yet: then a busy node is worth waiting for."""
        with self.condition:
            return not self.engine.num_workers and not self.is_closed

    def diagnosis(self) -> Diagnosis:
        """The reason why the loop waits."""
        with self.condition:
            self.note_setup()
            waiting = self.now() - self.sleeps_since if self.sleeps_until != -math.inf else 0.0
        return diagnose(self.recorder.snapshot(waiting))

    def tell(self) -> None:
        """Log, once per pass, why the loop has waited, if it has and the pass has not failed."""
        if self.engine.failure is None:
            executor = self.executor
            tell(self.recorder, self._last_diagnosis, executor.name, self.settings.partition, executor.ask_ranks)

    def _last_diagnosis(self) -> Diagnosis | None:
        self.note_setup()
        records = self.recorder.records()
        # Of a pass that was left, the first window says nothing.
        is_known = self.is_complete or records.totals.batches > records.setup.window
        return diagnose(records) if is_known else None

    def note_setup(self) -> None:
        """Record the workers and limits of the pass; a pass that is over keeps its last ones."""
        with self.condition:
            self.has_changed = False
            workers = {number: str(node) for number, node in self.engine.workers.items()}
            if self.is_closed or not workers:
                return
            settings = self.settings
            here = {number: self.seats[number].worker for number in workers if number in self.seats}
            names = {number: worker.name for number, worker in here.items()}
            machines = {number: worker.machine for number, worker in here.items()}
            # The window of a table of streams shrinks with each that ends, whose worker stays.
            window = len(workers) * settings.prefetch_factor if settings.iterable else self.engine.table.window
            limits = window, settings.prefetch_factor, settings.max_in_flight_bytes
            draws_from = "source" if isinstance(settings.sampler, Source) else "sampler"
            kept = settings.persistent_workers, settings.iterable, draws_from
            self.recorder.setup = Setup(workers, *limits, names, machines, *kept)
