"""What a loop waits for at both ends of a pass: torch's loader, and ours with whole batches and with parts.

::

    python -m tests.benchmark.parts            # about five minutes on 2 cores
    python -m tests.benchmark.parts --quick    # a short round: does it work?

Samples sleep, so a few cores serve any number of workers. *whole* is our loader with a ``collate_fn`` that calls
torch's, of which no batch is made in parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from rpcdataloader import RPCDataloader

from .loaders import environment, node_server
from .processes import describe_machine
from .table import format_number, format_table


class Sleeping(Dataset[Any]):
    """Each sample takes this time."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), index % 256, dtype=torch.uint8), index


def whole(samples: list[Any]) -> Any:
    """As torch's function."""
    return default_collate(samples)


class Row(NamedTuple):
    """A loop: its number of workers, the size of its batches and their number, seconds per sample and per step."""

    num_workers: int
    batch_size: int
    num_batches: int
    sample: float
    step: float


ROWS = {
    "64 samples of 50 ms, 16 workers": Row(16, 64, 20, 0.05, 0.0),
    "32 samples of 20 ms, 8 workers, steps of 100 ms": Row(8, 32, 24, 0.02, 0.1),
    "the same, 33 batches, no steps": Row(8, 32, 33, 0.02, 0.0),
}
LOADERS = "torch", "whole", "parts"


class Passes(NamedTuple):
    """Of the first and of the second pass: seconds to the first batch, share of the pass spent waiting, seconds."""

    first: tuple[float, float]
    share: tuple[float, float]
    whole: tuple[float, float]
    last: tuple[float, float]  # seconds between the last two batches


def measure(row: Row, loader: str, address: str) -> Passes:
    """Two passes with workers that stay; of ours, on a running node server."""
    dataset = Sleeping(row.batch_size * row.num_batches, row.sample)
    options: dict[str, Any] = {"batch_size": row.batch_size, "persistent_workers": True}
    if loader == "torch":
        batches: Any = DataLoader(dataset, num_workers=row.num_workers, **options)
    else:
        options |= {"workers": address, "num_workers": row.num_workers}
        batches = RPCDataloader(dataset, collate_fn=whole if loader == "whole" else None, **options)
    found = []
    for _ in range(2):
        times = [time.perf_counter()]
        waited = 0.0
        for _batch in batches:
            times.append(time.perf_counter())
            waited += times[-1] - times[-2] - (row.step if len(times) > 2 else 0.0)
            time.sleep(row.step)
        total = time.perf_counter() - times[0]
        found.append((times[1] - times[0], waited / total, total, times[-1] - times[-2]))
    return Passes(*zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short round: does it work?")
    rounds = 1 if parser.parse_args().quick else 5
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    cells = []
    with environment() as (folder, env):
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        for name, row in ROWS.items():
            with node_server(row.num_workers, env, folder) as (address, _pid):
                found = [{loader: measure(row, loader, address) for loader in LOADERS} for _ in range(rounds)]
            for loader in LOADERS:
                columns = []
                for what in "first", "share", "last":
                    for at in 0, 1:
                        values = [getattr(turn[loader], what)[at] for turn in found]
                        columns.append(format_number(statistics.median(values)))
                cells.append([name, loader, *columns])
                print(cells[-1], flush=True)
    header = ["loop", "loader", *(f"{what}, pass {at}" for what in ("first s", "waiting", "last s") for at in (1, 2))]
    print(format_table(header, cells, 2))
    print(f"\nMedians of {rounds} interleaved rounds on {describe_machine()}.")


if __name__ == "__main__":
    main()
