"""The workers of a pass: opened where the roster says, replaced when they end, looked for when their nodes are gone.

Receiver threads report what happens to workers. A node that is gone is tried again by a thread of its own, which
connects, builds the dataset and replays the changes made to it, while the pass goes on. One condition, the pass's own,
guards everything here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.node import Node
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.session import Session
from rpcdataloader.client.watcher import Watch
from rpcdataloader.client.worker import Worker
from rpcdataloader.errors import AuthenticationError, ConnectError, ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.loader.placement import Placement
from rpcdataloader.plan.roster import Roster
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.pickling import Encoded

logger = logging.getLogger("rpcdataloader.loader")

# Seconds between two tries to bring back a node: the first, and at most. Each try is itself patient while nobody
# listens there, as a node server needs some seconds to start.
FIRST_PAUSE = 0.1
MAX_PAUSE = 5.0


@dataclass(frozen=True, slots=True)
class Opening:
    """The first request to a worker, and the epoch that it was made for."""

    request: Encoded
    epoch: Any


class CrewOwner(Protocol):
    """The pass; all but the last three are called with the condition."""

    def joined(self, worker: Worker, worker_id: int) -> None:
        """The worker takes requests."""

    def leaving(self, worker: Worker) -> None:
        """The worker answers what it has, and takes no more."""

    def left(self, worker: Worker, error: RPCError, *, died: bool) -> bool:
        """A worker that had joined is gone; ``died`` says whether what it was loading may be the reason.

        Returns:
            Whether a batch is blamed for it.
        """

    def needs(self, worker_id: int) -> bool:
        """Whether anybody would miss this worker."""

    def failed(self, error: BaseException) -> None:
        """The pass cannot go on."""

    def is_current(self, opening: Opening) -> bool:
        """Whether an opening is still the right one."""

    def resized(self, num_workers: int) -> None:
        """There should be so many workers from now on."""

    def changed(self) -> None:
        """After one of these: there may be something to do."""

    def opening(self, worker_id: int) -> Opening:
        """The first request to a worker, in which there is what is the user's to pickle."""

    def opened(self, reply: Message | RPCError) -> None:
        """A worker has answered its opening."""


class Crew:
    """The workers of one pass.

    Args:
        owner: Told of what happens to them.
        dataset: What they use; on the nodes of ``placement`` that are there.
        placement: Where they should be.
        condition: Guards the pass. Methods that say so are called with it.
        label: Beginning of what is logged: the rank, if there are several.
        needs_all: None of them can be missing: each has a stream of its own.
        max_deaths: Workers that die in a row while no batch is to blame, without an answer of any worker: the next ones
            are not replaced. The deaths at a batch have a limit of their own.
        reconnect_timeout: Seconds to wait for nodes when no worker is left.
    """

    def __init__(
        self,
        owner: CrewOwner,
        dataset: RemoteDataset,
        placement: Placement,
        condition: threading.Condition,
        *,
        label: str,
        needs_all: bool,
        max_deaths: int,
        reconnect_timeout: float,
    ) -> None:
        # Not kept: the pass keeps its crew, and must go with its last reference.
        self._owner: CrewOwner = weakref.proxy(owner)
        self._dataset = dataset
        self._condition = condition
        self._client = get_client()
        self._max_deaths = max_deaths
        self._reconnect_timeout = reconnect_timeout
        self._label = label
        self._needs_all = needs_all
        self._placement = placement
        # Guarded by the condition:
        self._roster = Roster(placement.homes, placement.others, needs_all=needs_all)
        self._nodes = dict.fromkeys((*placement.homes, *placement.others))
        self._workers: dict[Worker, tuple[int, Node]] = {}  # with its number, and where it is
        self._ready: set[Worker] = set()
        self._at_work: set[Worker] = set()  # those that have answered the first request of this epoch
        self._draining: set[Worker] = set()
        self._num_deaths = 0  # since the last answer
        self._stuck_since: float | None = None
        self._reasons: dict[Node, BaseException] = {}  # why each node is of no use
        self._last_error: BaseException | None = None  # how the last worker ended
        self._gone: dict[Node, Session] = {}  # the last session of each node, if that is known to be lost
        self._sent_away: set[Worker] = set()
        self._promised: set[int] = set()  # places whose worker has retired, so that there is room for the next
        self._joining: set[Node] = set()  # looked at, as it is not known yet what they offer
        self._num_wanted = len(placement.homes)
        self._num_offered = placement.num_offered  # by all nodes, those that have joined included
        self._watch: Watch | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Open the first workers.

        Raises:
            SerializationError: What the loader sends them cannot be pickled.
        """
        with self._condition:
            self._look_at_nodes()
            places = self._roster.to_open()
        # All before the first is asked for, so that what cannot be pickled is found early.
        openings = [self._owner.opening(worker_id) for worker_id, _node in places]
        with self._condition:
            for (worker_id, node), opening in zip(places, openings, strict=True):
                self._open(worker_id, node, opening)
            places = self._plan()
        self.fill(places)
        if self._placement.register is not None:
            self._roster.expects_more = True
            known = [node.address for node in self._nodes]
            self._watch = self._client.watch(self._placement.register, known, self._register_changed)

    def _look_at_nodes(self) -> None:
        for node in self._roster.homes:
            session = node.session()
            if session.is_ready and self._dataset.is_on(session):
                self._roster.node_up(node)
            else:
                self._reasons[node] = ConnectionLostError("it is not there")

    # With the condition

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers))

    def answered(self, worker: Worker) -> None:
        """A worker has answered something."""
        self._num_deaths = 0
        self._close_idle(worker)

    def _close_idle(self, worker: Worker) -> None:
        if worker in self._sent_away and not (worker in self._ready and worker.connection.num_pending):
            worker.close()

    def begin_epoch(self) -> list[tuple[int, Node]]:
        """Every place is needed again, and workers that are ready join anew; returns the places to :meth:`fill`."""
        self._roster.reopen()
        self._at_work.clear()
        # Who leaves has no part in this one.
        self._ready -= self._draining
        for worker in list(self._sent_away):
            self._close_idle(worker)
        for worker in self._ready:
            self._owner.joined(worker, self._workers[worker][0])
        return self._plan()

    def time_left(self) -> float | None:
        """Seconds until it is no use to wait any longer for workers; None while there are enough to go on."""
        if not self._roster.is_stuck or (self._workers and not self._needs_all):
            self._stuck_since = None
            return None
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since + self._reconnect_timeout - now if self._roster.is_hopeful else 0.0

    def verdict(self) -> BaseException:
        """Why it is no use to wait."""
        if not self._roster.is_hopeful:
            # What a constructor has raised says more than how the last worker ended.
            raised = [reason for reason in self._reasons.values() if not isinstance(reason, RPCError)]
            return next(iter(raised), None) or self._last_error or ConnectionLostError("no worker is left")
        told = "; ".join(f"{node.address}: {reason}" for node, reason in self._reasons.items())
        return ConnectionLostError(
            f"no worker is left, and none came back within {self._reconnect_timeout:g} s (reconnect_timeout): {told}"
        )

    def close(self) -> list[Worker]:
        """Open no more; returns the workers, to be closed without the condition."""
        self._closed.set()
        if self._watch is not None:
            self._watch.close()
        self._condition.notify_all()
        return list(self._workers)

    def wake(self) -> None:
        """After :meth:`close`, without the condition: end the waits of threads that look for nodes."""
        for node in (*self._nodes, *self._joining):
            node.wake()

    # Receiver threads

    def opened(self, worker: Worker, reply: Message | RPCError) -> None:
        """A worker has answered the first request of an epoch."""
        with contextlib.suppress(ReferenceError):  # closed meanwhile, and gone
            self._owner.opened(reply)
        with self._condition:
            if worker in self._workers and isinstance(reply, Message):
                self._at_work.add(worker)
            self._close_idle(worker)

    def worker_ready(self, worker: Worker) -> None:
        with self._condition:
            if worker not in self._workers or self._closed.is_set():
                return
            self._ready.add(worker)
            worker_id, node = self._workers[worker]
            self._promised.discard(worker_id)
            for other, (other_id, other_node) in list(self._workers.items()):
                if other_id == worker_id and other_node is not node:
                    # It has stood in for this one.
                    self._send_away(other)
            self._owner.joined(worker, worker_id)
        self._tell_owner()

    def worker_draining(self, worker: Worker) -> None:
        with self._condition:
            self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        if worker in self._ready and worker not in self._draining:
            self._draining.add(worker)
            self._owner.leaving(worker)

    def _send_away(self, worker: Worker) -> None:
        self._sent_away.add(worker)
        if self._needs_all:
            worker.close()  # its stream goes on elsewhere after the last answer
        else:
            self._leave(worker)
            self._close_idle(worker)

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        with self._condition:
            place = self._workers.pop(worker, None)
            if self._closed.is_set() or place is None:
                return
            worker_id, node = place
            if self._client.is_closed:
                self._owner.failed(error)
                return
            retired = worker.retired and worker.session.is_ready
            was_draining = worker in self._draining
            self._draining.discard(worker)
            never_came = isinstance(error, ConnectError)
            is_up = worker.session.is_ready
            if was_draining and not is_up:
                error = ConnectionLostError(f"{worker.session.name} is shutting down")
            # A node that goes with all of its workers says nothing about what one of them was loading.
            died = is_up and not never_came and not was_draining
            is_blamed = False
            if worker in self._ready:
                self._ready.discard(worker)
                # One that was still starting has not loaded anything.
                is_blamed = self._owner.left(worker, error, died=died and worker in self._at_work)
            self._at_work.discard(worker)
            if worker.was_refused:
                self._roster.refused(worker_id, node)
            else:
                self._roster.vacated(worker_id, node)
            if not is_up or (never_came and not worker.was_refused):
                self._roster.node_down(node)
            if worker in self._sent_away:
                self._sent_away.discard(worker)
            elif not self._owner.needs(worker_id):
                self._roster.close(worker_id)
            elif retired:
                self._promised.add(worker_id)
            else:
                self._reasons[node] = self._last_error = error
                if not is_blamed and (died or (never_came and is_up and not worker.was_refused)):
                    self._count_death(worker_id)
                self._tell(worker, worker_id, node, error)
            places = self._plan()
        self.fill(places)
        self._tell_owner()

    def _count_death(self, worker_id: int) -> None:
        self._num_deaths += 1
        if self._num_deaths > self._max_deaths:
            self._roster.close(worker_id)  # they die before they answer anything

    def _tell(self, worker: Worker, worker_id: int, node: Node, error: RPCError) -> None:
        """Log how a worker ended, and what follows; of a node that is lost with all of its workers, once."""
        if not worker.session.is_ready:
            if self._gone.get(node) is worker.session:
                return
            self._gone[node] = worker.session
        if self._roster.is_home_up(worker_id):
            logger.warning("%s%s; another worker starts there", self._label, error)
        else:
            num_left = sum(other.session.is_ready for other in self._workers)
            logger.warning("%sgoing on with %d of %d workers: %s", self._label, num_left, self._num_wanted, error)

    def _plan(self) -> list[tuple[int, Node]]:
        """Look for the nodes that are worth it, and return the places to fill; with the condition.

        In one breath with what has changed: a place that is to be filled is no reason to give up.
        """
        if self._closed.is_set():
            return []
        for node in self._roster.to_try():
            seek = functools.partial(self._seek, node, joins=False)
            self._client.start_thread(f"rpcdl-seek {node.address}", seek, self._closed)
        return self._roster.to_open()

    def _resize(self) -> None:
        self._num_wanted = self._roster.num_places
        self._owner.resized(self._num_wanted)

    # Any thread, without the condition

    def add(self, nodes: Iterable[Node]) -> None:
        """More nodes are there for this pass; returns at once."""
        with self._condition:
            for node in nodes:
                if node in self._nodes:
                    self._roster.add(node, 0)
                elif node not in self._joining:
                    self._joining.add(node)
                    join = functools.partial(self._seek, node, joins=True)
                    self._client.start_thread(f"rpcdl-join {node.address}", join, self._closed)
            self._resize()
            places = self._plan()
        self.fill(places)
        self._tell_owner()

    def remove(self, nodes: Iterable[Node]) -> None:
        """These nodes are not for this pass any more: their workers answer what they have, and end."""
        gone = set(nodes)
        with self._condition:
            self._joining -= gone
            for node in gone & self._nodes.keys():
                self._roster.remove(node)
            for worker, (_worker_id, node) in list(self._workers.items()):
                if node in gone:
                    self._send_away(worker)
            self._resize()
            places = self._plan()
        self.fill(places)
        self._tell_owner()

    def _register_changed(self, added: Sequence[Address], removed: Sequence[Address]) -> None:
        if self._closed.is_set():
            return
        # A server that was started again is in both.
        self.remove(self._client.node(address, is_registered=True) for address in removed if address not in added)
        self.add(self._client.node(address, is_registered=True) for address in added)

    def fill(self, places: list[tuple[int, Node]]) -> None:
        """Open a worker for each of these places."""
        while places:
            worker_id, node = places.pop()
            try:
                places += self._fill(worker_id, node)
            except BaseException as exc:
                with self._condition:
                    if not self._closed.is_set():
                        self._owner.failed(exc)
                return

    def _fill(self, worker_id: int, node: Node) -> list[tuple[int, Node]]:
        """Open a worker; returns the places that are to be filled because it could not be."""
        while True:
            opening = self._owner.opening(worker_id)
            with self._condition:
                if self._closed.is_set():
                    return []
                if self._owner.is_current(opening):
                    return [] if self._open(worker_id, node, opening) else self._plan()

    def _tell_owner(self) -> None:
        with contextlib.suppress(ReferenceError):  # closed meanwhile, and gone
            self._owner.changed()

    def _open(self, worker_id: int, node: Node, opening: Opening) -> bool:
        """Ask for a worker, if the node is still there.

        With the condition, so that it is ready only after its first request is on the way.
        """
        session = node.session()
        if not session.is_ready or not self._dataset.is_on(session):
            # Lost in between.
            self._reasons[node] = ConnectionLostError("it is not there any more")
            self._roster.node_down(node)
            self._roster.vacated(worker_id, node)
            return False
        keep_waiting = self._is_open if worker_id in self._promised else self._is_alone
        worker = self._dataset.open_worker(session, self, keep_waiting)
        self._workers[worker] = worker_id, node
        # Fails when it is lost already, which is about to be reported.
        with contextlib.suppress(RPCError):
            complete = functools.partial(self.opened, worker)
            worker.submit(opening.request.payload, opening.request.buffers, complete)
        return True

    def _is_open(self) -> bool:
        """Whether somebody waits for workers: the place of one that has retired will be free again."""
        return not self._closed.is_set()

    def _is_alone(self) -> bool:
        """Whether no worker is there yet: then a busy node is worth waiting for."""
        with self._condition:
            return not self._ready and not self._closed.is_set()

    # Threads that look for a node

    def _seek(self, node: Node, *, joins: bool) -> None:
        """Try a node again and again until it can be used, or never will.

        Args:
            joins: It is new to this pass.
        """
        pause = FIRST_PAUSE
        # With a pause before the first try: of a node that has just been lost, others may not know it yet.
        while not self._closed.wait(pause):
            if self._try(node, joins=joins):
                self._tell_owner()
                return
            pause = min(2 * pause, MAX_PAUSE)

    def _join(self, node: Node) -> None:
        """Give a node that is new its places: this process's share of what it offers. With the condition."""
        self._joining.discard(node)
        self._nodes[node] = None
        offered, partition = node.num_workers(), self._placement.partition
        numbers = range(self._num_offered, self._num_offered + offered)
        self._num_offered += offered
        share = sum(number % partition.world_size == partition.rank for number in numbers)
        if self._placement.max_workers:
            share = min(share, max(0, self._placement.max_workers - self._roster.num_places))
        self._roster.add(node, 0 if self._needs_all else share)
        self._resize()
        logger.info("%s%s joins with %d workers", self._label, node.address, share)

    def _try(self, node: Node, *, joins: bool) -> bool:
        """Connect, and build the dataset there; returns whether it is known now if the node can be used."""
        try:
            session = node.session()
            session.wait(lambda: not self._closed.is_set())
            session.follow_rank()
            self._dataset.build_on([session])
        except (ConnectError, ConnectionLostError, RemoteProtocolError, AuthenticationError) as exc:
            is_foreign = isinstance(exc, (RemoteProtocolError, AuthenticationError))
            if is_foreign and joins:
                return self._give_up(node, exc)
            with self._condition:
                if joins and node not in self._joining:
                    return True  # removed meanwhile
                if is_foreign and str(exc) != str(self._reasons.get(node)):
                    # Another server has the port for a moment, or the right one was started with other settings.
                    logger.warning("%s%s is tried again: %s", self._label, node.address, exc)
                self._reasons[node] = exc
                self._roster.node_failed(node)
                places = self._plan()
            self.fill(places)
            return False
        except BaseException as exc:
            return self._give_up(node, exc)
        with self._condition:
            if joins and node not in self._joining:
                return True  # removed meanwhile
            if joins:
                self._join(node)
            elif self._gone.pop(node, session) is not session and not self._closed.is_set():
                logger.warning("%s%s is there again", self._label, node.address)
            self._reasons.pop(node, None)
            self._roster.node_up(node)
            places = self._plan()
        self.fill(places)
        return True

    def _give_up(self, node: Node, error: BaseException) -> bool:
        """The node can never be used, which is known now."""
        logger.warning("%s%s is not used any more: %s", self._label, node.address, error)
        with self._condition:
            self._joining.discard(node)
            self._reasons[node] = error
            self._roster.node_hopeless(node)
            places = self._plan()
        self.fill(places)
        return True
