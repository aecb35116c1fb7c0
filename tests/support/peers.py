"""Peers that tests play themselves: what such tests know of the protocol, and of this process's own sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcdataloader.client.client import get_client
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import read_welcome
from rpcdataloader.wire import frames, handshake
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import Channel, local_identity, open_channel
from rpcdataloader.wire.credentials import load_credentials
from rpcdataloader.wire.exceptions import loads_exception as loads_exception
from rpcdataloader.wire.frames import HEADER_SIZE as HEADER_SIZE
from rpcdataloader.wire.frames import MessageType as MessageType
from rpcdataloader.wire.handshake import NO_TICKET as NO_TICKET
from rpcdataloader.wire.handshake import PREAMBLE_SIZE as PREAMBLE_SIZE
from rpcdataloader.wire.handshake import STATUS_TICKET as STATUS_TICKET
from rpcdataloader.wire.handshake import Tickets
from rpcdataloader.wire.messages import Call, Welcome
from rpcdataloader.wire.messages import pack_handles as pack_handles
from rpcdataloader.wire.pickling import dumps
from rpcdataloader.wire.status import Report as Report
from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE

WRONG = b"not the secret of the test suite"


def preamble(ticket: bytes = NO_TICKET, tls: bool = False) -> bytes:
    """The first bytes of a connection."""
    return handshake.Preamble(ticket, tls=tls).encode()


def message(type: int, payload: bytes = b"", number: int = 0, key: bytes | None = None) -> bytes:
    """A message in clear, or one that is sealed with a key."""
    return b"".join(frames.encode(frames.Sealer(key) if key else None, MessageType(type), number, payload))


class Stranger:
    """One end of a handshake, with a wrong secret.

    Args:
        ticket: That of a client.
        of_client: The preamble that a client has sent, to be a server.
    """

    def __init__(self, ticket: bytes = NO_TICKET, *, of_client: bytes | None = None) -> None:
        identity = local_identity("server" if of_client else "client")
        start = handshake.Preamble.decode(of_client) if of_client else handshake.Preamble(ticket)
        self._handshake = handshake.Handshake(WRONG, identity, start)

    def says(self) -> bytes:
        """What it has to send now: a client its preamble and HELLO at first."""
        return self._handshake.data_to_send()

    def hears(self, type: int, payload: bytes) -> None:
        """Take a message of the other end."""
        self._handshake.receive(frames.Message(MessageType(type), payload=payload))


def session_of(address: str) -> RemoteSession:
    """This process's session on a node server."""
    return get_client().node(Address.parse(address)).session()


def ticket_of(address: str) -> bytes:
    """A ticket of it, which no other connection has."""
    session = session_of(address)
    session.wait()
    return session.make_ticket()


def open_channel_to(address: str, ticket: bytes = NO_TICKET) -> Channel:
    """A connection that is authenticated, by the secret of the tests."""
    deadline = Deadline(20 * TIMEOUT_SCALE)
    return open_channel(Address.parse(address), load_credentials(), local_identity("client"), ticket, deadline)


def open_as_client(address: str, ticket: bytes = NO_TICKET) -> tuple[Channel, Welcome]:
    """The same, and its welcome."""
    channel = open_channel_to(address, ticket)
    return channel, read_welcome(channel, Deadline(None))


def open_worker_of(address: str, control: Channel, session: int) -> Channel:
    """A worker connection of a session that :func:`open_as_client` has begun, whose process id is ``session``."""
    return open_as_client(address, Tickets(control.ticket_key, session).make())[0]


def encode_call(function: Callable[..., Any], *args: Any) -> tuple[bytes, list[memoryview]]:
    """Payload and blocks of a call."""
    encoded = dumps(tuple(Call(function, args, {})))
    return encoded.payload, encoded.buffers
