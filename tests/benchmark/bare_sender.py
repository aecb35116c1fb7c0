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
from typing import Any

import numpy as np
import torch

from . import datasets
from .workloads import WORKLOADS, Workload

# As a worker of a loader with prefetch_factor=2: one is sent, one is made.
_NUM_BUFFERS = 2


class _Maker:
    """Makes the batches of a workload, each in one piece of memory that is given.

    Stacking tensors writes each byte once, as a worker that collates does. Batches of other kinds are collated first
    and then copied together.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._dataset = getattr(datasets, workload.dataset)(*workload.args)
        self._positions = itertools.count()

    def __call__(self, memory: np.ndarray) -> None:
        samples = [self._dataset[next(self._positions)] for _ in range(self._workload.batch_size)]
        if isinstance(samples[0], torch.Tensor):
            shape = (len(samples), *samples[0].shape)
            torch.stack(samples, out=torch.from_numpy(memory).view(samples[0].dtype).view(shape))
            return
        offset = 0
        for tensor in _collate(samples):
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            memory[offset : offset + data.nbytes] = data
            offset += data.nbytes


def _collate(samples: list[Any]) -> list[torch.Tensor]:
    if isinstance(samples[0], dict):
        return list(datasets.get_only(samples).values())
    return [torch.tensor(samples)]


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
    make = _Maker(workload)
    buffers = [np.empty(workload.batch_bytes, np.uint8) for _ in range(_NUM_BUFFERS)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"ready 127.0.0.1:{server.getsockname()[1]}", flush=True)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, contextlib.suppress(ConnectionError):
        (_send_made if mode == "made" else _send_ready)(sock, make, buffers)


if __name__ == "__main__":
    main(WORKLOADS[sys.argv[1]], sys.argv[2])
