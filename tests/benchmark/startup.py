"""How fast a pass begins, and what idle workers occupy: ours, and torch's loader with fork and with spawn.

::

    python -m tests.benchmark.startup            # everything: about 15 minutes on 2 cores, and 12 GB of memory
    python -m tests.benchmark.startup --quick    # fewer workers, paths and modules: does it work?
    python -m tests.benchmark.startup --check    # fail below 80 % of the recorded ratios

**Rows.** Each is a fresh training process, in interleaved rounds. Ours has a node server that is up, as they are, and
has served nobody before: its session, imports and datasets are made by the measurement.

- ``small``: a list of 100,000 paths and 2 workers, against torch's with fork: what a pass costs before it begins.
- ``paths``: a dataset that holds a list of a million paths and 32 workers, against torch's with spawn, which is what
  a training process with a GPU and threads has to use. With fork, for comparison. Of torch's with spawn, only the first
  epoch: the second is the same, and takes minutes.
- ``imports``: a dataset whose module imports 1,000 modules from a slow mount (see ``slow_modules.py``) and 8 workers.
  The training process imports them, too, as *build* shows; cold is the first epoch, where a session or each worker
  spawned imports them, and warm the second.

``ours`` is given an ordinary dataset, as torch's loader is, and sends it to the node; ``ours-built`` is an
``RPCDataset`` that the node builds.

**Columns.** *build*: dataset and loader are made. *first*: from ``iter()`` to the first batch. *all*: until every
worker has delivered one. *second*: from letting the first iterator go to the first batch of the second epoch.
*memory*: the proportional set size of all processes but the trainer while they have nothing to do: workers, and node
server and session, or torch's helpers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import recorded, slow_modules
from .__main__ import describe_machine
from .claims import Claim, Found, format_claims, measure_claims
from .loaders import LOADERS, node_server
from .processes import ask_trainer, measure_rounds, stop_by_signals
from .startup_trainer import Start
from .table import format_number, format_table

# Spawning 32 workers one after the other takes minutes.
_TIMEOUT = 1800.0
_QUICK_DIVISOR = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A dataset and the loaders that begin with it; the last one is what the others are compared with."""

    title: str
    num_workers: int
    loaders: tuple[str, ...]


ROWS = {
    "small": Row("a short list of paths", 2, ("ours", "ours-built", "torch-fork")),
    "paths": Row("a list of a million paths", 32, ("ours", "ours-built", "torch-fork", "torch-spawn")),
    "imports": Row("imports from a slow mount", 8, ("ours", "ours-built", "torch-fork", "torch-spawn")),
}

TITLES = {
    "ours": "ours",
    "ours-built": "ours, RPCDataset",
    "torch-fork": "torch, fork",
    "torch-spawn": "torch, spawn",
}


_FORK, _SPAWN = "torch DataLoader, fork", "torch DataLoader, spawn"
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
    "first-batch-paths": Claim(
        f"first batch, {_MILLION}", _SPAWN, 0.1, "paths", "ours", "torch-spawn", "first_seconds", True
    ),
    "idle-memory": Claim(f"memory, {_MILLION}", _SPAWN, 0.25, "paths", "ours", "torch-spawn", "idle_bytes", True),
}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.startup", description="Compare how passes begin.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="some of them (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of everything: does it work?")
    recorded.add_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
        if args.record or args.check:
            parser.error("--quick measures something else than what is claimed")
    return args


def _measure(dataset: str, num_workers: int, loader: str, divisor: int) -> Start:
    """Start a server for ours, and a trainer; wait for the figures, stop both.

    Raises:
        ChildError: One of the processes failed.
    """
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        modules = folder / "mount"
        modules.mkdir()
        if dataset == "imports":
            slow_modules.write(modules, 1000 // divisor)
        env = LOADERS["ours-tcp"].make_environment(folder)
        env["PYTHONPATH"] += f":{modules}"
        servers = [stack.enter_context(node_server(num_workers, env, folder))] if loader.startswith("ours") else []
        arguments = {
            "loader": loader,
            "dataset": dataset,
            "num_workers": num_workers,
            "num_paths": 10**6 // divisor,
            "second": (dataset, loader) != ("paths", "torch-spawn"),
            "addresses": [address for address, _pid in servers],
            "servers": [pid for _address, pid in servers],
        }
        return Start(**ask_trainer("startup_trainer.measure", arguments, env, folder, _TIMEOUT))


def make_table(rows: Mapping[str, Row], found: Found) -> str:
    """Return a row for each dataset and loader: medians of the rounds."""
    header = ["dataset", "workers", "loader", "build ms", "first ms", "all ms", "second ms", "memory MB", "processes"]
    lines = []
    for (dataset, loader), rounds in found.items():
        labels = [rows[dataset].title, str(rows[dataset].num_workers), TITLES[loader]]
        starts = list(rounds.values())
        if not starts:
            lines.append([*labels, "failed", *["-"] * (len(header) - 4)])
            continue
        times = [
            _format_milliseconds([getattr(start, name) for start in starts])
            for name in ("build_seconds", "first_seconds", "all_seconds", "second_seconds")
        ]
        memory = format_number(statistics.median(start.idle_bytes for start in starts) / 1e6)
        lines.append([*labels, *times, memory, str(starts[0].num_processes)])
    return format_table(header, lines, 3)


def _format_milliseconds(seconds: Sequence[float | None]) -> str:
    """The median; a dash where nothing was measured."""
    known = [value for value in seconds if value is not None]
    return format_number(statistics.median(known) * 1e3) if known else "-"


def main() -> None:
    args = _parse_args()
    stop_by_signals()
    divisor = _QUICK_DIVISOR if args.quick else 1
    rows = {name: replace(ROWS[name], num_workers=max(2, ROWS[name].num_workers // divisor)) for name in args.rows}
    machine = describe_machine()
    found = measure_rounds(
        {name: row.loaders for name, row in rows.items()},
        args.rounds,
        lambda name, loader: _measure(name, rows[name].num_workers, loader, divisor),
        lambda start: f"{start.first_seconds * 1e3:.0f} ms",
    )
    ratios = measure_claims(CLAIMS, found)
    print(make_table(rows, found))
    if args.quick:
        print("\nA tenth of the paths and modules.")
    elif ratios:
        print(f"\nWhat is claimed:\n\n{format_claims(CLAIMS, ratios)}")
    print(f"\nMedians of {args.rounds} interleaved rounds, {machine}.")
    sys.exit(recorded.conclude(args, CLAIMS, ratios, machine))


if __name__ == "__main__":
    main()
