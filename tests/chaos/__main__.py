"""``python -m tests.chaos --seed 1 --minutes 5 --ranks 4 --soak``: see how much a training job survives."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.chaos.driver import ChaosError, Scenario, environment, run
from tests.support.network import why_not
from tests.support.zygote import Zygote


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the adversary, and of everything random (default: 0)")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long, without the run in peace (default: 1)")
    parser.add_argument("--ranks", type=int, default=4, help="training processes (default: 4)")
    parser.add_argument("--servers", type=int, default=3, help="node servers, one more comes and goes (default: 3)")
    parser.add_argument("--workers", type=int, default=4, help="workers of each (default: 4)")
    parser.add_argument("--every", type=int, default=25, help="batches of all ranks between two events (default: 25)")
    parser.add_argument("--network", action="store_true", help="cut the network, and slow it down; needs root")
    parser.add_argument("--soak", action="store_true", help="watch that memory and descriptors stay flat")
    parser.add_argument("--quiet", action="store_true", help="do not show events as they happen")
    args = parser.parse_args()
    if args.network and (reason := why_not()):
        parser.error(f"--network: {reason}")
    scenario = Scenario(
        args.seed,
        args.ranks,
        args.servers,
        args.workers,
        args.every,
        minutes=args.minutes,
        in_network=args.network,
        registered=True,
        soak=args.soak,
    )
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        os.environ.update(environment(Path(folder)))
        zygote = Zygote(Path(folder), "torch.distributed")
        try:
            report = run(scenario, zygote, lambda line: None if args.quiet else print(line, flush=True))
        except ChaosError as exc:
            print(exc, file=sys.stderr)
            return 1
        finally:
            zygote.close()
    print(report)
    return 0 if all(trend.is_flat for trend in report.trends) else 1


if __name__ == "__main__":
    sys.exit(main())
