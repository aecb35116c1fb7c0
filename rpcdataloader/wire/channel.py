"""One connection from the first byte on: preamble, handshake, then sealed messages in both directions.

The same class serves both sides. Any thread may send, one at a time and in the order of sealing; one thread receives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from rpcdataloader import __version__
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
    RPCError,
    RPCTimeoutError,
)
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import connect, is_original
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.frames import (
    HANDSHAKE_LIMITS,
    Allocate,
    Arrival,
    Decoder,
    Message,
    MessageType,
    SharedBlock,
    encode,
    heap_blocks,
)
from rpcdataloader.wire.handshake import (
    NO_TICKET,
    PREAMBLE_SIZE,
    PROTOCOL_VERSION,
    STATUS_TICKET,
    Established,
    Handshake,
    Identity,
    Preamble,
    Refusal,
    TlsError,
    UnavailableError,
    UnknownSessionError,
)
from rpcdataloader.wire.tls import VARIABLES, TlsFiles, TlsTransport, reason_of
from rpcdataloader.wire.transport import Deadline, Transport, without_start


class Outgoing(NamedTuple):
    """A message to send; the first fields are the arguments of :func:`~rpcdataloader.wire.frames.encode`."""

    type: MessageType
    request_id: int = 0
    payload: bytes = b""
    buffers: Sequence[memoryview] = ()
    flags: int = 0
    digest_of_blocks: bytes = b""
    descriptor: int = -1  # to send with it, over a Unix socket; closed then
    size_bytes: int = 0  # of payload and blocks together; of a request, whose answer the sender counts against it


class Receiver:
    """The messages of one direction.

    Args:
        deadline: Bounds each receive call; None for no limit.
    """

    def __init__(self, transport: Transport, decoder: Decoder, deadline: Deadline | None = None) -> None:
        self._transport = transport
        self._decoder = decoder
        self._deadline = deadline
        self._arrival: Arrival | None = None  # of the present message

    def receive(self) -> Message | None:
        """Receive the next message; None when the peer has closed between two messages.

        Raises:
            RemoteProtocolError: The peer sent something forbidden, or the message was altered on its way.
            ConnectionLostError: The connection broke, perhaps in the middle of a message.
        """
        self._arrival = None
        try:
            message = self._decoder.read(self._fill)
        except EOFError:
            raise ConnectionLostError(f"connection to {self._transport.name} lost in the middle of a message") from None
        if message is not None:
            message.arrival, message.peer = self._arrival, self._transport.name
        return message

    def _fill(self, views: list[memoryview], is_first: bool) -> int:
        transport = self._transport
        filled, missing = 0, sum(map(len, views))
        if len(transport.unread) >= missing and len(views) == 1:  # as of a small message that was read ahead
            views[0][:] = transport.unread[:missing]
            transport.unread = transport.unread[missing:]
            return missing
        while True:
            if self._deadline is not None:
                # For each receive anew: a peer that sends a byte now and then must not hold this side without limit.
                transport.limit(self._deadline)
            if not is_first and not transport.unread:
                # Nothing is read ahead, so that this takes another receive call.
                if self._arrival is None:
                    self._arrival = Arrival(time.monotonic(), time.thread_time(), True)
                if self._arrival.was_here and transport.count_waiting() < missing:
                    self._arrival = self._arrival._replace(was_here=False)
            size = transport.recv_into(views)
            filled += size
            missing -= size
            if not size or not missing:
                return filled
            views, is_first = without_start(views, size), False


class Channel:
    """An authenticated connection.

    Attributes:
        name: Name of the peer in messages: an address or ``"client host:pid"``.
        ticket: The one in the preamble.
        ticket_key: Key of the session's tickets, if this is its control connection.
        differences: Versions that differ between the two sides without being refused.
        recv: :meth:`Receiver.receive`.
    """

    def __init__(self, transport: Transport, established: Established, ticket: bytes, name: str) -> None:
        self.name = name
        self.ticket = ticket
        self.ticket_key = established.ticket_key
        self.peer = established.peer
        self.differences = established.differences
        self.transport = transport
        self._sealer = established.send
        self._send_lock = threading.Lock()
        self._decoder = Decoder(heap_blocks, established.receive)
        self.recv = Receiver(transport, self._decoder).receive

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self.transport.fileno()

    def allocate_with(self, allocate: Allocate) -> None:
        """Let ``allocate`` choose the memory for received blocks."""
        self._decoder.allocate = allocate

    def borrow_with(self, borrow: Callable[[int, SharedBlock], Any]) -> None:
        """Accept descriptors, and blocks in shared memory, which ``borrow`` finds."""
        self.transport.take_descriptors()
        self._decoder.borrow = borrow

    @property
    def is_sending(self) -> bool:
        """Whether a thread, perhaps this one, is in the middle of a message."""
        return self._send_lock.locked()

    def send(
        self,
        type: MessageType,
        request_id: int = 0,
        payload: bytes | bytearray | memoryview = b"",
        buffers: Sequence[memoryview] = (),
        flags: int = 0,
    ) -> None:
        """Seal and send one message; blocks until the kernel has taken all of it."""
        with self._send_lock:
            try:
                self.transport.send(encode(self._sealer, type, request_id, payload, buffers, flags))
            except LocalProtocolError:
                raise  # it was not sealed
            except BaseException:
                # A KeyboardInterrupt between sealing and sending, as in `begin`.
                self.transport.shutdown()
                raise

    def seal(self, message: Outgoing) -> list[bytes | memoryview]:
        """Seal a message, which is sent next; for a single thread at a time, as :meth:`begin`."""
        return encode(self._sealer, *message[:6])

    def begin(self, *messages: Outgoing) -> bool:
        """Seal messages, and send what the kernel takes of them without a wait; True if that is all.

        Otherwise the transport's ``send`` begins with the rest. A message with a descriptor comes alone, and is small:
        it is sent whole.
        """
        try:
            pieces: list[bytes | memoryview] = []
            for message in messages:
                pieces += self.seal(message)
            if messages[0].descriptor < 0:
                return self.transport.send_now(pieces)
            with contextlib.closing(os.fdopen(messages[0].descriptor, "rb", 0)) as file:
                self.transport.send_descriptor(b"".join(pieces), file.fileno())
            return True
        except BaseException:
            # A KeyboardInterrupt between sealing and sending: the peer would take the next message for an altered one.
            self.transport.shutdown()
            raise


def open_channel(
    address: Address,
    credentials: Credentials,
    identity: Identity,
    ticket: bytes,
    deadline: Deadline,
    *,
    retry: bool = False,
    tell: Callable[[str], None] = lambda _reason: None,
    find_host: Callable[[], str] = str,
    tls: TlsFiles | None = None,
) -> Channel:
    """Connect to a node server and authenticate both sides.

    Args:
        ticket: A new one of a session, ``NO_TICKET`` or ``STATUS_TICKET``.
        deadline: Bounds connecting and the handshake together.
        retry, find_host: Arguments of :func:`~rpcdataloader.wire.connecting.connect`.
        tell: Function that takes the reason for which the server is still waited for, whenever that changes.
        tls: Files for TLS; None without TLS. They are read now, as they may have been renewed. Not for Unix sockets,
            which cannot be listened in on.

    Raises:
        UnavailableError: The server, or this process, has no room for a connection now, or its certificate is being
            renewed.
        ConnectError: No server listens there.
        AuthenticationError: One side does not know the secret of the other, or does not accept its certificate.
        RemoteProtocolError: The peer is no node server, or one of another version.
    """
    transport = connect(address, deadline, retry=retry, tell=tell, find_host=find_host)
    try:
        tell("it has accepted the connection, and does not finish the handshake (is it overloaded?)")
        if credentials.insecure:
            transport.require_same_user()
        handshake = Handshake(credentials.secret, identity, Preamble(ticket, tls=tls is not None))
        if tls is not None:
            try:
                credentials_of_tls = tls.load("client")
            except TlsError as exc:  # they could be used before
                raise UnavailableError(str(exc)) from exc
            transport.limit(deadline)
            transport.send([handshake.preamble_to_send()])
            secure = TlsTransport(transport, credentials_of_tls, address.host)
            secure.shake_hands(deadline, functools.partial(_shake_hands, transport, handshake, deadline))
            transport = secure
        established = _shake_hands(transport, handshake, deadline)
        transport.limit(Deadline(None))
        return Channel(transport, established, ticket, str(address))
    except BaseException as exc:
        transport.close()
        match exc:
            case RPCTimeoutError():
                raise ConnectError(
                    f"{address} accepted the connection, but did not finish the handshake in time "
                    "(is it a node server of this package? is it overloaded?)"
                ) from exc
            case UnavailableError():
                raise UnavailableError(f"{address}: {exc}") from exc
            case UnknownSessionError():
                raise UnknownSessionError(f"{address}: {exc}") from exc
            case RemoteProtocolError():
                raise RemoteProtocolError(f"{address}: {exc}") from exc
            case TlsError():
                raise AuthenticationError(f"{address}: {exc}") from exc
            case AuthenticationError():
                secret = f"this client's secret: {credentials.source}, fingerprint {credentials.fingerprint}"
                raise AuthenticationError(f"{address}: {exc} ({secret})") from exc
            case ConnectionLostError():
                # One that has begun a session is none of these.
                is_unknown = not address.is_unix and ticket in (NO_TICKET, STATUS_TICKET)
                if is_unknown and is_original(find_host() or address.host, address.port):
                    raise RemoteProtocolError(
                        f"{address}: a worker of the original RPCDataloader listens there, and no node server of this "
                        "package. It runs what any peer sends to that port: stop it, and install this package there"
                    ) from exc
                guess = "in the handshake: perhaps it is no node server, or one that ends"
                raise ConnectionLostError(f"{exc} ({guess})") from exc
        raise


def pair_channel(transport: Transport, name: str) -> Channel:
    """One end of a socket pair between a process and its child, which need not prove who they are."""
    return Channel(transport, Established(None, None, local_identity("client"), []), NO_TICKET, name)


def accept_channel(
    transport: Transport, credentials: Credentials, identity: Identity, tls: TlsFiles | None = None
) -> Channel:
    """Authenticate a client, whose preamble has arrived. The process that forked this one limits its time.

    Args:
        tls: Files for TLS, which is then required; None without TLS. The files are read now.

    Raises:
        AuthenticationError: The client does not know the secret, or its certificate is not accepted.
        UnavailableError: This server's own files for TLS cannot be used now.
        RemoteProtocolError: The client speaks another protocol or version, or broke this one.
    """
    if credentials.insecure:
        transport.require_same_user()
    start = bytearray(PREAMBLE_SIZE)
    size = transport.recv_into([memoryview(start)])
    preamble = Preamble.decode(bytes(start[:size]))
    handshake = Handshake(credentials.secret, identity, preamble)
    if tls is not None or preamble.tls:
        transport = _accept_tls(transport, handshake, preamble, tls)
    established = _shake_hands(transport, handshake, Deadline(None))
    peer = established.peer
    transport.name = f"client {peer.host}:{peer.pid}" + ("" if peer.rank is None else f" rank {peer.rank}")
    return Channel(transport, established, preamble.ticket, transport.name)


def _accept_tls(transport: Transport, handshake: Handshake, preamble: Preamble, files: TlsFiles | None) -> TlsTransport:
    try:
        if files is None:
            raise TlsError(
                "the client speaks TLS and this node server does not; start the server with --tls-cert, --tls-key and "
                f"--tls-ca, or unset {VARIABLES} for the client"
            )
        if not preamble.tls:
            raise TlsError(
                f"this node server requires TLS, and the client does not speak it; set {VARIABLES} for the client"
            )
        try:
            credentials = files.load("server")
        except TlsError as exc:  # it could be used before, and may be about to be renewed
            raise UnavailableError(str(exc)) from exc
    except (TlsError, UnavailableError) as exc:
        _refuse(transport, handshake, exc)
        raise
    secure = TlsTransport(transport, credentials)
    secure.shake_hands(Deadline(None))
    return secure


def _refuse(transport: Transport, handshake: Handshake, error: Refusal) -> None:
    if isinstance(error, UnavailableError):
        # An unauthenticated client learns OpenSSL's words, and nothing of the server's files.
        cause = error.__cause__ and error.__cause__.__cause__
        reason = reason_of(cause) if isinstance(cause, OSError) else "they are not safe"
        error = UnavailableError(f"it cannot use its own certificate and key ({reason}); its log says more")
    handshake.refuse(error)
    _send_farewell(transport, handshake.data_to_send())


def _shake_hands(transport: Transport, handshake: Handshake, deadline: Deadline) -> Established:
    receiver = Receiver(transport, Decoder(heap_blocks, None, HANDSHAKE_LIMITS), deadline)
    while True:
        transport.limit(deadline)
        if data := handshake.data_to_send():
            transport.send([data])
        if handshake.established is not None:
            return handshake.established
        try:
            message = receiver.receive()
            if message is None:
                raise ConnectionLostError(
                    f"{transport.name} closed the connection during the handshake "
                    f"(is it a {handshake.peer_role} of this package?)"
                )
            handshake.receive(message)
        except RPCError:
            # Tell the other side why, if possible; the first error is raised.
            if data := handshake.data_to_send():
                _send_farewell(transport, data)
            raise


def _send_farewell(transport: Transport, data: bytes) -> None:
    with contextlib.suppress(RPCError):
        transport.send([data])
        transport.finish()


# Slurm's are numbers. A longer one must not make a HELLO too long to send.
_MAX_JOB_CHARS = 64


def local_identity(role: str, rank: int | None = None) -> Identity:
    """Describe this process."""
    return Identity(
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=rank,
        protocol=PROTOCOL_VERSION,
        python_implementation=platform.python_implementation(),
        python_version=platform.python_version(),
        machine=platform.machine(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        cloudpickle=_version("cloudpickle"),
        # A server tells unauthenticated clients as little as possible.
        job=os.environ.get("SLURM_JOB_ID", "")[:_MAX_JOB_CHARS] if role == "client" else "",
        rpcdataloader=__version__,
    )


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built in place, without metadata; or not installed
        return "unknown"
