"""From the figures of all rounds to Markdown tables, and to the figures that claims are about."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .claims import median_ratio
from .loaders import LOADERS
from .table import format_number, format_ratio, format_spread, format_table
from .trainer import Figures, Phase
from .workloads import WORKLOADS

_NUM_LABELS = 2

# Below this, GB/s say nothing and CPU time is given per batch.
_TINY_BATCH_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trainer process: which, in which round, and what it found; None for the figures when it failed."""

    workload: str
    loader: str
    round: int
    figures: Figures | None


def _get_rate(phase: Phase) -> float:
    return phase.num_batches / phase.seconds


def _get_cpu(phase: Phase) -> float:
    return phase.cpu_seconds / phase.num_batches


def _get_thread(phase: Phase) -> float:
    return phase.thread_seconds / phase.num_batches


# What can be compared, by name.
FIGURES: dict[str, Callable[[Figures], float]] = {
    "rate": lambda figures: _get_rate(figures.idle),
    "cpu": lambda figures: _get_cpu(figures.idle),
    "busy rate": lambda figures: _get_rate(figures.busy),
    "busy cpu": lambda figures: _get_cpu(figures.busy),
    "busy thread": lambda figures: _get_thread(figures.busy),
}

# Title, figure, loader that it is compared with.
_IDLE_RATIOS = ("x torch", "rate", "torch"), ("x bare", "rate", "bare-made"), ("CPU x bare", "cpu", "bare")
_BUSY_RATIOS = (
    ("x torch", "busy rate", "torch"),
    ("x original", "busy rate", "original"),
    ("step x ready", "busy thread", "ready"),
)


class Report:
    """Tables and figures of a number of measurements."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._keys = list(dict.fromkeys((one.workload, one.loader) for one in measurements))
        self._found: dict[tuple[str, str], dict[int, Figures]] = {}
        for one in measurements:
            if one.figures is not None:
                self._found.setdefault((one.workload, one.loader), {})[one.round] = one.figures

    def get(self, workload: str, loader: str, figure: str) -> dict[int, float]:
        """Return a figure in each round in which it was measured, by the number of the round."""
        rounds = self._found.get((workload, loader), {})
        return {number: FIGURES[figure](figures) for number, figures in rounds.items()}

    def make_idle_table(self) -> str:
        """Return the table of a trainer that only takes batches: a row for each loader and workload, as measured."""
        header = ["workload", "loader", "batches/s", "GB/s", "CPU s/GB", "switches/batch", "first batch ms"]
        keys = [(workload, loader) for workload, loader in self._keys if LOADERS[loader].loads]
        return self._make_table(keys, header, lambda figures: figures.idle, self._idle_cells, _IDLE_RATIOS)

    def make_busy_table(self) -> str:
        """Return the table of a trainer that computes 10 ms per batch."""
        header = ["workload", "loader", "batches/s", "GB/s", "CPU s/GB", "switches/batch", "thread CPU ms/step"]
        return self._make_table(self._keys, header, lambda figures: figures.busy, self._busy_cells, _BUSY_RATIOS)

    def _make_table(
        self,
        keys: Sequence[tuple[str, str]],
        header: Sequence[str],
        get_phase: Callable[[Figures], Phase],
        get_cells: Callable[[Sequence[Figures]], list[str]],
        ratios: Sequence[tuple[str, str, str]],
    ) -> str:
        rows = []
        for workload, loader in keys:
            labels = [WORKLOADS[workload].title, LOADERS[loader].title]
            figures = list(self._found.get((workload, loader), {}).values())
            if not figures:
                rows.append([*labels, "failed", *["-"] * (len(header) + len(ratios) - 3)])
                continue
            phases = [get_phase(one) for one in figures]
            compared = [
                format_ratio(median_ratio(self.get(workload, loader, figure), self.get(workload, reference, figure)))
                for _, figure, reference in ratios
            ]
            size = WORKLOADS[workload].batch_bytes
            rows.append([*labels, *_phase_cells(phases, size), *get_cells(figures), *compared])
        return format_table([*header, *(title for title, _, _ in ratios)], rows, _NUM_LABELS)

    @staticmethod
    def _idle_cells(figures: Sequence[Figures]) -> list[str]:
        return [format_number(statistics.median(one.first_batch_seconds for one in figures) * 1e3)]

    @staticmethod
    def _busy_cells(figures: Sequence[Figures]) -> list[str]:
        return [format_number(statistics.median(_get_thread(one.busy) for one in figures) * 1e3)]


def _phase_cells(phases: Sequence[Phase], batch_bytes: int) -> list[str]:
    """Return the columns batches/s, GB/s, CPU s/GB and switches/batch, those that waited and those that had to."""
    rates = [_get_rate(phase) for phase in phases]
    rate = statistics.median(rates)
    cpu = statistics.median(_get_cpu(phase) for phase in phases)
    switches = [
        format_number(statistics.median(count / phase.num_batches for count, phase in zip(counts, phases, strict=True)))
        for counts in ([phase.voluntary for phase in phases], [phase.involuntary for phase in phases])
    ]
    if batch_bytes < _TINY_BATCH_BYTES:
        size, cost = "-", f"{format_number(cpu * 1e3)} ms/batch"
    else:
        size, cost = format_number(rate * batch_bytes / 1e9), format_number(cpu / (batch_bytes / 1e9))
    return [format_spread(rates, rate), size, cost, " + ".join(switches)]
