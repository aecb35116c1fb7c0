"""What the recorded tables in ``docs/figures`` show: charts of loaders, and the numbers of the first page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmark.claims import CLAIMS, load

from .svg import BLUE, GREEN, GREY, ORANGE, RED, Picture, Scale

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "figures"
BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"

_COLOURS = {
    "ours, TCP": BLUE,
    "ours, shared memory": GREEN,
    "torch DataLoader": GREY,
    "original 0.2.1": RED,
    "bare sockets": ORANGE,
    "bare sockets, batches made": GREEN,
}


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a recorded table: cells by the titles of their columns."""
    lines = (FOLDER / f"{name}.md").read_text().splitlines()
    header, _, *rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    titles = [cell.strip() for cell in header]
    return [dict(zip(titles, (cell.strip() for cell in row), strict=True)) for row in rows]


def number(cell: str) -> float | None:
    """Return the first number of a cell; None for a dash."""
    return None if cell == "-" else float(cell.split()[0].replace(",", ""))


def draw_loaders(table: str, title: str, least: float, most: float) -> Picture:
    """Draw bars in groups, for the ratios to torch in a recorded table, on a logarithmic scale."""
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for row in read_table(table):
        ratio, rate = number(row["x torch"]), row["batches/s"].partition(" (")[0]
        if ratio is not None:
            groups.setdefault(row["workload"], []).append((row["loader"], ratio, f"{ratio:.3g} x, {rate}/s"))
    height = 48 + sum(34 + 22 * len(bars) for bars in groups.values())
    text = "For each kind of batch, the batches per second of each loader, relative to torch's DataLoader."
    picture = Picture(f"{title}, relative to torch's DataLoader", text, 600, height + 34)
    picture.text(12, 28, f"{title}, torch = 1")
    scale = Scale(least, most, 220, 490, is_log=True)
    for value in scale.powers():
        picture.text(scale.at(value), height + 20, f"{value:g}", "middle", "soft")
        picture.line([(scale.at(value), 44), (scale.at(value), height)], "wire" if value == 1 else "grid")
    y = 44.0
    for group, bars in groups.items():
        picture.text(12, y + 22, group, look="soft")
        y += 34
        for label, ratio, shown in bars:
            start, end = sorted((scale.at(1), scale.at(ratio)))
            picture.text(scale.start - 8, y + 13, label, "end")
            picture.bar(start, y, end - start, 16, _COLOURS[label])
            picture.text(end + 6, y + 13, shown)
            y += 22
    return picture


def _range(name: str) -> str:
    """Return the recorded ratio, which is that of the less favourable machine, and the one of the other machine."""
    claim, recorded = CLAIMS[name], load()[name]
    (row,) = [row for row in read_table("claims") if (row["work"], row["against"]) == (claim.work, claim.against)]
    ratios = [found for cell in ("ratio", "on a slower machine") if (found := number(row[cell])) is not None]
    if recorded not in ratios:
        raise ValueError(f"{name} is {recorded} in recorded.json, and {ratios} in claims.md: record both in one run")
    return f"{min(ratios):.1f} to {max(ratios):.1f} x" if len(ratios) > 1 else f"{recorded:.1f} x"


def make_numbers(losses: dict[str, Any]) -> str:
    """Return the table.

    Args:
        losses: Contents of ``losses.json``.
    """
    killed, resumed = losses["killed"], losses["resumed"]
    ranks, workers = resumed["ranks"], resumed["workers"]
    startup = {row["loader"]: number(row["first ms"]) or 0.0 for row in read_table("startup") if row["workers"] == "32"}
    firsts = [number(row["of the second pass s"]) or 0.0 for row in read_table("parts")[:3]]
    loaders = ("ours, RPCDataset", "ours, this machine, fork", "torch, fork", "torch, spawn")
    ours, here, fork, spawn = (startup[name] / 1000 for name in loaders)
    *_, both = read_table("elsewhere")
    return f"""\
| | |
|---:|---|
| **{_range("float32-tcp")}** | as many float32 image batches per second as torch's local `DataLoader`, over TCP, \
with the same 2 workers |
| **{_range("float32-local")}** | as many of these on one machine, where workers and training share memory |
| **{_range("jpeg-local")}** | as many decoded and cropped JPEGs on one machine, fewer of \
[small ones](docs/compared.md#performance); {load()["jpeg-malloc"]:.2f} x where torch gets [two \
variables](docs/waiting.md#what-to-change-first) for malloc, as our workers do |
| **{number(both["x torch"]):.1f} x** | as many JPEGs from disk, decoded and cropped, if one CPU behind a link of 10 \
Gbit/s [helps](docs/compared.md#performance) the only one of a training; {number(both["x malloc"]):.1f} x where torch \
gets these settings |
| **{_range("busy")}** | as many float32 batches as the [original RPCDataloader](docs/compared.md#which-one-to-use) \
0.2.1, while the training loop computes |
| **{killed["lost"] + killed["changed"]} of {killed["batches"]:,}** | batches lost or changed when a node with \
{killed["killed"]} of {killed["workers"]} workers is killed |
| **{resumed["once"]:,} of {resumed["samples"]:,}** | samples seen once when {ranks[0]} ranks with {workers[0]} \
workers stop in mid-epoch and {ranks[1]} ranks with {workers[1]} workers continue it |
| **{ours:.2f} s** | to the first batch of an `RPCDataset` that lists a million paths, with 32 workers, and \
{here:.2f} s of the dataset itself on one machine; torch: {fork:.2f} s with fork, {spawn:.0f} s with spawn |
| **{firsts[2]:.2f} s** | to the first batch of a second pass, of 64 samples that take 50 ms each, with 16 workers; \
torch: {firsts[0]:.1f} s |
"""


def put_numbers(page: str, table: str) -> str:
    """Return the page with this table in place of what is between the comments."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
