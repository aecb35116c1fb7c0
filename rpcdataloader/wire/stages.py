"""What a worker tells of one batch beside its reply: 40 bytes of durations. Pure.

Durations only, never times of day: the clocks of two machines are never compared. A worker measures the batches whose
request asks for it, and sends nothing with the others.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rpcdataloader.errors import RemoteProtocolError

_LAYOUT = struct.Struct("<10f")


class Stages(NamedTuple):
    """Seconds that a batch took at its worker.

    Attributes:
        idle: Time without any request before this one; 0 if the request was there when the one before was answered.
        fetch: Time in the dataset.
        collate: Time in the collate function.
        encode: Time to pickle the batch.
        reply: Time that the worker's previous measured reply waited to be written, and was written.
        cpu: CPU time of all threads of the worker in fetch, collate and encode.
        runqueue: Time in these that the main thread waited for a CPU (the second number of ``/proc/self/schedstat``).
        sending: Time since the previous measured reply that the connection had unacknowledged data
            (``tcpi_busy_time``), of which it was limited
        peer_limited: by the receive window of the trainer (``tcpi_rwnd_limited``),
        buffer_limited: by its own send buffer (``tcpi_sndbuf_limited``).
    """

    idle: float = 0.0
    fetch: float = 0.0
    collate: float = 0.0
    encode: float = 0.0
    reply: float = 0.0
    cpu: float = 0.0
    runqueue: float = 0.0
    sending: float = 0.0
    peer_limited: float = 0.0
    buffer_limited: float = 0.0

    @property
    def task(self) -> float:
        """Time that the worker was at work on the batch."""
        return self.fetch + self.collate + self.encode

    def pack(self) -> bytes:
        """The bytes on the wire."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Stages:
        """Read :meth:`pack`; durations that are negative or no numbers count as 0.

        Raises:
            RemoteProtocolError: The length is wrong.
        """
        if len(data) != _LAYOUT.size:
            raise RemoteProtocolError(f"stages of {len(data)} bytes instead of {_LAYOUT.size}")
        return cls._make(value if 0 <= value < _LONGEST else 0.0 for value in _LAYOUT.unpack(data))


# A peer may send infinity. Three years is longer than any batch.
_LONGEST = 1e8
