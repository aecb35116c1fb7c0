"""How fast a pass begins, and what idle workers occupy: ours, and torch's loader with fork and with spawn.

::

    python -m tests.benchmark.startup            # everything: about 10 minutes on 2 cores, and 12 GB of memory
    python -m tests.benchmark.startup --quick    # fewer workers and paths: does it work?
    python -m tests.benchmark.startup --check    # fail below 80 % of the recorded ratios

**Rows.** Each is a fresh training process, in interleaved rounds. Ours has a node server that is up, as they are, and
has served nobody before: its session, imports and datasets are made by the measurement.

- ``small``: a list of 100,000 paths and 2 workers, against torch's with fork: what a pass costs before it begins.
- ``paths``: a dataset that holds a list of a million paths and 32 workers, against torch's with spawn, which is what
  a training process with a GPU and threads has to use. With fork, for comparison. Of torch's with spawn, only the first
  epoch: the second is the same, and takes minutes.

``ours`` is given an ordinary dataset, as torch's loader is, and sends it to the node; ``ours-built`` is an
``RPCDataset`` that the node builds; ``ours-fork`` and ``ours-forkserver`` have workers of this machine, which
multiprocessing starts so, as torch's.

**Columns.** *build*: dataset and loader are made. *first*: from ``iter()`` to the first batch. *all*: until every
worker has delivered one. *second*: from letting the first iterator go to the first batch of the second epoch.
*memory*: the proportional set size of all processes but the trainer while they have nothing to do: workers, and node
server and session, or torch's helpers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .claims import Claim, Found, add_options, conclude, format_claims, measure_claims
from .loaders import environment, node_server
from .processes import ask_trainer, describe_machine, measure_rounds, stop_by_signals
from .table import format_number, format_table
from .trainer import wait_for_workers

# Spawning 32 workers one after the other takes minutes.
_TIMEOUT = 1800.0

# Title, number of workers, number of paths, loaders.
ROWS = {
    "small": (
        "a short list of paths",
        2,
        10**5,
        ("ours", "ours-built", "ours-fork", "ours-forkserver", "torch-fork", "torch-forkserver"),
    ),
    "paths": ("a list of a million paths", 32, 10**6, ("ours", "ours-built", "ours-fork", "torch-fork", "torch-spawn")),
}

TITLES = {
    "ours": "ours",
    "ours-built": "ours, RPCDataset",
    "ours-fork": "ours, this machine, fork",
    "ours-forkserver": "ours, this machine, forkserver",
    "torch-fork": "torch, fork",
    "torch-forkserver": "torch, forkserver",
    "torch-spawn": "torch, spawn",
}

_FORK, _SPAWN = "torch DataLoader, fork", "torch DataLoader, spawn"
_FORKSERVER = "torch DataLoader, forkserver"
_SECOND = "first batch of the second epoch"
_MILLION = "a million paths, 32 workers"

# Times and sizes: less is better, so goals are upper limits.
CLAIMS = {
    "first-batch-built": Claim(
        "first batch, RPCDataset", _FORK, 1.0, "small", "ours-built", "torch-fork", "first_seconds", True
    ),
    "second-epoch-built": Claim(
        f"{_SECOND}, RPCDataset", _FORK, 1.0, "small", "ours-built", "torch-fork", "second_seconds", True
    ),
    "first-batch": Claim("first batch", _FORK, 1.0, "small", "ours", "torch-fork", "first_seconds", True),
    "second-epoch": Claim(_SECOND, _FORK, 1.0, "small", "ours", "torch-fork", "second_seconds", True),
    "first-batch-here": Claim(
        "first batch, this machine", _FORK, 1.0, "small", "ours-fork", "torch-fork", "first_seconds", True
    ),
    "second-epoch-here": Claim(
        f"{_SECOND}, this machine", _FORK, 1.0, "small", "ours-fork", "torch-fork", "second_seconds", True
    ),
    "first-batch-forkserver": Claim(
        "first batch, this machine",
        _FORKSERVER,
        1.0,
        "small",
        "ours-forkserver",
        "torch-forkserver",
        "first_seconds",
        True,
    ),
    "first-batch-paths": Claim(
        f"first batch, {_MILLION}", _SPAWN, 0.1, "paths", "ours", "torch-spawn", "first_seconds", True
    ),
    "idle-memory": Claim(f"memory, {_MILLION}", _SPAWN, 0.25, "paths", "ours", "torch-spawn", "idle_bytes", True),
}


@dataclass(frozen=True, slots=True)
class Start:
    """What the columns show, in seconds and bytes; no ``second_seconds`` without a second epoch."""

    build_seconds: float
    first_seconds: float
    all_seconds: float
    second_seconds: float | None
    idle_bytes: int
    num_processes: int


# --- the trainer


def _build(loader: str, num_paths: int, num_workers: int, addresses: list[str]) -> Any:
    paths = importlib.import_module("benchmark.datasets").Paths
    options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers}
    if loader.startswith("torch"):
        from torch.utils.data import DataLoader

        return DataLoader(paths(num_paths), multiprocessing_context=loader.removeprefix("torch-"), **options)
    from rpcdataloader import RPCDataloader, RPCDataset

    if not addresses:
        return RPCDataloader(paths(num_paths), multiprocessing_context=loader.removeprefix("ours-"), **options)
    if loader == "ours-built":
        return RPCDataloader(RPCDataset(addresses, paths, num_paths), **options)
    return RPCDataloader(paths(num_paths), workers=addresses, **options)


def measure(
    loader: str, num_workers: int, num_paths: int, second: bool, addresses: list[str], servers: list[int]
) -> Start:
    """Build the loader and begin two epochs.

    Args:
        second: Whether to begin a second epoch.
        addresses: Of the node server, for ours; ``servers`` are its process ids.
    """
    # Everybody's trainer has it.
    importlib.import_module("torch")
    start = time.perf_counter()
    made = _build(loader, num_paths, num_workers, addresses)
    built = time.perf_counter()
    batches = iter(made)
    next(batches)
    first = time.perf_counter()
    wait_for_workers(batches, num_workers, lambda batch: batch[1])
    everybody = time.perf_counter()
    time.sleep(1.0)  # what was prefetched is there, and nobody is at work
    processes = [*servers, *_find_descendants([os.getpid(), *servers])]
    idle_bytes = _sum_memory(processes)
    second_seconds = None
    if second:
        begun = time.perf_counter()
        del batches  # torch's loader waits for the end of its workers
        batches = iter(made)
        next(batches)
        second_seconds = time.perf_counter() - begun
    return Start(built - start, first - built, everybody - built, second_seconds, idle_bytes, len(processes))


def _find_descendants(roots: Iterable[int]) -> list[int]:
    """Return the processes below these, at any depth; without themselves."""
    found: list[int] = []
    todo = list(roots)
    while todo:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                below = [int(pid) for pid in path.read_text().split()]
                found += below
                todo += below
    return found


def _sum_memory(pids: Iterable[int]) -> int:
    """Return the proportional set size of these processes together, in bytes: shared pages are divided among all."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


# --- the harness


def _ask(row: str, loader: str, divisor: int) -> Start:
    """Start a server for ours, and a trainer; wait for the figures, stop both."""
    _title, num_workers, num_paths, _loaders = ROWS[row]
    num_workers = max(2, num_workers // divisor)
    with environment() as (folder, env), contextlib.ExitStack() as stack:
        is_remote = loader in ("ours", "ours-built")
        servers = [stack.enter_context(node_server(num_workers, env, folder))] if is_remote else []
        arguments = {
            "loader": loader,
            "num_workers": num_workers,
            "num_paths": num_paths // divisor,
            "second": (row, loader) != ("paths", "torch-spawn"),
            "addresses": [address for address, _pid in servers],
            "servers": [pid for _address, pid in servers],
        }
        return Start(**ask_trainer("startup.measure", arguments, env, folder, _TIMEOUT))


def make_table(found: Found) -> str:
    """Return a row for each dataset and loader: medians of the rounds."""
    header = ["dataset", "workers", "loader", "build ms", "first ms", "all ms", "second ms", "memory MB", "processes"]
    lines = []
    for (row, loader), rounds in found.items():
        title, num_workers, _num_paths, _loaders = ROWS[row]
        starts = list(rounds.values())
        cells = ["failed", *"-----"]
        if starts:
            names = ("build_seconds", "first_seconds", "all_seconds", "second_seconds")
            cells = [_format_median([getattr(start, name) for start in starts], 1e3) for name in names]
            cells.append(_format_median([start.idle_bytes for start in starts], 1e-6))
            cells.append(str(starts[0].num_processes))
        lines.append([title, str(num_workers), TITLES[loader], *cells])
    return format_table(header, lines, 3)


def _format_median(values: list[Any], factor: float) -> str:
    """The median; a dash where nothing was measured."""
    return "-" if None in values else format_number(statistics.median(values) * factor)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.startup", description="Compare how passes begin.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="some of them (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of everything: does it work?")
    add_options(parser)
    args = parser.parse_args()
    if args.quick and (args.record or args.check):
        parser.error("--quick measures something else than what is claimed")
    stop_by_signals()
    rounds, divisor = (1, 10) if args.quick else (args.rounds, 1)
    machine = describe_machine()
    found = measure_rounds(
        {name: ROWS[name][3] for name in args.rows},
        rounds,
        lambda row, loader: _ask(row, loader, divisor),
        lambda start: f"{start.first_seconds * 1e3:.0f} ms",
    )
    ratios = measure_claims(CLAIMS, found)
    print(make_table(found))
    if args.quick:
        print("\nA tenth of the workers and paths.")
    else:
        print(f"\nWhat is claimed:\n\n{format_claims(CLAIMS, ratios)}")
    print(f"\nMedians of {rounds} interleaved rounds, {machine}.")
    sys.exit(conclude(args, CLAIMS, ratios, machine))


if __name__ == "__main__":
    main()
