"""The numbers of the first page: each from recorded data, in a table between two comments of the README."""

from __future__ import annotations

from typing import Any

from tests.benchmark.claims import CLAIMS
from tests.benchmark.recorded import load

from .results import number, read_table

BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"


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
    first = {
        row["loader"]: (number(row["first ms"]) or 0.0) / 1000
        for row in read_table("startup")
        if row["workers"] == "32"
    }
    rows = [
        (
            _range("float32-tcp"),
            "as many float32 image batches per second as torch's local `DataLoader`, over TCP, with the same 2 workers",
        ),
        (_range("float32-unix"), "as many of these on one machine, where workers and training share memory"),
        (
            _range("busy"),
            "as many as the [original RPCDataloader](docs/compared.md#which-one-to-use) 0.2.1, while the training loop "
            "computes",
        ),
        (
            f"{killed['lost'] + killed['changed']} of {killed['batches']:,}",
            f"batches lost or changed when a node with {killed['killed']} of {killed['workers']} workers is killed",
        ),
        (
            f"{resumed['once']:,} of {resumed['samples']:,}",
            f"samples seen once when {resumed['ranks'][0]} ranks with {resumed['workers'][0]} workers stop in "
            f"mid-epoch and {resumed['ranks'][1]} ranks with {resumed['workers'][1]} workers continue it",
        ),
        (
            f"{first['ours, RPCDataset']:.2f} s",
            f"to the first batch of an `RPCDataset` that lists a million paths, with 32 workers; torch: "
            f"{first['torch, fork']:.2f} s with fork, "
            f"{first['torch, spawn']:.0f} s with spawn",
        ),
    ]
    return "| | |\n|---:|---|\n" + "".join(f"| **{figure}** | {text} |\n" for figure, text in rows)


def put_numbers(page: str, table: str) -> str:
    """Return the page with this table in place of what is between the comments.

    Raises:
        ValueError: The page has no such comments.
    """
    before, found, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n" + table + "\n" + END + after
