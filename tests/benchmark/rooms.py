"""How many rooms one batch passes: files, functions and calls of the package per steady batch, in trainer and worker.

::

    python -m tests.benchmark.rooms                 # two lines: some seconds
    python -m tests.benchmark.rooms --functions     # and every function, with its calls per batch
    python -m tests.benchmark.rooms --batch-size 1  # each integer collated into a tensor

One worker of an embedded pool loads batches that are one integer. ``sys.setprofile`` counts in all threads, after a
warm-up. Functions that at most one batch in twenty enters are left out, and so is what is written in C.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.diagnosis import records
from rpcdataloader.loader import iterator

from .rooms_counting import CountedIntegers, Profile, follow_worker

NUM_WARMUP = 200
_WORKER_TIMEOUT = 30.0

# Calls per batch, by file and function.
Rooms = dict[str, dict[str, float]]


def measure(num_batches: int, batch_size: int | None) -> dict[str, Rooms]:
    """The rooms of the trainer and of its worker; a batch size of None is the integer itself."""
    profile = Profile()
    # The profile makes a batch, and the wait for it, take many times as long: more than one in twenty would be noted.
    records.PROBE_INTERVAL = records.MAX_PROBE_INTERVAL = 1.0
    iterator.NOTED_WAIT = 1.0  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="rpcdl-rooms-") as folder:
        path = Path(folder) / "worker"
        per_batch = batch_size or 1
        first, last = NUM_WARMUP * per_batch, (NUM_WARMUP + num_batches) * per_batch
        dataset = RPCDataset("local:1", CountedIntegers, first, last, num_batches, str(path))
        loader = RPCDataloader(dataset, batch_size=batch_size, worker_init_fn=follow_worker)
        profile.follow_new_threads()
        batches = iter(loader)
        profile.follow_this_thread()
        for _ in islice(batches, NUM_WARMUP):
            pass
        profile.clear()
        for _ in islice(batches, num_batches):
            pass
        trainer = profile.describe(num_batches)
        sys.setprofile(None)
        deadline = time.monotonic() + _WORKER_TIMEOUT
        while not path.exists():  # the worker is as far as the window reaches, or nearly
            if time.monotonic() > deadline:
                raise RuntimeError("the worker has not written what it counted")
            next(batches)
        worker = json.loads(path.read_text())
        del batches
    return {"trainer": trainer, "worker": worker}


def describe(rooms: Rooms) -> str:
    """Such as ``21 files, 105 functions, 146 calls``."""
    num_calls = round(sum(sum(functions.values()) for functions in rooms.values()))
    return f"{len(rooms)} files, {sum(map(len, rooms.values()))} functions, {num_calls} calls"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.rooms", description="Count the calls that one batch costs; see the module."
    )
    parser.add_argument("--batches", type=int, default=2000, help="batches that are counted (default: 2000)")
    parser.add_argument("--batch-size", type=int, help="collate so many integers (default: none, and one integer each)")
    parser.add_argument("--functions", action="store_true", help="list every function, too")
    args = parser.parse_args()
    if args.batches < 1 or (args.batch_size is not None and args.batch_size < 1):
        parser.error("--batches and --batch-size must be positive")
    for process, rooms in measure(args.batches, args.batch_size).items():
        print(f"{process}: {describe(rooms)}")
        if args.functions:
            for file, functions in sorted(rooms.items()):
                print(f"  {file}")
                for name, calls in sorted(functions.items(), key=lambda item: int(item[0].rpartition(":")[2])):
                    print(f"    {calls:6.2f}  {name}")


if __name__ == "__main__":
    main()
