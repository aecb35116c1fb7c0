"""Durations of one batch on its way: 32 bytes that a worker sends behind its reply, and how the reply arrived. Pure.

Durations only, so that the clocks of two machines need not agree. Every reply carries the times of fetch and collate in
its pickle. The others are measured where the request asks for it, and follow the pickle.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rpcdataloader.errors import RemoteProtocolError

# Without the two that every reply carries.
_LAYOUT = struct.Struct("<8f")

SIZE_BYTES = _LAYOUT.size


class Arrival(NamedTuple):
    """The arrival of a message that took more than one receive call.

    Attributes:
        at: Time of its first bytes (``time.monotonic``).
        cpu: CPU time of the receiving thread at that moment.
        was_here: True if the kernel had all missing bytes each time they were asked for.
    """

    at: float
    cpu: float
    was_here: bool


class Stages(NamedTuple):
    """Seconds that a batch took at its worker.

    Attributes:
        fetch: Time in the dataset.
        collate: Time in the collate function.
        idle: Time without any request before this one; 0 if the request was there when the previous one was answered.
        encode: Time to pickle the batch.
        reply: Time that the worker's previous measured reply waited to be written, and was written.
        cpu: CPU time of all threads of the worker in fetch, collate and encode.
        runqueue: Time in these that the main thread waited for a CPU (the second number of ``/proc/self/schedstat``).
        sending: Time since the previous measured reply that the connection had unacknowledged data
            (``tcpi_busy_time``); 0 for a Unix socket.
        peer_limited: Part of ``sending`` that the receive window of the trainer was full (``tcpi_rwnd_limited``).
        own_limited: Part of ``sending`` that the send buffer of the worker was full (``tcpi_sndbuf_limited``).
    """

    fetch: float = 0.0
    collate: float = 0.0
    idle: float = 0.0
    encode: float = 0.0
    reply: float = 0.0
    cpu: float = 0.0
    runqueue: float = 0.0
    sending: float = 0.0
    peer_limited: float = 0.0
    own_limited: float = 0.0

    @property
    def task(self) -> float:
        """Time that the worker spent on the batch."""
        return self.fetch + self.collate + self.encode

    def pack(self) -> bytes:
        """The bytes on the wire."""
        return _LAYOUT.pack(*self[2:])

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Stages:
        """Read :meth:`pack`; negative durations and NaN count as 0.

        Raises:
            RemoteProtocolError: The length is wrong.
        """
        if len(data) != _LAYOUT.size:
            raise RemoteProtocolError(f"stages of {len(data)} bytes instead of {_LAYOUT.size}")
        return cls(0.0, 0.0, *map(_checked, _LAYOUT.unpack(data)))

    def with_timings(self, timings: tuple[float, float]) -> Stages:
        """With the times of fetch and collate, which are checked in the same way."""
        fetch, collate = map(_checked, timings)
        return self._replace(fetch=fetch, collate=collate)


def _checked(seconds: float) -> float:
    return seconds if 0 <= seconds < _LONGEST else 0.0


# A peer may send infinity. Three years is longer than any batch.
_LONGEST = 1e8
