"""One measurement at scale in a process of its own: a trainer with many workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rpcdataloader import RPCDataloader, RPCDataset

from . import datasets, proc
from .taking import Phase, take, wait_for_workers


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


def measure_naps(address: str, num_workers: int, batch_size: int, nap: float, seconds: float) -> Flow:
    """Workers that sleep for so long per sample."""
    loader = RPCDataloader(RPCDataset(address, datasets.Naps, nap), batch_size, num_workers=num_workers)
    batches = iter(loader)
    wait_for_workers(batches, num_workers, lambda batch: batch)
    for _ in range(2 * num_workers):  # what has waited meanwhile comes at once
        next(batches)
    # Workers that sleep for the same time are done together.
    return _flow(batches, seconds, num_workers)


def measure_bytes(address: str, num_workers: int, batch_bytes: int, seconds: float) -> Flow:
    """Workers that send the same batch as fast as they can."""
    dataset = RPCDataset(address, datasets.Ready, batch_bytes)
    loader = RPCDataloader(dataset, batch_size=None, num_workers=num_workers)
    batches = iter(loader)
    take(batches, seconds / 4)
    return _flow(batches, seconds)


def measure_forks(address: str, server: int, num_workers: int, num_paths: int) -> Forks:
    """Workers of a session that holds a list of so many paths."""
    start = time.perf_counter()
    dataset = RPCDataset(address, datasets.Paths, num_paths)
    len(dataset)
    built = time.perf_counter()
    session_bytes = proc.sum_memory([server, *proc.find_descendants([server])])
    begun = time.perf_counter()
    batches = iter(RPCDataloader(dataset, batch_size=64, num_workers=num_workers))
    next(batches)
    first = time.perf_counter()
    wait_for_workers(batches, num_workers, lambda batch: batch[1])
    everybody = time.perf_counter()
    all_bytes = proc.sum_memory([server, *proc.find_descendants([server])])
    return Forks(built - start, first - begun, everybody - begun, session_bytes, all_bytes)
