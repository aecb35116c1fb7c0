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

from rpcdataloader.server.admission import Admission
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.gate import run_gate
from rpcdataloader.server.link import Link
from rpcdataloader.server.output import OutputReader
from rpcdataloader.server.processes import Process, fork
from rpcdataloader.wire.transport import accept

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a connection must prove that it knows the secret, and how many may be at it at once.
GATE_TIMEOUT = 10.0
MAX_GATES = 128

_CLIENT_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def write_to_stderr(line: str) -> None:
    """The default place of the output of workers."""
    sys.stderr.write(line)
    sys.stderr.flush()


@dataclass(slots=True)
class _Child:
    """A gate or, once it is authenticated, a session."""

    process: Process
    link: Link
    sock: socket.socket
    source: str
    started: float
    session_id: bytes | None = None
    client: str = ""
    admitted: set[int] = field(default_factory=set)


class NodeServer:
    """The loop of a node server.

    Args:
        listener: Listening socket; closed when the server ends or drains.
        context: What sessions and workers are told.
        max_connections: Cap on workers; None for no cap.
        grace: Seconds that a drain may take before everything is ended.
        write_output: Takes the lines that sessions and workers print.
        lifeline: A descriptor whose end of file means that the owner of this server is gone; None without one.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ServerContext,
        *,
        max_connections: int | None,
        grace: float,
        write_output: Callable[[str], None] = write_to_stderr,
        lifeline: int | None = None,
    ) -> None:
        self._listener = listener
        self._context = context
        self._admission = Admission(max_connections)
        self._grace = grace
        self._write_output = write_output
        self._lifeline = lifeline
        self._children: dict[int, _Child] = {}
        self._outputs: set[OutputReader] = set()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._stop_requests = 0
        self._drain_deadline: float | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Run until :meth:`stop`; returns when every child has ended."""
        self._watch(self._listener.fileno(), self._on_connection)
        self._watch(self._wake_read, self._on_wake)
        if self._lifeline is not None:
            self._watch(self._lifeline, self._on_lifeline, select.POLLHUP)
        try:
            while self._drain_deadline is None or self._children:
                for descriptor, _events in self._poll.poll(self._poll_timeout()):
                    # An earlier handler of this round may have dropped it.
                    if handler := self._handlers.get(descriptor):
                        handler()
                self._end_what_is_late()
        finally:
            self._close()

    def stop(self) -> None:
        """Drain; called a second time, end at once. Safe in a signal handler and in any thread."""
        self._stop_requests += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _watch(self, descriptor: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def _unwatch(self, descriptor: int) -> None:
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def _close(self) -> None:
        for child in list(self._children.values()):
            child.process.kill()
        # What was printed last is still in the pipes of those that have ended.
        for output in self._outputs:
            output.finish()
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- gates and sessions

    def _on_connection(self) -> None:
        accepted = accept(self._listener)
        if accepted is None:
            return
        sock, source = accepted
        self._make_room()
        ours, theirs = Link.pair()
        sessions = {child.session_id: child.link for child in self._children.values() if child.session_id}

        def run() -> None:
            self._forget_in_child()
            ours.close()
            run_gate(sock, source, theirs, sessions, self._context)

        process = fork(run)
        theirs.close()
        child = _Child(process, ours, sock, source, time.monotonic())
        self._children[process.pid] = child
        self._watch(ours.fileno(), lambda: self._on_link(child))
        self._watch(process.fileno(), lambda: self._on_end(child))

    def _make_room(self) -> None:
        """Too many unproved connections: the oldest of the busiest source goes."""
        gates = [child for child in self._children.values() if child.session_id is None]
        if len(gates) >= MAX_GATES:
            busiest = Counter(child.source for child in gates).most_common(1)[0][0]
            victim = next(child for child in gates if child.source == busiest)
            logger.info("ended an unauthenticated connection from %s: too many of them", victim.source)
            victim.process.kill()

    def _forget_in_child(self) -> None:
        """Close, in a fork, what belongs to this process; links to sessions are closed by the gate."""
        self._listener.close()
        for descriptor in (self._wake_read, self._wake_write, self._lifeline):
            if descriptor is not None:
                os.close(descriptor)
        for output in self._outputs:
            os.close(output.fileno())
        for child in self._children.values():
            child.sock.close()
            os.close(child.process.fileno())
            if child.session_id is None:
                child.link.close()

    def _on_link(self, child: _Child) -> None:
        received = child.link.recv()
        if received is None:
            self._unwatch(child.link.fileno())
            return
        event, descriptors = received
        kind = event["event"]
        if kind == "session":
            child.session_id = bytes.fromhex(event["id"])
            child.client = event["client"]
            self._add_output(descriptors[0], f"[{child.client}]")
            # The session ends with its client, even while user code keeps it from looking.
            self._watch(child.sock.fileno(), lambda: self._on_client_gone(child), _CLIENT_GONE)
            child.link.send("welcome", wait=False)
            if self._drain_deadline is not None:
                child.link.send("drain", wait=False)
        elif kind == "worker":
            self._add_output(descriptors[0], f"[{child.client} worker {event['worker']}]")
        elif kind == "admit":
            reason = self._admission.admit(child.session_id)
            if reason is None:
                child.admitted.add(event["worker"])
                logger.info("worker %d of %s started", event["worker"], child.client)
            else:
                logger.info("busy: %s gets no worker: %s", child.client, reason)
            child.link.send("admitted", worker=event["worker"], reason=reason, wait=False)
        elif kind == "ended" and event["worker"] in child.admitted:
            child.admitted.remove(event["worker"])
            self._admission.release(child.session_id)
            level = logging.INFO if event["reason"] == "exited with status 0" else logging.WARNING
            logger.log(level, "worker %d of %s %s", event["worker"], child.client, event["reason"])

    def _on_client_gone(self, child: _Child) -> None:
        self._unwatch(child.sock.fileno())
        child.process.kill()

    def _on_end(self, child: _Child) -> None:
        descriptor = child.process.fileno()
        gone = child.sock.fileno() not in self._handlers
        reason = child.process.reap()
        if reason is None:
            return
        self._unwatch(descriptor)
        self._unwatch(child.link.fileno())
        self._unwatch(child.sock.fileno())
        child.link.close()
        child.sock.close()
        del self._children[child.process.pid]
        if child.session_id is not None:
            if child.admitted:
                self._admission.release(child.session_id, len(child.admitted))
            if gone or reason == "exited with status 0":
                logger.info("session of %s ended: the client has gone", child.client)
            else:
                logger.warning("session of %s %s", child.client, reason)

    # --- output

    def _add_output(self, descriptor: int, prefix: str) -> None:
        output = OutputReader(descriptor, prefix, self._write_output)
        self._outputs.add(output)
        self._watch(descriptor, lambda: self._on_output(output))

    def _on_output(self, output: OutputReader) -> None:
        if not output.read():
            self._unwatch(output.fileno())
            self._outputs.discard(output)

    # --- the end

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self._stop_requests > 1:
            self._end_all()
        elif self._stop_requests == 1:
            self._drain()

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        self._unwatch(self._lifeline)
        self._drain()
        self._end_all()

    def _drain(self) -> None:
        if self._drain_deadline is not None:
            return
        logger.info("draining: %d sessions, at most %g s", len(self._children), self._grace)
        self._drain_deadline = time.monotonic() + self._grace
        self._unwatch(self._listener.fileno())
        self._listener.close()
        for child in self._children.values():
            if child.session_id is None:
                child.process.kill()
            else:
                child.link.send("drain", wait=False)

    def _end_all(self) -> None:
        self._drain_deadline = math.inf
        for child in self._children.values():
            child.process.kill()

    def _poll_timeout(self) -> float | None:
        times = [child.started + GATE_TIMEOUT for child in self._children.values() if child.session_id is None]
        if self._drain_deadline is not None:
            times.append(self._drain_deadline)
        first = min(times, default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic()) * 1000 + 1

    def _end_what_is_late(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.session_id is None and now > child.started + GATE_TIMEOUT:
                logger.info("refused %s: no handshake within %g s", child.source, GATE_TIMEOUT)
                child.process.kill()
        if self._drain_deadline is not None and now > self._drain_deadline and self._children:
            logger.warning("ended %d sessions that were still busy after %g s", len(self._children), self._grace)
            self._end_all()


@contextlib.contextmanager
def stopping_on_signals(server: NodeServer) -> Iterator[None]:
    """Let SIGTERM and SIGINT drain ``server``; only where signals can be handled, in a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: server.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
