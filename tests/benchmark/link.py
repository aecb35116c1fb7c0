"""How much of a link batches fill: images over one of known speed, between two network namespaces of this machine.

``python -m tests.benchmark.link`` needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from rpcdataloader import RPCDataloader, RPCDataset
from tests.benchmark import datasets
from tests.benchmark.loaders import NUM_WORKERS, make_environment, node_server
from tests.benchmark.trainer import take
from tests.support.network import Network, why_not

BATCH_SIZE = 64
IMAGE_BYTES = 3 * 224 * 224


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.link", description=__doc__)
    parser.add_argument("--gigabits", type=float, default=10.0, help="speed of the link (default: %(default)s Gbit/s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measurement (default: %(default)s)")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"this needs root and network namespaces ({reason})")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpcdl-link-")))
        network = stack.enter_context(contextlib.closing(Network()))
        host, cable = network.add()
        cable.limit(args.gigabits)
        env = make_environment(folder)
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        where = ("--host", cable.address, "--port", "0")
        with host.entered():
            address, _pid = stack.enter_context(node_server(NUM_WORKERS, env, folder, *where))
        stack.enter_context(network.trainer.entered())
        batches = iter(RPCDataloader(RPCDataset([address], datasets.Images, "uint8"), BATCH_SIZE))
        take(batches, args.seconds / 5)
        received, began = cable.received_bytes, time.perf_counter()
        rate = take(batches, args.seconds).rate * BATCH_SIZE
        bytes_per_second = (cable.received_bytes - received) / (time.perf_counter() - began)
        del batches  # before the server ends
    capacity = args.gigabits * 1e9 / 8
    print(
        f"A link of {args.gigabits:g} Gbit/s carries {capacity / IMAGE_BYTES:,.0f} images of 3x224x224 uint8 per "
        f"second: {rate:,.0f} came, and {bytes_per_second / capacity:.0%} of it was filled."
    )


if __name__ == "__main__":
    main()
