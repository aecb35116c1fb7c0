"""What overlapping an all-to-all gains over a link of known speed: two ranks in network namespaces of this machine.

``python -m tests.benchmark.overlap`` prints the table of ``examples.recommender.measure --parts overlap`` over such a
link, in about a minute. It needs root, ``ip`` and ``tc``. Further arguments go to the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.support.network import Cable, Host, Network, why_not

_PORT = "29500"  # nothing else is in these namespaces


def run_ranks(places: list[Host], cable: Cable, options: list[str]) -> int:
    """Run a rank on each host; returns the first exit status that is not 0."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": cable.near_address, "MASTER_PORT": _PORT}
    command = [sys.executable, "-m", "examples.recommender.measure", "--parts", "overlap", *options]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, (host, interface) in enumerate(zip(places, cable.interfaces, strict=True)):
            env = {**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": interface}
            with host.entered():
                ranks.append(subprocess.Popen(command, env=env, cwd=Path(__file__).parents[2]))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        # One that waits for another which has failed gives up after half an hour.
        while all(rank.poll() is None for rank in ranks):
            with contextlib.suppress(subprocess.TimeoutExpired):
                ranks[0].wait(0.1)
        return next((rank.returncode for rank in ranks if rank.poll()), 0) or max(rank.wait() for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.overlap", description=__doc__)
    parser.add_argument("--megabits", type=float, default=400.0, help="speed of the link (default: %(default)s)")
    args, options = parser.parse_known_args()
    if reason := why_not():
        sys.exit(f"this needs root and network namespaces ({reason})")
    with contextlib.closing(Network()) as network:
        host, cable = network.add()
        cable.limit(args.megabits / 1000)
        print(f"A link of {args.megabits:g} Mbit/s:", flush=True)
        sys.exit(run_ranks([network.trainer, host], cable, options))


if __name__ == "__main__":
    main()
