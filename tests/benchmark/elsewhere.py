"""What CPUs elsewhere bring a training whose own CPU decodes too slowly.

::

    python -m tests.benchmark.elsewhere             # under four minutes
    python -m tests.benchmark.elsewhere --quick     # a short round: does it work?
    python -m tests.benchmark.elsewhere --record    # writes docs/figures/elsewhere.md

The trainer is pinned to the first CPU, and torch's workers with it. Our worker runs on the second one, in another
network namespace, at the far end of a link of known speed; *both* has a second worker, beside the trainer. This needs
root, ``ip``, ``tc``, two CPUs, and scikit-learn, whose photographs the JPEGs are cut from.

**Work**: 256 JPEGs of 500x375 in a folder, which the kernel keeps in memory: read, decoded with Pillow, cropped at
random, flipped or not, to uint8 3x224x224, in batches of 32. The loop copies each batch, as to a GPU, and sleeps, as
for the GPU's step: 0.75 times the CPU time in which a batch is decoded. So one CPU cannot feed it, and two nearly can.

**Figures** are medians of interleaved rounds, each measurement with fresh processes, with the smallest and the largest
rate in brackets. *x torch* is the median ratio, in the same round, to the better of torch's two numbers of workers, and
*x malloc* that to torch with our workers' settings of malloc, which keep freed memory. *CPU s* is user and system time
of the trainer process with all its threads, without workers. *Waiting* is the share of the loop's time that it spends
in ``next``.

Other programs on these CPUs slow down torch more than ours, which has both: record on a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import datasets
from .loaders import environment, node_server
from .places import Places, two_places
from .processes import ask_trainer, describe_machine, measure_rounds, stop_by_signals
from .table import format_number, format_ratio, format_spread, format_table
from .trainer import get_cpu_seconds

_BATCH_SIZE = 32
_NUM_FILES = 256
_STEP_OF_DECODING = 0.75
_FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "elsewhere.md"


@dataclass(frozen=True, slots=True)
class Way:
    """A loader and its workers.

    Attributes:
        title: For the table.
        num_here: Number of workers on the trainer's CPU.
        num_elsewhere: Number of workers on the other one.
        gigabits: Speed of the link; 0 where it is not used.
        loader: For the environment: see ``loaders.py``.
        dtype: Of the images.
    """

    title: str
    num_here: int
    num_elsewhere: int = 0
    gigabits: float = 0.0
    loader: str = "ours-tcp"
    dtype: str = "uint8"


WAYS = {
    "torch-1": Way("torch DataLoader, 1 worker", 1, loader="torch"),
    "torch-2": Way("torch DataLoader, 2 workers", 2, loader="torch"),
    "torch-malloc": Way("torch, 1 worker, malloc as in ours", 1, loader="torch-malloc"),
    "float32": Way("ours elsewhere, 1 Gbit/s, float32", 0, 1, 1.0, dtype="float32"),
    "elsewhere-1": Way("ours elsewhere, 1 Gbit/s", 0, 1, 1.0),
    "elsewhere-10": Way("ours elsewhere, 10 Gbit/s", 0, 1, 10.0),
    "both": Way("ours on both, 10 Gbit/s", 1, 1, 10.0),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a loop has seen: images, seconds, seconds in ``next``, and CPU seconds of the trainer process."""

    num_images: int
    seconds: float
    waited_seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.num_images / self.seconds


# What was measured in each round, by the number of the round, of each way.
Found = Mapping[tuple[str, str], Mapping[int, Figures]]


# --- the trainer


def loop(batches: Iterator[torch.Tensor], seconds: float, step: float) -> Figures:
    """Take batches for that long, with a pause after each, as for a step of a GPU."""
    num_images, waited, elapsed = 0, 0.0, 0.0
    target: torch.Tensor | None = None
    cpu_start, start = get_cpu_seconds(), time.perf_counter()
    while elapsed < seconds:
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        target = torch.empty_like(batch) if target is None else target
        target.copy_(batch)
        num_images += len(batch)
        del batch
        time.sleep(step)
        elapsed = time.perf_counter() - start
    return Figures(num_images, elapsed, waited, get_cpu_seconds() - cpu_start)


def measure(way: str, folder: str, address: str, seconds: float, step: float) -> Figures:
    """Build the loader, and let the loop run, first to warm up."""
    chosen = WAYS[way]
    if chosen.loader.startswith("torch"):
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        dataset = datasets.Files(folder, chosen.dtype)
        batches: Any = DataLoader(dataset, _BATCH_SIZE, num_workers=chosen.num_here)
    else:
        from rpcdataloader import RPCDataloader, RPCDataset

        workers = [address, *([f"local:{chosen.num_here}"] if chosen.num_here else [])]
        batches = RPCDataloader(RPCDataset(workers, datasets.Files, folder, chosen.dtype), _BATCH_SIZE)
    iterator = iter(batches)
    first = next(iterator)
    if (first.shape, first.dtype) != ((_BATCH_SIZE, 3, 224, 224), getattr(torch, chosen.dtype)):
        raise ValueError(f"a batch of {first.shape} and {first.dtype}")
    loop(iterator, seconds / 2, step)
    return loop(iterator, seconds, step)


# --- the harness


def choose_step(folder: Path) -> float:
    """Return how long a step lasts, in whole milliseconds."""
    images = datasets.Files(str(folder))
    decoding = min(
        timeit.repeat(
            lambda: torch.stack([images[i] for i in range(_BATCH_SIZE)]), timer=time.thread_time, number=1, repeat=9
        )
    )
    return round(_STEP_OF_DECODING * decoding, 3)


def ask(places: Places, way: str, images: Path, seconds: float, step: float) -> Figures:
    """Start a node server, if one is needed, and a trainer; wait for the figures, stop both."""
    chosen = WAYS[way]
    arguments = {"way": way, "folder": str(images), "address": "", "seconds": seconds, "step": step}
    with contextlib.ExitStack() as stack:
        folder, env = stack.enter_context(environment(chosen.loader))
        if chosen.num_elsewhere:
            places.limit(chosen.gigabits)
            with places.entered_elsewhere():
                server = node_server(chosen.num_elsewhere, env, folder, *places.server_options)
                arguments["address"], _pid = stack.enter_context(server)
        stack.enter_context(places.entered_here())
        return Figures(**ask_trainer("elsewhere.measure", arguments, env, folder, 60 + 4 * seconds))


def find_best(found: Found, ways: Sequence[str]) -> dict[int, float]:
    """Return the best rate of these ways, by the number of the round."""
    best: dict[int, float] = {}
    for way in ways:
        for number, figures in found.get(("JPEGs", way), {}).items():
            best[number] = max(best.get(number, 0.0), figures.rate)
    return best


def make_table(found: Found) -> str:
    """Return a row for each way that was tried."""
    references = [find_best(found, ways) for ways in (("torch-1", "torch-2"), ("torch-malloc",))]
    rows = []
    for (_subject, way), rounds in found.items():
        cells = ["failed", *"----"]
        if rounds:
            cells = [format_spread([figures.rate for figures in rounds.values()])]
            for best in references:
                ratios = [figures.rate / best[number] for number, figures in rounds.items() if number in best]
                cells.append(format_ratio(statistics.median(ratios) if ratios else None))
            cells.append(
                format_number(statistics.median(1000 * one.cpu_seconds / one.num_images for one in rounds.values()))
            )
            waiting = statistics.median(figures.waited_seconds / figures.seconds for figures in rounds.values())
            cells.append(f"{100 * waiting:.0f} %")
        rows.append([WAYS[way].title, *cells])
    header = ["loader", "images/s", "x torch", "x malloc", "trainer's CPU s per 1,000", "waiting"]
    return format_table(header, rows, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.elsewhere", description="Measure what CPUs elsewhere bring."
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each, after a warm-up (default: 3)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="some of them (default: all)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="one round of 0.5 s: does it work?")
    group.add_argument("--record", action="store_true", help=f"write the table to {_FIGURE.name}")
    args = parser.parse_args()
    rounds, seconds = (1, 0.5) if args.quick else (args.rounds, args.seconds)
    stop_by_signals()
    with contextlib.ExitStack() as stack:
        images = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rpcdl-images-")))
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        try:
            places, reason = stack.enter_context(two_places(1))
        except ValueError as exc:
            sys.exit(f"this needs two CPUs: {exc}")
        if reason:
            sys.exit(f"this needs root and network namespaces ({reason})")
        datasets.write_files(images, _NUM_FILES)
        step = choose_step(images)
        machine = describe_machine()
        found = measure_rounds(
            {"JPEGs": args.ways},
            rounds,
            lambda _subject, way: ask(places, way, images, seconds, step),
            lambda figures: f"{figures.rate:.0f} images/s",
        )
    text = (
        f"{make_table(found)}\n\nMedians of {rounds} interleaved rounds of {seconds:g} s. "
        f"A step of {_BATCH_SIZE} images takes {1e3 * step:.0f} ms; {machine}.\n"
    )
    print(text)
    if args.record:
        _FIGURE.write_text(text)


if __name__ == "__main__":
    main()
