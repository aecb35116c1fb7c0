"""From what was measured in all rounds to Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from .claims import median_ratio
from .loaders import LOADERS
from .table import format_number, format_ratio, format_spread, format_table
from .taking import Phase
from .trainer import Figures
from .workloads import WORKLOADS

_NUM_LABELS = 2

# Below this, GB/s say nothing and CPU time is given per batch.
_TINY_BATCH_BYTES = 100_000

Found = Mapping[tuple[str, str], Mapping[int, Figures]]

# Title, figure, loader that it is compared with.
_IDLE_RATIOS = (
    ("x torch", "idle.rate", "torch"),
    ("x bare", "idle.rate", "bare-made"),
    ("CPU x bare", "idle.cpu", "bare"),
)
_BUSY_RATIOS = (
    ("x torch", "busy.rate", "torch"),
    ("x original", "busy.rate", "original"),
    ("step x ready", "busy.thread", "ready"),
)


def make_idle_table(found: Found) -> str:
    """Return the table of a trainer that only takes batches: a row for each loader and workload, as measured."""
    loading = {key: rounds for key, rounds in found.items() if LOADERS[key[1]].loads}
    return _make_table(
        loading, "first batch ms", lambda one: one.first_batch_seconds, lambda one: one.idle, _IDLE_RATIOS
    )


def make_busy_table(found: Found) -> str:
    """Return the table of a trainer that computes 10 ms per batch."""
    return _make_table(found, "thread CPU ms/step", lambda one: one.busy.thread, lambda one: one.busy, _BUSY_RATIOS)


def _make_table(
    found: Found,
    title: str,
    get_seconds: Callable[[Figures], float],
    get_phase: Callable[[Figures], Phase],
    ratios: Sequence[tuple[str, str, str]],
) -> str:
    header = ["workload", "loader", "batches/s", "GB/s", "CPU s/GB", "switches/batch", title]
    rows = []
    for (workload, loader), rounds in found.items():
        labels = [WORKLOADS[workload].title, LOADERS[loader].title]
        if not rounds:
            rows.append([*labels, "failed", *["-"] * (len(header) + len(ratios) - 3)])
            continue
        cells = _phase_cells([get_phase(one) for one in rounds.values()], WORKLOADS[workload].batch_bytes)
        cells.append(format_number(statistics.median(map(get_seconds, rounds.values())) * 1e3))
        for _title, figure, reference in ratios:
            cells.append(format_ratio(median_ratio(found, workload, loader, reference, figure)))
        rows.append([*labels, *cells])
    return format_table([*header, *(title for title, _, _ in ratios)], rows, _NUM_LABELS)


def _phase_cells(phases: Sequence[Phase], batch_bytes: int) -> list[str]:
    """Return the columns batches/s, GB/s, CPU s/GB and switches/batch, those that waited and those that had to."""
    rates = [phase.rate for phase in phases]
    rate = statistics.median(rates)
    cpu = statistics.median(phase.cpu for phase in phases)
    voluntary = statistics.median(phase.voluntary / phase.num_batches for phase in phases)
    involuntary = statistics.median(phase.involuntary / phase.num_batches for phase in phases)
    if batch_bytes < _TINY_BATCH_BYTES:
        size, cost = "-", f"{format_number(cpu * 1e3)} ms/batch"
    else:
        size, cost = format_number(rate * batch_bytes / 1e9), format_number(cpu / (batch_bytes / 1e9))
    return [format_spread(rates), size, cost, f"{format_number(voluntary)} + {format_number(involuntary)}"]
