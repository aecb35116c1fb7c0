"""The receiving side of bare sockets: one thread per sender, exact receives into buffers that are used again.

What it does: move the same collated bytes as the loaders, from two processes over two TCP connections on loopback, with
``MSG_WAITALL`` into huge pages that are used again, and hand each batch to the consumer, from the connections in turn.
The senders (``bare_sender.py``) send from memory that is used again.

What it does not do: ask for batches, frame them, pickle, authenticate, tell what is inside, build tensors, keep a batch
for longer than until the next one, replace a sender that died. ``bare`` computes nothing either: its senders have
their batches ready, so on cores that all share, it has the time that a loader's workers need for the samples. In
``bare-made``, the senders make each batch as workers do: that is the same work, and what sockets can do for it.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

# As a loader with prefetch_factor=2: two in flight, and the one that the trainer holds.
_BUFFERS_PER_CONNECTION = 3


def _make_buffer(size_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class _Receiver:
    """One connection and its thread, which ends when the socket is shut down."""

    def __init__(self, address: str, batch_bytes: int) -> None:
        host, port = address.rsplit(":", 1)
        self.ready: SimpleQueue[memoryview | None] = SimpleQueue()
        self.free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(_BUFFERS_PER_CONNECTION):
            self.free.put(_make_buffer(batch_bytes))
        self._sock = socket.create_connection((host, int(port)))
        self._thread = threading.Thread(target=self._run, name=f"bare-recv {address}")
        self._thread.start()

    def _run(self) -> None:
        while (buffer := self.free.get()) is not None:
            received = 0
            while received < buffer.nbytes:
                # One call is capped at 2 GiB, and a signal may cut it short.
                count = self._sock.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
                if not count:
                    self.ready.put(None)
                    return
                received += count
            self.ready.put(buffer)

    def close(self) -> None:
        self.free.put(None)
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


class BareLoader:
    """Yields what the senders send, one batch from each in turn; a batch is valid until the next one is asked for."""

    def __init__(self, addresses: Sequence[str], batch_bytes: int) -> None:
        self.addresses = addresses
        self.batch_bytes = batch_bytes

    def __iter__(self) -> Iterator[memoryview]:
        receivers: list[_Receiver] = []
        try:
            receivers.extend(_Receiver(address, self.batch_bytes) for address in self.addresses)
            while True:
                for receiver in receivers:
                    batch = receiver.ready.get()
                    if batch is None:
                        raise ConnectionError("a sender closed its connection")
                    yield batch
                    receiver.free.put(batch)
        finally:
            for receiver in receivers:
                receiver.close()
