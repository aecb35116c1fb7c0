"""``python -m tests.simulation --seconds 60``: try to break the decisions of a pass.

The product's driver and engine (``rpcdataloader.loader.driver``, ``rpcdataloader.plan``), one for each rank, run in a
cluster that does not exist, with a time of its own. A seed chooses how large that is, every option of a pass, and what
goes wrong when; the same seed is always the same run. A judge beside each engine checks every action, and that nothing
is forgotten.

See how many faults of each kind there were with ``--counts``; run one seed again with ``--seed 7 --only``.
"""

from __future__ import annotations

import argparse
import math
import sys

from tests.simulation.scenarios import choose_scenario
from tests.simulation.shrink import shrink
from tests.simulation.simulator import run, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, on a core of its own (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--only", action="store_true", help="no other seed than this one")
    parser.add_argument("--counts", action="store_true", help="show how many faults there were of each kind")
    args = parser.parse_args()
    report = simulate(math.inf, args.seed, 1) if args.only else simulate(args.seconds, args.seed)
    if args.counts:
        for kind, number in report.counts.most_common():
            print(f"{number:10,} {kind}")
    if report.failed_seed is not None:
        print(explain(report.failed_seed))
    print(report)
    return int(report.failed_seed is not None)


def explain(seed: int) -> str:
    """The shrunk schedule of a seed that fails."""
    first = run(choose_scenario(seed))
    scenario, faults, outcome = shrink(choose_scenario(seed))
    lines = [f"seed {seed} fails {first.violation}", f"Shrunk, it fails {outcome.violation}", str(scenario)]
    lines += [f"  at {fault.time:.6f} s: {fault.kind} ({fault.pick}, {fault.size:.6f})" for fault in faults]
    return "\n".join([*lines, outcome.trace])


if __name__ == "__main__":
    sys.exit(main())
