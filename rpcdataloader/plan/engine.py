"""Every decision of a pass: events and times go in, actions come out.

Pure: no thread, lock, clock, socket or log in it. The driver (:mod:`rpcdataloader.loader.driver`) holds one lock around
every call, and carries the actions out after it has let the lock go, in the order in which they came. Two threads may
therefore carry out the actions of two events in any order, so an action never relies on an earlier one having been
carried out; what comes too late is answered by an event (:meth:`Engine.open_failed`, :meth:`Engine.worker_lost`).

Three parts are joined here. A *table* knows where each task is (:mod:`~rpcdataloader.plan.table`). The *roster* knows
at which node each place is, and which nodes are worth trying. The engine itself knows the workers, from the moment in
which one is asked for until it is lost, and decides what the end of each means: who is blamed, what is tried again, and
when waiting is of no use any more.

Workers are numbers that are never used twice, so that news of one that is gone cannot be taken for another's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.plan.actions import Action, Cancel, Close, End, Load, Open, Restart, Say, Seek
from rpcdataloader.plan.batches import BatchTable
from rpcdataloader.plan.roster import Roster
from rpcdataloader.plan.streams import StreamTable
from rpcdataloader.plan.table import Table

N = TypeVar("N", bound=Hashable)

# Seconds before a node is tried again: the first time, and at most. The first pause is for the others: of a node that
# has just been lost, they may not know it yet. Each try is itself patient while nobody listens there, as a node server
# needs some seconds to start.
FIRST_PAUSE = 0.1
MAX_PAUSE = 5.0

# Seconds until a batch is tried again after an exception that may pass: the first time, and at most.
RETRY_PAUSE = 0.5
MAX_RETRY_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user has chosen of all this.

    Attributes:
        num_workers: Workers of this process when the pass begins; streams of an iterable-style dataset.
        is_iterable: The dataset is iterable-style.
        prefetch_factor: Tasks per worker that are asked for in advance.
        in_order: Batches are delivered in the order of the sampler.
        max_in_flight_bytes: Limit of what is answered and on its way, in bytes.
        max_retries: Tries of a task that kills its workers, or fails with an exception that may pass.
        task_timeout: Seconds that a task may take; None for any time.
        reconnect_timeout: Seconds to wait for nodes when no worker is left.
        marks_last_try: The last try of a task is another request than those before.
        label: Beginning of every message: the rank, if there are several.
        rank: Of this process, among those that share the nodes.
        world_size: Number of these.
        num_offered: Workers of all nodes together.
        max_workers: Of this process, however many nodes there come to be; 0 for no limit.
    """

    num_workers: int
    is_iterable: bool = False
    prefetch_factor: int = 2
    in_order: bool = True
    max_in_flight_bytes: int = 2**30
    max_retries: int = 3
    task_timeout: float | None = None
    reconnect_timeout: float = 300.0
    marks_last_try: bool = False
    label: str = ""
    rank: int = 0
    world_size: int = 1
    num_offered: int = 0
    max_workers: int = 0


class Condemned(NamedTuple):
    """A task that has killed too many workers: an error with this text is delivered in its place."""

    text: str
    payload: Any
    stream: int | None


class Delivery(NamedTuple):
    """What the consumer gets next: the answer to a task, or an error in its place."""

    number: int
    condemned: Condemned | None


@dataclass(slots=True, eq=False)
class _Worker(Generic[N]):
    """A worker that was asked for, and is not lost."""

    number: int
    place: int
    node: N
    incarnation: Hashable  # of its node
    has_joined: bool = False  # it takes tasks
    is_at_work: bool = False  # it has answered the first request of this epoch
    is_draining: bool = False
    is_sent_away: bool = False


@dataclass(slots=True)
class _Trouble:
    """What has gone wrong with a task that is not delivered."""

    killed: list[str]  # how each worker that was at work on it has ended
    num_retries: int = 0  # exceptions after which it was tried again


class Engine(Generic[N]):
    """The decisions of one pass, or of several with the same workers.

    Args:
        options: What the user has chosen.
        homes: The node of each place.
        others: More nodes, which help while all homes are gone.
        describe: A task in an error message.
        turn: The stream whose batch comes first.

    Attributes:
        failure: Why the pass cannot go on; None while it can.
        expects_more: Whether nodes may be added that are not known yet.
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
        self._num_wanted = len(homes)
        self._table: Table = self._new_table(0.0, turn)
        self._roster = Roster(homes, others, needs_all=options.is_iterable)
        self._nodes = set(homes) | set(others)
        self._out: list[Action] = []
        self._is_changed = True  # workers, places or nodes, since the last look at the roster
        # Workers
        self._workers: dict[int, _Worker[N]] = {}
        self._num_opened = 0
        self._num_deaths = 0  # for which no task is to blame, since the last answer
        self._max_deaths = options.max_retries * len(homes)
        self._promised: set[int] = set()  # places whose worker has retired, so that there is room for the next
        # Nodes
        self._incarnations: dict[N, Hashable] = {}
        self._gone: set[N] = set()  # those that were lost with all of their workers
        self._joining: set[N] = set()  # tried, as it is not known yet what they offer
        self._pauses: dict[N, float] = {}  # before the last try of each node that is being tried
        self._reasons: dict[N, BaseException] = {}  # why each node is of no use
        self._num_offered = options.num_offered
        # Tasks
        self._troubles: dict[int, _Trouble] = {}
        self._condemned: dict[int, Condemned] = {}
        self._last_copies: set[tuple[int, int]] = set()  # those sent as the last try; by worker and task
        # The end
        self._stuck_since: float | None = None
        self._last_error: BaseException | None = None  # how the last worker ended
        self._interrupted = ""  # what it was at

    def _new_table(self, batch_size_bytes: float, turn: int) -> Table:
        options = self._options
        common: dict[str, Any] = {
            "prefetch_factor": options.prefetch_factor,
            "in_order": options.in_order,
            "max_in_flight_bytes": options.max_in_flight_bytes,
            "batch_size_bytes": batch_size_bytes,
            "max_retries": options.max_retries,
            "task_timeout": options.task_timeout,
        }
        if options.is_iterable:
            return StreamTable(num_streams=options.num_workers, turn=turn, **common)
        return BatchTable(num_workers=max(1, self._num_wanted), hedging=True, **common)

    # The input and the consumer

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`add_task` is allowed. Stays true until a task is added or delivered, or a stream ends."""
        return self._table.wants_input

    def add_task(self, payload: Any) -> int:
        """Add what the sampler has given; returns its number."""
        return self._table.add_task(payload)

    def end_of_input(self) -> None:
        """The sampler has no more."""
        self._table.end_of_input()

    def payload(self, number: int) -> Any:
        """What was added under a number, until it is delivered."""
        return self._table.payload(number)

    def stream_of(self, number: int) -> int | None:
        """The stream that a task belongs to, until it is delivered; None where there are no streams."""
        return self._table.stream_of(number)

    @property
    def has_deliverable(self) -> bool:
        """Whether :meth:`deliver` gives something now."""
        return self._table.has_deliverable

    def deliver(self) -> Delivery | None:
        """Hand the next answer to the consumer; None while it is not there."""
        number = self._table.pop_deliverable()
        if number is None:
            return None
        if self._troubles:
            self._troubles.pop(number, None)
        return Delivery(number, self._condemned.pop(number, None) if self._condemned else None)

    @property
    def is_finished(self) -> bool:
        """Whether the input has ended and everything is delivered."""
        return self._table.finished

    @property
    def num_workers(self) -> int:
        """Workers that take tasks."""
        return sum(worker.has_joined for worker in self._workers.values())

    def begin_epoch(self, now: float, turn: int = 0) -> None:
        """Another epoch begins, with the same workers; what was not delivered of the last one is dropped."""
        self._table = self._new_table(self._table.batch_size_bytes, turn)
        self._troubles.clear()
        self._condemned.clear()
        self._last_copies.clear()
        self._roster.reopen()
        self._is_changed = True
        for worker in list(self._workers.values()):
            self._out.append(Restart(worker.number))
            worker.is_at_work = False
            # Draining workers skip this epoch.
            worker.has_joined = worker.has_joined and not worker.is_draining
            if worker.is_sent_away:
                self._close_idle(worker)
            elif worker.has_joined:
                self._table.worker_joined(worker.number, now, worker.node, worker.place)

    # Answers

    def answered(self, worker: int, number: int, *, size_bytes: int, task_seconds: float | None, now: float) -> bool:
        """A worker answered a task with a batch, or with an exception that stands.

        Returns:
            Whether the answer is what will be delivered; otherwise it is to be forgotten.
        """
        self._num_deaths = 0
        if self._last_copies:
            self._last_copies.discard((worker, number))
        counts = self._table.replied(worker, number, size_bytes=size_bytes, task_seconds=task_seconds, now=now)
        if counts:
            for loser in self._table.losers(number):
                self._out.append(Cancel(loser, number))
        self._close_if_sent_away(worker)
        return counts

    def failed(self, worker: int, number: int, error: BaseException, now: float) -> bool:
        """A worker answered a task with an exception that may pass.

        Returns:
            Whether the task is tried again, or was answered by another worker; if not, :meth:`answered` comes next.
        """
        is_last = not self._options.marks_last_try or (worker, number) in self._last_copies
        trouble = self._troubles.get(number) or _Trouble([])
        # Copies sent before the last attempt do not count.
        if trouble.num_retries >= self._options.max_retries and is_last:
            return False
        delay = min(RETRY_PAUSE * 2**trouble.num_retries, MAX_RETRY_PAUSE)
        tried_again = self._table.retry(worker, number, delay=delay, now=now)
        if tried_again is None:
            return False
        self._num_deaths = 0
        self._last_copies.discard((worker, number))
        if tried_again:
            trouble.num_retries += 1
            self._troubles[number] = trouble
            task = self._describe(self._table.payload(number))
            self._say(f"{task} is tried again in {delay:g} s: {type(error).__name__}: {error}")
        self._close_if_sent_away(worker)
        return True

    def stream_ended(self, worker: int, number: int, now: float) -> None:
        """A worker answered that its stream was at its end before this task."""
        self._num_deaths = 0
        self._table.ended(worker, number, now)
        self._close_if_sent_away(worker)

    def _close_if_sent_away(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None and worker.is_sent_away:
            self._close_idle(worker)

    def _close_idle(self, worker: _Worker[N]) -> None:
        """End a worker that was sent away, when it has answered what it had."""
        is_busy = worker.has_joined and (not worker.is_at_work or self._table.in_flight(worker.number))
        if not is_busy:
            self._out.append(Close(worker.number))

    # Workers

    def worker_ready(self, number: int, now: float) -> None:
        """A worker takes requests."""
        worker = self._workers.get(number)
        if worker is None:
            return
        self._promised.discard(worker.place)
        for other in list(self._workers.values()):
            if other.place == worker.place and other.node != worker.node:
                self._send_away(other)  # it has stood in for this one
        worker.has_joined = True
        self._table.worker_joined(number, now, worker.node, worker.place)

    def worker_at_work(self, number: int) -> None:
        """A worker has answered the first request of this epoch."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.is_at_work = True
            if worker.is_sent_away:
                self._close_idle(worker)

    def worker_draining(self, number: int) -> None:
        """A worker answers what it has, and takes no more."""
        worker = self._workers.get(number)
        if worker is not None:
            self._drain(worker)

    def _drain(self, worker: _Worker[N]) -> None:
        if worker.has_joined and not worker.is_draining:
            worker.is_draining = True
            self._table.worker_draining(worker.number)

    def _send_away(self, worker: _Worker[N]) -> None:
        worker.is_sent_away = True
        if self._options.is_iterable:
            self._out.append(Close(worker.number))  # its stream goes on elsewhere after the last answer
        else:
            self._drain(worker)
            self._close_idle(worker)

    def open_failed(self, number: int, error: BaseException) -> None:
        """A node was gone before it could be asked for a worker."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            self._reasons[worker.node] = error
            self._roster.node_down(worker.node)
            self._roster.vacated(worker.place, worker.node)
            self._is_changed = True

    def worker_lost(
        self,
        number: int,
        error: RPCError,
        now: float,
        *,
        node_is_up: bool,
        came: bool = True,
        was_refused: bool = False,
        has_retired: bool = False,
    ) -> None:
        """A worker has ended, or never came to be.

        Args:
            number: Of the worker.
            error: How it ended.
            now: Time of the event.
            node_is_up: The session on its node is there.
            came: It was there; False if it could not be reached.
            was_refused: The node had no room for it.
            has_retired: It has done its share of work, and another one may take its place.
        """
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        self._is_changed = True
        place, node = worker.place, worker.node
        is_current = self._incarnations.get(node) == worker.incarnation
        if worker.is_draining and not node_is_up:
            error = ConnectionLostError(f"{node} is shutting down")
        # A node that goes with all of its workers says nothing about what one of them was loading.
        died = node_is_up and came and not worker.is_draining
        # One that was still starting has not loaded anything.
        is_blamed = worker.has_joined and self._leave(worker, error, now, is_blamed=died and worker.is_at_work)
        if was_refused:
            self._roster.refused(place, node)
        else:
            self._roster.vacated(place, node)
        if is_current and (not node_is_up or (not came and not was_refused)):
            self._roster.node_down(node)
        if worker.is_sent_away:
            return
        if not self._table.needs(place):
            self._roster.close(place)
        elif has_retired and node_is_up:
            self._promised.add(place)
        else:
            self._reasons[node] = self._last_error = error
            if not is_blamed and (died or (not came and node_is_up and not was_refused)):
                self._count_death(place)
            self._tell(worker, error, node_is_up=node_is_up)

    def _leave(self, worker: _Worker[N], error: RPCError, now: float, *, is_blamed: bool) -> bool:
        """What a worker that took tasks had goes to others; returns whether the one that it was at is to blame."""
        number = self._table.running(worker.number)
        self._interrupted = "" if number is None else self._describe(self._table.payload(number))
        for lost in self._table.in_flight(worker.number):
            self._last_copies.discard((worker.number, lost))
        self._table.worker_left(worker.number, now)
        if number is None or not is_blamed:
            return False
        trouble = self._troubles.setdefault(number, _Trouble([]))
        trouble.killed.append(str(error))
        if self._table.blame(number):
            told = "; ".join(trouble.killed)
            text = f"{self._interrupted} has ended {len(trouble.killed)} workers in a row: {told}"
            self._condemned[number] = Condemned(text, self._table.payload(number), self._table.stream_of(number))
        return True

    def _count_death(self, place: int) -> None:
        self._num_deaths += 1
        if self._num_deaths > self._max_deaths:
            self._roster.close(place)  # they die before they answer anything

    def _tell(self, worker: _Worker[N], error: BaseException, *, node_is_up: bool) -> None:
        """Say how a worker ended, and what follows; of a node that is lost with all of its workers, once."""
        if not node_is_up:
            if worker.node in self._gone or self._incarnations.get(worker.node) != worker.incarnation:
                return
            self._gone.add(worker.node)
        if self._roster.is_home_up(worker.place):
            self._say(f"{error}; another worker starts there")
        else:
            num_left = sum(other.node not in self._gone for other in self._workers.values())
            self._say(f"going on with {num_left} of {self._num_wanted} workers: {error}")

    # Nodes

    @property
    def expects_more(self) -> bool:
        return self._roster.expects_more

    @expects_more.setter
    def expects_more(self, value: bool) -> None:
        self._roster.expects_more = value

    def is_sought(self, node: N) -> bool:
        """Whether it is of interest if a node can be reached."""
        return node in self._joining or node in self._pauses

    def node_up(self, node: N, incarnation: Hashable, num_offered: int = 0) -> None:
        """Workers can be opened on a node.

        Args:
            node: Where.
            incarnation: Something that another session there would not have.
            num_offered: Workers that it offers; asked of nodes that are new to the pass.
        """
        if self._roster.is_hopeless(node):
            return  # removed meanwhile
        self._is_changed = True
        self._pauses.pop(node, None)
        if node in self._joining:
            self._join(node, num_offered)
        elif node in self._gone and self._incarnations.get(node) != incarnation:
            self._say(f"{node} is there again")
        self._gone.discard(node)
        self._incarnations[node] = incarnation
        self._reasons.pop(node, None)
        self._roster.node_up(node)

    def _join(self, node: N, num_offered: int) -> None:
        """Give a node that is new its places: this process's share of what it offers."""
        options = self._options
        self._joining.discard(node)
        self._nodes.add(node)
        numbers = range(self._num_offered, self._num_offered + num_offered)
        self._num_offered += num_offered
        share = sum(number % options.world_size == options.rank for number in numbers)
        if options.max_workers:
            share = min(share, max(0, options.max_workers - self._roster.num_places))
        self._roster.add(node, 0 if options.is_iterable else share)
        self._resize()
        self._say(f"{node} joins with {share} workers", is_warning=False)

    def node_failed(self, node: N, error: BaseException, *, is_foreign: bool = False) -> None:
        """A node could not be reached, which may change.

        Args:
            node: Which one.
            error: Why.
            is_foreign: Something answered that is not what was there. Another server may have the port for a moment;
                but a node that is new to the pass is done without.
        """
        if not self.is_sought(node):
            return
        if is_foreign and node in self._joining:
            self.node_hopeless(node, error)
            return
        if is_foreign and str(error) != str(self._reasons.get(node)):
            self._say(f"{node} is tried again: {error}")
        self._reasons[node] = error
        self._roster.node_failed(node)
        self._is_changed = True
        self._pauses[node] = min(2 * self._pauses[node], MAX_PAUSE)
        self._out.append(Seek(node, self._pauses[node]))

    def node_missing(self, node: N, error: BaseException) -> None:
        """A node that the pass begins with is not there."""
        self._reasons[node] = error

    def node_hopeless(self, node: N, error: BaseException) -> None:
        """A node can never be used: it cannot build the dataset, for example."""
        if not self.is_sought(node):
            return
        self._say(f"{node} is not used any more: {error}")
        self._pauses.pop(node, None)
        self._joining.discard(node)
        self._reasons[node] = error
        self._roster.node_hopeless(node)
        self._is_changed = True

    def add_nodes(self, nodes: Iterable[N]) -> None:
        """More nodes are there for this pass."""
        for node in nodes:
            if node in self._nodes:
                self._roster.add(node, 0)
            elif node not in self._joining:
                self._joining.add(node)
                self._seek(node)
        self._resize()
        self._is_changed = True

    def remove_nodes(self, nodes: Iterable[N]) -> None:
        """Nodes are not for this pass any more: their workers answer what they have, and end."""
        gone = set(nodes)
        for node in gone:
            self._joining.discard(node)
            self._pauses.pop(node, None)
            if node in self._nodes:
                self._roster.remove(node)
        for worker in list(self._workers.values()):
            if worker.node in gone:
                self._send_away(worker)
        self._resize()
        self._is_changed = True

    def _resize(self) -> None:
        self._num_wanted = self._roster.num_places
        self._table.resize(max(1, self._num_wanted))

    def _seek(self, node: N) -> None:
        self._pauses[node] = FIRST_PAUSE
        self._out.append(Seek(node, FIRST_PAUSE))

    # Time, and what is to be done

    def act(self, now: float) -> list[Action]:
        """What is to be done after the last events, each thing once."""
        if self._is_changed:
            self._fill_places()
        while (assigned := self._table.assign(now)) is not None:
            worker, number = assigned
            is_last = bool(self._troubles) and self._is_last_try(number)
            if is_last:
                self._last_copies.add(assigned)
            self._out.append(Load(worker, number, self._table.payload(number), is_last))
        out, self._out = self._out, []
        return out

    def _is_last_try(self, number: int) -> bool:
        trouble = self._troubles.get(number)
        return trouble is not None and trouble.num_retries >= self._options.max_retries

    def _fill_places(self) -> None:
        """Look for the nodes that are worth it, and open workers."""
        self._is_changed = False
        for node in self._roster.to_try():
            self._seek(node)
        for place, node in self._roster.to_open():
            self._num_opened += 1
            number = self._num_opened
            self._workers[number] = _Worker(number, place, node, self._incarnations.get(node))
            self._out.append(Open(number, place, node, place in self._promised))

    def tick(self, now: float) -> None:
        """Time has passed: end what is late, and give up when waiting is of no use any more."""
        if self._options.task_timeout is not None:
            self._out += [End(worker, number) for worker, number in self._table.timed_out(now)]
        if self.failure is None and (deadline := self._stuck_until(now)) is not None and deadline <= now:
            self.failure = self._verdict()

    def due(self, now: float) -> float | None:
        """When to call :meth:`tick` and :meth:`act` again if nothing happens before; None for never."""
        times = [time for time in (self._table.due(now), self._stuck_until(now)) if time is not None]
        return min(times, default=None)

    def _stuck_until(self, now: float) -> float | None:
        """When it is of no use to wait for workers any longer; None while there are enough to go on."""
        if not self._roster.is_stuck or (self._workers and not self._options.is_iterable):
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since + self._options.reconnect_timeout if self._roster.is_hopeful else now

    def _verdict(self) -> BaseException:
        """Why it is of no use to wait."""
        if self._roster.is_hopeful:
            told = "; ".join(f"{node}: {reason}" for node, reason in self._reasons.items())
            limit = f"{self._options.reconnect_timeout:g} s (reconnect_timeout)"
            error: BaseException = ConnectionLostError(f"no worker is left, and none came back within {limit}: {told}")
        else:
            # What a constructor has raised says more than how the last worker ended.
            raised = [reason for reason in self._reasons.values() if not isinstance(reason, RPCError)]
            error = next(iter(raised), None) or self._last_error or ConnectionLostError("no worker is left")
        if self._interrupted and isinstance(error, ConnectionLostError):
            error = type(error)(f"{error}; it was loading {self._interrupted}")
        return error

    def _say(self, text: str, *, is_warning: bool = True) -> None:
        self._out.append(Say(self._options.label + text, is_warning))
