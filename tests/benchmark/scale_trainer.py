"""One measurement at scale in a process of its own: a trainer with many workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rpcdataloader import RPCDataloader, RPCDataset

from . import datasets, proc
from .processes import be_trainer
from .taking import Phase, take, wait_for_workers


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure.

    Attributes:
        kind: A key of ``MEASURES``.
        address: Of the node server.
        server: Its process id.
        num_workers: So many.
        batch_size: Samples in a batch.
        amount: Seconds of a sample, bytes of a batch, or paths of an index: see ``MEASURES``.
        seconds: Length of the measurement.
    """

    kind: str
    address: str
    server: int
    num_workers: int
    batch_size: int
    amount: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Flow:
    """Batches that flowed, and threads and open descriptors of the trainer meanwhile."""

    phase: Phase
    num_threads: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class Forks:
    """Workers forked from a session that holds a large index.

    Attributes:
        build_seconds: Until the index was built.
        first_seconds: From ``iter`` to the first batch.
        all_seconds: From ``iter`` until every worker has delivered a batch.
        session_bytes: Memory of node server and session before, proportional set size.
        all_bytes: The same, and that of the workers, afterwards.
    """

    build_seconds: float
    first_seconds: float
    all_seconds: float
    session_bytes: int
    all_bytes: int


def _flow(batches: Iterator[Any], seconds: float, round_length: int = 1) -> Flow:
    phase = take(batches, seconds, round_length=round_length)
    # Without the descriptor of this look.
    return Flow(phase, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")) - 1)


def _measure_naps(task: Task) -> Flow:
    """Workers that sleep for ``amount`` seconds per sample."""
    dataset = RPCDataset(task.address, datasets.Naps, task.amount)
    loader = RPCDataloader(dataset, task.batch_size, num_workers=task.num_workers)
    batches = iter(loader)
    wait_for_workers(batches, task.num_workers, lambda batch: batch)
    for _ in range(2 * task.num_workers):  # what has waited meanwhile comes at once
        next(batches)
    # Workers that sleep for the same time are done together.
    return _flow(batches, task.seconds, task.num_workers)


def _measure_bytes(task: Task) -> Flow:
    """Workers that send ``amount`` bytes, always the same, as fast as they can."""
    dataset = RPCDataset(task.address, datasets.Ready, int(task.amount))
    loader = RPCDataloader(dataset, batch_size=None, num_workers=task.num_workers)
    batches = iter(loader)
    take(batches, task.seconds / 4)
    return _flow(batches, task.seconds)


def _measure_forks(task: Task) -> Forks:
    """Workers of a session that holds a list of ``amount`` paths."""
    start = time.perf_counter()
    dataset = RPCDataset(task.address, datasets.Paths, int(task.amount))
    len(dataset)
    built = time.perf_counter()
    session_bytes = proc.sum_memory([task.server, *proc.find_descendants([task.server])])
    begun = time.perf_counter()
    batches = iter(RPCDataloader(dataset, task.batch_size, num_workers=task.num_workers))
    next(batches)
    first = time.perf_counter()
    wait_for_workers(batches, task.num_workers, lambda batch: batch[1])
    everybody = time.perf_counter()
    all_bytes = proc.sum_memory([task.server, *proc.find_descendants([task.server])])
    return Forks(built - start, first - begun, everybody - begun, session_bytes, all_bytes)


MEASURES: dict[str, Callable[[Task], Flow | Forks]] = {
    "naps": _measure_naps,
    "bytes": _measure_bytes,
    "forks": _measure_forks,
}


def measure(task: Task) -> Flow | Forks:
    return MEASURES[task.kind](task)


if __name__ == "__main__":
    be_trainer(Task, measure)
