"""What it costs the trainer to relay the samples of a stream to the workers of its transform.

::

    python -m tests.benchmark.streams            # about a minute on 2 cores
    python -m tests.benchmark.streams --quick    # a short round: does it work?

Batches of 64 raw samples of 110 kB, from one worker: received as they are, received as one array, and relayed to
another worker, which answers with their sizes. A gigabyte counts once, though what is relayed passes the trainer twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader

from .loaders import environment, node_server
from .processes import describe_machine
from .table import format_number, format_table
from .trainer import Phase, take

_BATCH_SIZE = 64
_SAMPLE_BYTES = 110_000
_WARMUP_BATCHES = 8


class RawSamples(IterableDataset[Any]):
    """Endless; the samples are arrays of bytes."""

    def __iter__(self) -> Iterator[Any]:
        samples = [np.full(_SAMPLE_BYTES, number, np.uint8) for number in range(_BATCH_SIZE)]
        while True:
            yield from samples


def as_they_are(samples: list[Any]) -> list[Any]:
    """In place of the collate function."""
    return samples


#: Arguments of each loader.
WAYS: dict[str, dict[str, Any]] = {
    "received": {"collate_fn": as_they_are},
    "received as one array": {"collate_fn": np.stack},
    "relayed": {"collate_fn": as_they_are, "transform": len},
}


def measure(address: str, way: str, seconds: float) -> Phase:
    """Take batches for that long."""
    batches = iter(RPCDataloader(RawSamples(), _BATCH_SIZE, workers=address, num_workers=1, **WAYS[way]))
    for _ in range(_WARMUP_BATCHES):
        next(batches)
    return take(batches, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.streams", description="Measure what relays cost.")
    parser.add_argument("--quick", action="store_true", help="a short round: does it work?")
    rounds, seconds = (1, 0.5) if parser.parse_args().quick else (5, 4.0)
    with environment() as (folder, env), node_server(2, env, folder) as (address, _pid):
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        found = [{way: measure(address, way, seconds) for way in WAYS} for _ in range(rounds)]
    gigabytes = _BATCH_SIZE * _SAMPLE_BYTES / 1e9
    rows = []
    for way in WAYS:
        rate, cpu, loop = (
            statistics.median(getattr(turn[way], name) for turn in found) for name in ("rate", "cpu", "thread")
        )
        ratio = statistics.median(turn["relayed"].cpu / turn[way].cpu for turn in found)
        rows.append(
            [way, f"{rate * gigabytes:.2f}", f"{cpu / gigabytes:.3f}", format_number(loop * 1e6), f"{ratio:.2f}"]
        )
    print(format_table(["samples", "GB/s", "trainer CPU s/GB", "its loop us/batch", "relayed / this"], rows, 0))
    print(f"\nMedians of {rounds} interleaved rounds on {describe_machine()}.")


if __name__ == "__main__":
    main()
