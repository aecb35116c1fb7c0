"""The nodes of this process as a client. One client per process, created on first use and gone with the process.

After a fork by user code, the child starts afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext

from rpcdataloader.client.background import Alarm, Callers, Janitor, Waiting, start_when_there_is_room
from rpcdataloader.client.discovery import ASK_TIMEOUT, Remote, ask_all
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession, told_while_waiting
from rpcdataloader.client.sharing import current_partition
from rpcdataloader.client.worker import ClientSettings
from rpcdataloader.errors import ConnectError, ConnectionLostError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.server.local import Inherited
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import local_identity
from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.register import LOOK_TIMEOUT, Lookup
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.status import LoopStatus, Report, slowest_rank
from rpcdataloader.wire.tls import client_tls
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")

# Seconds between two reports.
PERIOD = 5.0

TIMEOUT_VARIABLE = "RPCDATALOADER_CONNECT_TIMEOUT"

# A node server imports torch before it listens, and jobs start trainers and workers at the same time.
CONNECT_TIMEOUT = 60.0

# Seconds between two looks for the first node server, which training waits for.
FIRST_PAUSE = 1.0

# Seconds for callbacks of the user at the end, when all calls have failed.
CALLBACK_TIMEOUT = 2.0

# A thread that still resolves a name or waits for a first answer cannot be woken; it does not use torch.
CONNECTING_JOIN_TIMEOUT = 0.2


class Client:
    """This process as a client; thread-safe.

    Raises:
        ValueError: ``RPCDATALOADER_CONNECT_TIMEOUT`` is no number of seconds, or a variable of TLS is missing.
        AuthenticationError: The files of TLS cannot be used.
    """

    def __init__(self) -> None:
        self._batches: Callable[[], PageablePool | None] = lambda: None  # a weak reference
        self.alarm = Alarm()
        partition = current_partition()
        rank = partition.rank if partition.world_size > 1 else None
        self._settings = ClientSettings(connect_timeout(), rank, PageablePool(), self.alarm, client_tls())
        self.additions = self._settings.additions
        self.reporter = Reporter(self.alarm, lambda: list(self._nodes.values()))
        self._lock = Lock()
        # Guarded by the lock:
        self._callers: Callers | None = None
        self._janitor: Janitor | None = None
        self._nodes: dict[Address, Node] = {}
        self._lookups: dict[Lookup, Lookup] = {}
        self._local: list[LocalNode] = []
        self._threads: dict[threading.Thread, tuple[threading.Event, float | None]] = {}
        self.is_closed = False

    @property
    def allocator(self) -> PageablePool:
        """Memory for batches, which all loaders share while one of them holds it; freed after the last one."""
        with self._lock:
            if (pool := self._batches()) is None:
                pool = PageablePool()
                self._batches = weakref.ref(pool)
            return pool

    @property
    def callers(self) -> Callers:
        """Runs callbacks of the user."""
        with self._lock:
            self._callers = self._callers or Callers()
            return self._callers

    @property
    def janitor(self) -> Janitor:
        """Runs what finalizers hand over.

        Raises:
            ConnectionLostError: There is no room for its thread.
        """
        if self._janitor is None:
            try:
                self._begin_janitor()
            except RuntimeError:
                self._begin_janitor_late()
        assert self._janitor is not None
        return self._janitor

    def _begin_janitor_late(self) -> None:
        with Waiting(self.alarm, lambda: "room for a thread of this process") as waiting:
            try:
                limit = Deadline(self._settings.connect_timeout)
                start_when_there_is_room(self._begin_janitor, limit, lambda _reason: waiting.poll())
            except RuntimeError as exc:
                raise ConnectionLostError(f"cannot begin: {exc}") from exc

    def _begin_janitor(self) -> None:
        with self._lock:
            self._janitor = self._janitor or Janitor()

    def nodes(self, where: Remote, local: LocalNode | None = None) -> list[Node]:
        """The nodes that ``where`` names, after that of this machine; opens no connection yet.

        Raises:
            ConnectError: ``where`` has lookups alone, and no server came before the connect timeout.
        """
        here: list[Node] = [] if local is None else [local]
        found = self.look(where) if here or where.addresses else self._find(where)
        return here + [self.node(address, is_registered=address not in where.addresses) for address in found]

    def local_node(self, context: BaseContext | None, inherited: Inherited) -> LocalNode:
        """A place for sessions of this machine, begun when it is asked for one.

        Args:
            context: Context of multiprocessing; None for the default one of this process.

        Raises:
            ConnectionLostError: This process ends, and has closed its connections.
        """
        with self._lock:
            self._check_open("workers of this machine")
            node = LocalNode(self._settings, context or multiprocessing.get_context(), inherited)
            self._local = [*(other for other in self._local if not other.has_ended), node]
            return node

    def look(self, where: Remote) -> dict[Address, str]:
        """The node servers of the moment, as :meth:`Lookup.look` tells them; those at addresses are always there."""
        found = dict.fromkeys(where.addresses, "")
        for lookup in self._open(where):
            found |= lookup.look(LOOK_TIMEOUT)
        return found

    def follow(self, where: Remote) -> tuple[dict[Address, str], float]:
        """The same for passes under way, which share their looks; and the seconds until the next one."""
        found, pause = dict.fromkeys(where.addresses, ""), math.inf
        for lookup in self._open(where):
            servers, seconds = lookup.follow()
            found, pause = found | servers, min(pause, seconds)
        return found, pause

    def _open(self, where: Remote) -> list[Lookup]:
        with self._lock:
            return [self._lookups.setdefault(lookup, lookup.open()) for lookup in where.lookups]

    def _find(self, where: Remote) -> dict[Address, str]:
        """The node servers of the moment, or the first ones that come."""
        timeout, deadline = self._settings.connect_timeout, None
        condition = " or ".join(lookup.condition for lookup in where.lookups)

        def problems() -> str:
            found = [each for lookup in where.lookups for each in self._lookups[lookup].problems.items()]
            # Other users may have chosen the names, if they can write to the directory.
            return printable(f" ({'; '.join(f'{name}: {reason}' for name, reason in found)})") if found else ""

        with Waiting(self.alarm, lambda: f"a node server to be {condition}{problems()}"):
            while not (found := self.look(where)):
                if deadline is None:
                    deadline = Deadline(timeout)
                    logger.warning("waiting for a node server to be %s, for at most %g s", condition, timeout)
                if not deadline.pause(min(FIRST_PAUSE, *(lookup.pause for lookup in where.lookups), timeout / 10)):
                    raise ConnectError(
                        f"no node server is {condition}, and none came within {timeout:g} s{problems()}; "
                        + "; ".join(lookup.advice for lookup in where.lookups)
                    )
        return found

    def node(self, address: Address, *, is_registered: bool = False) -> Node:
        """The node server at ``address``.

        Args:
            is_registered: True for a server that registered: if it refuses connections, it has gone.

        Raises:
            ConnectionLostError: This process ends, and has closed its connections.
        """
        with self._lock:
            self._check_open(address)
            if address not in self._nodes:
                settings = dataclasses.replace(self._settings, waits_for_servers=not is_registered)
                self._nodes[address] = Node(address, settings)
            elif not is_registered:  # it is named, too
                self._nodes[address].settings = self._settings
            return self._nodes[address]

    def _check_open(self, what: object) -> None:
        if self.is_closed:
            raise ConnectionLostError(
                f"{what} can no longer be used: this process ends (exit functions run in the reverse order of "
                "their registration; register yours after the first use)"
            )

    def wait_for_any(self, sessions: Sequence[RemoteSession], timeout: float | None = None) -> None:
        """Wait until one of ``sessions``, all connecting, is ready or lost; at most ``timeout`` seconds."""
        with told_while_waiting(sessions), (changed := self._settings.changed):
            changed.wait_for(lambda: not all(map(_connects, sessions)), timeout)

    def in_order_of_coming(self, sessions: Iterable[RemoteSession]) -> Iterator[RemoteSession]:
        """Yield each session once it is ready or lost."""
        waiting = list(sessions)
        while waiting:
            self.wait_for_any(waiting)
            waiting.sort(key=_connects)
            yield waiting.pop(0)

    def start_thread(
        self, name: str, function: Callable[[], None], stop: threading.Event, join_timeout: float | None = None
    ) -> bool:
        """Run ``function`` in a thread; :meth:`close` ends the sessions, sets ``stop``, and joins it.

        Returns:
            False if the client is closed, or no thread can be started: there are too many, or the interpreter ends.
        """
        thread = threading.Thread(target=function, name=name, daemon=True)
        with self._lock, contextlib.suppress(RuntimeError):
            self._threads = {other: end for other, end in self._threads.items() if other.is_alive()}
            if not self.is_closed:
                thread.start()
                self._threads[thread] = stop, join_timeout
                return True
        logger.debug("cannot start the thread %s", name)
        return False

    def ask_ranks(self, dataset: str, then: Callable[[LoopStatus | None], None]) -> bool:
        """Ask a node server, in a new thread, for the loop over a dataset of the rank that waits most.

        Returns:
            False if there is no node server that several ranks use; then ``then`` is not called.
        """
        addresses = [node.address for node in list(self._nodes.values()) if node.current]

        def ask() -> None:
            node = next(ask_all(addresses), None)  # all ranks report to each
            then(None if node is None else slowest_rank(node.clients, dataset, local_identity("client").job))

        return bool(addresses) and self.start_thread("rpcdl-ranks", ask, threading.Event(), ASK_TIMEOUT)

    def close(self) -> None:
        """End every session, and join every thread; idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            nodes = [*self._nodes.values(), *self._local]
        if self.additions.current.forward_output:
            self._settings.printer.linger()
        self.alarm.close()
        if self._janitor is not None:
            self._janitor.close()
        connections = [each for node in nodes for session in node.sessions for each in session.connections()]
        for node in nodes:
            node.close()
        for connection in connections:
            connection.join(None if connection.is_open else CONNECTING_JOIN_TIMEOUT)
        for stop, _timeout in self._threads.values():
            stop.set()
        # These threads may have begun sessions meanwhile; and a session that still connects does not report its end.
        for node in nodes:
            node.close()
            node.wake()
        for thread, (_stop, timeout) in self._threads.items():
            thread.join(timeout)
        for node in nodes:
            node.close()
        if self._callers is not None:
            self._callers.close(CALLBACK_TIMEOUT)
        self._settings.printer.close()


def _connects(session: RemoteSession) -> bool:
    return session.welcome is None and session.is_usable


def connect_timeout() -> float:
    """Seconds to wait for node servers: ``RPCDATALOADER_CONNECT_TIMEOUT``, or 60.

    Raises:
        ValueError: The variable holds no such number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or str(CONNECT_TIMEOUT)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= threading.TIMEOUT_MAX:
            return seconds
    raise ValueError(f"environment variable {TIMEOUT_VARIABLE} must be a number of seconds above 0, but is {text!r}")


_lock = Lock()
_client: Client | None = None


def get_client() -> Client:
    """The client of this process."""
    global _client
    with _lock:
        if _client is None:
            _client = Client()
            # torch's daemon threads abort an interpreter that finalises; this joins them before.
            atexit.register(_client.close)
        return _client


def close_client() -> None:
    """End the client of this process; the next use starts afresh."""
    global _client
    with _lock:
        client, _client = _client, None
    if client is not None:
        atexit.unregister(client.close)
        client.close()


def _forget_in_child() -> None:
    global _client, _lock
    _lock = Lock()
    client, _client = _client, None
    if client is not None:
        atexit.unregister(client.close)


at_fork(Part.CLIENT, in_child=_forget_in_child)


class Reporter:
    """Tells node servers, every few seconds, how the training loops of this process do; thread-safe.

    The alarm's thread sends one small message without reply per node server. Errors end nothing: the first one is a
    warning.
    """

    def __init__(self, alarm: Alarm, find_nodes: Callable[[], Sequence[Node]]) -> None:
        self._alarm = alarm
        self._find_nodes = find_nodes
        # For the alarm's thread alone: whether the last report had a loop, and the level of the next error.
        self._has_reported = False
        self._level = logging.WARNING
        self._lock = Lock()
        # Guarded by the lock; the alarm is set while it has elements:
        self._loops: list[weakref.WeakMethod[Callable[[], LoopStatus | None]]] = []

    def add(self, describe: Callable[[], LoopStatus | None]) -> None:
        """A loop begins.

        Args:
            describe: Method of the loop, referred to weakly. Returns None while there is nothing to report.
        """
        with self._lock:
            self._loops.append(weakref.WeakMethod(describe))
            if len(self._loops) == 1:
                self._alarm.call_after(PERIOD, self._report)

    def _report(self) -> None:
        try:
            found = [describe() for loop in list(self._loops) if (describe := loop()) is not None]
            told = [status for status in found if status is not None]
            if told or self._has_reported:  # the last report has no loop
                payload = Report.of(told)
                for node in self._find_nodes():
                    for session in node.sessions[-1:]:
                        session.report(payload)
            self._has_reported = bool(told)
        except Exception:
            logger.log(self._level, "cannot report how the training loops do; they go on", exc_info=True)
            self._level = logging.DEBUG
        describe = None  # or it would keep the loop
        with self._lock:
            self._loops = [loop for loop in self._loops if loop() is not None]
            if self._loops:
                self._alarm.call_after(PERIOD, self._report)
