"""One new connection, in a fork of its own: read the preamble, become a session, hand the socket to one, or tell the
status of the node.

Whatever arrives before the secret was proved is read here and never in the node server. The node server ends a gate
that takes too long, so nothing here has a clock.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping

from rpcdataloader.errors import RPCError
from rpcdataloader.server.connections import Kind, TrafficCounters
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.link import Link
from rpcdataloader.server.session import run_session
from rpcdataloader.server.statistics import serve_status
from rpcdataloader.wire.channel import Channel, accept_channel, recv_preamble
from rpcdataloader.wire.frames import STATUS_ID, MessageType, Preamble, encode
from rpcdataloader.wire.identity import local_identity
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.server")


def run_gate(
    sock: socket.socket,
    source: str,
    node: Link,
    sessions: Mapping[bytes, Link],
    context: ServerContext,
    counters: TrafficCounters,
) -> None:
    """Serve one accepted connection until it has become something else.

    Args:
        source: Who connected, for the log.
        node: Link to the node server.
        sessions: The node server's ends of the links to its sessions, by session id: a socket written there
            arrives at the session.
        counters: Of the session that this may become.
    """
    stream = Stream(sock, source, counters.of(0))
    kind: Kind | None = None
    try:
        preamble = recv_preamble(stream)
        if preamble is None:
            return
        if any(preamble.session_id) and preamble.session_id != STATUS_ID:
            _hand_over(stream, preamble, sessions.get(preamble.session_id), context)
            return
        for session in sessions.values():
            session.close()
        kind = "status" if preamble.session_id == STATUS_ID else "control"
        channel = accept_channel(stream, preamble, context.credentials, local_identity("server"), context.tls)
    except RPCError as exc:
        context.log_refusal(source, exc, kind)
    else:
        if kind == "status":
            _serve_status(channel, node, context)
        else:
            run_session(channel, node, context, source, counters)
        return
    stream.linger()


def _serve_status(channel: Channel, node: Link, context: ServerContext) -> None:
    try:
        serve_status(channel, node, context)
    except RPCError as exc:
        logger.info("a status connection of %s ends: %s", channel.name, exc)


def _hand_over(stream: Stream, preamble: Preamble, session: Link | None, context: ServerContext) -> None:
    if session is not None:
        clear = preamble.encode().hex()
        if session.send("connection", [stream.fileno()], source=stream.name, preamble=clear):
            return
    text = "there is no such session on this node server (it ended, or the server was restarted)"
    refusal = json.dumps({"code": "protocol", "text": text}).encode()
    stream.send(encode(None, MessageType.REFUSED, payload=refusal))
    context.log_refusal(stream.name, "unknown session", "worker")
    stream.linger()
