"""From the figures of all rounds to one Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .loaders import LOADERS
from .trainer import Figures, Phase
from .workloads import WORKLOADS

_HEADER = (
    "workload",
    "loader",
    "batches/s",
    "GB/s",
    "CPU s/GB",
    "first batch ms",
    "x torch",
    "busy batches/s",
    "busy GB/s",
    "busy CPU s/GB",
    "busy x torch",
)
_NUM_LABELS = 2
_REFERENCE = "torch"

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


def _format(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _format_phase(
    get_phase: Callable[[Figures], Phase], rounds: Sequence[Figures], batch_bytes: int
) -> tuple[str, str, str]:
    """Return the columns batches/s, GB/s and CPU s/GB."""
    phases = [get_phase(figures) for figures in rounds]
    rates = [_get_rate(phase) for phase in phases]
    rate = statistics.median(rates)
    text = _format(rate)
    if len(rates) > 1:
        text += f" ({_format(min(rates))} to {_format(max(rates))})"
    cpu = statistics.median(phase.cpu_seconds / phase.num_batches for phase in phases)
    if batch_bytes < _TINY_BATCH_BYTES:
        return text, "-", f"{_format(cpu * 1e3)} ms/batch"
    batch_gb = batch_bytes / 1e9
    return text, _format(rate * batch_gb), _format(cpu / batch_gb)


def _format_ratio(
    get_phase: Callable[[Figures], Phase], rounds: dict[int, Figures], references: dict[int, Figures]
) -> str:
    """Return the median of the ratios within one round, which a slow minute of the machine changes least."""
    ratios = [
        _get_rate(get_phase(figures)) / _get_rate(get_phase(references[number]))
        for number, figures in rounds.items()
        if number in references
    ]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _get_idle(figures: Figures) -> Phase:
    return figures.idle


def _get_busy(figures: Figures) -> Phase:
    return figures.busy


def _make_row(workload: str, loader: str, found: dict[tuple[str, str], dict[int, Figures]]) -> list[str]:
    labels = [WORKLOADS[workload].title, LOADERS[loader].title]
    rounds = found.get((workload, loader), {})
    if not rounds:
        return [*labels, "failed", *["-"] * (len(_HEADER) - 3)]
    references = found.get((workload, _REFERENCE), {})
    size = WORKLOADS[workload].batch_bytes
    figures = list(rounds.values())
    first = statistics.median(one.first_batch_seconds for one in figures) * 1e3
    return [
        *labels,
        *_format_phase(_get_idle, figures, size),
        _format(first),
        _format_ratio(_get_idle, rounds, references),
        *_format_phase(_get_busy, figures, size),
        _format_ratio(_get_busy, rounds, references),
    ]


def make_table(measurements: Sequence[Measurement]) -> str:
    """Return the table: a row for each loader and workload, in the order of the measurements."""
    found: dict[tuple[str, str], dict[int, Figures]] = {}
    keys = list(dict.fromkeys((one.workload, one.loader) for one in measurements))
    for one in measurements:
        if one.figures is not None:
            found.setdefault((one.workload, one.loader), {})[one.round] = one.figures
    rows = [list(_HEADER), *(_make_row(workload, loader, found) for workload, loader in keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < _NUM_LABELS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * width if column < _NUM_LABELS else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)
