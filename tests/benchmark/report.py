"""From what was measured in all rounds to Markdown tables."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping

from .claims import median_ratio
from .loaders import LOADERS
from .table import format_number, format_ratio, format_spread, format_table
from .trainer import Figures
from .workloads import WORKLOADS

# Below this, GB/s say nothing and CPU time is given per batch.
_TINY_BATCH_BYTES = 100_000

# By the phase: a figure of its own, and ratios, by their titles: figure, and loader that it is compared with.
_COLUMNS = {
    "idle": (
        ("first batch ms", "first_batch_seconds"),
        {
            "x torch": ("idle.rate", "torch"),
            "x malloc": ("idle.rate", "torch-malloc"),
            "x bare": ("idle.rate", "bare-made"),
            "CPU x bare": ("idle.cpu", "bare"),
        },
    ),
    "busy": (
        ("thread CPU ms/step", "busy.thread"),
        {
            "x torch": ("busy.rate", "torch"),
            "x original": ("busy.rate", "original"),
            "step x ready": ("busy.thread", "ready"),
        },
    ),
}


def make_table(found: Mapping[tuple[str, str], Mapping[int, Figures]], phase: str) -> str:
    """Return a row for each loader and workload, as measured.

    Args:
        phase: ``idle``, of a trainer that only takes batches, or ``busy``, of one that computes.
    """
    (title, figure), ratios = _COLUMNS[phase]
    header = ["workload", "loader", "batches/s", "GB/s", "CPU s/GB", title, *ratios]
    rows = []
    for (workload, loader), rounds in found.items():
        if (phase, loader) == ("idle", "ready"):
            continue  # it loads nothing
        cells = ["failed", *"-" * (len(header) - 3)]
        if rounds:
            phases = [getattr(one, phase) for one in rounds.values()]
            cells = _cells([one.rate for one in phases], [one.cpu for one in phases], WORKLOADS[workload].batch_bytes)
            cells.append(format_number(statistics.median(map(operator.attrgetter(figure), rounds.values())) * 1e3))
            cells += [format_ratio(median_ratio(found, workload, loader, other, one)) for one, other in ratios.values()]
        rows.append([WORKLOADS[workload].title, LOADERS[loader], *cells])
    return format_table(header, rows, 2)


def _cells(rates: list[float], cpus: list[float], batch_bytes: int) -> list[str]:
    """Return the columns batches/s, GB/s and CPU s/GB."""
    rate, cpu = statistics.median(rates), statistics.median(cpus)
    if batch_bytes < _TINY_BATCH_BYTES:
        return [format_spread(rates), "-", f"{format_number(cpu * 1e3)} ms/batch"]
    return [format_spread(rates), format_number(rate * batch_bytes / 1e9), format_number(cpu / (batch_bytes / 1e9))]
