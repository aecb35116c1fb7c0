"""One measurement of a start in a process of its own: dataset, loader, first batch twice, and memory of workers."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import proc
from .processes import be_trainer
from .slow_modules import NAME
from .taking import wait_for_workers

# Enough for all workers to be seen.
_NUM_SMALL = 100_000


@dataclass(frozen=True, slots=True)
class Task:
    """What to start.

    Attributes:
        loader: ``ours``, ``ours-built`` (an ``RPCDataset``, built by the node), ``torch-fork`` or ``torch-spawn``.
        dataset: ``small``, ``paths`` or ``imports``.
        num_workers: So many.
        num_paths: Of the dataset ``paths``.
        second: Whether to begin a second epoch.
        addresses: Of the node server, for ours.
        servers: Its process ids.
    """

    loader: str
    dataset: str
    num_workers: int
    num_paths: int
    second: bool
    addresses: list[str]
    servers: list[int]


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


def _get_factory(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the class of the dataset and its arguments."""
    if task.dataset == "imports":
        return importlib.import_module(f"{NAME}.dataset").Slow, (_NUM_SMALL,)
    paths = importlib.import_module("benchmark.datasets").Paths
    return paths, (task.num_paths if task.dataset == "paths" else _NUM_SMALL,)


def _build(task: Task) -> Any:
    options: dict[str, Any] = {"batch_size": 8, "num_workers": task.num_workers}
    factory, args = _get_factory(task)
    if task.loader.startswith("torch"):
        from torch.utils.data import DataLoader

        context = task.loader.partition("-")[2]
        return DataLoader(factory(*args), multiprocessing_context=context, **options)
    from rpcdataloader import RPCDataloader, RPCDataset

    if task.loader == "ours-built":
        return RPCDataloader(RPCDataset(task.addresses, factory, *args), **options)
    return RPCDataloader(factory(*args), workers=task.addresses, **options)


def measure(task: Task) -> Start:
    """Build the loader and begin two epochs."""
    # Everybody's trainer has it.
    importlib.import_module("torch")
    start = time.perf_counter()
    loader = _build(task)
    built = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    wait_for_workers(batches, task.num_workers, lambda batch: batch[1])
    everybody = time.perf_counter()
    time.sleep(1.0)  # what was prefetched is there, and nobody is at work
    processes = [*task.servers, *proc.find_descendants([os.getpid(), *task.servers])]
    idle_bytes = proc.sum_memory(processes)
    second_seconds = None
    if task.second:
        begun = time.perf_counter()
        del batches  # torch's loader waits for the end of its workers
        batches = iter(loader)
        next(batches)
        second_seconds = time.perf_counter() - begun
    return Start(built - start, first - built, everybody - built, second_seconds, idle_bytes, len(processes))


if __name__ == "__main__":
    be_trainer(Task, measure)
