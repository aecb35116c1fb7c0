"""The node server: listen, fork a gate per connection, reap, drain; ``sessions.py`` handles the sessions.

The server has one thread, which never reads from the network and runs no user code: forks do both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rpcdataloader.errors import ConnectError
from rpcdataloader.server import events
from rpcdataloader.server.announcement import Announcement
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import GATE
from rpcdataloader.server.gate import Gate, SpareGates, fork_gate
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Loop, StopSignals, reap_orphans
from rpcdataloader.server.sessions import Child, ClientSession, OpenGate, Sessions, become
from rpcdataloader.wire.connecting import accept, peer_name

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

# Seconds of silence after which an owner that writes to the lifeline counts as gone: a machine that vanished does not
# close it.
LIFELINE_SILENCE = 60.0


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        write_output: Function that takes the lines that sessions and workers print.
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
        write_output: Callable[[str], object],
        lifeline: int | None = None,
    ) -> None:
        self._context = context
        self._grace = context.settings.grace
        self._loop = Loop()
        # A connection may go away between poll and accept.
        listener.setblocking(False)
        self._listener = listener
        self._accept_at = 0.0  # time from which connections are accepted; infinite while they are, and in a drain
        self._sessions = Sessions(context, self._loop, write_output)
        self._lifeline = lifeline
        self._owner_gone_at = math.inf
        self.announcement: Announcement | None = None
        # By process id: gates, sessions, and status connections.
        self._children: dict[int, Child] = {}
        # Enough for the session and the workers of one client.
        self._spares = SpareGates(context.num_workers + 1, lambda: fork_gate(self._forget_in_child, context))
        self._drain_deadline: float | None = None
        self._num_stops = 0
        self.signals = StopSignals()

    def serve(self) -> None:
        """Run until a signal or the owner's end; returns when every child has ended."""
        self._loop.watch(self.signals.fileno(), self._on_signals)
        if self._lifeline is not None:
            self._loop.watch(self._lifeline, self._on_lifeline)
        self._spares.wait(time.monotonic())
        try:
            while self._drain_deadline is None or self._busy():
                self._loop.wait(TICK)
                self._do_what_is_due(time.monotonic())
        finally:
            self._close()

    def _close(self) -> None:
        self._spares.close()
        for child in self._children.values():
            child.end("the node server has ended")
            child.process.reap(wait=True)
        self._sessions.close()
        self._listener.close()

    def _gates(self) -> Iterator[OpenGate]:
        return (child for child in list(self._children.values()) if isinstance(child, OpenGate))

    def _busy(self) -> list[Child]:
        """The children that a drain waits for: all but status connections."""
        return [*self._gates(), *self._sessions]

    # --- connections

    def _on_connection(self) -> None:
        if not self._has_room():
            return
        try:
            # Before the connection is accepted, as a gate that is forked later would inherit it.
            spare = self._spares.take(time.monotonic())
            with contextlib.ExitStack() as failed:
                failed.callback(self._spares.give_back, spare)
                row = self._context.counters.open(GATE, spare.process.pid, time.monotonic_ns())
                failed.callback(self._context.counters.close, row)
                if (accepted := accept(self._listener)) is None:
                    return
                sock, source = accepted
                failed.callback(sock.close)
                peer = peer_name(sock)
                has_it = spare.link.send(events.Accepted(peer, row), [sock.fileno()])
                failed.pop_all()
        except (ConnectError, OSError) as exc:
            logger.warning("cannot accept a connection now: %s", getattr(exc, "strerror", exc))
            self._accept_after(EXHAUSTED_PAUSE)
            return
        process, pid = spare.process, spare.process.pid
        gate = self._children[pid] = OpenGate(
            process=process,
            link=spare.link,
            sock=sock,
            source=source,
            peer=peer,
            row=row,
            deadline=time.monotonic() + GATE_TIMEOUT,
        )
        self._loop.watch(gate.link.fileno(), lambda: self._on_link(pid))
        self._loop.watch(process.fileno(), lambda: self._on_end(pid))
        if not has_it:
            gate.end("its connection could not be handed over")

    def _accept_after(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while."""
        self._loop.unwatch(self._listener.fileno())
        self._accept_at = time.monotonic() + seconds

    def _has_room(self) -> bool:
        """Whether a gate may be forked; at the limit, the oldest gate of the busiest source is ended to make room."""
        gates = [(gate.deadline, gate) for gate in self._gates() if gate.deadline < math.inf]
        if len(gates) < MAX_GATES:
            return True
        busiest = Counter(gate.source for _deadline, gate in gates).most_common(1)[0][0]
        deadline, victim = next((deadline, gate) for deadline, gate in gates if gate.source == busiest)
        youth = deadline - GATE_TIMEOUT + GATE_PATIENCE - time.monotonic()
        if youth > 0:
            self._accept_after(youth)
            return False
        self._context.log_refusal(victim.peer, "too many unauthenticated connections")
        victim.end("too many unauthenticated connections")
        return True

    def _forget_in_child(self) -> None:
        """Close the node server's descriptors in a fork."""
        self._listener.close()
        self.signals.close()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._sessions.forget_in_child()
        for child in self._children.values():
            child.forget_in_child()
        self._spares.forget_in_child()

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
        except (OSError, ValueError, LookupError) as exc:
            # No room for a descriptor, or user code wrote to a descriptor of ours.
            whose = child.client if isinstance(child, ClientSession) else child.source
            logger.error("the session of %s has lost its link: %s", whose, exc)
            child.end(f"its link to the node server broke ({exc})")
        self._loop.unwatch(child.link.fileno())
        return False

    def _receive(self, child: Child, event: events.Event, descriptors: list[int]) -> None:
        if isinstance(child, ClientSession):
            self._sessions.receive(child, event, descriptors)
        elif isinstance(event, events.WantsStacks):
            self._sessions.ask_for_stacks(descriptors)
        elif isinstance(child, OpenGate):
            match event:
                case events.SessionBegun():
                    self._children[child.process.pid] = self._sessions.begin(child, event, descriptors[0])
                case events.IsForWorker():
                    self._hand_over(child, event)
                case events.Refused():
                    child.is_refused = True
                case events.TellsStatus():
                    self._children[child.process.pid] = become(child, Child)

    def _hand_over(self, gate: OpenGate, wanted: events.IsForWorker) -> None:
        """Pass a connection to its session, if it has room, and keep the gate for the next one."""
        if not self._sessions.hand_over(gate, wanted):
            return
        is_ending = gate.deadline == math.inf or gate.process.ended
        if is_ending or not self._spares.has_room or not gate.link.post(events.HandedOver()):
            gate.end("its session has its connection")
            return
        del self._children[gate.process.pid]
        self._loop.unwatch(gate.link.fileno())
        self._loop.unwatch(gate.process.fileno())
        gate.sock.close()
        self._context.counters.close(gate.row)
        self._spares.give_back(Gate(gate.process, gate.link))
        self._accept_at = 0.0

    def _on_end(self, pid: int) -> None:
        child = self._children[pid]
        descriptor = child.process.fileno()
        reason = child.process.reap()
        if reason is None:
            return
        self._loop.unwatch(descriptor)
        # Its last events.
        while self._on_link(pid):
            pass
        child = self._children.pop(pid)  # its last event may have replaced it
        self._loop.unwatch(child.link.fileno())
        self._loop.unwatch(child.sock.fileno())
        child.close()
        if self._drain_deadline is None:
            self._accept_at = 0.0
        if isinstance(child, ClientSession):
            self._sessions.ended(child, reason)
        self._context.counters.close(child.row)
        if os.getpid() == 1:
            reap_orphans(self._children.keys() | self._spares.pids)

    # --- the end

    def _on_signals(self) -> None:
        for _signal in range(self.signals.take()):
            self._num_stops += 1
            if self._num_stops == 1:
                self._drain()
            else:
                self._end_all("the node server was told to end")

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        try:
            has_written = bool(os.read(self._lifeline, 4096))
        except OSError:  # a terminal that was closed
            has_written = False
        self._owner_gone_at = time.monotonic() + LIFELINE_SILENCE
        if not has_written:
            self._on_owner_gone(self._lifeline)

    def _on_owner_gone(self, lifeline: int) -> None:
        self._loop.unwatch(lifeline)
        self._owner_gone_at = math.inf
        logger.info("the owner of this server has gone")
        self._drain()
        if self._grace == 0:
            self._end_all("the owner of the node server has gone")

    def _drain(self) -> None:
        if self._drain_deadline is not None:
            return
        self._context.counters.row(0).draining[0] = 1
        self._spares.close()
        self._drain_deadline = time.monotonic() + self._grace
        if self.announcement is not None:
            self.announcement.close()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._accept_at = math.inf
        # Readers of this line may start another server at the same address.
        logger.info("draining: %d sessions, at most %g s", len(self._sessions), self._grace)
        for gate in self._gates():
            gate.end("the node server is draining")
        self._sessions.drain()

    def _end_all(self, reason: str) -> None:
        self._drain_deadline = math.inf
        for child in self._children.values():
            child.end(reason)

    def _do_what_is_due(self, now: float) -> None:
        for gate in self._gates():
            if now > gate.deadline:
                if not gate.is_refused:
                    self._context.log_refusal(gate.peer, f"no handshake within {GATE_TIMEOUT:g} s")
                gate.end("no handshake in time")
            if gate.wanted is not None:
                self._hand_over(gate, gate.wanted)
        for child in self._children.values():
            child.link.flush()
        self._spares.refill(now)
        if self.announcement is not None and now > self.announcement.due:
            self.announcement.renew()
        self._sessions.do_what_is_due(now)
        if self._lifeline is not None and now > self._owner_gone_at:
            self._on_owner_gone(self._lifeline)
        if now > self._accept_at:
            self._loop.watch(self._listener.fileno(), self._on_connection)
            self._accept_at = math.inf
        if self._drain_deadline is not None and now > self._drain_deadline and (busy := self._busy()):
            logger.warning("ended %d sessions that were still busy after %g s", len(busy), self._grace)
            self._end_all(f"still busy {self._grace:g} s after it was told to drain")
