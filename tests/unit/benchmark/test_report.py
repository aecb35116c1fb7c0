from __future__ import annotations

from tests.benchmark.report import Measurement, Report
from tests.benchmark.trainer import Figures, Phase


def figures(rate, cpu_seconds=0.1, step_seconds=0.01) -> Figures:
    """Of a trainer that took batches for 2 s."""
    num_batches = 2 * rate
    idle = Phase(num_batches, 2.0, cpu_seconds * num_batches, 0.0, voluntary=4 * num_batches, involuntary=num_batches)
    busy = Phase(num_batches, 2.0, 0.0, step_seconds * num_batches, 0, 0)
    return Figures(1.0, 0.05, idle, busy)


def cells(table, title) -> dict[str, str]:
    """Of the row with this loader, by the title of the column."""
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    (row,) = (row for row in rows if row[1] == title)
    return dict(zip(header, row, strict=True))


def test_tables_have_medians_and_ratios_within_a_round():
    report = Report(
        [
            *(
                Measurement("uint8", "ours-tcp", i, figures(rate, step_seconds=0.0105))
                for i, rate in enumerate([30, 10, 8])
            ),
            *(Measurement("uint8", "torch", i, figures(rate)) for i, rate in enumerate([20, 10, 4])),
            *(Measurement("uint8", "ready", i, figures(1000)) for i in range(3)),
            Measurement("uint8", "original", 0, None),
        ]
    )
    row = cells(report.make_idle_table(), "ours, TCP")
    assert row["batches/s"] == "10.0 (8.00 to 30.0)"
    assert row["GB/s"] == "0.096"
    assert row["switches/batch"] == "4.00 + 1.00"
    assert row["first batch ms"] == "50.0"
    assert (row["x torch"], row["x bare"]) == ("1.50", "-")
    assert "list of ready batches" not in report.make_idle_table()
    row = cells(report.make_busy_table(), "ours, TCP")
    assert (row["thread CPU ms/step"], row["step x ready"]) == ("10.5", "1.05")
    assert cells(report.make_idle_table(), "original 0.2.1")["batches/s"] == "failed"
    assert report.get("uint8", "torch", "rate") == {0: 20.0, 1: 10.0, 2: 4.0}
    assert report.get("uint8", "original", "rate") == {}


def test_cost_of_tiny_batches_is_per_batch():
    row = cells(
        Report([Measurement("integer", "torch", 0, figures(1000, cpu_seconds=0.0002))]).make_idle_table(),
        "torch DataLoader",
    )
    assert (row["GB/s"], row["CPU s/GB"]) == ("-", "0.200 ms/batch")
