"""The node server: listen, fork a gate per connection, reap, drain; ``sessions.py`` handles the sessions.

The server has one thread, which never reads from the network and runs no user code: forks do both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rpcdataloader.errors import ConnectError
from rpcdataloader.server.announcement import Announcement
from rpcdataloader.server.children import Child, ClientSession, OpenGate, become
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import GATE
from rpcdataloader.server.events import Accepted, Event, IsForWorker, Refused, SessionBegun, TellsStatus, WantsStacks
from rpcdataloader.server.gate import Gate, SpareGates, fork_gate
from rpcdataloader.server.loop import Door, Lifeline, Loop
from rpcdataloader.server.output import Outputs
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, reap_orphans
from rpcdataloader.server.sessions import Admission, Sessions
from rpcdataloader.wire.connecting import accept, peer_name

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a connection must prove that it knows the secret, and the most connections that may be at it. At the
# limit, a connection older than the patience makes room. Until there is one, new connections wait in the kernel's
# queue: the workers of a large job come all at once.
GATE_TIMEOUT = 10.0
GATE_PATIENCE = 1.0
MAX_GATES = 128

# Seconds until a retry when a session has no room for a message.
RETRY_PAUSE = 0.05

# poll(2) takes milliseconds in 32 bits.
_MAX_POLL_TIMEOUT = 3600.0


def write_to_stderr(line: str) -> None:
    """Write a line of output to standard error, the default."""
    sys.stderr.write(line)
    sys.stderr.flush()


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        max_connections_per_client: Cap on the workers of one client; None for no cap.
        grace: Seconds of a drain after which all processes are ended.
        write_output: Function that takes the lines that sessions and workers print.
        lifeline: Descriptor that shows whether the owner of this server lives (see ``loop.py``); None without an owner.
        announcement: File by which clients find the server, renewed here and ended by a drain; None without one.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ServerContext,
        *,
        max_connections_per_client: int | None,
        grace: float,
        write_output: Callable[[str], None] = write_to_stderr,
        lifeline: int | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        self._context = context
        self._grace = grace
        self._loop = Loop()
        self._door = Door(listener, self._loop, self._on_connection)
        self._outputs = Outputs(self._loop, write_output)
        admission = Admission(context.max_connections, max_connections_per_client)
        self._sessions = Sessions(context, admission, self._loop, self._outputs)
        self._lifeline = None if lifeline is None else Lifeline(lifeline)
        self._announcement = announcement
        # By process id: gates, sessions, and status connections.
        self._children: dict[int, Child] = {}
        # Enough for the session and the workers of one client.
        self._spares = SpareGates(context.num_workers + 1, lambda: fork_gate(self._forget_in_child, context))
        self._stop_requests = 0
        self._drain_deadline: float | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Run until :meth:`stop`; returns when every child has ended."""
        self._door.open()
        self._loop.watch(self._wake_read, self._on_wake)
        if self._lifeline is not None:
            self._loop.watch(self._lifeline.fileno(), self._lifeline.read)
        self._spares.wait(time.monotonic())
        try:
            while self._drain_deadline is None or self._busy():
                self._loop.wait(self._next_due() - time.monotonic())
                self._do_what_is_due()
        finally:
            self._close()

    def stop(self) -> None:
        """Drain; called a second time, end at once. Safe in a signal handler and in any thread."""
        self._stop_requests += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def wakeup_fileno(self) -> int:
        """A descriptor that ends the server's wait when written to (:func:`signal.set_wakeup_fd`)."""
        return self._wake_write

    def _close(self) -> None:
        self._spares.close()
        for child in self._children.values():
            child.end("the node server has ended")
            child.process.reap(wait=True)
        self._sessions.close()
        self._outputs.finish()
        self._door.close()

    def close(self) -> None:
        """Close the descriptors, once :meth:`stop` can no longer be called."""
        os.close(self._wake_read)
        os.close(self._wake_write)

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
            gate = self._spares.take(time.monotonic())
            with contextlib.ExitStack() as failed:
                failed.callback(self._spares.give_back, gate)
                row = self._context.counters.open(GATE, gate.process.pid, time.monotonic_ns())
                failed.callback(self._context.counters.close, row)
                accepted = accept(self._door.listener)
                if accepted is not None:
                    self._open_gate(gate, row, *accepted)
                    failed.pop_all()
        except (ConnectError, OSError) as exc:
            logger.warning("cannot accept a connection now: %s", getattr(exc, "strerror", exc))
            self._door.pause(EXHAUSTED_PAUSE)

    def _open_gate(self, spare: Gate, row: int, sock: socket.socket, source: str) -> None:
        with contextlib.ExitStack() as failed:
            failed.callback(sock.close)
            peer = peer_name(sock)
            has_it = spare.link.send(Accepted(peer, row), [sock.fileno()])
            failed.pop_all()
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

    def _has_room(self) -> bool:
        """Whether a gate may be forked; at the limit, the oldest gate of the busiest source is ended to make room."""
        gates = [(gate.deadline, gate) for gate in self._gates() if gate.deadline is not None]
        if len(gates) < MAX_GATES:
            return True
        busiest = Counter(gate.source for _deadline, gate in gates).most_common(1)[0][0]
        deadline, victim = next((deadline, gate) for deadline, gate in gates if gate.source == busiest)
        youth = deadline - GATE_TIMEOUT + GATE_PATIENCE - time.monotonic()
        if youth > 0:
            self._door.pause(youth)
            return False
        self._context.log_refusal(victim.peer, "too many unauthenticated connections")
        victim.end("too many unauthenticated connections")
        return True

    def _forget_in_child(self) -> None:
        """Close the node server's descriptors in a fork."""
        self._door.listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self._lifeline is not None:
            os.close(self._lifeline.fileno())
        self._outputs.forget_in_child()
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

    def _receive(self, child: Child, event: Event, descriptors: list[int]) -> None:
        if isinstance(child, ClientSession):
            self._sessions.receive(child, event, descriptors)
        elif isinstance(event, WantsStacks):
            self._sessions.ask_for_stacks(descriptors)
        elif isinstance(child, OpenGate):
            match event:
                case SessionBegun():
                    self._children[child.process.pid] = self._sessions.begin(child, event, descriptors[0])
                case IsForWorker():
                    self._sessions.hand_over(child, event)
                case Refused():
                    child.is_refused = True
                case TellsStatus():
                    self._children[child.process.pid] = become(child, Child)

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
        self._door.open()
        if isinstance(child, ClientSession):
            self._sessions.ended(child, reason)
        self._context.counters.close(child.row)
        if os.getpid() == 1:
            reap_orphans(self._children.keys() | self._spares.pids)

    # --- the end

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self._stop_requests > 0:
            self._drain()
        if self._stop_requests > 1:
            self._end_all("the node server was told to end")

    def _on_owner_gone(self, lifeline: Lifeline) -> None:
        self._loop.unwatch(lifeline.fileno())
        lifeline.deadline = math.inf
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
        if self._announcement is not None:
            self._announcement.end()
        self._door.close()
        # Readers of this line may start another server at the same address.
        logger.info("draining: %d sessions, at most %g s", len(self._sessions), self._grace)
        for gate in self._gates():
            gate.end("the node server is draining")
        self._sessions.drain()

    def _end_all(self, reason: str) -> None:
        self._drain_deadline = math.inf
        for child in self._children.values():
            child.end(reason)

    def _next_due(self) -> float:
        """The time of the next action."""
        now = time.monotonic()
        times = [now + _MAX_POLL_TIMEOUT, self._sessions.due, self._spares.due, self._door.due]
        times += [gate.deadline for gate in self._gates() if gate.deadline is not None]
        if self._drain_deadline is not None:
            times.append(self._drain_deadline)
        if self._lifeline is not None:
            times.append(self._lifeline.deadline)
        if self._announcement is not None:
            times.append(self._announcement.due)
        if any(child.has_unsent for child in self._children.values()) or any(gate.wanted for gate in self._gates()):
            times.append(now + RETRY_PAUSE)
        return min(times)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for gate in self._gates():
            if gate.deadline is not None and now > gate.deadline:
                if not gate.is_refused:
                    self._context.log_refusal(gate.peer, f"no handshake within {GATE_TIMEOUT:g} s")
                gate.end("no handshake in time")
            if gate.wanted is not None:
                self._sessions.hand_over(gate, gate.wanted)
        for child in self._children.values():
            if child.has_unsent:
                child.has_unsent = not child.link.flush()
        self._spares.refill(now)
        if self._announcement is not None and now > self._announcement.due:
            self._announcement.renew()
        self._sessions.do_what_is_due(now)
        if self._lifeline is not None and now > self._lifeline.deadline:
            self._on_owner_gone(self._lifeline)
        if now > self._door.due:
            self._door.open()
        if self._drain_deadline is not None and now > self._drain_deadline and (busy := self._busy()):
            logger.warning("ended %d sessions that were still busy after %g s", len(busy), self._grace)
            self._end_all(f"still busy {self._grace:g} s after it was told to drain")


@contextlib.contextmanager
def stopping_on_signals(server: NodeServer) -> Iterator[None]:
    """Let SIGTERM and SIGINT drain ``server``; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: server.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    # A signal that the kernel gives to another thread, such as one of a preloaded module, does not interrupt poll.
    wakeup = signal.set_wakeup_fd(server.wakeup_fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
