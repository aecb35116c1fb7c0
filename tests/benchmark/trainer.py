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
from .proc import Switches, count_switches, switches_between
from .workloads import WORKLOADS

# What the loaders prefetch (2 per worker) is made at the same time and arrives in a bunch.
_MIN_WARMUP_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure.

    Attributes:
        loader: Name of a contestant.
        workload: Name of a workload.
        addresses: Of the servers.
        seconds: Per phase.
        copy: Copy each batch once.
        step_loops: Rounds of an empty loop per batch that make a busy trainer: see :func:`spin`.
    """

    loader: str
    workload: str
    addresses: list[str]
    seconds: float
    copy: bool
    step_loops: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Batches taken in a row: how many, in how many seconds, and what they cost this process.

    Attributes:
        num_batches: So many.
        seconds: On the clock.
        cpu_seconds: Of all threads, without the steps that a busy trainer computes.
        thread_seconds: CPU time of the thread that takes the batches, steps included.
        voluntary: How often threads of this process gave up the processor because they waited.
        involuntary: How often because others were given it.
    """

    num_batches: int
    seconds: float
    cpu_seconds: float
    thread_seconds: float
    voluntary: int
    involuntary: int


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


def spin(loops: int) -> None:
    """A step of training as the interpreter lock sees it: a fixed amount of work in pure Python.

    The lock is given up when other threads ask for it, and never otherwise. Fixed work and not a time, on whatever
    clock: what other threads cost this one, in time and in CPU time, shall show.
    """
    for _ in range(loops):
        pass


def count_loops(seconds: float) -> int:
    """Return how many loops of :func:`spin` take so much CPU time here and now, at best."""
    loops = 100_000
    best = min(_time_loops(loops) for _ in range(10))
    return max(1, round(loops * seconds / best))


def _time_loops(loops: int) -> float:
    start = time.thread_time()
    spin(loops)
    return time.thread_time() - start


def _get_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _take(batches: Iterator[Any], copier: _Copier | None, loops: int, seconds: float, min_batches: int) -> Phase:
    """Take batches for as long and as many as said, whichever is more."""
    num_batches = 0
    spun = 0.0
    switches: Switches | None = None
    switches_before = count_switches()
    cpu_start, thread_start = _get_cpu_seconds(), time.thread_time()
    start = time.perf_counter()
    while switches is None:
        batch = next(batches)
        if copier is not None:
            copier(batch)
        if loops:
            spin_start = time.thread_time()
            spin(loops)
            spun += time.thread_time() - spin_start
        num_batches += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and num_batches >= min_batches:
            thread_seconds = time.thread_time() - thread_start
            cpu_seconds = _get_cpu_seconds() - cpu_start - spun
            switches = switches_between(switches_before, count_switches())
    return Phase(num_batches, elapsed, max(0.0, cpu_seconds), thread_seconds, *switches)


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
    for loops in (0, task.step_loops):
        _take(batches, copier, loops, task.seconds / 4, _MIN_WARMUP_BATCHES)
        phases.append(_take(batches, copier, loops, task.seconds, workload.min_batches))
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
