"""The first bytes of a connection: 32, from the client, in clear. Pure.

::

    offset  size  field
         0     8  magic          b"RPCDLDR\\x01"
         8     2  version        of the protocol; judged in the handshake, where both sides can be named
        10     2  flags          bit 0: TLS follows at once; others zero, ignored when received
        12     4  reserved       zero; ignored when received
        16    16  session id     zero: start a session; 1: tell the status of the node; else: start a worker of that
                                 session

The preamble is the same in every version of the protocol.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rpcdataloader.errors import RemoteProtocolError

PROTOCOL_VERSION = 2

_PREAMBLE = struct.Struct("<8sHHI16s")
_PREAMBLE_MAGIC = b"RPCDLDR\x01"
_PREAMBLE_TLS = 1
PREAMBLE_SIZE = _PREAMBLE.size
SESSION_ID_SIZE = 16

# In place of a session id, requests a status connection. Ids of sessions are random.
STATUS_ID = bytes([1]).ljust(SESSION_ID_SIZE, b"\0")


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first bytes of a connection, from the client.

    Attributes:
        session_id: 16 bytes; zero to start a new session, ``STATUS_ID`` for a status connection.
        version: Version of the protocol that the client speaks.
        tls: True if the client speaks TLS from here on. A server that does not, or that requires it, can then say so.
    """

    session_id: bytes = bytes(SESSION_ID_SIZE)
    version: int = PROTOCOL_VERSION
    tls: bool = False

    def __post_init__(self) -> None:
        if len(self.session_id) != SESSION_ID_SIZE:
            raise ValueError(f"a session id has {SESSION_ID_SIZE} bytes, not {len(self.session_id)}")
        if not 0 <= self.version < 2**16:
            raise ValueError(f"protocol version {self.version} does not fit into two bytes")

    def encode(self) -> bytes:
        """The 32 bytes to send."""
        return _PREAMBLE.pack(_PREAMBLE_MAGIC, self.version, _PREAMBLE_TLS * self.tls, 0, self.session_id)

    @classmethod
    def decode(cls, data: bytes) -> Preamble:
        """Read the 32 bytes that a client sent.

        Raises:
            RemoteProtocolError: These are not the first bytes of this protocol.
        """
        if len(data) != PREAMBLE_SIZE:
            raise RemoteProtocolError(f"the preamble has {PREAMBLE_SIZE} bytes, the peer sent {len(data)}")
        magic, version, flags, _, session_id = _PREAMBLE.unpack(data)
        if magic != _PREAMBLE_MAGIC:
            raise RemoteProtocolError(f"the peer does not speak this protocol: its first bytes are {magic!r}")
        return cls(session_id, version, bool(flags & _PREAMBLE_TLS))
