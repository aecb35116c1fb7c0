"""Questions to node servers about their status. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import local_identity, open_channel
from rpcdataloader.wire.credentials import Credentials, client_credentials
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.handshake import STATUS_ID
from rpcdataloader.wire.status import NodeStatus, StatusRequest
from rpcdataloader.wire.tls import TlsCredentials, client_tls
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")

# Seconds for the answer of each of several node servers.
ASK_TIMEOUT = 3.0


def ask_all(
    addresses: Iterable[Address], find_credentials: Callable[[Address], Credentials] = client_credentials
) -> Iterator[NodeStatus]:
    """Ask node servers for their status, one after the other; leaves out those that do not answer."""
    for address in addresses:
        try:
            yield ask_status(address, find_credentials(address), client_tls(), Deadline(ASK_TIMEOUT))[0]
        except (TimeoutError, RPCError, ValueError) as exc:
            logger.debug("%s does not tell its status: %s", address, exc)


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
