"""How trainers take batches, and what that costs them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .proc import Switches, count_switches, switches_between

_TIMEOUT = 300.0


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
) -> Phase:
    """Take batches for that long.

    Args:
        batches: Of a loader.
        seconds: At least.
        min_batches: As many as this at least.
        round_length: Their number is a multiple of this.
        step: Called after each batch.
    """
    num_batches = 0
    spent = 0.0  # in steps
    switches: Switches | None = None
    switches_before = count_switches()
    cpu_start, thread_start = get_cpu_seconds(), time.thread_time()
    start = time.perf_counter()
    while switches is None:
        next(batches)
        if step is not None:
            step_start = time.thread_time()
            step()
            spent += time.thread_time() - step_start
        num_batches += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and num_batches >= min_batches and num_batches % round_length == 0:
            thread_seconds = time.thread_time() - thread_start
            cpu_seconds = get_cpu_seconds() - cpu_start - spent
            switches = switches_between(switches_before, count_switches())
    return Phase(num_batches, elapsed, max(0.0, cpu_seconds), thread_seconds, *switches)


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
