"""One measurement in a process of its own: a trainer that takes batches from a loader for some seconds.

Argument: a :class:`Task` as JSON. Writes ``figures {...}`` (:class:`Figures` as JSON) to standard output.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from .loaders import LOADERS
from .workloads import WORKLOADS

# What the loaders prefetch (2 per worker) is made at the same time and arrives in a bunch.
_MIN_WARMUP_BATCHES = 4
_BUSY_SECONDS = 0.010


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure: names of loader and workload, addresses of the servers, seconds per phase."""

    loader: str
    workload: str
    addresses: list[str]
    seconds: float
    copy: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """Batches taken in a row: how many, in how many seconds, for how much CPU time of this process.

    The CPU time is without that which a busy trainer spends on purpose.
    """

    num_batches: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured. ``setup_seconds``: import of the loader, its construction and that of the dataset."""

    setup_seconds: float
    first_batch_seconds: float
    idle: Phase
    busy: Phase


class _Copier:
    """Copies each batch to the same place, as a copy to a GPU would; reads every byte."""

    def __init__(self, batch: Any) -> None:
        self._copies = [tensor.clone() for tensor in _get_tensors(batch)]

    def __call__(self, batch: Any) -> None:
        for copy, tensor in zip(self._copies, _get_tensors(batch), strict=True):
            copy.copy_(tensor)


def _get_tensors(batch: Any) -> list[Any]:
    import torch

    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, memoryview):
        return [torch.frombuffer(batch, dtype=torch.uint8)]
    return list(batch.values())


def _spin(seconds: float) -> None:
    """Hold the interpreter lock for some CPU time.

    CPU time and not time on the clock: a step of training is a fixed amount of work, which takes longer when
    threads of the loader take the lock or the processor meanwhile.
    """
    deadline = time.thread_time() + seconds
    while time.thread_time() < deadline:
        for _ in range(200):
            pass


def _get_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _take(
    batches: Iterator[Any], copier: _Copier | None, busy_seconds: float, seconds: float, min_batches: int
) -> Phase:
    """Take batches for as long and as many as said, whichever is more."""
    num_batches = 0
    cpu_start = _get_cpu_seconds()
    start = time.perf_counter()
    while True:
        batch = next(batches)
        if copier is not None:
            copier(batch)
        if busy_seconds:
            _spin(busy_seconds)
        num_batches += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and num_batches >= min_batches:
            cpu_seconds = _get_cpu_seconds() - cpu_start - num_batches * busy_seconds
            return Phase(num_batches, elapsed, max(0.0, cpu_seconds))


def measure(task: Task) -> Figures:
    """Build the loader and take batches, first idle and then busy."""
    import torch

    if task.copy:
        torch.set_num_threads(1)
    workload = WORKLOADS[task.workload]
    start = time.perf_counter()
    loader = LOADERS[task.loader].build(workload, task.addresses)
    built = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    first = time.perf_counter()

    size = sum(tensor.nbytes for tensor in _get_tensors(batch))
    if size != workload.batch_bytes:
        raise ValueError(f"a batch of {size} bytes, where {workload.batch_bytes} were expected")
    copier = _Copier(batch) if task.copy else None
    del batch
    phases = []
    for busy_seconds in (0.0, _BUSY_SECONDS):
        _take(batches, copier, busy_seconds, task.seconds / 4, _MIN_WARMUP_BATCHES)
        phases.append(_take(batches, copier, busy_seconds, task.seconds, workload.min_batches))
    return Figures(built - start, first - built, *phases)


def _stop(_signal: int, _frame: object) -> NoReturn:
    sys.exit("terminated")


def main() -> None:
    # So that torch's loader ends its workers.
    signal.signal(signal.SIGTERM, _stop)
    # torch's loader keeps a descriptor open for each tensor that its workers send.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures = measure(Task(**json.loads(sys.argv[1])))
    print("figures", json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    main()
