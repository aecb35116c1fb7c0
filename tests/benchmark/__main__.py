"""The harness: reads the options, runs the rounds, prints the table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import recorded
from .claims import CLAIMS, format_claims, measure_claims, plan
from .loaders import LOADERS, NUM_WORKERS, PACKAGE
from .processes import ChildError, running, stop_by_signals
from .report import Measurement, Report
from .trainer import Figures, Phase, Task, count_loops
from .workloads import WORKLOADS

# CPU time of a step of the busy trainer, where nothing disturbs it.
_STEP_SECONDS = 0.010


def _make_parser_of_names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return [name for name in known if name in names]

    return parse


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description="Compare loaders; see the package.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each phase of each (default: 3)")
    for option, known in ("workloads", list(WORKLOADS)), ("loaders", list(LOADERS)):
        parser.add_argument(
            f"--{option}",
            type=_make_parser_of_names(known),
            default=known,
            help=f"comma-separated, of {', '.join(known)} (default: all)",
        )
    parser.add_argument(
        "--claims", action="store_true", help="measure what the claims need, instead of --workloads and --loaders"
    )
    parser.add_argument("--record", action="store_true", help="as --claims, and write the ratios to recorded.json")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"as --claims, and fail below {100 * recorded.LEAST_LEFT:g} %% of the recorded ratios",
    )
    parser.add_argument("--copy", action="store_true", help="the trainer also copies each batch, as to a GPU")
    parser.add_argument("--quick", action="store_true", help="one round of 0.5 s: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured to FILE")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.5
    if args.rounds < 1 or args.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    if args.record and args.check:
        parser.error("--record would overwrite what --check compares with")
    args.claims = args.claims or args.record or args.check
    return args


def _measure(workload: str, loader: str, seconds: float, copy: bool, step_loops: int) -> Figures:
    """Start servers and trainer, wait for the figures, stop both.

    Raises:
        ChildError: One of the processes failed.
        OSError: The loader cannot be had.
    """
    # Two warm-ups and two phases; slow loaders take longer, because they wait for a number of batches.
    timeout = 120 + 10 * seconds
    contestant = LOADERS[loader]
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name:
        folder = Path(name)
        env = contestant.make_environment(folder)
        with contestant.serve(WORKLOADS[workload], env, folder) as addresses:
            task = Task(loader, workload, addresses, seconds, copy, step_loops)
            with running(f"{PACKAGE}.trainer", [json.dumps(asdict(task))], env, folder) as trainer:
                figures = json.loads(trainer.read_line("figures ", timeout))
                trainer.wait(timeout)
    return Figures(**{**figures, "idle": Phase(**figures["idle"]), "busy": Phase(**figures["busy"])})


def describe_machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    found["text"] = (
        f"{found['cpus']} CPUs ({found['machine']}), Python {found['python']}, torch {found['torch']}, "
        f"load average at the start {found['load_average'][0]}"
    )
    return found


def _run_rounds(args: argparse.Namespace) -> list[Measurement]:
    planned = plan(CLAIMS, list(LOADERS)) if args.claims else dict.fromkeys(args.workloads, args.loaders)
    # Once for all, so that the steps of a busy trainer are the same work for everybody.
    step_loops = count_loops(_STEP_SECONDS)
    measurements = []
    for workload, loaders in planned.items():
        for number in range(args.rounds):
            for loader in loaders:
                label = f"{workload}, round {number + 1} of {args.rounds}, {loader}"
                print(label, end=": ", file=sys.stderr, flush=True)
                figures = None
                try:
                    figures = _measure(workload, loader, args.seconds, args.copy, step_loops)
                    print(f"{figures.idle.num_batches / figures.idle.seconds:.1f} batches/s", file=sys.stderr)
                except (ChildError, OSError) as error:
                    print(f"failed\n{error}", file=sys.stderr)
                measurements.append(Measurement(workload, loader, number, figures))
    return measurements


def main() -> None:
    args = _parse_args()
    stop_by_signals()
    goals = {name: claim.goal for name, claim in CLAIMS.items()}
    if args.check and not recorded.find_known(goals):
        sys.exit(2)
    machine = describe_machine()
    measurements = _run_rounds(args)
    report = Report(measurements)
    ratios = measure_claims(CLAIMS, report.get)
    print(f"A trainer that only takes batches:\n\n{report.make_idle_table()}")
    print(f"\nA trainer that computes {_STEP_SECONDS * 1e3:g} ms per batch:\n\n{report.make_busy_table()}")
    if ratios:
        print(f"\nWhat is claimed:\n\n{format_claims(goals, ratios)}")
    print(
        f"\nMedians of {args.rounds} interleaved rounds of {args.seconds:g} s, {NUM_WORKERS} workers, {machine['text']}"
        f"{', every batch copied once by the trainer' if args.copy else ''}."
    )
    if args.json is not None:
        found = {"machine": machine, "seconds": args.seconds, "copy": args.copy, "ratios": ratios}
        args.json.write_text(json.dumps({**found, "measurements": [asdict(one) for one in measurements]}, indent=1))
    if args.record:
        recorded.record(ratios, machine)
    if args.check:
        sys.exit(recorded.check(goals, ratios))


if __name__ == "__main__":
    main()
