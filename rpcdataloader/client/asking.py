"""One question to a node server about its status. Imports no torch."""

from __future__ import annotations

import contextlib

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import local_identity, open_channel
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.handshake import STATUS_ID
from rpcdataloader.wire.status import NodeStatus, StatusRequest
from rpcdataloader.wire.tls import TlsCredentials
from rpcdataloader.wire.transport import Deadline


def ask_status(
    address: Address, credentials: Credentials, tls: TlsCredentials | None, deadline: Deadline, *, stacks: bool = False
) -> tuple[NodeStatus, str]:
    """Return a node server's status, and the version of its package.

    Raises:
        TimeoutError: No answer came before the deadline.
        RPCError: There is no node server, or it does not answer.
        ValueError: A variable of the environment is malformed.
    """
    tls = None if address.is_unix else tls
    channel = open_channel(address, credentials, local_identity("client"), STATUS_ID, deadline, tls=tls)
    with contextlib.closing(channel.transport):
        channel.transport.limit(deadline)
        channel.send(MessageType.STATS, payload=StatusRequest(stacks).encode())
        message = channel.recv()
    if message is None:
        raise ConnectionLostError(f"{address} closed the connection without an answer")
    if message.type != MessageType.STATS:
        raise RemoteProtocolError(f"{address} answered with message type {message.type} instead of its status")
    return NodeStatus.decode(message.payload), channel.peer.rpcdataloader
