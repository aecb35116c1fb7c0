"""The timing of a worker's requests."""

from __future__ import annotations

import resource
import time

from rpcdataloader.fetch.samples import whereabouts
from rpcdataloader.host.resources import CpuUse, read
from rpcdataloader.wire.messages import Stages


def _cpu_seconds() -> float:
    """CPU time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _runqueue_seconds() -> float:
    """Seconds that the main thread has waited for a CPU (sched-stats, "/proc/<pid>/schedstat")."""
    numbers = read("/proc/self/schedstat").split()
    return int(numbers[1]) / 1e9 if len(numbers) > 1 else 0.0


class Meter:
    """Timing of those requests that ask for it, about 50 per second at most: one at a time, in the main thread."""

    def __init__(self) -> None:
        self._idle = self._cpu = self._fetch_cpu = self._runqueue = self._encode = 0.0
        self._cpus = CpuUse()

    def begin(self, idle: float) -> None:
        """Start timing a request, for which the worker has waited ``idle`` seconds."""
        self._idle = idle
        self._runqueue, self._fetch_cpu = _runqueue_seconds(), 0.0
        whereabouts.fetched = self._fetched
        self._cpu = _cpu_seconds()

    def _fetched(self) -> None:
        whereabouts.fetched, self._fetch_cpu = None, _cpu_seconds() - self._cpu

    def encodes(self) -> None:
        """Note that the result is ready to be pickled."""
        self._encode = time.perf_counter()

    def end(self) -> bytes:
        """Return the stages of a reply that is ready to be sent."""
        encode = time.perf_counter() - self._encode
        cpu, runqueue = _cpu_seconds() - self._cpu, _runqueue_seconds() - self._runqueue
        cpus, busy_cpus = self._cpus.look(time.monotonic())
        stages = Stages(
            idle=self._idle,
            encode=encode,
            cpu=cpu,
            runqueue=runqueue,
            fetch_cpu=self._fetch_cpu,
            cpus=cpus,
            busy_cpus=busy_cpus,
        )
        return stages.pack()
