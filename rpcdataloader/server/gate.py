"""A gate: a process that is forked for a connection which does not name a session here.

It reads the preamble, authenticates the client, and then becomes a session, or serves the node's status. Everything
that arrives before the secret is proved is read here, or by a worker, and never in the node server. That ends slow
gates, so a gate needs no clock.
"""

from __future__ import annotations

import logging
import socket

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.server.counters import Row
from rpcdataloader.server.events import Link
from rpcdataloader.server.processes import name_process
from rpcdataloader.server.session import run_session
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.server.status import serve_status
from rpcdataloader.wire.channel import accept_channel, local_identity, recv_preamble
from rpcdataloader.wire.handshake import STATUS_ID
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.server")


def run_gate(sock: socket.socket, peer: str, node: Link, context: ServerContext, row: Row) -> None:
    """Serve a connection; ``row`` is that of the session to come."""
    name_process("rpcdl-gate")
    stream = Stream(sock, peer)
    try:
        preamble = recv_preamble(stream)
        if preamble is None:
            return
        channel = accept_channel(stream, preamble, context.credentials, local_identity("server"), context.tls)
    except ConnectionLostError as exc:
        logger.debug("%s", exc)
    except RPCError as exc:
        node.send(context.refusal(peer, exc))
    else:
        if preamble.session_id == STATUS_ID:
            serve_status(channel, node)
        else:
            run_session(channel, node, context, row)
        return
    stream.linger()
