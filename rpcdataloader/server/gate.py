"""One new connection, in a fork of its own: read the preamble, become a session, let one have the socket, or tell the
status of the node.

Whatever arrives before the secret was proved is read here and never in the node server. The node server ends a gate
that takes too long, so nothing here has a clock. A gate may have been forked long before its connection came, and has
nothing of the sessions that there are.
"""

from __future__ import annotations

import json
import logging
import socket

from rpcdataloader.errors import RPCError
from rpcdataloader.server.connections import Kind
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.events import Accepted, HandedOver, IsForWorker, Refused
from rpcdataloader.server.link import Link
from rpcdataloader.server.processes import name_process
from rpcdataloader.server.session import run_session
from rpcdataloader.server.statistics import serve_status
from rpcdataloader.wire.channel import Channel, accept_channel, recv_preamble
from rpcdataloader.wire.frames import MessageType, encode
from rpcdataloader.wire.identity import local_identity
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
