"""Memory and descriptors of processes over time: whether they stay what they were."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """Of a process, at one moment."""

    time: float
    rss_mib: float
    num_descriptors: int
    num_threads: int


class Watch:
    """Samples of some processes.

    Args:
        warm_up: Seconds of each process's life that do not count: caches and pools fill.
    """

    def __init__(self, warm_up: float = 20.0) -> None:
        self._warm_up = warm_up
        self._samples: defaultdict[str, list[Usage]] = defaultdict(list)

    def look(self, name: str, pid: int, now: float) -> None:
        """Take a sample; a process that is gone gives none."""
        with contextlib.suppress(OSError, KeyError):
            lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            status = {key: value.split()[0] for key, value in lines if value.split()}
            usage = Usage(now, int(status["VmRSS"]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))
            self._samples[f"{name} (pid {pid})"].append(usage)

    def trends(self) -> list[Trend]:
        """Of the processes that lived for long enough."""
        found = []
        for name, samples in self._samples.items():
            late = [sample for sample in samples if sample.time >= samples[0].time + self._warm_up]
            if len(late) >= 8:
                half = len(late) // 2
                found.append(Trend(name, late[-1].time - late[0].time, _typical(late[:half]), _typical(late[half:])))
        return found


class Trend(NamedTuple):
    """The typical usage in the first and in the second half of a process's life."""

    name: str
    seconds: float
    first: Usage
    second: Usage

    @property
    def is_flat(self) -> bool:
        """Less than 16 MiB and 8 descriptors more, and 8 threads."""
        return (
            self.second.rss_mib - self.first.rss_mib < 16
            and self.second.num_descriptors - self.first.num_descriptors < 8
            and self.second.num_threads - self.first.num_threads < 8
        )

    def __str__(self) -> str:
        first, second = self.first, self.second
        verdict = "flat" if self.is_flat else "GROWS"
        return (
            f"{self.name}, {self.seconds:.0f} s: RSS {first.rss_mib:.1f} -> {second.rss_mib:.1f} MiB, "
            f"descriptors {first.num_descriptors} -> {second.num_descriptors}, "
            f"threads {first.num_threads} -> {second.num_threads}: {verdict}"
        )


def _typical(samples: list[Usage]) -> Usage:
    time, rss, descriptors, threads = (statistics.median(values) for values in zip(*samples, strict=True))
    return Usage(time, rss, int(descriptors), int(threads))
