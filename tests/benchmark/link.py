"""When is the network the bound? Loads over a link of known speed, between two network namespaces of this machine.

``python -m tests.benchmark.link`` prints a Markdown table, in about two minutes. It needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rpcdataloader import RPCDataloader, RPCDataset
from tests.benchmark import datasets
from tests.benchmark.processes import running
from tests.support.network import Cable, Host, Network, why_not

ROUND_TRIP_MS = 0.2
BATCH_SIZE = 64
_WARMUP_SECONDS = 1.0
_MIN_BATCHES = 8
# A link is full, as far as TCP can fill it.
_FULL = 0.85


@dataclass(frozen=True, slots=True)
class Sample:
    """What is loaded: a title, the class of the dataset and its argument, and the bytes of a sample."""

    title: str
    dataset: type
    argument: object
    num_bytes: int


SAMPLES = (
    Sample("3x224x224 float32", datasets.Images, "float32", 3 * 224 * 224 * 4),
    Sample("3x224x224 uint8", datasets.Images, "uint8", 3 * 224 * 224),
    Sample("JPEG file of 110 kB", datasets.Files, 110_000, 110_000),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured: samples per second, and the share of the link that the bytes on the wire took."""

    gigabits: float
    sample: Sample
    rate: float
    share: float

    def __str__(self) -> str:
        allowed = self.gigabits * 1e9 / 8 / self.sample.num_bytes
        bound = "link" if self.share >= _FULL else "CPUs"
        return (
            f"| {self.gigabits:g} Gbit/s | {self.sample.title} | {allowed:,.0f} | {self.rate:,.0f} | {self.share:.0%} "
            f"| {bound} |"
        )


HEADER = (
    "| link | sample | samples/s that fill the link | samples/s | share of the link | bound by |\n"
    "| --- | --- | ---: | ---: | ---: | --- |"
)


def shape(hosts: tuple[Host, Host], cable: Cable, gigabits: float, delays: bool) -> None:
    """Let both ends of a cable send at most so fast and, if the kernel can, with half of the round trip on the way."""
    for host, interface in zip(hosts, cable.interfaces, strict=True):
        # Of a millisecond: what the timer of the kernel may be late. And more than the largest packet before it is cut.
        burst = max(256 * 1024, int(gigabits * 1e9 / 8 / 1000))
        limit = ["rate", f"{gigabits:g}gbit", "burst", str(burst), "latency", "20ms"]
        host.run("tc", "qdisc", "replace", "dev", interface, "root", "handle", "1:", "tbf", *limit)
        if delays:
            delay = ["delay", f"{ROUND_TRIP_MS / 2:g}ms", "limit", "100000"]
            host.run("tc", "qdisc", "replace", "dev", interface, "parent", "1:1", "handle", "2:", "netem", *delay)


def can_delay(host: Host) -> bool:
    """Whether this kernel has netem."""
    try:
        host.run("tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms")
        host.run("tc", "qdisc", "delete", "dev", "lo", "root")
    except subprocess.CalledProcessError:
        return False
    return True


def measure(sample: Sample, address: str, cable: Cable, gigabits: float, seconds: float) -> Row:
    """Take batches for so long."""
    loader = RPCDataloader(RPCDataset([address], sample.dataset, sample.argument), batch_size=BATCH_SIZE)
    batches = iter(loader)
    warm = time.perf_counter() + _WARMUP_SECONDS
    while True:
        next(batches)
        if time.perf_counter() > warm:
            break
    num_batches, received, start = 0, cable.received_bytes, time.perf_counter()
    while True:
        next(batches)
        num_batches += 1
        elapsed = time.perf_counter() - start
        if elapsed > seconds and num_batches >= _MIN_BATCHES:
            break
    on_the_wire = cable.received_bytes - received
    return Row(gigabits, sample, num_batches * BATCH_SIZE / elapsed, on_the_wire * 8 / elapsed / (gigabits * 1e9))


@contextlib.contextmanager
def serve(host: Host, cable: Cable, num_workers: int, folder: Path) -> Iterator[str]:
    """A node server at the far end; gives its address."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(32))
    os.environ["RPCDATALOADER_TOKEN_FILE"] = str(token)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    args = ["--host", cable.address, "--port", "0", "--num-workers", str(num_workers)]
    with contextlib.ExitStack() as stack:
        with host.entered():
            child = stack.enter_context(running("rpcdataloader.launch", args, env, folder))
        yield child.read_line("rpcdataloader ready ", 60).split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.link", description=__doc__)
    parser.add_argument("--gigabits", default="1,10,25", help="speeds of the link, in Gbit/s (default: %(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="workers at the far end (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="0.3 s each: does it work?")
    args = parser.parse_args()
    if reason := why_not():
        print(f"skipped: this needs root and network namespaces ({reason})")
        return
    seconds = 0.3 if args.quick else args.seconds
    with contextlib.closing(Network()) as network, tempfile.TemporaryDirectory(prefix="rpcdl-link-") as name:
        host, cable = network.add()
        delays = can_delay(host)
        with serve(host, cable, args.num_workers, Path(name)) as address, network.trainer.entered():
            print(HEADER)
            for gigabits in map(float, args.gigabits.split(",")):
                shape((network.trainer, host), cable, gigabits, delays)
                for sample in SAMPLES:
                    print(measure(sample, address, cable, gigabits, seconds), flush=True)
    trip = f"{ROUND_TRIP_MS:g} ms" if delays else "that of this machine: its kernel has no netem"
    print(
        f"\nBatches of {BATCH_SIZE}, {args.num_workers} workers, {seconds:g} s each, round trip {trip}. Trainer and "
        f"workers share {len(os.sched_getaffinity(0))} CPUs, which are the bound where the link is not full. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}."
    )


if __name__ == "__main__":
    main()
