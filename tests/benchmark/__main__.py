"""The harness: reads the options, runs the rounds, prints the tables."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .claims import CLAIMS, add_options, conclude, format_claims, measure_claims, plan
from .loaders import LOADERS, NUM_WORKERS, environment, serve
from .processes import ask_trainer, describe_machine, measure_rounds, stop_by_signals
from .report import make_table
from .trainer import Figures, Phase, count_loops
from .workloads import JPEGS, WORKLOADS

# CPU time of a step of the busy trainer, where nothing disturbs it.
_STEP_SECONDS = 0.010


def _measure(workload: str, loader: str, seconds: float, step_loops: int) -> Figures:
    """Start servers and trainer, wait for the figures, stop both."""
    with environment(loader) as (folder, env), serve(loader, workload, NUM_WORKERS, env, folder) as addresses:
        arguments = {
            "loader": loader,
            "workload": workload,
            "addresses": addresses,
            "seconds": seconds,
            "step_loops": step_loops,
        }
        # Two warm-ups and two phases; slow loaders take longer, because they wait for a number of batches.
        found = ask_trainer("trainer.measure", arguments, env, folder, 120 + 10 * seconds)
    return Figures(found["first_batch_seconds"], Phase(**found["idle"]), Phase(**found["busy"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark", description="Compare loaders; see the package.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each phase of each (default: 3)")
    for option, known in ("workloads", list(WORKLOADS)), ("loaders", list(LOADERS)):
        parser.add_argument(f"--{option}", nargs="+", choices=known, default=known, help="some of them (default: all)")
    parser.add_argument(
        "--jpegs", type=Path, metavar="FOLDER", help="your own, for the workload jpeg (default: two of scikit-learn's)"
    )
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="one round of 0.5 s: does it work?")
    args = parser.parse_args()
    if args.jpegs:
        if args.record or args.check:
            parser.error("figures are recorded, and compared, with the usual JPEGs")
        os.environ[JPEGS] = str(args.jpegs.resolve())  # for trainers and servers
    rounds, seconds = (1, 0.5) if args.quick else (args.rounds, args.seconds)
    stop_by_signals()
    machine = describe_machine()
    planned = {
        workload: [name for name in loaders if name in args.loaders]
        for workload, loaders in plan(CLAIMS, list(LOADERS)).items()
        if workload in args.workloads
    }
    # Once for all, so that the steps of a busy trainer are the same work for everybody.
    step_loops = count_loops(_STEP_SECONDS)
    found = measure_rounds(
        planned,
        rounds,
        lambda workload, loader: _measure(workload, loader, seconds, step_loops),
        lambda figures: f"{figures.idle.rate:.1f} batches/s",
    )
    ratios = measure_claims(CLAIMS, found)
    print(f"A trainer that only takes batches:\n\n{make_table(found, 'idle')}")
    print(f"\nA trainer that computes {_STEP_SECONDS * 1e3:g} ms per batch:\n\n{make_table(found, 'busy')}")
    print(f"\nWhat is claimed:\n\n{format_claims(CLAIMS, ratios)}")
    print(f"\nMedians of {rounds} interleaved rounds of {seconds:g} s, {NUM_WORKERS} workers, {machine}.")
    sys.exit(conclude(args, CLAIMS, ratios, machine))


if __name__ == "__main__":
    main()
