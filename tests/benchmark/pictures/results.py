"""Charts of the tables in ``docs/figures``, which the programs of the benchmark have printed."""

from __future__ import annotations

from pathlib import Path

from .svg import BLUE, GREEN, GREY, ORANGE, RED, VIOLET, Bars, Picture, Scale, Series, draw_lines

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "figures"

_COLOURS = {
    "ours, TCP": BLUE, "ours, shared memory": GREEN, "torch DataLoader": GREY, "original 0.2.1": RED,
    "bare sockets": ORANGE, "bare, made": GREEN,
    "ours, RPCDataset": BLUE, "ours": VIOLET, "torch, fork": GREY, "torch, spawn": ORANGE,
}  # fmt: skip


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a recorded table: cells by the titles of their columns."""
    header, _, *rows = [line.strip("|").split("|") for line in (FOLDER / f"{name}.md").read_text().splitlines()]
    titles = [cell.strip() for cell in header]
    return [dict(zip(titles, (cell.strip() for cell in row), strict=True)) for row in rows]


def number(cell: str) -> float | None:
    """Return the first number of a cell; None for a dash."""
    return None if cell == "-" else float(cell.split()[0].replace(",", ""))


def draw_loaders() -> Picture:
    text = "For each kind of batch, the batches per second of each loader, relative to torch's DataLoader."
    return _draw_loaders("loaders", "Batches per second, relative to torch's DataLoader", text, 0.3, 100)


def draw_one_machine() -> Picture:
    text = "Workers on the trainer's machine share memory with it: up to six times the batches of torch's DataLoader."
    return _draw_loaders("one-machine", "On one machine: batches per second, relative to torch", text, 0.9, 10)


def _draw_loaders(table: str, title: str, text: str, low: float, high: float) -> Picture:
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for row in read_table(table):
        ratio = number(row["x torch"])
        if ratio is not None:
            label = row["loader"].replace("bare sockets, batches made", "bare, made")
            rate = row["batches/s"].partition(" (")[0]
            groups.setdefault(row["workload"], []).append((label, ratio, f"{ratio:.3g} x, {rate}/s"))
    return Bars(groups, _COLOURS, low, high, 1, "batches/s, torch = 1").draw(title, text)


def draw_startup() -> Picture:
    return _draw_startup("first ms", 30, "ms to the first batch", "Time to the first batch")


def draw_memory() -> Picture:
    return _draw_startup("memory MB", 100, "MB, idle workers", "Memory of the workers and their servers")


def _draw_startup(column: str, low: float, unit: str, title: str) -> Picture:
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for row in read_table("startup"):
        value = number(row[column])
        assert value is not None, row
        group = f"{row['dataset']}, {row['workers']} workers"
        groups.setdefault(group, []).append((row["loader"], value, f"{row[column]} {unit.split()[0].strip(',')}"))
    bars = Bars(groups, _COLOURS, low, 10 ** (5 if low < 100 else 4), low, unit)
    return bars.draw(title, f"{title}: rpcdataloader against torch's loader with fork and with spawn.")


def _read_workers(batch_size: int, column: str) -> list[tuple[float, float]]:
    rows = [row for row in read_table("workers") if row["batch size"] == str(batch_size)]
    return [(float(row["workers"]), number(row[column]) or 0.0) for row in rows]


_WORKERS = Scale(1, 256, 64, 576, is_log=True)
_TICKS = [2.0**power for power in range(9)]


def draw_workers() -> Picture:
    series = []
    for batch_size, colour in (1, BLUE), (8, ORANGE):
        points = _read_workers(batch_size, "batches/s")
        ideal = [(workers, workers / (batch_size * 0.020)) for workers, _ in points]
        name = "single samples" if batch_size == 1 else f"batches of {batch_size}"
        series.append(Series(name, colour, points))
        series.append(Series("ideal", GREY, ideal, 'stroke-dasharray="5 5"', has_dots=False))
    text = "Batches per second with 1 to 256 workers whose samples take 20 ms, and what these could do at best."
    rates = Scale(3, 20_000, 340, 90, is_log=True)
    units = "workers, on 2 cores with the trainer", "batches/s"
    return draw_lines("Throughput against the number of workers", text, series, _WORKERS, rates, units, _TICKS)


def draw_cost() -> Picture:
    table = [(float(row["workers"]), number(row["us/batch, epoch of 1,000,000"]) or 0.0) for row in read_table("table")]
    series = [
        Series("batches of 8", ORANGE, _read_workers(8, "trainer CPU us/batch")),
        Series("single samples", BLUE, _read_workers(1, "trainer CPU us/batch")),
        Series("its task table, of 1,000,000 batches", GREEN, table),
    ]
    text = "Processor time of the training process for each batch, with 1 to 256 workers, and that of its task table."
    costs = Scale(3, 2000, 340, 90, is_log=True)
    units = "workers", "CPU us per batch"
    return draw_lines("The trainer's processor time for each batch", text, series, _WORKERS, costs, units, _TICKS)
