"""Numbers and Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def format_number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def format_spread(values: Sequence[float], middle: float) -> str:
    """The middle one, with the smallest and the largest in brackets if there are several."""
    text = format_number(middle)
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

    Raises:
        ValueError: A row has another number of cells.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under {len(header)} titles: {list(row)}")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column < num_labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * width if column < num_labels else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)
