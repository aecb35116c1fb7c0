"""Every decision of a pass: events and times go in, actions come out.

Pure: no thread, lock, clock, socket or log in it. The driver (:mod:`rpcdataloader.loader.driver`) holds one lock around
every call, and carries the actions out after it has let the lock go, in the order in which they came. Two threads may
therefore carry out the actions of two events in any order, so an action never relies on an earlier one having been
carried out; what comes too late is answered by an event (:meth:`Engine.open_failed`, :meth:`Engine.worker_lost`).

Three parts are joined here. The *table* knows where each task is (:mod:`~rpcdataloader.plan.table`): the consumer adds
tasks to it, and asks it what there is. The *crew* knows the workers and their nodes, and *retries* what has gone wrong
with which task. The engine decides what the end of a worker means for the task that it was at, and what is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Load, PlanOptions, ReportWait, Restart
from rpcdataloader.plan.batches import BatchTable
from rpcdataloader.plan.crew import Crew, Loss, Member
from rpcdataloader.plan.retries import Retries
from rpcdataloader.plan.streams import StreamTable
from rpcdataloader.plan.table import Table

N = TypeVar("N", bound=Hashable)

# Seconds that the consumer waits for one batch until the user is told, and until the user is told again. Shorter waits
# are ordinary where storage is slow; a hang that prints nothing looks like a training that goes on.
REPORT_AFTER = 60.0
REPORT_AGAIN = 300.0


class Delivery(NamedTuple):
    """What the consumer gets next: the answer to a task, or an error in its place.

    Attributes:
        answer: What :meth:`Engine.answered` was told; None of a task that is condemned.
        stream: That it is of, if there are streams.
        condemned: Text of the error in its place, if the task has killed too many workers.
    """

    number: int
    payload: Any
    answer: Any
    stream: int | None
    condemned: str | None


class Engine(Generic[N]):
    """The decisions of one pass, or of several with the same workers.

    Args:
        describe: A task in an error message.
        turn: The stream whose batch comes first.

    Attributes:
        failure: Why the pass cannot go on; None while it can.
        table: Where each task is; another object in the next epoch.
    """

    def __init__(
        self,
        options: PlanOptions,
        homes: Sequence[N],
        others: Sequence[N] = (),
        *,
        describe: Callable[[Any], str] = str,
        turn: int = 0,
    ) -> None:
        self.failure: BaseException | None = None
        self._options = options
        self._describe = describe
        self._out: list[Action] = []
        self._crew = Crew(options, homes, others, self._out)
        self._interrupted = ""  # what the last worker that was lost was at
        self._waiting_since: float | None = None  # the consumer, for what is delivered next
        self._report_at = math.inf
        self._begin(0.0, turn)

    def _begin(self, batch_size_bytes: float, turn: int) -> None:
        options = self._options
        self._retries = Retries(
            options.max_retries, marks_last_try=options.marks_last_try, leaves_out=options.leaves_out
        )
        self.table: Table[Any]
        if options.is_iterable:
            self.table = StreamTable(options, batch_size_bytes, turn)
        else:
            options = replace(options, num_workers=max(1, self._crew.num_wanted))
            self.table = BatchTable(options, batch_size_bytes)

    # The consumer

    def deliver(self) -> Delivery | None:
        """Hand the next answer to the consumer; None while it is not there."""
        task = self.table.pop_deliverable()
        if task is None:
            return None
        self._waiting_since = None
        condemned = self._retries.delivered(task.number) if self._retries.is_needed else None
        return Delivery(task.number, task.payload, task.answer, task.stream, condemned)

    def consumer_waits(self, now: float) -> None:
        """The consumer has found nothing to deliver; it may say so again."""
        if self._waiting_since is None:
            self._waiting_since, self._report_at = now, now + REPORT_AFTER

    @property
    def num_workers(self) -> int:
        """Workers that take tasks."""
        return sum(worker.has_joined for worker in self._crew)

    @property
    def workers(self) -> dict[int, N]:
        """The node of each worker that takes tasks."""
        return {one.number: one.node for one in self._crew if one.has_joined and not one.is_draining}

    def begin_epoch(self, now: float, turn: int = 0) -> None:
        """Another epoch begins, with the same workers; what was not delivered of the last one is dropped."""
        self._begin(self.table.batch_size_bytes, turn)
        self._waiting_since = None
        self._crew.reopen()
        for worker in self._crew:
            self._out.append(Restart(worker.number))
            worker.is_at_work = False
            # Draining workers skip this epoch.
            worker.has_joined = worker.has_joined and not worker.is_draining
            if worker.is_sent_away:
                self._close_idle(worker)
            elif worker.has_joined:
                self.table.worker_joined(worker.number, now, worker.node, worker.place)

    # Answers

    def answered(
        self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float, answer: Any = None
    ) -> bool:
        """A worker answered a task with a batch, or with an exception that stands.

        Returns:
            Whether ``answer`` is what will be delivered; otherwise it is to be forgotten.
        """
        table = self.table
        is_doubled = table.num_doubled > 0  # perhaps this one
        counts = table.replied(worker, number, size_bytes=size_bytes, task_seconds=task_seconds, now=now, answer=answer)
        if counts and is_doubled:
            for loser in table.losers(number):
                self._out.append(Cancel(loser, number))
        self._copy_ended(worker, number)
        return counts

    def failed(self, worker: int, number: int, error: BaseException, now: float) -> bool:
        """A worker answered a task with an exception that may pass.

        Returns:
            Whether the task is tried again, or was answered by another worker; if not, :meth:`answered` comes next.
        """
        delay = self._retries.delay(worker, number)
        tried_again = None if delay is None else self.table.retry(worker, number, delay=delay, now=now)
        if tried_again is None:
            return False
        if tried_again:
            self._retries.tried_again(number)
            task = self._describe(self.table.tasks[number].payload)
            self._crew.say(f"{task} is tried again in {delay:g} s: {type(error).__name__}: {error}")
        self._copy_ended(worker, number)
        return True

    def stream_ended(self, worker: int, number: int, now: float) -> None:
        """A worker answered that its stream was at its end before this task."""
        self.table.ended(worker, number, now)
        self._copy_ended(worker, number)

    def _copy_ended(self, number: int, task: int) -> None:
        self._crew.num_deaths = 0
        if self._retries.is_needed:
            self._retries.copy_ended(number, task)
        worker = self._crew.members.get(number)
        if worker is not None and worker.is_sent_away:
            self._close_idle(worker)

    # Workers

    def worker_ready(self, number: int, now: float) -> None:
        """A worker takes requests."""
        worker = self._crew.members.get(number)
        if worker is None or worker.is_closed:
            return
        for other in self._crew.ready(worker):
            self._send_away(other, now)
        worker.has_joined = True
        self.table.worker_joined(number, now, worker.node, worker.place)

    def worker_at_work(self, number: int) -> None:
        """A worker has answered the first request of this epoch."""
        worker = self._crew.members.get(number)
        if worker is not None:
            worker.is_at_work = True
            if worker.is_sent_away:
                self._close_idle(worker)

    def worker_draining(self, number: int) -> None:
        """A worker answers what it has, and takes no more."""
        worker = self._crew.members.get(number)
        if worker is not None:
            self._drain(worker)

    def _drain(self, worker: Member[N]) -> None:
        if worker.has_joined and not worker.is_draining:
            worker.is_draining = True
            self.table.worker_draining(worker.number)

    def _send_away(self, worker: Member[N], now: float) -> None:
        worker.is_sent_away = True
        if not self._options.is_iterable:
            self._drain(worker)
        elif worker.has_joined:
            # Its stream goes on elsewhere after the last answer. What it says until it has ended is not waited for.
            worker.has_joined = False
            self._leave(worker.number, now)
        self._close_idle(worker)

    def _close_idle(self, worker: Member[N]) -> None:
        """End a worker that was sent away, when it has answered what it had."""
        is_busy = worker.has_joined and (not worker.is_at_work or self.table.in_flight(worker.number))
        if not is_busy and not worker.is_closed:
            worker.is_closed = True
            self._out.append(Close(worker.number))

    def open_failed(self, number: int, error: BaseException) -> None:
        """A node was gone before it could be asked for a worker."""
        self._crew.open_failed(number, error)

    def worker_lost(self, number: int, loss: Loss, now: float) -> None:
        """A worker has ended, or never came to be."""
        worker = self._crew.remove(number)
        if worker is None:
            return
        if worker.is_draining and not loss.node_is_up:
            loss = Loss(ConnectionLostError(f"{worker.node} is shutting down"), node_is_up=False)
        # A node that goes with all of its workers says nothing about what one of them was loading.
        died = loss.node_is_up and loss.came and not worker.is_draining
        # One that was still starting has not loaded anything.
        is_blamed = worker.has_joined and self._leave(number, now, loss if died and worker.is_at_work else None)
        is_needed = self.table.needs(worker.place)
        self._crew.lost(worker, loss, is_needed=is_needed, is_blamed=is_blamed, died=died)

    def _leave(self, worker: int, now: float, death: Loss | None = None) -> bool:
        """What a worker that took tasks had goes to others; returns whether the one that it was at is to blame."""
        number = self.table.running(worker, None if death is None else death.task)
        self._interrupted = "" if number is None else self._describe(self.table.tasks[number].payload)
        for lost in self.table.in_flight(worker):
            self._retries.copy_ended(worker, lost)
        self.table.worker_left(worker, now)
        if number is None or death is None:
            return False
        place = death.place if number == death.task else None
        if self.table.blame(number, is_too_many=self._retries.died(number, str(death.error), place)):
            self._retries.condemn(number, self._interrupted)
        return True

    # Nodes

    def expect_more(self) -> None:
        """Nodes may be added that are not known yet, so the loss of all others is not the end."""
        self._crew.roster.expects_more = True

    def node_up(self, node: N, incarnation: Hashable, num_offered: int = 0) -> None:
        """Workers can be opened on a node.

        Args:
            incarnation: Something that another session there would not have.
            num_offered: Workers that it offers; asked of nodes that are new to the pass.
        """
        self._crew.node_up(node, incarnation, num_offered)
        self.table.resize(max(1, self._crew.num_wanted))

    def node_missing(self, node: N, error: BaseException) -> None:
        """A node that the pass begins with is not there."""
        self._crew.node_missing(node, error)

    def node_failed(self, node: N, error: BaseException, *, is_foreign: bool = False) -> None:
        """A node could not be reached, which may change.

        Args:
            is_foreign: Something answered that is not what was there. Another server may have the port for a moment;
                but a node that is new to the pass is done without.
        """
        self._crew.node_failed(node, error, is_foreign=is_foreign)

    def node_hopeless(self, node: N, error: BaseException) -> None:
        """A node can never be used: it cannot build the dataset, for example."""
        self._crew.node_hopeless(node, error)

    def add_nodes(self, nodes: Iterable[N]) -> None:
        """More nodes are there for this pass."""
        self._crew.add_nodes(nodes)
        self.table.resize(max(1, self._crew.num_wanted))

    def remove_nodes(self, nodes: Iterable[N], now: float) -> None:
        """Nodes are not for this pass any more: their workers answer what they have, and end."""
        for worker in self._crew.remove_nodes(nodes):
            self._send_away(worker, now)
        self.table.resize(max(1, self._crew.num_wanted))

    # Time, and what is to be done

    def act(self, now: float) -> list[Action]:
        """What is to be done after the last events, each thing once."""
        if self._crew.is_changed:
            self._crew.fill_places()
        table, out = self.table, self._out
        while (assigned := table.assign(now)) is not None:
            worker, number = assigned
            is_last, left_out = False, None
            if self._retries.is_needed:
                is_last, left_out = self._retries.sent(worker, number), self._retries.left_out(number)
            out.append(Load(worker, number, table.tasks[number].payload, is_last, left_out))
        actions = out[:]
        out.clear()
        return actions

    def tick(self, now: float) -> None:
        """Time has passed: end what is late, and give up when waiting is of no use any more."""
        self._out += [End(worker, number) for worker, number in self.table.timed_out(now)]
        if self.failure is None and (deadline := self._crew.stuck_until(now)) is not None and deadline <= now:
            error = self._crew.verdict()
            if self._interrupted and isinstance(error, ConnectionLostError):
                error = type(error)(f"{error}; it was loading {self._interrupted}")
            self.failure = error
        if self._waiting_since is not None and self._report_at <= now and (task := self.table.awaited()) is not None:
            self._out.append(ReportWait(self.table.holder(task), task.payload, now - self._waiting_since))
            self._report_at = now + REPORT_AGAIN

    def due(self, now: float) -> float | None:
        """When to call :meth:`tick` and :meth:`act` again if nothing happens before; None for never."""
        due = self.table.due(now)
        stuck_until = self._crew.stuck_until(now) if self._crew.is_stuck else None
        report_at = None if self._waiting_since is None or not self.table.tasks else self._report_at
        return min((time for time in (due, stuck_until, report_at) if time is not None), default=None)
