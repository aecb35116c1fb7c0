"""Every decision of a pass: events and times go in, actions come out.

Pure: it has no thread, lock, clock, socket or log. The driver (:mod:`rpcdataloader.loader.driver`) holds one lock
around every call, and then carries the actions out without the lock, in their order. Two threads may therefore carry
out the actions of two events in any order. So an action never relies on an earlier one being done, and late actions are
answered by an event (``crew.open_failed``, :meth:`Engine.worker_lost`).

Two parts are joined here. The *table* knows the tasks (:mod:`~rpcdataloader.plan.table`); the consumer adds to it and
queries it. The *crew* knows the workers and their nodes. The engine decides what a worker's end means for its task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.plan.actions import Action, Cancel, Close, End, PlanOptions, ReportWait, Restart
from rpcdataloader.plan.crew import Crew, Loss, Member, listed
from rpcdataloader.plan.table import Entry, Split, Table

N = TypeVar("N", bound=Hashable)

# Seconds of waiting for one batch after which the user is told, first and again: a silent hang looks like a running
# training. Where storage is slow, long waits are ordinary: the next batch may take twice as long as was told before, up
# to the second number.
REPORT_AFTER, MOST_UNTOLD = 3.0, 60.0
REPORT_AGAIN = 10.0

# Seconds of waiting after which that includes the worker's stack, and seconds between two of these.
STACK_AFTER = 10.0
STACK_AGAIN = 300.0

# Seconds of waiting for one batch after which the report to the node servers says so.
SHOW_AFTER = 10.0


class Engine(Generic[N]):
    """The decisions of one pass, or of several with the same workers.

    Args:
        describe: Function that names a task in error messages.
        turn: Stream whose batch comes first.
        split: Function that makes parts of a batch, see :class:`~rpcdataloader.plan.table.Table`; None for none.

    Attributes:
        failure: Reason why the pass cannot go on; None while it can.
        table: Tasks of this epoch; replaced for the next one.
        crew: Workers and nodes. It takes the events that concern no task itself.
    """

    def __init__(
        self,
        options: PlanOptions,
        homes: Sequence[N],
        others: Sequence[N] = (),
        *,
        describe: Callable[[Any], str] = str,
        turn: int = 0,
        split: Split | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._options = options
        self._describe = describe
        self._split = split
        self._out: list[Action] = []
        self.crew = Crew(options, homes, others, self._out)
        self._leaving: list[Member[N]] = []  # workers to close once they have answered their requests
        self._interrupted = ""  # task of the last lost worker
        self._waiting_since: float | None = None  # start of the consumer's wait for the next delivery
        self._report_at = math.inf
        self._stack_at = -math.inf  # time from which on a report has a stack
        self._begin(0.0, None, turn)

    def _begin(self, batch_size_bytes: float, batch_seconds: float | None, turn: int) -> None:
        options = self._options
        self._untold_seconds = REPORT_AFTER  # that a batch may take
        if not options.is_iterable:
            options = replace(options, num_workers=max(1, self.crew.num_wanted))
        self.table = Table(options, batch_size_bytes, turn, batch_seconds=batch_seconds, split=self._split)

    # The consumer

    def deliver(self) -> Entry | None:
        """Hand the next answered or condemned task to the consumer; None until it is here."""
        task = self.table.pop_deliverable()
        if task is not None:
            self._waiting_since = None
        return task

    def consumer_waits(self, now: float) -> None:
        """Note that the consumer found nothing to deliver; may be repeated."""
        if self._waiting_since is None:
            self._waiting_since, self._report_at = now, now + self._untold_seconds

    @property
    def num_workers(self) -> int:
        """Number of workers that take tasks."""
        return sum(worker.has_joined for worker in self.crew)

    @property
    def workers(self) -> dict[int, N]:
        """The node of each worker that takes tasks."""
        return {one.number: one.node for one in self.crew if one.has_joined and not one.is_draining}

    def begin_epoch(self, now: float, turn: int = 0) -> None:
        """Begin another epoch with the same workers; undelivered tasks of the last one are dropped."""
        busy = self.table.in_flight
        idle = {each for each in self.crew if each.has_joined and each.is_at_work and not busy(each.number)}
        self._begin(self.table.batch_size_bytes, self.table.batch_seconds, turn)
        self._waiting_since = None
        self.crew.reopen()
        for worker in self.crew:
            worker.is_at_work = False
            if worker.is_draining:
                # All that it still answers belongs to an earlier epoch, and it may hang there, without a task's limit.
                worker.has_joined = False
                self._close_when_done(worker)
                continue
            self._out.append(Restart(worker.number))
            if worker.has_joined:
                self._join(worker, now, was_idle=worker in idle)

    # Answers

    def answered(
        self,
        worker: int,
        number: float,
        *,
        size_bytes: int,
        task_seconds: float | None = None,
        now: float = 0.0,
        has_failed: bool = False,
        answer: Any = None,
    ) -> Entry | None:
        """Note that a worker answered a task with a batch, a part of one, or an exception: :meth:`Table.replied`.

        Returns:
            The task, if ``answer`` will be delivered; otherwise None, and the caller forgets it. If it is a part, and
            its batch has all of them, the caller joins them and calls :meth:`joined` or :meth:`unfit`.
        """
        if self.crew.num_deaths:
            self.crew.survived()
        task = self.table.replied(worker, number, size_bytes, task_seconds, now, has_failed, answer)
        if task is not None and task.holders:  # with a superfluous copy
            self._out += [Cancel(loser.id, number) for loser in task.holders]
        return task

    def joined(self, number: float, *, size_bytes: int, answer: Any) -> None:
        """Note that the answers of a batch's parts were joined to one."""
        self.table.joined(number, size_bytes, answer)

    def unfit(self) -> None:
        """Note that the parts of a batch do not fit together: from now on, all batches are made as a whole."""
        self._split = None
        self.table.unfit()

    def stream_ended(self, worker: int, number: float, now: float) -> None:
        """Note a worker's answer that its stream ended before this task."""
        if self.crew.num_deaths:
            self.crew.survived()
        self.table.ended(worker, number, now)

    # Workers

    def worker_ready(self, number: int, now: float) -> None:
        """Note that a worker takes requests."""
        worker = self.crew.members.get(number)
        if worker is None or worker.is_closed:
            return
        for other in self.crew.ready(worker, now):
            self._send_away(other)
        worker.has_joined = True
        self._join(worker, now)

    def _join(self, worker: Member[N], now: float, *, was_idle: bool = False) -> None:
        self.table.worker_joined(worker.number, now, worker.node, worker.place)
        # It may hang in a task of an earlier epoch; if not, a change to the dataset comes first, of any length.
        if worker.has_begun and not was_idle:
            self.table.worker_began(worker.number, now)

    def worker_at_work(self, number: int, now: float) -> None:
        """Note that a worker has answered the first request of this epoch."""
        worker = self.crew.members.get(number)
        if worker is not None:
            worker.has_begun = worker.is_at_work = True
            self.crew.worker_began(worker)
            if worker.has_joined:
                self.table.worker_began(number, now)

    def worker_failed(self, number: int, error: BaseException) -> None:
        """Note that user code raised an exception in a worker's first request of this epoch.

        It ends the pass if no worker has ever answered; otherwise the worker is replaced.
        """
        worker = self.crew.members.get(number)
        if worker is None:
            return
        if worker.has_joined:  # nothing else that it answers is a batch
            worker.has_joined = False
            self._leave(number)
        if worker.is_sent_away:
            return
        self._send_away(worker)
        if not self.crew.start_failed(worker, error):
            self.failure = self.failure or error

    def worker_draining(self, number: int) -> None:
        """Note that a worker answers its requests, and takes no more."""
        worker = self.crew.members.get(number)
        if worker is not None:
            self._drain(worker)

    def _drain(self, worker: Member[N]) -> None:
        if worker.has_joined and not worker.is_draining:
            worker.is_draining = True
            self.table.worker_draining(worker.number)

    def _send_away(self, worker: Member[N]) -> None:
        worker.is_sent_away = True
        if not self._options.is_iterable:
            self._drain(worker)
        elif worker.has_joined:
            # Its stream goes on elsewhere after the last answer. Later messages of this worker are not waited for.
            worker.has_joined = False
            self._leave(worker.number)
        self._close_when_done(worker)

    def _close_when_done(self, worker: Member[N]) -> None:
        if not worker.is_closed and worker not in self._leaving:
            self._leaving.append(worker)

    def worker_lost(self, number: int, loss: Loss) -> None:
        """Note that a worker has ended, or could not be started."""
        worker = self.crew.remove(number)
        if worker is None:
            return
        if worker in self._leaving:
            self._leaving.remove(worker)
        if worker.is_draining and not loss.node_is_up:
            loss = Loss(ConnectionLostError(f"{worker.node} is shutting down"), node_is_up=False)
        # A node that fails with all of its workers says nothing about their tasks.
        died = loss.node_is_up and loss.came and not worker.is_draining
        # A worker that was still starting has not loaded anything.
        is_blamed = worker.has_joined and self._leave(number, loss if died and worker.is_at_work else None)
        is_needed = self.table.needs(worker.place)
        self.crew.lost(worker, loss, is_needed=is_needed, is_blamed=is_blamed, died=died)

    def _leave(self, worker: int, death: Loss | None = None) -> bool:
        """Give the tasks of a lost worker to others; returns whether its present task is to blame."""
        task = self.table.running(worker, None if death is None else death.task)
        self._interrupted = "" if task is None else self._describe(task.payload)
        self.table.worker_left(worker)
        if task is None or death is None:
            return False
        if (condemned := self.table.blame(task, str(death.error))) is not None:
            ends = f"has ended {len(condemned.killed)} workers in a row: {'; '.join(condemned.killed)}"
            condemned.condemned = f"{self._describe(condemned.payload)} {ends}"
        return True

    # Nodes

    def remove_nodes(self, nodes: Iterable[N]) -> None:
        """Remove nodes from this pass: their workers answer their requests, and end."""
        for worker in self.crew.remove_nodes(nodes):
            self._send_away(worker)

    # Time and actions

    def act(self, now: float) -> list[Action]:
        """Return the actions that follow from the last events, each once."""
        if self.crew.is_changed:
            for superfluous in self.crew.superfluous:
                self._send_away(superfluous)
        for leaver in self._leaving[:]:
            if not (leaver.has_joined and (not leaver.is_at_work or self.table.in_flight(leaver.number))):
                self._leaving.remove(leaver)
                leaver.is_closed = True
                self._out.append(Close(leaver.number))
        if self.crew.is_changed:
            self.crew.fill_places(now)
            self.table.resize(max(1, self.crew.num_wanted))
        loads = self.table.assign(now)
        if self.table.superfluous:
            self._out += [Cancel(*copy) for copy in self.table.superfluous]
            self.table.superfluous.clear()
        actions = self._out + loads
        self._out.clear()
        return actions

    def tick(self, now: float) -> None:
        """Note that time has passed: end late workers, and give up when waiting is futile."""
        self._out += [End(worker, number) for worker, number in self.table.timed_out(now)]
        self.crew.tick(now)
        if self.failure is None and self.crew.stuck_until <= now:
            error = self.crew.verdict()
            if self._interrupted and isinstance(error, ConnectionLostError):
                error = type(error)(f"{error}; it was loading {self._interrupted}")
            self.failure = error
        if self._report_at <= now and (report := self.present_wait(now)) is not None:
            self._report_at = now + REPORT_AGAIN
            self._untold_seconds = max(REPORT_AFTER, min(2 * report.seconds, MOST_UNTOLD))
            has_stack = report.seconds >= STACK_AFTER and self._stack_at <= now
            if has_stack:
                self._stack_at = now + STACK_AGAIN
            self._out.append(report._replace(has_stack=has_stack))

    def present_wait(self, now: float) -> ReportWait | None:
        """The task that the consumer waits for, and its worker; None if it waits for no task."""
        if self._waiting_since is None or (task := self.table.awaited()) is None:
            return None
        worker = task.holders[0].id if task.holders else None
        return ReportWait(worker, task.payload, now - self._waiting_since, self.summary(now))

    def summary(self, now: float) -> str:
        """The state of the pass in a line: tasks, workers, nodes, and the next deadline."""
        tasks = Counter(
            "answered" if task.size_bytes is not None else "at workers" if task.holders or task.parts else "waiting"
            for task in self.table.tasks.values()
        )
        due = self.due(now)
        then = "nothing is due" if due == math.inf else f"next decision in {max(0.0, due - now):.1f} s"
        return f"tasks: {listed(tasks)}; {self.crew.summary(now)}; {then}"

    def long_wait(self, now: float) -> str:
        """A line about the consumer's present wait, if that is long; otherwise empty."""
        seconds = 0.0 if self._waiting_since is None else now - self._waiting_since
        return "" if seconds < SHOW_AFTER else f"Waiting for {seconds:.0f} s. {self.summary(now)}. "

    def due(self, now: float) -> float:
        """Time for the next :meth:`tick` and :meth:`act` without further events; infinite for never."""
        report_at = math.inf if self._waiting_since is None or not self.table.tasks else self._report_at
        return min(self.table.due(now), self.crew.stuck_until, report_at, self.crew.late_at)
