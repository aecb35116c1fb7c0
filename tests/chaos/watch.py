"""Memory and descriptors of processes over time: whether they stay what they were."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

WARM_UP = 20.0  # seconds of each process's life that do not count: caches and pools fill
MOST = {"MiB": 16.0, "descriptors": 8, "threads": 8}  # by which a process that lives for long may grow


class Watch:
    """Samples of some processes."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)

    def look(self, name: str, pid: int, now: float) -> None:
        """Take a sample; a process that is gone gives none."""
        with contextlib.suppress(OSError, KeyError):
            lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            status = {key: value.split()[0] for key, value in lines if value.split()}
            usage = int(status["VmRSS"]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])
            self._samples[f"{name} (pid {pid})"].append((now, *usage))

    def trends(self) -> list[Trend]:
        """Of the processes that lived for long enough."""
        found = []
        for name, samples in self._samples.items():
            late = [sample for sample in samples if sample[0] >= samples[0][0] + WARM_UP]
            if len(late) >= 8:
                halves = late[: len(late) // 2], late[len(late) // 2 :]
                first, second = ([statistics.median(values) for values in zip(*half, strict=True)] for half in halves)
                found.append(Trend(name, late[-1][0] - late[0][0], first[1:], second[1:]))
        return found


class Trend(NamedTuple):
    """The typical usage in the first and in the second half of a process's life."""

    name: str
    seconds: float
    first: list[float]
    second: list[float]

    @property
    def is_flat(self) -> bool:
        return all(
            after - before < most for before, after, most in zip(self.first, self.second, MOST.values(), strict=True)
        )

    def __str__(self) -> str:
        numbers = [
            f"{old:.0f} -> {new:.0f} {what}" for old, new, what in zip(self.first, self.second, MOST, strict=True)
        ]
        return f"{self.name}, {self.seconds:.0f} s: {', '.join(numbers)}: {'flat' if self.is_flat else 'GROWS'}"
