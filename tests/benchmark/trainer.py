"""One measurement in a process of its own: a trainer that takes batches from a loader for some seconds."""

from __future__ import annotations

import functools
import resource
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .loaders import build
from .workloads import WORKLOADS

# What the loaders prefetch (2 per worker) is made at the same time and arrives in a bunch.
_MIN_WARMUP_BATCHES = 4
_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Batches taken in a row: how many, in how many seconds, and what they cost this process.

    Attributes:
        num_batches: So many.
        seconds: On the clock.
        cpu_seconds: Of all threads, without the steps that a busy trainer computes.
        thread_seconds: CPU time of the thread that takes the batches, steps included.
    """

    num_batches: int
    seconds: float
    cpu_seconds: float
    thread_seconds: float

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.num_batches / self.seconds

    @property
    def cpu(self) -> float:
        """CPU seconds per batch."""
        return self.cpu_seconds / self.num_batches

    @property
    def thread(self) -> float:
        """CPU seconds per batch of the thread that takes it."""
        return self.thread_seconds / self.num_batches


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, of a trainer that only takes batches, and of one that computes."""

    first_batch_seconds: float
    idle: Phase
    busy: Phase


def get_cpu_seconds() -> float:
    """Return user and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def take(
    batches: Iterator[Any],
    seconds: float,
    *,
    min_batches: int = 1,
    round_length: int = 1,
    step: Callable[[], None] | None = None,
    finish: Callable[[], None] = lambda: None,
) -> Phase:
    """Take batches for that long.

    Args:
        batches: Of a loader.
        seconds: At least.
        min_batches: As many as this at least.
        round_length: Their number is a multiple of this.
        step: Called after each batch.
        finish: Called at the end, before the clocks are read.
    """
    num_batches = 0
    elapsed = spent = 0.0  # spent in steps
    cpu_start, thread_start, start = get_cpu_seconds(), time.thread_time(), time.perf_counter()
    while elapsed < seconds or num_batches < min_batches or num_batches % round_length:
        next(batches)
        if step is not None:
            step_start = time.thread_time()
            step()
            spent += time.thread_time() - step_start
        num_batches += 1
        elapsed = time.perf_counter() - start
    finish()
    cpu_seconds = max(0.0, get_cpu_seconds() - cpu_start - spent)
    return Phase(num_batches, time.perf_counter() - start, cpu_seconds, time.thread_time() - thread_start)


def wait_for_workers(batches: Iterator[Any], num_workers: int, get_ids: Callable[[Any], Any]) -> None:
    """Take batches until each worker has delivered one: until then, some are still being started.

    Args:
        batches: Of a loader.
        num_workers: So many.
        get_ids: From a batch to the tensor of the numbers of the workers that have loaded its samples.

    Raises:
        TimeoutError: Some have delivered nothing within five minutes.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + _TIMEOUT
    while len(seen) < num_workers:
        seen.update(get_ids(next(batches)).tolist())
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {len(seen)} of {num_workers} workers have delivered a batch")


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
    best = min(timeit.repeat(lambda: spin(loops), timer=time.thread_time, number=1, repeat=10))
    return max(1, round(loops * seconds / best))


def count_bytes(batch: Any) -> int:
    """Return the size of a tensor, or of the tensors of a dictionary."""
    return sum(part.nbytes for part in (batch.values() if isinstance(batch, dict) else [batch]))


def measure(loader: str, workload: str, addresses: list[str], seconds: float, step_loops: int) -> Figures:
    """Build the loader and take batches, first idle and then busy.

    Args:
        seconds: Length of each phase.
        step_loops: Rounds of an empty loop per batch that make a busy trainer: see :func:`spin`.
    """
    chosen = WORKLOADS[workload]
    built_loader = build(loader, workload, addresses)
    start = time.perf_counter()
    batches = iter(built_loader)
    size = count_bytes(next(batches))
    first_batch_seconds = time.perf_counter() - start
    if size != chosen.batch_bytes:
        raise ValueError(f"a batch of {size} bytes, where {chosen.batch_bytes} were expected")
    phases = []
    for step in (None, functools.partial(spin, step_loops)):
        take(batches, seconds / 4, min_batches=_MIN_WARMUP_BATCHES, step=step)
        phases.append(take(batches, seconds, min_batches=chosen.min_batches, step=step))
    return Figures(first_batch_seconds, *phases)
