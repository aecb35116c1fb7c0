"""Gates: processes that wait for a connection, and what each does with its own.

One is forked for every connection, some before anybody connects. It reads the preamble, and becomes a session, lets one
have the socket, or tells the status of the node. Whatever arrives before the secret was proved is read here and never
in the node server, which ends a gate that takes too long, so nothing here has a clock. A gate may have been forked long
before its connection came, and has nothing of the sessions that there are.
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
    """Wait for a connection and serve it until it has become something else.

    Args:
        node: Link to the node server, which gives the connection, and takes it again if it is that of a worker.
    """
    received = node.recv()
    if received is None:
        return
    event, descriptors = received
    if not isinstance(event, Accepted):
        raise TypeError(f"a gate waits for its connection, and not for {event}")
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
        logger.info("a status connection of %s ends: %s", channel.name, exc)


def _hand_over(stream: Stream, preamble: Preamble, node: Link, context: ServerContext) -> None:
    node.send(IsForWorker(preamble.session_id.hex(), preamble.encode().hex()))
    received = node.recv()
    if received is None or isinstance(received[0], HandedOver):
        return
    text = "there is no such session on this node server (it ended, or the server was restarted)"
    refusal = json.dumps({"code": "protocol", "text": text}).encode()
    stream.send(encode(None, MessageType.REFUSED, payload=refusal))
    context.log_refusal(stream.name, "unknown session", "worker")
    node.send(Refused())
    stream.linger()


# At most so many wait, as the first batch comes from one of the first workers. Each occupies 2.4 MB.
MAX_SPARES = 4

# Seconds since the last connection after which new ones are forked.
QUIET_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Gate:
    """A process that waits for its connection."""

    process: Process
    link: Link

    def end(self) -> None:
        """End it, and wait until it has ended."""
        self.process.kill("nobody has connected")
        self.process.reap(wait=True)
        self.link.close()


def fork_gate(forget: Callable[[], None], context: ServerContext) -> Gate:
    """Fork a gate, which waits for its connection.

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
    """Gates that are forked before anybody connects, so that no connection waits for the fork of a large process.

    The node server forks them while nothing comes in: beside workers that begin, they would take their time.

    Args:
        num_wanted: So many, at most :data:`MAX_SPARES`.
    """

    def __init__(self, num_wanted: int, fork: Callable[[], Gate]) -> None:
        self._num_wanted = min(num_wanted, MAX_SPARES)
        self._fork = fork
        self._gates: deque[Gate] = deque()
        self.due = math.inf  # when to call refill

    @property
    def pids(self) -> set[int]:
        """Their process ids."""
        return {gate.process.pid for gate in self._gates}

    def take(self, now: float) -> Gate:
        """The one that has waited longest, or a new one.

        Raises:
            OSError: The system has no room for a process or a descriptor.
        """
        self.wait(now)
        while self._gates:
            gate = self._gates.popleft()
            if gate.process.reap() is None:
                return gate
            gate.end()  # somebody has killed it
        return self._fork()

    def give_back(self, gate: Gate) -> None:
        """Keep one that was taken, and that has no connection yet."""
        self._gates.append(gate)

    def wait(self, now: float) -> None:
        """Fork no more before it has been quiet for a while."""
        self.due = now + QUIET_SECONDS

    def refill(self, now: float) -> None:
        """Fork one, if it is time for that and one is missing."""
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
        """Close, in a fork, what belongs to the node server."""
        for gate in self._gates:
            gate.link.close()
            os.close(gate.process.fileno())

    def close(self) -> None:
        """End them; idempotent."""
        self.due = math.inf
        while self._gates:
            self._gates.pop().end()
