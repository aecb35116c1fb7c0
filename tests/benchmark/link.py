"""What a link of known speed allows, between two network namespaces of this machine.

::

    python -m tests.benchmark.link               # how much of 10 Gbit/s batches of images fill
    python -m tests.benchmark.link --overlap     # what overlapping an all-to-all gains at 0.4 Gbit/s, in about a minute

The latter prints the table of ``examples.recommender.measure --parts overlap`` of two ranks, which further arguments go
to. Both need root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from rpcdataloader import RPCDataloader, RPCDataset
from tests.benchmark import datasets
from tests.benchmark.loaders import NUM_WORKERS, environment, node_server
from tests.benchmark.trainer import take
from tests.support.network import Cable, Host, Network, why_not

BATCH_SIZE = 64
IMAGE_BYTES = 3 * 224 * 224
SECONDS = 5.0
PORT = "29500"  # nothing else is in these namespaces


def fill(trainer: Host, host: Host, cable: Cable, gigabits: float) -> None:
    """Load images over the link, and tell how many came."""
    with contextlib.ExitStack() as stack:
        folder, env = stack.enter_context(environment())
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        where = ("--host", cable.address, "--port", "0")
        with host.entered():
            address, _pid = stack.enter_context(node_server(NUM_WORKERS, env, folder, *where))
        stack.enter_context(trainer.entered())
        batches = iter(RPCDataloader(RPCDataset([address], datasets.Images, "uint8"), BATCH_SIZE))
        take(batches, SECONDS / 5)
        received, began = cable.received_bytes, time.perf_counter()
        rate = take(batches, SECONDS).rate * BATCH_SIZE
        bytes_per_second = (cable.received_bytes - received) / (time.perf_counter() - began)
        del batches  # before the server ends
    capacity = gigabits * 1e9 / 8
    print(
        f"It carries {capacity / IMAGE_BYTES:,.0f} images of 3x224x224 uint8 per second: {rate:,.0f} came, "
        f"and {bytes_per_second / capacity:.0%} of it was filled."
    )


def overlap(places: list[Host], cable: Cable, options: list[str]) -> int:
    """Run a rank on each host; returns the first exit status that is not 0."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": cable.near_address, "MASTER_PORT": PORT}
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
            time.sleep(0.1)
        return next((rank.returncode for rank in ranks if rank.poll()), 0) or max(rank.wait() for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.benchmark.link", description="Measure over a link of known speed."
    )
    parser.add_argument("--overlap", action="store_true", help="measure an all-to-all in place of batches")
    parser.add_argument("--gigabits", type=float, help="speed of the link (default: 10, or 0.4 with --overlap)")
    args, options = parser.parse_known_args()
    if reason := why_not():
        sys.exit(f"this needs root and network namespaces ({reason})")
    gigabits = args.gigabits or (0.4 if args.overlap else 10.0)
    with contextlib.closing(Network()) as network:
        host, cable = network.add()
        cable.limit(gigabits)
        print(f"A link of {gigabits:g} Gbit/s:", flush=True)
        if args.overlap:
            sys.exit(overlap([network.trainer, host], cable, options))
        fill(network.trainer, host, cable, gigabits)


if __name__ == "__main__":
    main()
