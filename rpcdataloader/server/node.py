"""The node server: listen, fork a gate per connection, reap, drain; ``sessions.py`` handles the sessions.

The server has one thread, which never reads from the network and runs no user code: forks do both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Collection

from rpcdataloader.errors import ConnectError
from rpcdataloader.host.output import Output
from rpcdataloader.server import events
from rpcdataloader.server.announcement import Announcement
from rpcdataloader.server.counters import GATE
from rpcdataloader.server.events import Link, fork_linked
from rpcdataloader.server.gate import run_gate
from rpcdataloader.server.listening import accept
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Loop, StopSignals, reap_orphans
from rpcdataloader.server.sessions import Child, Connection, Sessions
from rpcdataloader.server.settings import ServerContext

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a connection must prove that it knows the secret, and the most connections that may be at it. At the
# limit, a connection older than the patience makes room. Until there is one, new connections wait in the kernel's
# queue: the workers of a large job come all at once.
GATE_TIMEOUT = 10.0
GATE_PATIENCE = 1.0
MAX_GATES = 128

# Seconds between two looks at what is due, such as the end of a time limit, or another attempt to send an event to a
# session that had no room for it.
TICK = 0.05

# The same while all gates are at hand and nothing is under way: an idle server should leave the CPU alone.
IDLE_TICK = 1.0

# Most spare gates: the first batch comes from one of the first workers. Each takes 2.4 MB.
MAX_SPARES = 4

# Seconds without connections after which spare gates are forked: otherwise they would compete with starting workers.
QUIET_SECONDS = 0.2

# Seconds for the kernel to end all children. One that waits for a file server may take longer.
END_TIMEOUT = 5.0

# Seconds of silence after which an owner that writes to the lifeline counts as gone: a machine that vanished does not
# close it.
LIFELINE_SILENCE = 60.0


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        log: Log, which gets the lines that sessions and workers print.
        lifeline: Descriptor that the server's owner holds open; None without an owner. End of file means that the owner
            has gone; so does silence for ``LIFELINE_SILENCE`` seconds after a first byte.

    Attributes:
        signals: A first one drains the server, and a second one ends it; heard while the caller says so.
        announcement: File by which clients find the server, renewed here and ended by a drain; None without one.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ServerContext,
        *,
        log: Output,
        lifeline: int | None = None,
    ) -> None:
        self._context = context
        self._grace = context.settings.grace
        self._loop = Loop()
        # A connection may go away between poll and accept.
        listener.setblocking(False)
        self._listener = listener
        self._accept_at = 0.0  # time from which connections are accepted; infinite while they are, and in a drain
        self._log = log
        self._sessions = Sessions(context, self._loop, log)
        self._lifeline = lifeline
        self._owner_gone_at = math.inf
        self.announcement: Announcement | None = None
        self._children: dict[int, Child] = {}  # by process id
        # Gates are forked in advance, so that no connection waits for the fork of a large process: enough for the
        # session and the workers of one client.
        self._num_spares = min(context.num_workers + 1, MAX_SPARES)
        self._fork_at = time.monotonic() + QUIET_SECONDS
        self._drain_deadline: float | None = None
        self._num_stops = 0
        self.signals = StopSignals()

    def serve(self) -> None:
        """Run until a signal or the owner's end; returns when every child has ended."""
        self._loop.watch(self.signals.fileno(), self._on_signals)
        if self._lifeline is not None:
            self._loop.watch(self._lifeline, self._on_lifeline)
        try:
            while self._drain_deadline is None or self._sessions:
                self._do_what_is_due(time.monotonic())
                self._loop.wait(_tick(self._children.values(), self._num_spares))
        finally:
            self._close()

    def _close(self) -> None:
        for child in self._children.values():
            child.end("the node server has ended")
        deadline = time.monotonic() + END_TIMEOUT
        for child in self._children.values():
            if child.process.reap(wait=deadline - time.monotonic()) is None:
                logger.warning("process %d does not end: it waits in the kernel", child.process.pid)
            child.close()
        self._sessions.close()
        self._listener.close()
        self._log.finish()

    def _gates(self) -> list[tuple[Child, Connection]]:
        """The gates whose connections are still undecided."""
        pairs = [(child, child.connection) for child in self._children.values()]
        return [(gate, connection) for gate, connection in pairs if connection and connection.deadline < math.inf]

    def _spares(self) -> list[Child]:
        """The gates without a connection, oldest first."""
        return [child for child in self._children.values() if child.connection is None]

    # --- connections

    def _on_connection(self) -> None:
        if not self._has_room():
            return
        now = time.monotonic()
        self._fork_at = now + QUIET_SECONDS
        try:
            # Before the connection is accepted, as a gate that is forked later would inherit it.
            gate = self._free_gate()
            with contextlib.ExitStack() as failed:
                row = self._context.counters.open(GATE, gate.process.pid, time.monotonic_ns())
                failed.callback(self._context.counters.close, row)
                if (accepted := accept(self._listener)) is None:
                    return
                sock, source, peer = accepted
                failed.callback(sock.close)
                has_it = gate.link.send(events.Accepted(peer, row), [sock.fileno()])
                failed.pop_all()
        except (ConnectError, OSError) as exc:
            logger.warning("cannot accept a connection now: %s", getattr(exc, "strerror", exc))
            self._accept_after(EXHAUSTED_PAUSE)
            return
        gate.connection = Connection(sock, source, peer, row, now + GATE_TIMEOUT)
        if not has_it:
            gate.end("its connection could not be handed over")

    def _free_gate(self) -> Child:
        """Return a gate without a connection; raises ``OSError`` if the system has no room for it."""
        for gate in self._spares():
            self._on_end(gate.process.pid)  # if it was killed from outside
            if gate.process.ended is None:
                return gate
        return self._fork_gate()

    def _fork_gate(self) -> Child:
        def run(node: Link) -> None:
            self._forget_in_child()
            run_gate(node, self._context)

        process, link = fork_linked(run)
        pid = process.pid
        self._loop.watch(link.fileno(), lambda: self._on_link(pid))
        self._loop.watch(process.fileno(), lambda: self._on_end(pid))
        gate = self._children[pid] = Child(process, link)
        return gate

    def _fork_spare(self, now: float) -> None:
        """Fork a gate in advance, if one is missing."""
        if now < self._fork_at or self._drain_deadline is not None or len(self._spares()) >= self._num_spares:
            return
        try:
            self._fork_gate()
        except OSError as exc:
            logger.info("cannot fork a gate in advance: %s", exc.strerror or exc)
            self._fork_at = now + EXHAUSTED_PAUSE

    def _accept_after(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while."""
        self._loop.unwatch(self._listener.fileno())
        self._accept_at = time.monotonic() + seconds

    def _has_room(self) -> bool:
        """Whether a gate may be forked; at the limit, the oldest gate of the busiest source is ended to make room."""
        gates = self._gates()
        if len(gates) < MAX_GATES:
            return True
        num_gates = Counter(connection.source for _gate, connection in gates)
        victim, connection = min(gates, key=lambda pair: (-num_gates[pair[1].source], pair[1].deadline))
        youth = connection.deadline - GATE_TIMEOUT + GATE_PATIENCE - time.monotonic()
        if youth > 0:
            self._accept_after(youth)
            return False
        reason = "too many unauthenticated connections"
        self._context.log_within_limits(logging.INFO, "closed a connection from %s: %s", connection.peer, reason)
        victim.end(reason)
        return True

    def _forget_in_child(self) -> None:
        """Close the node server's descriptors in a fork."""
        self._log.forget()
        self._listener.close()
        self.signals.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._sessions.forget_in_child()
        for child in self._children.values():
            child.forget_in_child()

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
            whose = "a gate" if child.session is None else f"the session of {child.session.client}"
            logger.error("%s has lost its link: %s", whose, exc)
            child.end(f"its link to the node server broke ({exc})")
        self._loop.unwatch(child.link.fileno())
        return False

    def _receive(self, child: Child, event: events.Event, descriptors: list[int]) -> None:
        if child.session is not None:
            self._sessions.receive(child.session, event, descriptors)
        elif child.connection is not None:
            match event:
                case events.SessionBegun():
                    child.session = self._sessions.begin(child, child.connection, event, descriptors[0])
                case events.IsForWorker():
                    self._hand_over(child, child.connection, event)
                case events.Refused():
                    child.connection.is_refused = True
                    self._context.log_refusal(event)
                case events.TellsStatus():
                    child.connection.deadline = math.inf
                case events.WantsStacks():
                    self._sessions.ask_for_stacks(descriptors)

    def _hand_over(self, gate: Child, connection: Connection, wanted: events.IsForWorker) -> None:
        """Pass a connection to its session, if it has room, and keep the gate for the next one."""
        if not self._sessions.hand_over(gate.link, connection, wanted):
            return
        is_ending = connection.deadline == math.inf or gate.process.ended
        if is_ending or len(self._spares()) >= self._num_spares or not gate.link.post(events.HandedOver()):
            gate.end("its session has its connection")
        else:
            self._drop_connection(gate, connection)

    def _drop_connection(self, child: Child, connection: Connection) -> None:
        self._loop.unwatch(connection.sock.fileno())
        connection.sock.close()
        self._context.counters.close(connection.row)
        child.connection = None
        if self._drain_deadline is None:
            self._accept_at = 0.0

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
        if child.session is not None:
            self._sessions.ended(child.session, reason)
        if child.connection is not None:
            self._drop_connection(child, child.connection)
        else:
            self._fork_at = time.monotonic() + EXHAUSTED_PAUSE
        if os.getpid() == 1:
            reap_orphans(self._children)

    # --- the end

    def _on_signals(self) -> None:
        self._num_stops += self.signals.take()
        if self._num_stops:
            self._drain()
        if self._num_stops > 1:
            self._end_all("the node server was told to end")

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        self._owner_gone_at = 0.0
        with contextlib.suppress(OSError):  # a terminal that was closed
            if os.read(self._lifeline, 4096):
                self._owner_gone_at = time.monotonic() + LIFELINE_SILENCE

    def _on_owner_gone(self, lifeline: int) -> None:
        self._loop.unwatch(lifeline)
        self._owner_gone_at = math.inf
        logger.info("the owner of this server has gone")
        self._drain()
        if self._grace == 0:
            self._drain_deadline = math.inf
            self._sessions.disconnect()

    def _drain(self) -> None:
        if self._drain_deadline is not None:
            return
        self._context.counters.row(0).draining[0] = 1
        self._drain_deadline = time.monotonic() + self._grace
        if self.announcement is not None:
            self.announcement.close()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._accept_at = math.inf
        # Readers of this line may start another server at the same address.
        logger.info("draining: %d sessions, at most %g s", len(self._sessions), self._grace)
        for child in [*self._spares(), *(gate for gate, _connection in self._gates())]:
            child.end("the node server is draining")
        self._sessions.drain()

    def _end_all(self, reason: str) -> None:
        self._drain_deadline = math.inf
        for child in self._children.values():
            child.end(reason)

    def _do_what_is_due(self, now: float) -> None:
        for gate, connection in self._gates():
            if now > connection.deadline:
                if not connection.is_refused:
                    reason = f"no handshake within {GATE_TIMEOUT:g} s"
                    self._context.log_refusal(events.Refused(connection.peer, reason, logging.INFO))
                gate.end("no handshake in time")
            if connection.wanted is not None:
                self._hand_over(gate, connection, connection.wanted)
        for child in self._children.values():
            child.link.flush()
        self._fork_spare(now)
        if self.announcement is not None and now > self.announcement.due:
            self.announcement.renew()
        self._sessions.do_what_is_due(now)
        if self._log.is_waiting:
            self._loop.watch(self._log.fileno(), self._log.flush, select.POLLOUT)
        else:
            self._loop.unwatch(self._log.fileno())
        if self._lifeline is not None and now > self._owner_gone_at:
            self._on_owner_gone(self._lifeline)
        if now > self._accept_at:
            self._loop.watch(self._listener.fileno(), self._on_connection)
            self._accept_at = math.inf
        if self._drain_deadline is not None and now > self._drain_deadline and self._sessions:
            logger.warning("ended %d sessions that were still busy after %g s", len(self._sessions), self._grace)
            self._end_all(f"still busy {self._grace:g} s after it was told to drain")


def _tick(children: Collection[Child], num_spares: int) -> float:
    """Seconds until the next look at what is due."""
    connections = [child.connection for child in children]
    is_ending = any(child.session is not None and child.session.is_client_gone for child in children)
    is_unsent = any(child.link.unsent for child in children)
    is_idle = connections.count(None) >= num_spares and not is_unsent and not is_ending
    return IDLE_TICK if is_idle and all(one is None or one.deadline == math.inf for one in connections) else TICK
