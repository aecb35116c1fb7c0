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
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import recorded, slow_modules
from .__main__ import describe_machine
from .claims import Goal, format_claims, median_ratio
from .loaders import LOADERS, PACKAGE
from .processes import ChildError, running, stop_by_signals
from .startup_trainer import Start, Task
from .table import format_number, format_table

# Spawning 32 workers one after the other takes minutes.
_TIMEOUT = 1800.0
_QUICK_DIVISOR = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A dataset and the loaders that begin with it; the last one is what the others are compared with."""

    dataset: str
    title: str
    num_workers: int
    loaders: tuple[str, ...]


ROWS = {
    "small": Row("small", "a short list of paths", 2, ("ours", "ours-built", "torch-fork")),
    "paths": Row("paths", "a list of a million paths", 32, ("ours", "ours-built", "torch-fork", "torch-spawn")),
    "imports": Row("imports", "imports from a slow mount", 8, ("ours", "ours-built", "torch-fork", "torch-spawn")),
}

TITLES = {
    "ours": "ours",
    "ours-built": "ours, RPCDataset",
    "torch-fork": "torch, fork",
    "torch-spawn": "torch, spawn",
}


@dataclass(frozen=True, slots=True)
class StartClaim:
    """A figure of ours at a row, against that of another loader."""

    goal: Goal
    row: str
    reference: str
    figure: str
    loader: str = "ours"


_MILLION = "a million paths, 32 workers"

# Times and sizes: less is better, so goals are upper limits.
CLAIMS = {
    "first-batch-built": StartClaim(
        Goal("first batch, RPCDataset", "torch DataLoader, fork", 1.0, True),
        "small",
        "torch-fork",
        "first_seconds",
        "ours-built",
    ),
    "second-epoch-built": StartClaim(
        Goal("first batch of the second epoch, RPCDataset", "torch DataLoader, fork", 1.0, True),
        "small",
        "torch-fork",
        "second_seconds",
        "ours-built",
    ),
    "first-batch": StartClaim(
        Goal("first batch", "torch DataLoader, fork", 1.0, True), "small", "torch-fork", "first_seconds"
    ),
    "second-epoch": StartClaim(
        Goal("first batch of the second epoch", "torch DataLoader, fork", 1.0, True),
        "small",
        "torch-fork",
        "second_seconds",
    ),
    "first-batch-paths": StartClaim(
        Goal(f"first batch, {_MILLION}", "torch DataLoader, spawn", 0.1, True), "paths", "torch-spawn", "first_seconds"
    ),
    "idle-memory": StartClaim(
        Goal(f"memory, {_MILLION}", "torch DataLoader, spawn", 0.25, True), "paths", "torch-spawn", "idle_bytes"
    ),
}

Found = Mapping[tuple[str, str], Mapping[int, Start]]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.startup", description="Compare how passes begin.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of everything: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    parser.add_argument("--record", action="store_true", help="write the ratios to recorded.json")
    parser.add_argument("--check", action="store_true", help="fail below 80 %% of the recorded ratios")
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    for name in args.rows:
        if name not in ROWS:
            parser.error(f"{name!r} is none of {', '.join(ROWS)}")
    if args.quick:
        args.rounds = 1
    if args.rounds < 1:
        parser.error("--rounds must be positive")
    if args.quick and (args.record or args.check):
        parser.error("--quick measures something else than what is claimed")
    return args


@contextlib.contextmanager
def _served(loader: str, num_workers: int, env: dict[str, str], folder: Path) -> Iterator[tuple[list[str], list[int]]]:
    """A node server for ours, nobody for torch: addresses and process ids."""
    if not loader.startswith("ours"):
        yield [], []
        return
    args = ["--port", "0", "--num-workers", str(num_workers)]
    with running("rpcdataloader.launch", args, env, folder) as server:
        yield [server.read_line("rpcdataloader ready ", _TIMEOUT).split()[0]], [server.pid]


def _measure(row: Row, loader: str, divisor: int) -> Start:
    """Start a server and a trainer, wait for the figures, stop both.

    Raises:
        ChildError: One of the processes failed.
    """
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name:
        folder = Path(name)
        modules = folder / "mount"
        modules.mkdir()
        if row.dataset == "imports":
            slow_modules.write(modules, 1000 // divisor)
        env = LOADERS["ours-tcp"].make_environment(folder)
        env["PYTHONPATH"] += f":{modules}"
        with _served(loader, row.num_workers, env, folder) as (addresses, servers):
            second = (row.dataset, loader) != ("paths", "torch-spawn")
            task = Task(loader, row.dataset, row.num_workers, 10**6 // divisor, second, addresses, servers)
            with running(f"{PACKAGE}.startup_trainer", [json.dumps(asdict(task))], env, folder) as trainer:
                start = json.loads(trainer.read_line("started ", _TIMEOUT))
                trainer.wait(_TIMEOUT)
    return Start(**start)


def make_table(rows: Sequence[Row], found: Found) -> str:
    """Return a row for each dataset and loader: medians of the rounds."""
    header = ["dataset", "workers", "loader", "build ms", "first ms", "all ms", "second ms", "memory MB", "processes"]
    lines = []
    for row in rows:
        for loader in row.loaders:
            starts = list(found.get((row.dataset, loader), {}).values())
            labels = [row.title, str(row.num_workers), TITLES[loader]]
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


def measure_claims(found: Found) -> dict[str, float]:
    """Return the ratios of those claims for which there is enough."""
    ratios = {}
    for name, claim in CLAIMS.items():
        ours, theirs = (
            {number: getattr(start, claim.figure) for number, start in found.get((claim.row, loader), {}).items()}
            for loader in (claim.loader, claim.reference)
        )
        ratio = median_ratio(ours, theirs)
        if ratio is not None:
            ratios[name] = ratio
    return ratios


def main() -> None:
    args = _parse_args()
    stop_by_signals()
    divisor = _QUICK_DIVISOR if args.quick else 1
    rows = [replace(ROWS[name], num_workers=max(2, ROWS[name].num_workers // divisor)) for name in args.rows]
    goals = {name: claim.goal for name, claim in CLAIMS.items()}
    if args.check and not recorded.find_known(goals):
        sys.exit(2)
    machine = describe_machine()
    found: dict[tuple[str, str], dict[int, Start]] = {}
    for row in rows:
        for number in range(args.rounds):
            for loader in row.loaders:
                print(
                    f"{row.dataset}, round {number + 1} of {args.rounds}, {loader}",
                    end=": ",
                    file=sys.stderr,
                    flush=True,
                )
                try:
                    start = _measure(row, loader, divisor)
                except (ChildError, OSError) as error:
                    print(f"failed\n{error}", file=sys.stderr)
                    continue
                print(f"{start.first_seconds * 1e3:.0f} ms", file=sys.stderr)
                found.setdefault((row.dataset, loader), {})[number] = start
    ratios = measure_claims(found)
    print(make_table(rows, found))
    if args.quick:
        print("\nA tenth of the paths and modules.")
    elif ratios:
        print(f"\nWhat is claimed:\n\n{format_claims(goals, ratios)}")
    print(f"\nMedians of {args.rounds} interleaved rounds, {machine['text']}.")
    if args.json is not None:
        starts = [
            {"dataset": dataset, "loader": loader, "round": number, **asdict(start)}
            for (dataset, loader), rounds in found.items()
            for number, start in rounds.items()
        ]
        args.json.write_text(json.dumps({"machine": machine, "ratios": ratios, "starts": starts}, indent=1))
    if args.record:
        recorded.record(ratios, machine)
    if args.check:
        sys.exit(recorded.check(goals, ratios))


if __name__ == "__main__":
    main()
