"""The node server: listen, fork a gate per connection, admit workers, reap, drain.

One thread, which never reads a byte from the network and runs no user code: whatever is received or built happens in
forks. It keeps the accepted socket of every session only to see the client go away while the session is busy.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.errors import ConnectError
from rpcdataloader.server.admission import Admission
from rpcdataloader.server.announcement import Announcement
from rpcdataloader.server.connections import AcceptedConnection, Origin, TrafficCounters
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.gate import run_gate
from rpcdataloader.server.link import Link
from rpcdataloader.server.output import OutputReader
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Process, fork, name_process, reap_orphans
from rpcdataloader.server.spares import Gate, SpareGates
from rpcdataloader.wire import transport
from rpcdataloader.wire.listening import accept, peer_name
from rpcdataloader.wire.registration import RENEWAL_PERIOD

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a connection must prove that it knows the secret, and how many may be at it at once. When there are
# too many, one that has had this long makes room, and until there is one, the others wait in the kernel's queue: the
# workers of a large job come all at once, and none of them is to blame for that.
GATE_TIMEOUT = 10.0
GATE_PATIENCE = 1.0
MAX_GATES = 128

# Seconds until another try when a session has no room for a message.
RETRY_PAUSE = 0.05

# Seconds after which an owner that has written to the lifeline must have written again: one whose machine has vanished
# does not close it.
LIFELINE_SILENCE = 60.0

# poll(2) takes milliseconds in 32 bits.
_MAX_POLL_TIMEOUT = 3600.0

_CLIENT_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def write_to_stderr(line: str) -> None:
    """The default place of the output of workers."""
    sys.stderr.write(line)
    sys.stderr.flush()


@dataclass(slots=True)
class _Child:
    """A gate or, once it is authenticated, a session.

    Attributes:
        source: Machine or user at the other end.
        peer: Address there.
        connection: What the log says of a session's.
        admitted: The same of its workers' connections, by number.
        deadline: When a gate must have become something else; None for a session, or when it is being ended.
        has_unsent: Whether something was posted to it that had no room.
        client_gone: Whether its client has closed the connection.
        row: Of a session, among the counters; None without one.
        worker_rows: The same of its admitted workers, by number.
        is_status: Whether it tells somebody the status of this node, and is nobody to wait for.
        is_asked: Whether the session was asked for stacks, and has not looked at that yet.
        is_refused: Of a gate, whether it has refused its connection, and waits for the other end to close.
        wanted: Of a gate whose connection a session has no room for now: id of the session, and the preamble.
    """

    process: Process
    link: Link
    sock: socket.socket
    source: str
    peer: str
    counters: TrafficCounters
    deadline: float | None
    session_id: bytes | None = None
    client: str = ""
    connection: AcceptedConnection | None = None
    admitted: dict[int, AcceptedConnection] = field(default_factory=dict)
    has_unsent: bool = False
    client_gone: bool = False
    row: int | None = None
    worker_rows: dict[int, int | None] = field(default_factory=dict)
    is_status: bool = False
    is_asked: bool = False
    is_refused: bool = False
    wanted: tuple[bytes, str] | None = None

    def post(self, event: str, **fields: Any) -> None:
        self.link.post(event, **fields)
        self.has_unsent = not self.link.flush()

    def end(self, reason: str) -> None:
        self.deadline = None
        self.process.kill(reason)


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        context: What sessions and workers are told.
        max_connections: Cap on workers; None for no cap.
        max_connections_per_client: Cap on the workers of one client; None for no cap.
        grace: Seconds that a drain may take before everything is ended.
        write_output: Takes the lines that sessions and workers print.
        lifeline: A descriptor whose end of file means that the owner of this server is gone; None without one. So does
            silence for ``LIFELINE_SILENCE`` seconds, once something has come from it.
        announcement: What lets clients find it, renewed here, and ended when the server drains; None without one.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ServerContext,
        *,
        max_connections: int | None,
        max_connections_per_client: int | None,
        grace: float,
        write_output: Callable[[str], None] = write_to_stderr,
        lifeline: int | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        self._listener = listener
        self._context = context
        self._counters = context.counters
        self._admission = Admission(max_connections, max_connections_per_client)
        self._grace = grace
        self._write_output = write_output
        self._lifeline = lifeline
        self._owner_deadline = math.inf  # when the owner must have written again
        self._announcement = announcement
        self._renew_at = math.inf if announcement is None else time.monotonic() + RENEWAL_PERIOD
        self._children: dict[int, _Child] = {}
        # For the session and the workers of a client that comes.
        self._spares = SpareGates(context.num_workers + 1, self._fork_gate)
        self._outputs: set[OutputReader] = set()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._stop_requests = 0
        self._drain_deadline: float | None = None
        self._listen_again: float | None = None
        self._look_at = math.inf  # while there are sessions: when to look whether their clients have vanished
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # A connection may go away between poll and accept.
        listener.setblocking(False)

    def serve(self) -> None:
        """Run until :meth:`stop`; returns when every child has ended."""
        self._watch(self._listener.fileno(), self._on_connection)
        self._watch(self._wake_read, self._on_wake)
        if self._lifeline is not None:
            self._watch(self._lifeline, self._on_lifeline)
        self._spares.wait(time.monotonic())
        try:
            while self._drain_deadline is None or self._busy():
                for descriptor, _events in self._poll.poll(self._poll_timeout()):
                    # An earlier handler of this round may have dropped it, or even used its number again: no handler
                    # believes that there is something to read.
                    if handler := self._handlers.get(descriptor):
                        handler()
                self._do_what_is_due()
        finally:
            self._close()

    def stop(self) -> None:
        """Drain; called a second time, end at once. Safe in a signal handler and in any thread."""
        self._stop_requests += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def wakeup_fileno(self) -> int:
        """A descriptor that ends the server's wait when something is written to it (:func:`signal.set_wakeup_fd`)."""
        return self._wake_write

    def _watch(self, descriptor: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def _unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def _close(self) -> None:
        self._spares.close()
        for child in self._children.values():
            child.end("the node server has ended")
            child.process.reap(wait=True)
        # What was printed last is still in the pipes of those that have ended.
        for output in self._outputs:
            output.finish()
        self._listener.close()

    def close(self) -> None:
        """Give the descriptors back, once nothing can call :meth:`stop` any more."""
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _busy(self) -> list[_Child]:
        """Those whose end a drain waits for."""
        return [child for child in self._children.values() if not child.is_status]

    # --- gates and sessions

    def _on_connection(self) -> None:
        if not self._has_room():
            return
        try:
            # Before there is a connection, which a gate that is forked now would hold as well.
            gate = self._spares.take(time.monotonic())
            with contextlib.ExitStack() as failed:
                failed.callback(self._spares.give_back, gate)
                accepted = accept(self._listener)
                if accepted is not None:
                    self._open_gate(gate, *accepted)
                    failed.pop_all()
        except (ConnectError, OSError) as exc:
            logger.warning("cannot take a connection now: %s", getattr(exc, "strerror", exc))
            self._pause_listening(EXHAUSTED_PAUSE)

    def _open_gate(self, gate: Gate, sock: socket.socket, source: str) -> None:
        with contextlib.ExitStack() as failed:
            failed.callback(sock.close)
            peer = peer_name(sock)
            has_it = gate.link.send("connection", [sock.fileno()], peer=peer)
            failed.pop_all()
        child = _Child(gate.process, gate.link, sock, source, peer, gate.counters, time.monotonic() + GATE_TIMEOUT)
        self._children[gate.process.pid] = child
        self._watch(gate.link.fileno(), lambda: self._on_link(child))
        self._watch(gate.process.fileno(), lambda: self._on_end(child))
        if not has_it:
            child.end("it could not be given its connection")

    def _fork_gate(self) -> Gate:
        ours, theirs = Link.pair()
        counters = TrafficCounters()

        def run() -> None:
            name_process("rpcdl-spare")
            self._forget_in_child()
            ours.close()
            run_gate(theirs, self._context, counters)

        try:
            return Gate(fork(run), ours, counters)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def _has_room(self) -> bool:
        """Whether another gate may be forked; too many unproved connections: the oldest of the busiest source goes."""
        gates = [(child.deadline, child) for child in self._children.values() if child.deadline is not None]
        if len(gates) < MAX_GATES:
            return True
        busiest = Counter(child.source for _deadline, child in gates).most_common(1)[0][0]
        deadline, victim = next((deadline, child) for deadline, child in gates if child.source == busiest)
        youth = deadline - GATE_TIMEOUT + GATE_PATIENCE - time.monotonic()
        if youth > 0:
            self._pause_listening(youth)
            return False
        self._context.log_refusal(victim.peer, "too many unauthenticated connections")
        victim.end("too many unauthenticated connections")
        return True

    def _pause_listening(self, seconds: float) -> None:
        self._listen_again = time.monotonic() + seconds
        self._unwatch(self._listener.fileno())

    def _resume_listening(self) -> None:
        if self._listen_again is not None and self._drain_deadline is None:
            self._watch(self._listener.fileno(), self._on_connection)
        self._listen_again = None

    def _forget_in_child(self) -> None:
        """Close, in a fork, what belongs to this process."""
        self._listener.close()
        for descriptor in (self._wake_read, self._wake_write, self._lifeline):
            if descriptor is not None:
                os.close(descriptor)
        for output in self._outputs:
            os.close(output.fileno())
        for child in self._children.values():
            child.sock.close()
            os.close(child.process.fileno())
            child.link.close()
        self._spares.forget_in_child()

    def _on_link(self, child: _Child) -> bool:
        """Take one message; returns whether there was one."""
        try:
            received = child.link.recv(wait=False)
            if received is not None:
                self._receive(child, *received)
                return True
        except BlockingIOError:
            return False
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as exc:
            # No room for a descriptor, or user code wrote to what is not its own.
            logger.error("the session of %s has lost its link: %s", child.client or child.source, exc)
            child.end(f"its link to the node server broke ({exc})")
        self._unwatch(child.link.fileno())
        return False

    def _receive(self, child: _Child, event: dict[str, Any], descriptors: list[int]) -> None:
        kind = event["event"]
        if kind == "session":
            child.session_id = bytes.fromhex(event["id"])
            child.client = event["name"]
            child.connection = AcceptedConnection(event["peer"], Origin(**event["origin"]), child.counters.of(0))
            child.deadline = None
            now, origin = time.monotonic_ns(), child.connection.origin
            child.row = self._counters.open_session(child.process.pid, now, origin.client, origin.rank, origin.job)
            if child.sock.family != socket.AF_UNIX:
                self._look_at = min(self._look_at, time.monotonic() + transport.LOOK_INTERVAL)
            self._add_output(descriptors[0], f"[{self._context.node} {child.client}]")
            # The session ends with its client, even while user code keeps it from looking.
            self._watch(child.sock.fileno(), lambda: self._on_client_gone(child), _CLIENT_GONE)
            child.post("welcome", row=child.row)
            if self._drain_deadline is not None:
                child.post("drain")
        elif kind == "worker connection":
            self._hand_over(child, bytes.fromhex(event["session"]), event["preamble"])
        elif kind == "worker":
            self._add_output(descriptors[0], f"[{self._context.node} {child.client} worker {event['worker']}]")
        elif kind == "admit":
            number, origin = event["worker"], Origin(**event["origin"])
            reason = self._admission.admit(child.session_id)
            row = None
            if reason is None:
                row = self._counters.open_worker(child.row, number, event["pid"], time.monotonic_ns())
                child.worker_rows[number] = row
                traffic = child.counters.of(number) if row is None else self._counters.row(row).traffic
                child.admitted[number] = AcceptedConnection(event["peer"], origin, traffic, number)
            else:
                self._context.log_refusal(event["peer"], f"busy: {reason}", "worker", origin)
            child.post("admitted", worker=number, reason=reason, row=row)
        elif kind == "ended" and event["worker"] in child.admitted:
            child.admitted.pop(event["worker"]).closed(event["reason"])
            self._counters.close_worker(child.worker_rows.pop(event["worker"]))
            self._admission.release(child.session_id)
            if event["reason"] != "exited with status 0":
                # Of an embedded pool this is the trainer's own terminal, and the trainer says so itself.
                level = logging.WARNING if self._context.tells_clients else logging.INFO
                logger.log(level, "worker %d of %s %s", event["worker"], child.client, event["reason"])
        elif kind == "refused":
            child.is_refused = True
        elif kind == "status":
            child.is_status = True
            child.deadline = None
        elif kind == "stacks":
            self._ask_for_stacks(descriptors)
        elif kind == "looked":
            child.is_asked = False

    def _hand_over(self, gate: _Child, session_id: bytes, preamble: str) -> None:
        """Let a session have the connection of a gate: now or, while it is too busy to look, later."""
        gate.wanted = None
        session = next((child for child in self._children.values() if child.session_id == session_id), None)
        if session is None:
            gate.post("unknown session")
        elif session.link.offer("connection", [gate.sock.fileno()], source=gate.peer, preamble=preamble):
            gate.post("handed over")
        else:
            gate.wanted = session_id, preamble

    def _ask_for_stacks(self, descriptors: list[int]) -> None:
        """Let every session write the stacks of its workers to the one descriptor."""
        try:
            for child in self._children.values():
                # One that is busy would pile them up.
                if child.session_id is not None and not child.is_asked:
                    child.is_asked = child.link.offer("stacks", descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_client_gone(self, child: _Child) -> None:
        self._unwatch(child.sock.fileno())
        child.client_gone = True
        child.end("its client has gone")

    def _look_for_clients(self, now: float) -> None:
        """End the sessions of clients whose host has vanished while something was under way to it."""
        sessions = [child for child in self._children.values() if child.session_id is not None]
        self._look_at = now + transport.LOOK_INTERVAL if sessions else math.inf
        for child in sessions:
            if not child.client_gone and transport.is_cut_off(child.sock):
                self._on_client_gone(child)

    def _on_end(self, child: _Child) -> None:
        descriptor = child.process.fileno()
        reason = child.process.reap()
        if reason is None:
            return
        self._unwatch(descriptor)
        # What it said last.
        while self._on_link(child):
            pass
        self._unwatch(child.link.fileno())
        self._unwatch(child.sock.fileno())
        child.link.close()
        child.sock.close()
        del self._children[child.process.pid]
        self._resume_listening()
        if child.session_id is not None:
            if child.admitted:
                self._admission.release(child.session_id, len(child.admitted))
            if child.client_gone or reason == "exited with status 0":
                reason = "the client has gone" if self._drain_deadline is None else "the node server is draining"
            else:
                logger.warning("session of %s %s", child.client, reason)
            for connection in child.admitted.values():
                connection.closed(f"its session has ended: {reason}")
            if child.connection is not None:
                child.connection.closed(reason)
            self._counters.close_session(child.row)
        if os.getpid() == 1:
            reap_orphans(self._children.keys() | self._spares.pids)

    # --- output

    def _add_output(self, descriptor: int, prefix: str) -> None:
        output = OutputReader(descriptor, prefix, self._write)
        self._outputs.add(output)
        self._watch(descriptor, lambda: self._on_output(output))

    def _on_output(self, output: OutputReader) -> None:
        if not output.read():
            self._unwatch(output.fileno())
            self._outputs.discard(output)

    def _write(self, line: str) -> None:
        # A full disk, or a terminal that is gone, must not take the datasets of all clients with it.
        with contextlib.suppress(OSError, ValueError):
            self._write_output(line)

    # --- the end

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self._stop_requests > 0:
            self._drain()
        if self._stop_requests > 1:
            self._end_all("the node server was told to end")

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        try:
            has_written = bool(os.read(self._lifeline, 4096))
        except OSError:  # a terminal that was closed
            has_written = False
        if has_written:
            self._owner_deadline = time.monotonic() + LIFELINE_SILENCE
        else:
            self._on_owner_gone()

    def _on_owner_gone(self) -> None:
        assert self._lifeline is not None
        self._unwatch(self._lifeline)
        self._owner_deadline = math.inf
        logger.info("the owner of this server has gone")
        self._drain()
        if self._grace == 0:
            self._end_all("the owner of the node server has gone")

    def _drain(self) -> None:
        if self._drain_deadline is not None:
            return
        self._counters.drain()
        self._spares.close()
        self._drain_deadline = time.monotonic() + self._grace
        if self._announcement is not None:
            self._renew_at = math.inf
            self._announcement.end()
        self._unwatch(self._listener.fileno())
        self._listener.close()
        # Who reads this may start another server at the same address.
        num_sessions = sum(child.session_id is not None for child in self._busy())
        logger.info("draining: %d sessions, at most %g s", num_sessions, self._grace)
        for child in self._busy():
            if child.session_id is None:
                child.end("the node server is draining")
            else:
                child.post("drain")

    def _end_all(self, reason: str) -> None:
        self._drain_deadline = math.inf
        for child in self._children.values():
            child.end(reason)

    def _poll_timeout(self) -> float:
        """Milliseconds until something is due."""
        times = [child.deadline for child in self._children.values() if child.deadline is not None]
        times += [time for time in (self._drain_deadline, self._listen_again) if time is not None]
        times += [self._renew_at, self._look_at, self._owner_deadline, self._spares.due]
        seconds = min(times) - time.monotonic()
        if any(child.has_unsent or child.wanted is not None for child in self._children.values()):
            seconds = min(seconds, RETRY_PAUSE)
        return max(0.0, min(seconds, _MAX_POLL_TIMEOUT)) * 1000 + 1

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.deadline is not None and now > child.deadline:
                if not child.is_refused:
                    self._context.log_refusal(child.peer, f"no handshake within {GATE_TIMEOUT:g} s")
                child.end("no handshake in time")
            if child.has_unsent:
                child.has_unsent = not child.link.flush()
            if child.wanted is not None:
                self._hand_over(child, *child.wanted)
        self._spares.refill(now)
        if self._announcement is not None and now > self._renew_at:
            self._renew_at = now + RENEWAL_PERIOD
            self._announcement.renew()
        if now > self._look_at:
            self._look_for_clients(now)
        if now > self._owner_deadline:
            self._on_owner_gone()
        if self._listen_again is not None and now > self._listen_again:
            self._resume_listening()
        if self._drain_deadline is not None and now > self._drain_deadline and (busy := self._busy()):
            logger.warning("ended %d sessions that were still busy after %g s", len(busy), self._grace)
            self._end_all(f"still busy {self._grace:g} s after it was told to drain")


@contextlib.contextmanager
def stopping_on_signals(server: NodeServer) -> Iterator[None]:
    """Let SIGTERM and SIGINT drain ``server``; only where signals can be handled, in a main thread."""
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
