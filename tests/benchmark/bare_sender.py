"""A process that sends batches over TCP loopback, one after the other, to whoever connects.

The bytes are those of the workload's own batches, collated. With ``ready``, batches that were made beforehand are sent
again and again. With ``made``, each one is made when its turn comes, as a worker does: samples from the dataset,
collated into memory that is used again, by one thread, while another one sends the batch before.

Arguments: name of the workload; ``ready`` or ``made``. Writes ``ready HOST:PORT`` once it listens.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch

from . import datasets
from .workloads import WORKLOADS, Workload

# As a worker of a loader with prefetch_factor=2: one is sent, one is made.
_NUM_BUFFERS = 2


def _make_batches_of(workload: Workload) -> Callable[[np.ndarray], None]:
    """Return what makes the next batch of a workload, whose samples are tensors, in one piece of memory."""
    dataset = getattr(datasets, workload.dataset)(*workload.args)
    positions = itertools.count()

    def make(memory: np.ndarray) -> None:
        samples = [dataset[next(positions)] for _ in range(workload.batch_size)]
        shape = (len(samples), *samples[0].shape)
        # Stacking writes each byte once, as a worker that collates does.
        torch.stack(samples, out=torch.from_numpy(memory).view(samples[0].dtype).view(shape))

    return make


def _send_ready(sock: socket.socket, make: Callable[[np.ndarray], None], buffers: list[np.ndarray]) -> None:
    for memory in buffers:
        make(memory)
    for memory in itertools.cycle(buffers):
        sock.sendall(memory.data)


def _send_made(sock: socket.socket, make: Callable[[np.ndarray], None], buffers: list[np.ndarray]) -> None:
    free: SimpleQueue[np.ndarray] = SimpleQueue()
    made: SimpleQueue[np.ndarray] = SimpleQueue()
    for memory in buffers:
        free.put(memory)

    def make_all() -> None:
        while True:
            memory = free.get()
            make(memory)
            made.put(memory)

    # A daemon: the process ends when its connection does.
    threading.Thread(target=make_all, name="bare-make", daemon=True).start()
    while True:
        memory = made.get()
        sock.sendall(memory.data)
        free.put(memory)


def main(workload: Workload, mode: str) -> None:
    # As any worker does.
    torch.set_num_threads(1)
    make = _make_batches_of(workload)
    buffers = [np.empty(workload.batch_bytes, np.uint8) for _ in range(_NUM_BUFFERS)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"ready 127.0.0.1:{server.getsockname()[1]}", flush=True)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):
        (_send_made if mode == "made" else _send_ready)(sock, make, buffers)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]], sys.argv[2])
