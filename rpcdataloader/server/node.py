"""The node server: listen, tell connections apart, fork gates, reap, drain; ``clients.py`` handles the clients.

The server has one thread, which never waits for the network and runs no user code. It looks at the first 32 bytes of a
connection and leaves them where they are: one with a good ticket goes to its session, one without a ticket is read by a
gate, which is forked for it, and everything else is refused. Peers without a ticket have proved nothing, so their
number and their time are limited.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sched
import select
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rpcdataloader.errors import ConnectError, RemoteProtocolError
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.server import events
from rpcdataloader.server.clients import ClientRecord, Clients
from rpcdataloader.server.events import RETRY_PAUSE, Link, Row, fork_linked
from rpcdataloader.server.logs import LimitedLog
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Leads, Loop, Process, StopSignals, fork, reap_orphans
from rpcdataloader.server.refusals import PEER_GONE, send_refusal
from rpcdataloader.server.session import run_gate
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.server.status import describe_node
from rpcdataloader.wire.connecting import accept
from rpcdataloader.wire.handshake import (
    NO_TICKET,
    PREAMBLE_SIZE,
    STATUS_TICKET,
    Preamble,
    Refusal,
    UnavailableError,
    UnknownSessionError,
    is_ours,
    session_of,
)
from rpcdataloader.wire.register import RENEWAL_PERIOD, Registration

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a connection must prove that it knows the secret, and the most connections that may be at it. At the
# limit, one older than ``PROOF_PATIENCE`` makes room. Until there is one, new connections wait in the kernel's queue.
PROOF_TIMEOUT = 10.0
MAX_UNPROVED = 128
PROOF_PATIENCE = 1.0

# Events of a session that are handled before one of its connections.
MAX_EVENTS = 256

# Seconds for the kernel to end all children. One that waits for a file server may take longer.
END_TIMEOUT = 5.0

# Seconds for the file server of the register when the server ends.
REGISTER_TIMEOUT = 1.0

# Seconds between two looks for orphans that have ended, as process 1 of a container.
ORPHANS_PERIOD = 5.0

# Seconds of silence after which an owner that writes to the lifeline counts as gone: a machine that vanished does not
# close it.
LIFELINE_SILENCE = 60.0

_NO_SUCH_SESSION = UnknownSessionError(
    "there is no such session on this node server: it ended, or the server was restarted"
)


@dataclass(slots=True, eq=False)
class Stranger:
    """A connection whose peer has proved nothing yet."""

    sock: socket.socket
    source: str  # its peer's host or user
    peer: str  # the same with the port
    since: float
    gate: Child | None = None
    timer: sched.Event | None = None  # the end of its time
    is_refused: bool = False  # True while its peer is expected to close it


@dataclass(slots=True, eq=False)
class Child:
    """A process of the node server: a gate, or what it has become."""

    process: Process
    link: Link
    row: Row
    connection: Stranger | None  # of a gate, until its peer has proved itself
    client: ClientRecord | None = None  # of a session

    def forget_in_child(self) -> None:
        self.link.close()
        os.close(self.process.fileno())
        if self.client is not None:
            self.client.sock.close()


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        held: Writing end of the context's pipe ``life``, which no other process has; closed when the server ends.
        lifeline: Descriptor that the server's owner holds open; None without an owner. End of file means that the owner
            has gone; so does silence for ``LIFELINE_SILENCE`` seconds after a first byte.

    Attributes:
        signals: A first one drains the server, and a second one ends it; heard while the caller says so.
        registration: File by which clients find the server, renewed by forks and ended by a drain; None without one.
    """

    def __init__(
        self, listener: socket.socket, context: ServerContext, held: Connection, lifeline: int | None = None
    ) -> None:
        self._context = context
        self._held = held
        self._loop = Loop()
        # A connection may go away between poll and accept.
        listener.setblocking(False)
        self._listener = listener
        self._strangers = LimitedLog()
        self._seldom = Seldom()
        self._clients = Clients(context, self._loop, self._strangers)
        self._lifeline = lifeline
        self._silence: sched.Event | None = None  # of the owner
        self.registration: Registration | None = None
        self._renewal: Process | None = None  # a fork, as a file server may hang
        self._unproved: set[Stranger] = set()
        self._children: dict[int, Child] = {}  # by process id
        self._started = time.monotonic_ns()
        self._grace_over: sched.Event | None = None
        self._num_stops = 0
        self.signals = StopSignals()

    def serve(self) -> None:
        """Run until a signal or the owner's end; returns when every child has ended."""
        self._loop.watch(self.signals.fileno(), self._on_signals)
        if self._lifeline is not None:
            self._loop.watch(self._lifeline, self._on_lifeline)
        if self.registration is not None:
            self._loop.call_after(RENEWAL_PERIOD, self._renew)
        if os.getpid() == 1:
            self._collect_orphans()
        self._accept_again()
        try:
            while not self._clients.is_draining or self._clients:
                unsent = [child for child in self._children.values() if not child.link.flush()]
                if (log := self._context.log).is_waiting:
                    self._loop.watch(log.fileno(), log.flush, select.POLLOUT)
                else:
                    self._loop.unwatch(log.fileno())
                self._loop.wait(RETRY_PAUSE if unsent else None)
        finally:
            self._close()

    def _close(self) -> None:
        for child in self._children.values():
            child.process.kill("the node server has ended")
        deadline = time.monotonic() + END_TIMEOUT
        for child in self._children.values():
            if child.process.reap(wait=deadline - time.monotonic()) is None:
                logger.warning("process %d does not end: it waits in the kernel", child.process.pid)
            child.link.close()
        self._clients.close()
        self._listener.close()
        if self._renewal is not None:
            self._renewal.reap(wait=REGISTER_TIMEOUT)
        self._context.log.finish()
        self._held.close()

    # --- connections

    def _accept_again(self) -> None:
        if not self._clients.is_draining:
            self._loop.watch(self._listener.fileno(), self._on_connection)

    def _pause_accepting(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while, or until one of the unproved ones makes room."""
        self._loop.unwatch(self._listener.fileno())
        self._loop.call_after(seconds, self._accept_again)

    def _on_connection(self) -> None:
        if not self._has_room():
            return
        try:
            accepted = accept(self._listener)
        except ConnectError as exc:
            self._warn_of_exhaustion(exc)
            self._pause_accepting(EXHAUSTED_PAUSE)
            return
        if accepted is not None:
            self._look_at(self._add_stranger(*accepted))

    def _add_stranger(self, sock: socket.socket, source: str, peer: str) -> Stranger:
        connection = Stranger(sock, source, peer, time.monotonic())
        self._unproved.add(connection)
        connection.timer = self._loop.call_after(PROOF_TIMEOUT, lambda: self._on_late(connection))
        return connection

    def _has_room(self) -> bool:
        """Whether a connection may come; at the limit, the oldest one of the busiest source makes room for it."""
        if len(self._unproved) < MAX_UNPROVED:
            return True
        if refused := [connection for connection in self._unproved if connection.is_refused]:
            self._drop(min(refused, key=lambda each: each.since), "it was refused")
            return True
        num_connections = Counter(connection.source for connection in self._unproved)
        victim = min(self._unproved, key=lambda each: (-num_connections[each.source], each.since))
        youth = victim.since + PROOF_PATIENCE - time.monotonic()
        if youth > 0:
            self._pause_accepting(youth)
            return False
        reason = "too many unauthenticated connections"
        self._strangers.closed(victim.peer, reason)
        if victim.gate is None:  # perhaps a client that has not come to its first bytes: it tries again
            send_refusal(victim.sock, UnavailableError(reason))
        self._drop(victim, reason)
        return True

    def _look_at(self, connection: Stranger) -> None:
        """Decide who reads a connection, once its preamble is there."""
        if connection not in self._unproved:
            return
        sock = connection.sock
        try:
            start = sock.recv(PREAMBLE_SIZE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._loop.watch(sock.fileno(), lambda: self._look_at(connection))
            return
        except OSError:
            start = b""
        self._loop.unwatch(sock.fileno())
        if not start:
            self._drop(connection, "its peer has gone")
            return
        if len(start) < PREAMBLE_SIZE and is_ours(start):
            # The loop would not come to rest while these can be read.
            self._loop.watch(sock.fileno(), lambda: self._on_cut_short(connection, len(start)), PEER_GONE)
            self._loop.call_after(RETRY_PAUSE, lambda: self._look_at(connection))
            return
        try:
            ticket = Preamble.decode(start).ticket
        except RemoteProtocolError as exc:
            self._strangers.refused(self._context.refusal(connection.peer, exc))
            self._drop(connection, str(exc))  # without a word, which it would not understand
            return
        if ticket in (NO_TICKET, STATUS_TICKET):
            self._fork_gate(connection)
        elif (client := self._clients.find(session_of(ticket))) is None:
            logger.debug("there is no session for a connection from %s", connection.peer)
            self._refuse(connection, _NO_SUCH_SESSION)
        elif not client.tickets.take(ticket):
            self._strangers.refused(events.Refused(connection.peer, "its ticket is forged or used", logging.INFO))
            self._refuse(connection, _NO_SUCH_SESSION)
        else:
            # Ends of workers make room, which the session has reported before its client could ask. User code may write
            # to the same link without end.
            for _ in range(MAX_EVENTS):
                if not self._on_link(client.process.pid):
                    break
            self._settle(connection)
            self._clients.hand_over(client, sock, connection.peer)

    def _refuse(self, connection: Stranger, error: Refusal) -> None:
        """Tell a peer why it is refused, and wait until it has read that: closing now would discard it."""
        connection.is_refused = True
        send_refusal(connection.sock, error)
        self._loop.watch(connection.sock.fileno(), lambda: self._drop(connection, "it was refused"), PEER_GONE)

    def _fork_gate(self, connection: Stranger) -> None:
        def run(node: Link) -> None:
            self._forget_in_child(connection)
            run_gate(connection.sock, connection.peer, node, self._context, row)

        with contextlib.ExitStack() as failed:
            try:
                row = self._context.counters.open()
                failed.callback(self._context.counters.close, row)
                process, link = fork_linked(run)
            except OSError as exc:
                self._warn_of_exhaustion(exc)
                self._refuse(
                    connection, UnavailableError(f"it has no room for another process or file ({exc.strerror})")
                )
                return
            failed.pop_all()
        pid = process.pid
        self._loop.watch(link.fileno(), lambda: self._on_link(pid))
        self._loop.watch(process.fileno(), lambda: self._on_end(pid))
        connection.gate = self._children[pid] = Child(process, link, row, connection)

    def _warn_of_exhaustion(self, exc: Exception) -> None:
        reason = getattr(exc, "strerror", None) or str(exc)
        if self._seldom.is_due(reason):
            logger.warning("cannot serve a connection now: %s", reason)

    def _on_late(self, connection: Stranger) -> None:
        if not connection.is_refused:
            reason = f"no handshake within {PROOF_TIMEOUT:g} s"
            self._strangers.refused(events.Refused(connection.peer, reason, logging.INFO))
        self._drop(connection, "no handshake in time")

    def _on_cut_short(self, connection: Stranger, size: int) -> None:
        reason = f"closed after {size} bytes of a preamble"
        self._strangers.refused(events.Refused(connection.peer, reason, logging.INFO))
        self._drop(connection, reason)

    def _drop(self, connection: Stranger, reason: str) -> None:
        """Close this process's side of a connection, and end its gate."""
        self._settle(connection)
        if connection.gate is not None:
            connection.gate.process.kill(reason)
        connection.sock.close()

    def _settle(self, connection: Stranger) -> None:
        """Count a connection no longer among the unproved ones, whose time is limited."""
        self._unproved.discard(connection)
        self._loop.unwatch(connection.sock.fileno())
        self._loop.cancel(connection.timer)
        if connection.gate is not None:
            connection.gate.connection = None
        self._accept_again()

    def _forget_in_child(self, own: Stranger | None = None) -> None:
        """Close the node server's descriptors in a fork, but for a gate's own connection."""
        self._context.log.forget()
        self._listener.close()
        self._held.close()
        self.signals.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._clients.forget_in_child()
        for child in self._children.values():
            child.forget_in_child()
        for connection in self._unproved - {own}:
            connection.sock.close()
        if self._renewal is not None and self._renewal.ended is None:
            os.close(self._renewal.fileno())

    # --- events and ends of children

    def _on_link(self, pid: int) -> bool:
        """Handle one event of a child; returns False without one."""
        child = self._children[pid]
        try:
            received = child.link.recv(wait=False)
            if received is not None:
                self._receive(child, *received)
                return True
        except BlockingIOError:
            return False
        except Exception as exc:
            # User code may write anything to a descriptor of ours. No room for the descriptors of an event is another
            # case: a gate, or a client that had just begun, tries again.
            whose = "a gate" if child.client is None else f"the session of {child.client.name}"
            logger.error("%s has lost its link: %s", whose, exc)
            child.process.kill(f"its link to the node server broke ({exc})")
            if child.client is not None:
                child.client.has_folder = True  # what would say so may be unread
        self._loop.unwatch(child.link.fileno())
        return False

    def _receive(self, child: Child, event: events.Event, descriptors: list[int]) -> None:
        connection = child.connection
        match event:
            case events.SessionBegun() if connection is not None and descriptors:
                self._settle(connection)
                child.process.leads = Leads.SESSION
                how = child.process, child.link, connection.sock, connection.peer, child.row
                child.client = self._clients.begin(*how, event, descriptors[0])
            case events.WantsStatus() if child.client is None:
                if connection is not None:
                    self._settle(connection)
                    connection.sock.close()
                self._tell_status(event.stacks, descriptors)
            case events.Refused() if connection is not None:
                connection.is_refused = True
                self._strangers.refused(event)
            case _:
                for descriptor in descriptors:  # of user code, or of a gate whose time was over
                    os.close(descriptor)
                if child.client is not None:
                    self._clients.receive(child.client, event)

    def _tell_status(self, stacks: bool, descriptors: list[int]) -> None:
        try:
            # Without descriptors, there was no room for them here.
            if descriptors:
                status = describe_node(self._clients, self._context, self._started, self._strangers.num_refused)
                os.write(descriptors[0], status.encode() + b"\n")
                if stacks:
                    self._clients.ask_for_stacks(descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_end(self, pid: int) -> None:
        child = self._children[pid]
        if (reason := child.process.reap()) is None:
            return
        self._loop.unwatch(child.process.fileno())
        # Its last events.
        while self._on_link(pid):
            pass
        del self._children[pid]
        self._loop.unwatch(child.link.fileno())
        child.link.close()
        self._context.counters.close(child.row)
        if child.client is not None:
            self._clients.ended(child.client, reason)
            child.client.sock.close()
            for sock, peer in child.client.coming.items():
                self._refuse(self._add_stranger(sock, peer, peer), _NO_SUCH_SESSION)
        if child.connection is not None:
            self._drop(child.connection, reason)

    def _collect_orphans(self) -> None:
        reap_orphans(self._children)
        self._loop.call_after(ORPHANS_PERIOD, self._collect_orphans)

    # --- the end

    def _on_signals(self) -> None:
        came = self.signals.take()
        self._num_stops += len(came - {signal.SIGHUP})  # where a login ends, it comes beside SIGTERM
        if came:
            self._drain()
        if self._num_stops > 1:
            self._end_all("the node server was told to end")

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        self._loop.cancel(self._silence)
        with contextlib.suppress(OSError):  # a terminal that was closed
            if os.read(self._lifeline, 4096):
                self._silence = self._loop.call_after(LIFELINE_SILENCE, self._on_owner_gone)
                return
        self._on_owner_gone()

    def _on_owner_gone(self) -> None:
        assert self._lifeline is not None
        self._loop.unwatch(self._lifeline)
        logger.info("the owner of this server has gone")
        self._drain()
        if self._context.settings.grace == 0 and self._grace_over is not None:
            self._loop.cancel(self._grace_over)
            self._clients.disconnect()

    def _drain(self) -> None:
        if self._clients.is_draining:
            return
        self._clients.is_draining = True
        grace = self._context.settings.grace
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()  # before the fork that deregisters, which would have it for a moment
        self._deregister()
        # Readers of this line may start another server at the same address.
        logger.info("draining: %d sessions, at most %g s", len(self._clients), grace)
        for connection in list(self._unproved):
            self._drop(connection, "the node server is draining")
        self._clients.drain()
        self._grace_over = self._loop.call_after(grace, self._on_grace_over)

    def _on_grace_over(self) -> None:
        grace = self._context.settings.grace
        logger.warning("ended %d sessions that were still busy after %g s", len(self._clients), grace)
        self._end_all(f"still busy {grace:g} s after it was told to drain")

    def _end_all(self, reason: str) -> None:
        for child in self._children.values():
            child.process.kill(reason)

    # --- the register

    def _renew(self) -> None:
        if self._clients.is_draining:
            return
        self._loop.call_after(RENEWAL_PERIOD, self._renew)
        if self._renewal is None or self._renewal.reap() is not None:
            with contextlib.suppress(OSError):  # no room for another process
                self._renewal = fork(self._renew_in_fork)

    def _renew_in_fork(self) -> None:
        assert self.registration is not None
        self._forget_in_child()
        self.registration.renew()

    def _deregister(self) -> None:
        """Begin to remove the file of the register: its file server may hang."""
        if self.registration is None:
            return
        if self._renewal is not None:
            self._renewal.kill("the node server is draining")  # it must not register again
            self._renewal.reap(wait=0.1)
        try:
            self._renewal = fork(self._deregister_in_fork)
        except OSError:  # no room for another process
            self.registration.close()

    def _deregister_in_fork(self) -> None:
        assert self.registration is not None
        self._forget_in_child()
        self.registration.close()
