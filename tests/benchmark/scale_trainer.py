"""One measurement at scale in a process of its own: a trainer with many workers.

Argument: a :class:`Task` as JSON. Writes ``scaled {...}`` (the figures as JSON) to standard output.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rpcdataloader import RPCDataloader, RPCDataset

from . import datasets, proc
from .everybody import wait_for_workers


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
    """Batches that flowed, and what they cost the trainer.

    Attributes:
        num_batches: So many.
        seconds: On the clock.
        cpu_seconds: Of all threads.
        thread_seconds: CPU time of the thread that takes the batches, which also sends most requests.
        voluntary: How often threads gave up the processor because they waited.
        involuntary: How often because others were given it.
        num_threads: Of this process.
        num_descriptors: Of this process.
    """

    num_batches: int
    seconds: float
    cpu_seconds: float
    thread_seconds: float
    voluntary: int
    involuntary: int
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


def _get_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _flow(batches: Iterator[Any], seconds: float, round_length: int = 1) -> Flow:
    """Take batches for that long, and on to the end of a round of so many."""
    switches = proc.count_switches()
    cpu, thread = _get_cpu_seconds(), time.thread_time()
    start = time.perf_counter()
    num_batches = 0
    elapsed = 0.0
    while elapsed < seconds or num_batches % round_length:
        next(batches)
        num_batches += 1
        elapsed = time.perf_counter() - start
    thread, cpu = time.thread_time() - thread, _get_cpu_seconds() - cpu
    switched = proc.switches_between(switches, proc.count_switches())
    return Flow(num_batches, elapsed, cpu, thread, *switched, proc.count_threads(), proc.count_descriptors())


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
    end = time.perf_counter() + task.seconds / 4
    while time.perf_counter() < end:
        next(batches)
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


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    print("scaled", json.dumps(asdict(MEASURES[task.kind](task))), flush=True)


if __name__ == "__main__":
    main()
