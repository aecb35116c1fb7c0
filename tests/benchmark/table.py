"""Numbers and Markdown tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def format_number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def format_spread(values: Sequence[float]) -> str:
    """The median, with the smallest and the largest in brackets if there are several."""
    text = format_number(statistics.median(values))
    return text if len(values) < 2 else f"{text} ({format_number(min(values))} to {format_number(max(values))})"


def format_ratio(ratio: float | None) -> str:
    """Two digits after the point; a dash where there is none."""
    return "-" if ratio is None else f"{ratio:.2f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_labels: int) -> str:
    """Return a Markdown table.

    Args:
        header: Titles of the columns.
        rows: Cells, as many in each as there are titles.
        num_labels: So many columns stand to the left; the rest are numbers, to the right.
    """
    rule = ["---" if column < num_labels else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])
