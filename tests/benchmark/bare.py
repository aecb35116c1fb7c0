"""Bare sockets: what this machine can do with the same bytes.

They move the same collated bytes as the loaders, from two processes over two TCP connections on loopback, with
``MSG_WAITALL`` into huge pages that are used again, and hand each batch to the consumer, from the connections in turn.

They do not ask for batches, frame them, pickle, authenticate, tell what is inside, build tensors, keep a batch for
longer than until the next one, replace a sender that died. Senders of ``bare`` send batches that were made beforehand,
again and again, so on cores that all share, they have the time that a loader's workers need for the samples. In
``bare-made``, each is made when its turn comes, as a worker does: samples from the dataset, collated into memory that
is used again, by one thread, while another one sends the batch before. That is the same work.

As a program, with the name of a workload and ``ready`` or ``made``, it is a sender, and writes ``ready HOST:PORT`` once
it listens.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue

import numpy as np
import torch

from . import datasets
from .workloads import WORKLOADS, Workload

# As a loader with prefetch_factor=2: two in flight, and the one that the trainer holds.
_BUFFERS_PER_CONNECTION = 3
# As a worker of such a loader: one is sent, one is made.
_BUFFERS_PER_SENDER = 2


class _Receiver:
    """One connection and its thread, which ends when the socket is shut down."""

    def __init__(self, address: str, batch_bytes: int) -> None:
        host, port = address.rsplit(":", 1)
        self.ready: SimpleQueue[memoryview | None] = SimpleQueue()
        self.free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(_BUFFERS_PER_CONNECTION):
            memory = mmap.mmap(-1, batch_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self.free.put(memoryview(memory))
        self._sock = socket.create_connection((host, int(port)))
        self._thread = threading.Thread(target=self._run, name=f"bare-recv {address}")
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (buffer := self.free.get()) is not None:
                received = 0
                while received < buffer.nbytes:
                    # One call is capped at 2 GiB, and a signal may cut it short.
                    count = self._sock.recv_into(buffer[received:], 0, socket.MSG_WAITALL)
                    if not count:
                        raise ConnectionError
                    received += count
                self.ready.put(buffer)
        self.ready.put(None)

    def close(self) -> None:
        self.free.put(None)
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


def receive(addresses: Sequence[str], batch_bytes: int) -> Iterator[memoryview]:
    """Yield what the senders send, one batch from each in turn; a batch is valid until the next one is asked for."""
    with contextlib.ExitStack() as stack:
        receivers = [stack.enter_context(contextlib.closing(_Receiver(address, batch_bytes))) for address in addresses]
        for receiver in itertools.cycle(receivers):
            batch = receiver.ready.get()
            if batch is None:
                raise ConnectionError("a sender closed its connection")
            yield batch
            receiver.free.put(batch)


def send(workload: Workload, mode: str) -> None:
    """Send batches, whose samples are tensors, to the first that connects."""
    # As any worker does.
    torch.set_num_threads(1)
    dataset = getattr(datasets, workload.dataset)(*workload.args)
    free: SimpleQueue[np.ndarray] = SimpleQueue()
    made: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(_BUFFERS_PER_SENDER):
        free.put(np.empty(workload.batch_bytes, np.uint8))

    def make_batches() -> None:
        for start in itertools.count(0, workload.batch_size):
            memory = free.get()
            samples = [dataset[start + number] for number in range(workload.batch_size)]
            shape = (len(samples), *samples[0].shape)
            # Stacking writes each byte once, as a worker that collates does.
            torch.stack(samples, out=torch.from_numpy(memory).view(samples[0].dtype).view(shape))
            made.put(memory)

    threading.Thread(target=make_batches, name="bare-make", daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"ready 127.0.0.1:{server.getsockname()[1]}", flush=True)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):
        while True:
            memory = made.get()
            sock.sendall(memory.data)
            (free if mode == "made" else made).put(memory)
    os._exit(0)  # the process ends when its connection does, whatever the other thread is at


if __name__ == "__main__":
    send(WORKLOADS[sys.argv[1]], sys.argv[2])
