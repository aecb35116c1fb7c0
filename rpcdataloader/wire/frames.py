"""The wire format of one message, without I/O; ``docs/protocol.md`` has the tables.

After the preamble (``handshake.py``), each message in either direction is a header, a body (table of block sizes,
digest of the blocks if any, payload), and the blocks, back to back.

The header and the HELLO message are the same in every version of the protocol, as is the preamble, so that sides of
different versions can tell each other.

Invariant: no length is believed before its MAC and its limit have been checked, no block is allocated before the
digest of the table that gives its size, and no message is handed out before all of that. The MAC covers the body
through its digest, and so the blocks of CALL and BUILD, whose bytes user code may interpret, for example as pickles.
It does not cover those of LOAD and of replies, which are the memory of arrays, tensors and byte strings: samples are
too large to hash (TLS protects those).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from rpcdataloader.errors import LocalProtocolError, RemoteProtocolError

# Magic, type, flags, size of the header, request id, bytes of the payload, number of blocks, reserved, digest, MAC.
_HEADER = struct.Struct("<4sBBHQQII32s16s")
_SEALED_PART = struct.Struct("<4sBBHQQII32s")
MAGIC = b"RPDL"

# In place of the magic, from other protocols' answers to a client's first message. HTTP/0.9 has no status line.
_OTHERS = (b"HTTP", "an HTTP server"), (b"<", "an HTTP server"), (b"SSH-", "an SSH server")
HEADER_SIZE = _HEADER.size
MAC_SIZE = 16
_NO_MAC = bytes(MAC_SIZE)
_COUNTER = struct.Struct("<Q")

# Below this, one more copy of the payload is cheaper than one more element for sendmsg to gather.
_JOIN_BELOW_BYTES = 16 * 1024


Buffer = bytes | bytearray | memoryview

Allocate = Callable[[int, Sequence[int]], list[Any]]
"""``allocate(request_id, sizes in bytes)`` returns memory for one block per size, in order.

The ``view`` of each is writable, contiguous, of format ``"B"``, and of exactly the requested size, which may be 0.
"""

Fill = Callable[[list[memoryview], bool], int]
"""``fill(views, is_first)`` receives into ``views``, none of them empty, in order: all, unless the stream ends.

Returns the number of bytes. ``is_first`` is true for the first bytes of a message.
"""


class MessageType(IntEnum):
    """The meaning of a message. Numbers below 16 belong to the set-up of a connection."""

    HELLO = 1
    AUTH = 2
    REFUSED = 3
    WELCOME = 4
    BUSY = 5
    CALL = 16
    REPLY = 17
    ERROR = 18
    RELEASE = 19
    CANCEL = 20
    LOG = 21
    GOAWAY = 22
    EXITED = 23
    BUILD = 24
    STACK = 25
    STATS = 26
    REPORT = 27
    MAPPING = 28
    RETURN = 29
    LOAD = 30


class Flag(IntFlag):
    """Bits of the ``flags`` field."""

    MEASURED = 1  # CALL: measure this one. REPLY to it: the payload ends with ``messages.Stages``.
    SHARED = 2  # REPLY: the table has three numbers for each block, as some lie in memory that both sides see
    REGISTERED = 4  # MAPPING of a client: a device reads its pages, which must stay


# Plain containers: a lookup in the enumerations costs more than all other checks of a header together.
_MESSAGE_TYPES: dict[int, MessageType] = {int(member): member for member in MessageType}
_WITH_BLOCK_DIGEST = frozenset((MessageType.CALL, MessageType.BUILD))
_DIGEST_SIZE = 32
_KNOWN_FLAGS = int(Flag.MEASURED | Flag.SHARED | Flag.REGISTERED)
_SHARED = int(Flag.SHARED)


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest message to accept; nothing is allocated for a larger one.

    The defaults are far above every real batch. They stop damaged lengths, not large data sets.
    """

    payload_size_bytes: int = 2**36
    num_blocks: int = 2**20
    block_size_bytes: int = 2**40
    message_size_bytes: int = 2**42

    def find_excess(self, payload_size: int, num_blocks: int, block_sizes: Sequence[int] = ()) -> str | None:
        """What is too large about a message, in words; None within the limits. All sizes are in bytes.

        ``num_blocks`` is in the header, and so is known before ``block_sizes``.
        """
        if payload_size > self.payload_size_bytes:
            return f"a payload of {payload_size} bytes is over the limit of {self.payload_size_bytes}"
        if num_blocks > self.num_blocks:
            return f"{num_blocks} blocks are over the limit of {self.num_blocks}"
        if block_sizes and max(block_sizes) > self.block_size_bytes:
            return f"a block of {max(block_sizes)} bytes is over the limit of {self.block_size_bytes}"
        if payload_size + sum(block_sizes) > self.message_size_bytes:
            total = payload_size + sum(block_sizes)
            return f"a message of {total} bytes is over the limit of {self.message_size_bytes}"
        return None


DEFAULT_LIMITS = Limits()

# Every process that reaches the port may send these messages, so they are small, and need no allocator.
HANDSHAKE_LIMITS = Limits(payload_size_bytes=4096, num_blocks=0, block_size_bytes=0, message_size_bytes=4096)


class Arrival(NamedTuple):
    """The arrival of a message that took more than one receive call."""

    at: float  # time of its first bytes (``time.monotonic``)
    cpu: float  # CPU time of the receiving thread at that moment
    was_here: bool  # the kernel had all missing bytes each time they were asked for


@dataclass(slots=True)
class Message:
    """One message, as received."""

    type: int
    flags: int = 0
    request_id: int = 0  # chosen by the client; a reply carries that of its request
    payload: Buffer = b""  # memory of the receiver's own, never reused for other messages
    blocks: list[Any] = field(default_factory=list)  # the allocator's, filled
    arrival: Arrival | None = None  # the channel's note; None if the message came as a whole
    peer: str = ""  # the channel's note: the sender's name here, such as the address of a node server


class Sealer:
    """Makes or checks the MACs of one direction of a connection.

    A MAC is keyed BLAKE2b (RFC 7693) of 16 bytes over a counter (8 bytes, little-endian, not sent) and the header up to
    the MAC. The counter is 0 for the first sealed message and grows with each, so a replayed, dropped, swapped or
    injected message fails, as an altered one does.

    Not thread-safe, and order matters: messages are sealed in the order of sending, under the connection's send lock.

    Args:
        key: 1 to 64 bytes.
    """

    __slots__ = ("_keyed", "num_sealed")

    def __init__(self, key: bytes) -> None:
        if not key:
            raise ValueError("the key is empty")
        # The key is hashed once. HMAC-SHA256 kept in the same way takes 1.7 times as long, and hmac.digest five times.
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_SIZE)
        self.num_sealed = 0

    def seal(self, header_without_mac: Buffer) -> bytes:
        """The MAC of the next message; the receiver computes it, too, and compares in constant time."""
        mac = self._keyed.copy()
        mac.update(_COUNTER.pack(self.num_sealed) + header_without_mac)
        self.num_sealed += 1
        return mac.digest()


class SharedBlock(NamedTuple):
    """A block that the receiver finds in memory which both sides see; none of its bytes are sent."""

    mapping: int  # from 1
    offset: int
    size_bytes: int

    @property
    def nbytes(self) -> int:
        """The number of bytes to send."""
        return 0


def as_bytes(buffer: Buffer) -> memoryview:
    """A view of format ``"B"`` and one dimension; TypeError when the buffer is not contiguous."""
    view = memoryview(buffer)
    # An empty view of another shape or format cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


class HeapBlock:
    """A block of ordinary memory, for messages that need no pool."""

    __slots__ = ("view",)

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))


def heap_blocks(_request_id: int, sizes: Sequence[int]) -> list[Any]:
    """Allocate blocks of ordinary memory (an ``Allocate``)."""
    return [HeapBlock(size) for size in sizes]


def encode(
    sealer: Sealer | None,
    type: int,
    request_id: int = 0,
    payload: Buffer = b"",
    buffers: Sequence[Buffer | SharedBlock] = (),
    flags: int = 0,
    digest_of_blocks: bytes = b"",
    limits: Limits = DEFAULT_LIMITS,
) -> list[bytes | memoryview]:
    """Encode one message as the buffers to send, in this order.

    Blocks are never copied: they, and a large payload, must not change until they have been sent.

    Args:
        sealer: Sealer of this direction; None in the handshake. Unchanged after an error.
        request_id: Number of the request; 0 for a message without one.
        payload: Bytes of the payload, usually a pickle.
        buffers: The blocks: C-contiguous, of any format and shape, also empty.
        digest_of_blocks: Result of :func:`digest_blocks` for a CALL or BUILD, if the caller has it already.
        limits: Limits of the receiver. Checked here too: it would answer by closing the connection.

    Returns:
        At least one buffer, none of them empty.

    Raises:
        LocalProtocolError: The message is over the limits.
    """
    if not isinstance(payload, bytes):
        payload = as_bytes(payload)
    blocks: list[memoryview] = []
    sizes: list[int] = []
    if buffers:
        blocks = [as_bytes(buffer) for buffer in buffers if not isinstance(buffer, SharedBlock)]
        sizes = [each.size_bytes if isinstance(each, SharedBlock) else memoryview(each).nbytes for each in buffers]
    if len(blocks) < len(buffers):
        flags |= _SHARED
    if sizes or len(payload) > limits.payload_size_bytes:
        excess = limits.find_excess(len(payload), len(sizes), sizes)
        if excess is not None:
            raise LocalProtocolError(f"this cannot be sent: {excess}; send it in parts")
    table = b""
    if sizes:
        if flags & _SHARED:
            places = (buffer[:2] if isinstance(buffer, SharedBlock) else (0, 0) for buffer in buffers)
            table = b"".join(struct.pack("<3Q", size, *place) for size, place in zip(sizes, places, strict=True))
        else:
            table = struct.pack(f"<{len(sizes)}Q", *sizes)
        if type in _WITH_BLOCK_DIGEST:
            table += digest_of_blocks or digest_blocks(blocks)
    digest = hashlib.sha256(table)
    digest.update(payload)
    header = _SEALED_PART.pack(
        MAGIC, type, flags, HEADER_SIZE, request_id, len(payload), len(sizes), 0, digest.digest()
    )
    mac = _NO_MAC if sealer is None else sealer.seal(header)
    encoded: list[bytes | memoryview]
    if len(payload) < _JOIN_BELOW_BYTES:
        encoded = [b"".join((header, mac, table, payload))]
    else:
        encoded = [header + mac + table, payload]
    encoded += filter(None, blocks)
    return encoded


def digest_blocks(blocks: Sequence[memoryview]) -> bytes:
    """The SHA-256 of the bytes of all blocks."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.digest()


class Decoder:
    """Turns the bytes of one direction of a connection into messages, without copying them.

    The caller owns the socket. Headers are received into reused memory, a body into memory of its own, and all blocks
    of a message at once into memory from ``allocate``. An error is final: the start of the next message is lost.

    Args:
        allocate: Function called once per message with blocks, after a check of their sizes. May be replaced between
            messages.
        sealer: Sealer of this direction; None before the handshake has made one.
        limits: Limits for each message.

    Attributes:
        borrow: Function that returns the memory of a shared block, given the request id; None to refuse such blocks.
    """

    def __init__(self, allocate: Allocate, sealer: Sealer | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self.allocate = allocate
        self.borrow: Callable[[int, SharedBlock], Any] | None = None
        self._sealer = sealer
        self._limits = limits
        self._header = memoryview(bytearray(HEADER_SIZE))
        self._is_broken = False

    def read(self, fill: Fill) -> Message | None:
        """Read the next message.

        Returns:
            The message; None if the stream ends before it.

        Raises:
            EOFError: The stream ends in the middle of a message.
            RemoteProtocolError: The peer broke the format, a limit or the MAC.
        """
        if self._is_broken:
            raise RemoteProtocolError("nothing more can be read from this connection after an error")
        try:
            size = fill([self._header], True)
            if not size:
                return None
            if size < HEADER_SIZE:
                self._check_magic(bytes(self._header[:size]))
                raise EOFError
            message, payload_size, num_blocks, digest = self._read_header()
            table_size = (24 if message.flags & _SHARED else 8) * num_blocks
            if num_blocks and message.type in _WITH_BLOCK_DIGEST:
                table_size += _DIGEST_SIZE
            body = memoryview(bytearray(table_size + payload_size))
            # A receive into an empty view returns 0, which looks like the end of the stream.
            if body and fill([body], False) < len(body):
                raise EOFError
            # Compared in constant time for uniformity only: guesses against an authenticated header are impossible.
            if not hmac.compare_digest(hashlib.sha256(body).digest(), digest):
                raise RemoteProtocolError(f"the body of message {message.request_id} was altered on its way")
            message.payload = body[table_size:]
            if num_blocks:
                self._read_blocks(fill, message, num_blocks, body[:table_size])
            return message
        except BaseException:
            self._is_broken = True
            raise

    @staticmethod
    def _check_magic(start: bytes) -> None:
        if not start.startswith(MAGIC) and not MAGIC.startswith(start):
            known = next((name for sign, name in _OTHERS if start.startswith(sign)), None)
            what = "the peer sent no message" if known is None else f"{known} answers there"
            raise RemoteProtocolError(f"{what}: {start[:4]!r} is where one should begin")

    def _read_header(self) -> tuple[Message, int, int, bytes]:
        """The message without its content, payload size, number of blocks, and digest of the body."""
        magic, code, flags, header_size, request_id, payload_size, num_blocks, reserved, digest, mac = _HEADER.unpack(
            self._header
        )
        if magic != MAGIC:
            self._check_magic(magic)
        sealer = self._sealer
        if sealer is not None:
            if not hmac.compare_digest(sealer.seal(self._header[:-MAC_SIZE]), mac):
                raise RemoteProtocolError(
                    f"message {sealer.num_sealed - 1} from the peer failed authentication (altered, replayed or "
                    "injected)"
                )
        elif mac != _NO_MAC:
            raise RemoteProtocolError("the peer sent a message with a MAC before the handshake was over")
        if header_size != HEADER_SIZE or reserved or flags & ~_KNOWN_FLAGS:
            raise RemoteProtocolError(
                f"the peer sent a header that this version cannot read: size {header_size}, flags {flags}, "
                f"reserved {reserved}"
            )
        if (type := _MESSAGE_TYPES.get(code)) is None:
            raise RemoteProtocolError(f"the peer sent a message of the unknown type {code}")
        is_usual = not num_blocks and payload_size <= self._limits.payload_size_bytes
        if not is_usual and (excess := self._limits.find_excess(payload_size, num_blocks)) is not None:
            raise _too_much(excess)
        return Message(type, flags, request_id), payload_size, num_blocks, digest

    def _read_blocks(self, fill: Fill, message: Message, num_blocks: int, table: memoryview) -> None:
        borrow = self.borrow
        shared: list[SharedBlock | None] = []
        if message.flags & _SHARED:
            message.flags &= ~_SHARED
            if borrow is None or message.type in _WITH_BLOCK_DIGEST:
                raise RemoteProtocolError("the peer sent a shared block where there is no shared memory")
            entries = struct.iter_unpack("<3Q", table)
            shared = [SharedBlock(mapping, offset, size) if mapping else None for size, mapping, offset in entries]
            sizes = struct.unpack(f"<{3 * num_blocks}Q", table)[::3]
        else:
            sizes = struct.unpack_from(f"<{num_blocks}Q", table)
        if (excess := self._limits.find_excess(len(message.payload), num_blocks, sizes)) is not None:
            raise _too_much(excess)
        if shared:
            sizes = tuple(size for size, block in zip(sizes, shared, strict=True) if block is None)
        message.blocks = self.allocate(message.request_id, sizes)
        views = [block.view for block in message.blocks]
        if tuple(map(len, views)) != sizes:
            raise LocalProtocolError(f"the allocator gave blocks of other sizes than {sizes}")
        if any(sizes) and fill(list(filter(None, views)), False) < sum(sizes):
            raise EOFError
        digest = table[8 * num_blocks :]
        if digest and not shared and not hmac.compare_digest(digest_blocks(views), digest):
            raise RemoteProtocolError(
                f"the blocks of message {message.request_id} were altered on their way, or by the sender's script"
            )
        if shared and borrow is not None:
            received = iter(message.blocks)
            message.blocks = [borrow(message.request_id, block) if block else next(received) for block in shared]


def _too_much(excess: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the peer announced too much: {excess}")
