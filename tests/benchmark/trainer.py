"""One measurement in a process of its own: a trainer that takes batches from a loader for some seconds."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from .loaders import LOADERS
from .taking import Phase, take
from .workloads import WORKLOADS

# What the loaders prefetch (2 per worker) is made at the same time and arrives in a bunch.
_MIN_WARMUP_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, of a trainer that only takes batches, and of one that computes."""

    first_batch_seconds: float
    idle: Phase
    busy: Phase


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


def _count_bytes(batch: Any) -> int:
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return sum(part.nbytes for part in parts)


def measure(loader: str, workload: str, addresses: list[str], seconds: float, step_loops: int) -> Figures:
    """Build the loader and take batches, first idle and then busy.

    Args:
        seconds: Length of each phase.
        step_loops: Rounds of an empty loop per batch that make a busy trainer: see :func:`spin`.
    """
    chosen = WORKLOADS[workload]
    built_loader = LOADERS[loader].build(chosen, addresses)
    built = time.perf_counter()
    batches = iter(built_loader)
    batch = next(batches)
    first = time.perf_counter()

    size = _count_bytes(batch)
    if size != chosen.batch_bytes:
        raise ValueError(f"a batch of {size} bytes, where {chosen.batch_bytes} were expected")
    del batch
    phases = []
    for step in (None, functools.partial(spin, step_loops)):
        take(batches, seconds / 4, min_batches=_MIN_WARMUP_BATCHES, step=step)
        phases.append(take(batches, seconds, min_batches=chosen.min_batches, step=step))
    return Figures(first - built, *phases)
