"""Gates: processes that wait for a connection and decide what becomes of it.

Each connection gets its own gate; some are forked in advance. A gate reads the preamble, then becomes a session, hands
the socket to a session, or serves the node's status. Everything that arrives before the secret is proved is read here
and never in the node server. The node server ends slow gates, so gates need no clock. A gate may be older than the
present sessions, and knows none of them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rpcdataloader.errors import RPCError
from rpcdataloader.server.connections import Kind
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.events import Accepted, HandedOver, IsForWorker, Link, Refused
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, Process, fork, name_process
from rpcdataloader.server.session import run_session
from rpcdataloader.server.statistics import serve_status
from rpcdataloader.wire.channel import Channel, accept_channel, local_identity, recv_preamble
from rpcdataloader.wire.frames import MessageType, encode
from rpcdataloader.wire.preamble import STATUS_ID, Preamble
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.server")


def run_gate(node: Link, context: ServerContext) -> None:
    """Wait for a connection and serve it, or hand it over.

    Args:
        node: Link to the node server, which sends the connection, and keeps it if it is a worker's.
    """
    received = node.recv()
    if received is None:
        return
    event, descriptors = received
    if not isinstance(event, Accepted):
        raise TypeError(f"a gate expects its connection, got {event}")
    name_process("rpcdl-gate")
    peer = event.peer
    row = context.counters.row(event.row)
    stream = Stream(socket.socket(fileno=descriptors[0]), peer, row.control)
    kind: Kind | None = None
    try:
        preamble = recv_preamble(stream)
        if preamble is None:
            return
        if any(preamble.session_id) and preamble.session_id != STATUS_ID:
            _hand_over(stream, preamble, node, context)
            return
        kind = "status" if preamble.session_id == STATUS_ID else "control"
        channel = accept_channel(stream, preamble, context.credentials, local_identity("server"), context.tls)
    except RPCError as exc:
        context.log_refusal(peer, exc, kind)
        node.send(Refused())
    else:
        if kind == "status":
            _serve_status(channel, node, context)
        else:
            run_session(channel, node, context, peer, row)
        return
    stream.linger()


def _serve_status(channel: Channel, node: Link, context: ServerContext) -> None:
    try:
        serve_status(channel, node, context)
    except RPCError as exc:
        logger.info("the status connection of %s ended: %s", channel.name, exc)


def _hand_over(stream: Stream, preamble: Preamble, node: Link, context: ServerContext) -> None:
    node.send(IsForWorker(preamble.session_id.hex(), preamble.encode().hex()))
    received = node.recv()
    if received is None or isinstance(received[0], HandedOver):
        return
    text = "there is no such session on this node server: it ended, or the server was restarted"
    refusal = json.dumps({"code": "protocol", "text": text}).encode()
    stream.send(encode(None, MessageType.REFUSED, payload=refusal))
    context.log_refusal(stream.name, "unknown session", "worker")
    node.send(Refused())
    stream.linger()


# Most spare gates: the first batch comes from one of the first workers. Each takes 2.4 MB.
MAX_SPARES = 4

# Seconds without connections after which spare gates are forked.
QUIET_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Gate:
    """A process that waits for its connection."""

    process: Process
    link: Link

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.process.kill("it was not needed")
        self.process.reap(wait=True)
        self.link.close()


def fork_gate(forget: Callable[[], None], context: ServerContext) -> Gate:
    """Fork a gate.

    Raises:
        OSError: The system has no room for a process or a descriptor.
    """
    ours, theirs = Link.pair()

    def run() -> None:
        name_process("rpcdl-spare")
        forget()
        ours.close()
        run_gate(theirs, context)

    try:
        return Gate(fork(run), ours)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


class SpareGates:
    """Gates forked in advance, so that no connection waits for the fork of a large process.

    The node server forks them while no connections arrive: otherwise they would compete with starting workers.

    Args:
        num_wanted: Number of spare gates, at most :data:`MAX_SPARES`.
    """

    def __init__(self, num_wanted: int, fork: Callable[[], Gate]) -> None:
        self._num_wanted = min(num_wanted, MAX_SPARES)
        self._fork = fork
        self._gates: deque[Gate] = deque()
        self.due = math.inf  # when to call refill

    @property
    def pids(self) -> set[int]:
        """Process ids of the gates."""
        return {gate.process.pid for gate in self._gates}

    def take(self, now: float) -> Gate:
        """Return the oldest gate, or a new one.

        Raises:
            OSError: The system has no room for a process or a descriptor.
        """
        self.wait(now)
        while self._gates:
            gate = self._gates.popleft()
            if gate.process.reap() is None:
                return gate
            gate.end()  # it was killed from outside
        return self._fork()

    def give_back(self, gate: Gate) -> None:
        """Keep a gate that was taken and has no connection yet."""
        self._gates.append(gate)

    def wait(self, now: float) -> None:
        """Postpone forking until no connection has come for a while."""
        self.due = now + QUIET_SECONDS

    def refill(self, now: float) -> None:
        """Fork a gate, if that is due and one is missing."""
        if now < self.due:
            return
        if len(self._gates) >= self._num_wanted:
            self.due = math.inf
            return
        try:
            self._gates.append(self._fork())
        except OSError as exc:
            logger.info("cannot fork a gate in advance: %s", exc.strerror or exc)
            self.due = now + EXHAUSTED_PAUSE

    def forget_in_child(self) -> None:
        """Close the node server's descriptors in a fork."""
        for gate in self._gates:
            gate.link.close()
            os.close(gate.process.fileno())

    def close(self) -> None:
        """End all gates; idempotent."""
        self.due = math.inf
        while self._gates:
            self._gates.pop().end()
