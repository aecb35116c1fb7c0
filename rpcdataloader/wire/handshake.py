"""The first bytes of a connection, versions, and a mutual proof of the secret, as a state machine without I/O.

The preamble is 32 bytes from the client, in clear, and the same in every version of the protocol. It has a ticket of a
session, or asks for a session, or for the status of the node. Then come HELLO and AUTH of both sides, the client's
first, each message as ``frames.py`` lays it out, with a JSON payload of at most 4 KiB; or REFUSED, from the side with
an objection. ``docs/protocol.md`` has the tables.

A proof is an HMAC under the shared secret over the role of its sender and a hash of everything said before: the
preamble, with the ticket, and both HELLOs, with fresh nonces, roles and versions. So an old transcript proves
nothing, a proof sent back to its sender proves nothing, and a man in the middle cannot change what the sides believe
about each other. From the same hash come the keys that seal all later messages, one for each direction, and the key of
a session's tickets.

Invariant: the client proves that it holds the secret before the server does, neither side trusts the other before it
has seen the proof, and nothing received here is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import secrets
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

from rpcdataloader.errors import AuthenticationError, ConnectError, LocalProtocolError, RemoteProtocolError
from rpcdataloader.wire.frames import HANDSHAKE_LIMITS, MAGIC, Message, MessageType, Sealer, encode
from rpcdataloader.wire.messages import printable, read_json

PROTOCOL_VERSION = 5

# Magic, version of the protocol, flags, reserved, ticket.
_PREAMBLE = struct.Struct("<8sHHI16s")
_PREAMBLE_MAGIC = b"RPCDLDR\x01"
_PREAMBLE_TLS = 1
PREAMBLE_SIZE = _PREAMBLE.size

# Process id of a session, number, MAC of both.
_TICKET = struct.Struct("<II8s")
TICKET_SIZE = _TICKET.size
_TICKET_MAC_SIZE = 8

# In place of a ticket, these ask for a new session and for the status of the node. No ticket has the number 0.
NO_TICKET = bytes(TICKET_SIZE)
STATUS_TICKET = bytes([1]).ljust(TICKET_SIZE, b"\0")

# Connections overtake each other. A ticket this far below the highest number is too old.
TICKET_WINDOW = 1 << 16

NONCE_SIZE = 32
_PROOF_SIZE = hashlib.sha256().digest_size

# Every use of the secret and of the hash has its own label, so that no value can serve another purpose.
_TRANSCRIPT_LABEL = b"rpcdataloader handshake transcript"
_PROOF_LABELS = {"client": b"rpcdataloader proof of the client", "server": b"rpcdataloader proof of the server"}
_KEY_LABELS = {"client": b"rpcdataloader key client to server", "server": b"rpcdataloader key server to client"}
_TICKET_LABEL = b"rpcdataloader key of tickets"

# Host names have at most 253 characters, and ten such strings fit into HANDSHAKE_LIMITS.
_MAX_STRING_CHARS = 255
_MAX_REFUSAL_CHARS = 500

_ROLE_NAMES = {"client": "client", "server": "node server"}


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first bytes of a connection, from the client."""

    ticket: bytes = NO_TICKET  # of a session; ``NO_TICKET`` asks for a new one, and ``STATUS_TICKET`` for the status
    version: int = PROTOCOL_VERSION  # that the client speaks
    tls: bool = False  # the client speaks TLS from here on; a server that does not, or requires it, can then say so

    def __post_init__(self) -> None:
        if len(self.ticket) != TICKET_SIZE:
            raise ValueError(f"a ticket has {TICKET_SIZE} bytes, not {len(self.ticket)}")
        if not 0 <= self.version < 2**16:
            raise ValueError(f"protocol version {self.version} does not fit into two bytes")

    def encode(self) -> bytes:
        """The 32 bytes to send."""
        return _PREAMBLE.pack(_PREAMBLE_MAGIC, self.version, _PREAMBLE_TLS * self.tls, 0, self.ticket)

    @classmethod
    def decode(cls, data: bytes) -> Preamble:
        """Read the 32 bytes that a client sent.

        Raises:
            RemoteProtocolError: These are not the first bytes of this protocol.
        """
        if not is_ours(data):
            found = data[: len(_PREAMBLE_MAGIC)]
            raise RemoteProtocolError(f"the peer does not speak this protocol: its first bytes are {found!r}")
        if len(data) != PREAMBLE_SIZE:
            raise RemoteProtocolError(f"the preamble has {PREAMBLE_SIZE} bytes, the peer sent {len(data)}")
        _magic, version, flags, _, ticket = _PREAMBLE.unpack(data)
        return cls(ticket, version, bool(flags & _PREAMBLE_TLS))


def is_ours(start: bytes) -> bool:
    """Whether a connection that begins like this may be one of this protocol."""
    return start[: len(_PREAMBLE_MAGIC)] == _PREAMBLE_MAGIC[: len(start)]


class Tickets:
    """The tickets of one session: its client makes one for each worker connection, and its node server takes it.

    A ticket is good once. It admits a connection to its session, and proves nothing beyond that: the handshake follows.

    Args:
        key: The ``ticket_key`` of the control connection's handshake.
        session: Process id of the session.
    """

    def __init__(self, key: bytes, session: int) -> None:
        self._key = key
        self._session = session
        self._numbers = itertools.count(1)
        self._highest = 0  # number of a taken ticket
        self._taken = 0  # bit n is set if the ticket n below the highest was taken

    def make(self) -> bytes:
        """A new ticket; for any thread."""
        return self._sign(next(self._numbers))

    def take(self, ticket: bytes) -> bool:
        """Whether a ticket is one of these, and has not been taken before."""
        number = _TICKET.unpack(ticket)[1]
        if not hmac.compare_digest(ticket, self._sign(number)):
            return False
        age = self._highest - number
        if age < 0:
            self._taken = self._taken << min(-age, TICKET_WINDOW) & (1 << TICKET_WINDOW) - 1
            self._highest, age = number, 0
        if age >= TICKET_WINDOW or self._taken >> age & 1:
            return False
        self._taken |= 1 << age
        return True

    def _sign(self, number: int) -> bytes:
        mac = hashlib.blake2b(struct.pack("<II", self._session, number), key=self._key, digest_size=_TICKET_MAC_SIZE)
        return _TICKET.pack(self._session, number, mac.digest())


def session_of(ticket: bytes) -> int:
    """The process id of the session that a ticket names; the ticket may be forged."""
    session: int = _TICKET.unpack(ticket)[0]
    return session


@dataclass(frozen=True, slots=True)
class Identity:
    """One side's self-description in HELLO."""

    role: str
    host: str
    pid: int
    rank: int | None  # in a distributed job; None outside of one
    protocol: int
    python_implementation: str  # such as ``"CPython"``
    python_version: str  # such as ``"3.11.7"``
    machine: str
    torch: str
    numpy: str
    cloudpickle: str
    job: str  # of Slurm, for the log; empty outside of one
    rpcdataloader: str  # version of this package

    def __str__(self) -> str:
        # A server speaks by a process that lives for one connection.
        which = f" (pid {self.pid})" if self.role == "client" else ""
        return f"the {_ROLE_NAMES.get(self.role, self.role)} on {self.host}{which}"


@dataclass(frozen=True, slots=True)
class Established:
    """Both sides have proved that they hold the secret, or one has made the other."""

    send: Sealer | None  # of this side's messages from now on; None on a socket pair, which nobody else can reach
    receive: Sealer | None  # of the peer's
    peer: Identity
    differences: list[str]  # versions that differ and may matter, for one warning
    ticket_key: bytes = b""  # of the session, if this is its control connection


class TlsError(AuthenticationError):
    """TLS failed, or only one of the two sides uses it; their secrets have not been compared."""


class UnavailableError(ConnectError):
    """A connection cannot be made or served now, for a reason that may pass: try again later.

    Args:
        cause: The reason without details that change while it lasts; the text by default.
    """

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause or text


class UnknownSessionError(RemoteProtocolError):
    """A worker connection has a ticket of a session that the node server does not know, or has had it already."""


Refusal = AuthenticationError | RemoteProtocolError | UnavailableError

# The first byte of a refusal in clear. Those of TLS begin with the type of a record, below 32.
IN_CLEAR = MAGIC[:1]


class Handshake:
    """One side: HELLO, then AUTH, each once. The client's preamble and HELLO are ready to send from the start.

    Not thread-safe. An error is final: send :meth:`data_to_send` before closing, so that the other side learns why.

    Args:
        identity: Self-description; its role chooses the side.
        preamble: The client's. On the server's side, it has been received already.
        nonce: 32 bytes, fresh and random by default; given by tests only.

    Attributes:
        established: Result of the handshake; None before both sides have proved that they hold the secret.
        peer_role: Role of the other side, in words.
    """

    def __init__(self, secret: bytes, identity: Identity, preamble: Preamble, nonce: bytes | None = None) -> None:
        if not secret:
            raise ValueError("the secret is empty")
        self.established: Established | None = None
        self._is_client = identity.role == "client"
        self._peer_role = "server" if self._is_client else "client"
        self.peer_role = _ROLE_NAMES[self._peer_role]
        self._secret = secret
        self._identity = identity
        self._preamble = preamble
        self._hello = _dump(nonce=(nonce or secrets.token_bytes(NONCE_SIZE)).hex(), identity=asdict(identity))
        if self._is_client:
            # Space, for JSON; a server of HTTP, or of another protocol of lines, would wait for more otherwise.
            self._hello += b"\r\n\r\n"
        self._expected: MessageType | None = MessageType.HELLO
        self._outgoing = bytearray()
        self._peer: Identity | None = None
        self._transcript = b""
        if self._is_client:
            self._outgoing += preamble.encode()
            self._queue(MessageType.HELLO, self._hello)

    def preamble_to_send(self) -> bytes:
        """A client's preamble alone, sent in clear before TLS; :meth:`data_to_send` does not return it again."""
        data = bytes(self._outgoing[:PREAMBLE_SIZE])
        del self._outgoing[:PREAMBLE_SIZE]
        return data

    def data_to_send(self) -> bytes:
        """Data for the peer; the next call does not return it again."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def receive(self, message: Message) -> None:
        """Process the peer's next message.

        Raises:
            AuthenticationError: One side does not hold the secret of the other.
            RemoteProtocolError: The peer is incompatible, or sent an unexpected message.
            LocalProtocolError: The handshake is over, with or without success.
        """
        if self._expected is None:
            raise LocalProtocolError("the handshake is over: it takes no further message")
        expected, self._expected = self._expected, None
        try:
            content = _load(message)
            if message.type == MessageType.REFUSED:
                raise _refusal_received(content, self.peer_role)
            if message.type != expected:
                raise RemoteProtocolError(
                    f"the {self.peer_role} sent message type {message.type} instead of {expected.name}"
                )
            if expected == MessageType.HELLO:
                self._receive_hello(bytes(message.payload), content)
                self._expected = MessageType.AUTH
            else:
                self._receive_auth(content)
        except (AuthenticationError, RemoteProtocolError) as error:
            if message.type != MessageType.REFUSED:
                self.refuse(error)
            raise

    def refuse(self, error: Refusal) -> None:
        """Tell the peer, with the next data to send, why the connection is refused."""
        self._expected = None
        self._outgoing += encode_refusal(error)

    def _receive_hello(self, payload: bytes, content: dict[str, Any]) -> None:
        _hex(content, "nonce", NONCE_SIZE)
        peer = _load_identity(content.get("identity"))
        if peer.role != self._peer_role:
            raise RemoteProtocolError(
                f"{peer} says that it is a {peer.role}, where only a {self._peer_role} can be; "
                "is something between the two sides sending messages back?"
            )
        _check_compatible(self._identity, peer)
        self._peer = peer
        hellos = (self._hello, payload) if self._is_client else (payload, self._hello)
        transcript = hashlib.sha256(_TRANSCRIPT_LABEL)
        for part in (self._preamble.encode(), *hellos):
            # With the length in front, moving a byte from one part to the next changes the hash.
            transcript.update(len(part).to_bytes(8, "little") + part)
        self._transcript = transcript.digest()
        if self._is_client:
            self._queue_proof()
        else:
            self._queue(MessageType.HELLO, self._hello)

    def _receive_auth(self, content: dict[str, Any]) -> None:
        assert self._peer is not None  # for mypy: HELLO comes first
        proof = _hex(content, "proof", _PROOF_SIZE)
        if not hmac.compare_digest(proof, self._derive(_PROOF_LABELS[self._peer_role])):
            raise AuthenticationError(
                f"{self._peer} and {self._identity} do not hold the same secret; "
                "give both the same token file (by default ~/.config/rpcdataloader/token), or, if that is a server of "
                "another user, use another port"
            )
        ours, theirs = _may_differ(self._identity), _may_differ(self._peer)
        self.established = Established(
            send=Sealer(self._derive(_KEY_LABELS[self._identity.role])),
            receive=Sealer(self._derive(_KEY_LABELS[self._peer_role])),
            peer=self._peer,
            differences=[
                f"{name}: {ours[name]} here, {theirs[name]} on {self._peer.host}"
                for name in sorted(dict(theirs.items() - ours.items()))
            ],
            ticket_key=self._derive(_TICKET_LABEL),
        )
        if not self._is_client:
            # Only now: a client without the secret gets no proof to try guesses against.
            self._queue_proof()

    def _derive(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\0" + self._transcript, "sha256")

    def _queue_proof(self) -> None:
        self._queue(MessageType.AUTH, _dump(proof=self._derive(_PROOF_LABELS[self._identity.role]).hex()))

    def _queue(self, type: MessageType, payload: bytes) -> None:
        self._outgoing += _encode(type, payload)


class _IncompatibleError(RemoteProtocolError):
    """The two sides' versions are incompatible."""


# In this order, since the classes are related. "protocol" stands for every other reason, known or not.
_REFUSALS: dict[str, type[Exception]] = {
    "tls": TlsError,
    "unavailable": UnavailableError,
    "authentication": AuthenticationError,
    "version": _IncompatibleError,
    "session": UnknownSessionError,
    "protocol": RemoteProtocolError,
}


def encode_refusal(error: Refusal) -> bytes:
    """The message of a side that refuses a connection."""
    code = next(code for code, error_class in _REFUSALS.items() if isinstance(error, error_class))
    return _encode(MessageType.REFUSED, _dump(code=code, text=str(error)[:_MAX_REFUSAL_CHARS]))


def refusal_in(message: Message, peer: str) -> Exception:
    """The error of a REFUSED message."""
    return _refusal_received(_load(message), peer)


def _refusal_received(content: dict[str, Any], peer: str) -> Exception:
    code, text = content.get("code"), content.get("text")
    if not isinstance(code, str) or not isinstance(text, str):
        return RemoteProtocolError(f"the {peer} refused this connection without a reason")
    error_class, text = _REFUSALS.get(code, RemoteProtocolError), _printable(text, _MAX_REFUSAL_CHARS)
    if error_class is UnavailableError:
        return UnavailableError(f"the {peer} cannot serve this connection now: {text}")
    return error_class(f"the {peer} refused this connection: {text}")


def _check_compatible(ours: Identity, peer: Identity) -> None:
    """Refuse a peer with which pickles must not be exchanged, naming both sides.

    Code objects only work in the minor version of Python that made them: a lambda of 3.11 crashes 3.12. Arrays and
    scalars of numpy 1 and 2 are pickled under different module names.
    """
    for (mine, shown, advice), (other, found, _) in zip(_must_match(ours), _must_match(peer), strict=True):
        if mine != other:
            raise _IncompatibleError(f"{ours} runs {shown}, {peer} runs {found}; {advice} on both sides")


def _must_match(side: Identity) -> list[tuple[object, str, str]]:
    """What must be equal on both sides, the same in words, and what to do if it is not."""
    python = f"{side.python_implementation} {_cut(side.python_version, 2)}"
    numpy = f"numpy {_cut(side.numpy, 1)}"
    package = f"rpcdataloader {side.rpcdataloader} (version {side.protocol} of the protocol)"
    return [
        (side.protocol, package, "install the same version of rpcdataloader"),
        (python, python, "use the same minor version of Python"),
        (numpy, numpy, "install the same major version of numpy"),
    ]


def _may_differ(side: Identity) -> dict[str, str]:
    # "2.11.0+cu128" on the trainer and "2.11.0+cpu" on the nodes is normal.
    torch, numpy = side.torch.partition("+")[0], _cut(side.numpy, 2)
    whole = {name: getattr(side, name) for name in ("rpcdataloader", "cloudpickle", "machine")}
    return {**whole, "torch": torch, "numpy": numpy}


def _cut(version: str, num_parts: int) -> str:
    return ".".join(version.split(".")[:num_parts])


def _encode(type: MessageType, payload: bytes) -> bytes:
    return b"".join(encode(None, type, payload=payload, limits=HANDSHAKE_LIMITS))


def _dump(**content: object) -> bytes:
    # Escapes for text that is not ASCII could exceed the limit of a message.
    return json.dumps(content, ensure_ascii=False).encode()


def _load(message: Message) -> dict[str, Any]:
    """The content of a message of the handshake."""
    if message.request_id or message.flags:
        raise RemoteProtocolError("the peer sent a message of the handshake with a request id or flags")
    try:
        return read_json(message.payload)
    except ValueError as error:
        raise RemoteProtocolError(f"the peer sent a message of the handshake that {error}") from None


def _hex(content: dict[str, Any], name: str, size_bytes: int) -> bytes:
    value = content.get(name)
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        data = b""
    if len(data) != size_bytes:
        raise RemoteProtocolError(f"the peer sent a message of the handshake without a {name} of {size_bytes} bytes")
    return data


def _load_identity(content: object) -> Identity:
    """Build an :class:`Identity` from the words of a peer that has proved nothing yet; ignores unknown ones."""
    values = content if isinstance(content, dict) else {}
    identity: dict[str, Any] = {}
    for item in fields(Identity):
        value = values.get(item.name)
        is_text, is_number = isinstance(value, str), type(value) is int and 0 <= value < 2**63
        if not (is_text if item.type == "str" else is_number or (item.name == "rank" and value is None)):
            raise RemoteProtocolError(f"the peer sent a HELLO without a valid {item.name}")
        identity[item.name] = _printable(value, _MAX_STRING_CHARS) if isinstance(value, str) else value
    return Identity(**identity)


def _printable(text: str, max_chars: int) -> str:
    """Text from a peer, fit for a terminal and a log: no control characters, no line breaks, limited in length."""
    shown = printable(text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[: max_chars - 3] + "..."
