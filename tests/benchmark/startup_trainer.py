"""One measurement of a start in a process of its own: dataset, loader, first batch twice, and memory of workers."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import proc
from .slow_modules import NAME
from .taking import wait_for_workers

# Enough for all workers to be seen.
_NUM_SMALL = 100_000


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds and bytes.

    Attributes:
        build_seconds: Import of the dataset's module, and construction of dataset and loader.
        first_seconds: From ``iter`` to the first batch.
        all_seconds: From ``iter`` until every worker has delivered a batch.
        second_seconds: From letting the iterator go, and with it its workers, to the first batch of the second epoch;
            None without one.
        idle_bytes: Memory of all processes but this one, after that.
        num_processes: How many these are.
    """

    build_seconds: float
    first_seconds: float
    all_seconds: float
    second_seconds: float | None
    idle_bytes: int
    num_processes: int


def _get_factory(dataset: str, num_paths: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the class of the dataset and its arguments."""
    if dataset == "imports":
        return importlib.import_module(f"{NAME}.dataset").Slow, (_NUM_SMALL,)
    paths = importlib.import_module("benchmark.datasets").Paths
    return paths, (num_paths if dataset == "paths" else _NUM_SMALL,)


def _build(
    loader: str, factory: Callable[..., Any], args: tuple[Any, ...], num_workers: int, addresses: list[str]
) -> Any:
    options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers}
    if loader.startswith("torch"):
        from torch.utils.data import DataLoader

        context = loader.partition("-")[2]
        return DataLoader(factory(*args), multiprocessing_context=context, **options)
    from rpcdataloader import RPCDataloader, RPCDataset

    if loader == "ours-built":
        return RPCDataloader(RPCDataset(addresses, factory, *args), **options)
    return RPCDataloader(factory(*args), workers=addresses, **options)


def measure(
    loader: str, dataset: str, num_workers: int, num_paths: int, second: bool, addresses: list[str], servers: list[int]
) -> Start:
    """Build the loader and begin two epochs.

    Args:
        loader: ``ours``, ``ours-built`` (an ``RPCDataset``, built by the node), ``torch-fork`` or ``torch-spawn``.
        dataset: ``small``, ``paths`` or ``imports``.
        second: Whether to begin a second epoch.
        addresses: Of the node server, for ours; ``servers`` are its process ids.
    """
    # Everybody's trainer has it.
    importlib.import_module("torch")
    start = time.perf_counter()
    made = _build(loader, *_get_factory(dataset, num_paths), num_workers, addresses)
    built = time.perf_counter()
    batches = iter(made)
    next(batches)
    first = time.perf_counter()
    wait_for_workers(batches, num_workers, lambda batch: batch[1])
    everybody = time.perf_counter()
    time.sleep(1.0)  # what was prefetched is there, and nobody is at work
    processes = [*servers, *proc.find_descendants([os.getpid(), *servers])]
    idle_bytes = proc.sum_memory(processes)
    second_seconds = None
    if second:
        begun = time.perf_counter()
        del batches  # torch's loader waits for the end of its workers
        batches = iter(made)
        next(batches)
        second_seconds = time.perf_counter() - begun
    return Start(built - start, first - built, everybody - built, second_seconds, idle_bytes, len(processes))
