"""Many workers: does a batch cost the same?

::

    python -m tests.benchmark.scale            # about 3 minutes on 2 cores
    python -m tests.benchmark.scale --quick    # few workers: does it work?

1 to 256 workers whose samples take 20 ms in which they sleep, so that as many as one likes fit on few cores. *of ideal*
is the rate divided by what so many sleepers could do. Batches of 1 sample and of 8: with single samples, 64 workers
make 3,200 batches per second, and the cores of a small machine are the limit: look at the CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

from .loaders import environment, node_server
from .processes import ask_trainer, describe_machine, stop_by_signals
from .table import format_number, format_table
from .trainer import Phase, take, wait_for_workers

_NAP_SECONDS = 0.020


@dataclass(frozen=True, slots=True)
class Flow:
    """Batches that flowed, and the threads of the trainer meanwhile."""

    phase: Phase
    num_threads: int


def measure(address: str, num_workers: int, batch_size: int, seconds: float) -> Flow:
    """Take batches from workers that sleep for each sample."""
    from rpcdataloader import RPCDataloader, RPCDataset

    from . import datasets

    dataset = RPCDataset(address, datasets.Naps, _NAP_SECONDS)
    batches = iter(RPCDataloader(dataset, batch_size, num_workers=num_workers))
    wait_for_workers(batches, num_workers, lambda batch: batch)
    for _ in range(2 * num_workers):  # what has waited meanwhile comes at once
        next(batches)
    # Workers that sleep for the same time are done together.
    phase = take(batches, seconds, round_length=num_workers)
    return Flow(phase, len(os.listdir("/proc/self/task")))


def _ask(num_workers: int, batch_size: int, seconds: float) -> list[str]:
    """Run a trainer with a node server of its own; returns a row of the table."""
    print(f"{num_workers} workers, batches of {batch_size}", file=sys.stderr, flush=True)
    with environment() as (folder, env), node_server(num_workers, env, folder) as (address, _pid):
        arguments = {"address": address, "num_workers": num_workers, "batch_size": batch_size, "seconds": seconds}
        found = ask_trainer("scale.measure", arguments, env, folder, 600.0)
    phase = Phase(**found["phase"])
    ideal = num_workers / (batch_size * _NAP_SECONDS)
    cells = [format_number(phase.rate), f"{phase.rate / ideal:.3f}", format_number(phase.cpu * 1e6)]
    return [str(num_workers), str(batch_size), *cells, str(found["num_threads"])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.scale", description="Measure how costs grow.")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it work?")
    args = parser.parse_args()
    stop_by_signals()
    machine = describe_machine()
    numbers, seconds = ((1, 4, 16), 1.0) if args.quick else ((1, 2, 4, 8, 16, 32, 64, 128, 256), 4.0)
    rows = [_ask(num_workers, batch_size, seconds) for batch_size in (8, 1) for num_workers in numbers]
    header = ["workers", "batch size", "batches/s", "of ideal", "trainer CPU us/batch", "its threads"]
    print(format_table(header, rows, 0))
    print(f"\nOn {machine}.")


if __name__ == "__main__":
    main()
