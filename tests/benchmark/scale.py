"""Many workers, many connections, long epochs, large indices: does a batch cost the same?

::

    python -m tests.benchmark.scale            # everything: about 5 minutes on 2 cores, and 4 GB of memory
    python -m tests.benchmark.scale --quick    # few workers, short epochs, a small index: does it work?
    python -m tests.benchmark.scale --parts workers,table

**Parts**

- ``workers``: 1 to 256 workers whose samples take 20 ms in which they sleep, so that as many as one likes fit on few
  cores. *of ideal* is the rate divided by what so many sleepers could do: the goal is 0.97 with up to 64. Batches of 1
  sample and of 8: with single samples, 64 workers make 3,200 batches per second, and the cores of a small machine are
  the limit: look at the CPU time.
- ``connections``: one trainer fed with batches of 8 MiB, which are ready, by 1 to 16 connections.
- ``table``: the table of tasks alone, without sockets, threads and torch: CPU time per batch with 2 to 256 workers in
  epochs of 10^3 and of 10^6 batches. This is what dispatching a batch costs.
- ``sampler``: a sampler of 10^8 indices: how many are drawn for the first batches, and what that takes.
- ``sessions``: 64 workers forked from a session that holds a list of paths of 2 GB: time, and memory beside the list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table

from .__main__ import describe_machine
from .loaders import LOADERS, PACKAGE
from .processes import running, stop_by_signals
from .scale_trainer import Flow, Forks, Task
from .table import format_number, format_table

_TIMEOUT = 600.0
_NAP_SECONDS = 0.020
_BATCH_BYTES = 8 * 2**20
# Of an element of the list: a str of 42 characters and the pointer to it.
_PATH_BYTES = 104


@contextlib.contextmanager
def _served(num_workers: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """A node server, and a function that runs a trainer with it."""
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name:
        folder = Path(name)
        env = LOADERS["ours-tcp"].make_environment(folder)
        options = ["--port", "0", "--num-workers", str(num_workers)]
        with running("rpcdataloader.launch", options, env, folder) as server:
            address = server.read_line("rpcdataloader ready ", _TIMEOUT).split()[0]

            def measure(kind: str, batch_size: int, amount: float, seconds: float) -> dict[str, Any]:
                task = Task(kind, address, server.pid, num_workers, batch_size, amount, seconds)
                with running(f"{PACKAGE}.scale_trainer", [json.dumps(asdict(task))], env, folder) as trainer:
                    found = json.loads(trainer.read_line("scaled ", _TIMEOUT))
                    trainer.wait(_TIMEOUT)
                return found

            yield measure


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_workers(quick: bool) -> str:
    rows = []
    for batch_size in 8, 1:
        for num_workers in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256):
            _say(f"{num_workers} workers, batches of {batch_size}")
            with _served(num_workers) as measure:
                flow = Flow(**measure("naps", batch_size, _NAP_SECONDS, 1.0 if quick else 4.0))
            rate = flow.num_batches / flow.seconds
            ideal = num_workers / (batch_size * _NAP_SECONDS)
            rows.append(
                [
                    str(num_workers),
                    str(batch_size),
                    format_number(rate),
                    f"{rate / ideal:.3f}",
                    format_number(flow.cpu_seconds / flow.num_batches * 1e6),
                    format_number(flow.thread_seconds / flow.num_batches * 1e6),
                    f"{flow.cpu_seconds / flow.seconds:.2f}",
                    str(flow.num_threads),
                    str(flow.num_descriptors),
                ]
            )
    header = ["workers", "batch size", "batches/s", "of ideal", "trainer CPU us/batch", "its loop's CPU us/batch"]
    return format_table([*header, "CPUs used by it", "threads", "descriptors"], rows, 0)


def measure_connections(quick: bool) -> str:
    rows = []
    for num_workers in (1, 2, 4, 16):
        _say(f"{num_workers} connections")
        with _served(num_workers) as measure:
            flow = Flow(**measure("bytes", 1, _BATCH_BYTES, 0.5 if quick else 4.0))
        gigabytes = flow.num_batches * _BATCH_BYTES / 1e9
        rows.append(
            [
                str(num_workers),
                format_number(gigabytes / flow.seconds),
                format_number(flow.cpu_seconds / gigabytes),
                format_number(flow.voluntary / flow.num_batches),
                format_number(flow.involuntary / flow.num_batches),
                str(flow.num_threads),
                str(flow.num_descriptors),
            ]
        )
    header = ["connections", "GB/s", "trainer CPU s/GB", "switches/batch, voluntary", "involuntary", "threads"]
    return format_table([*header, "descriptors"], rows, 0)


def time_table(num_workers: int, num_batches: int) -> float:
    """Return CPU seconds per batch of the table of tasks, when workers answer in turn and a consumer takes at once."""
    scheduler = Table(PlanOptions(num_workers))
    for worker in range(num_workers):
        scheduler.worker_joined(worker, 0.0)
    in_flight: deque[tuple[int, int]] = deque()
    now = 0.0
    num_added = 0
    start = time.thread_time()
    while True:
        while scheduler.pop_deliverable() is not None:
            pass
        while scheduler.wants_input:
            if num_added == num_batches:
                scheduler.end_of_input()
            else:
                scheduler.add_task(None)
                num_added += 1
        while (assigned := scheduler.assign(now)) is not None:
            in_flight.append(assigned)
        if scheduler.finished:
            return (time.thread_time() - start) / num_batches
        worker, number = in_flight.popleft()
        now += _NAP_SECONDS / num_workers
        scheduler.replied(worker, number, size_bytes=8, task_seconds=_NAP_SECONDS, now=now)


def measure_table(quick: bool) -> str:
    lengths = (10**3, 10**4) if quick else (10**3, 10**6)
    rows = []
    for num_workers in 2, 16, 64, 256:
        _say(f"table of {num_workers} workers")
        # A short epoch says little at once.
        seconds = [min(time_table(num_workers, length) for _ in range(10**4 // length or 1)) for length in lengths]
        rows.append([str(num_workers), *(format_number(value * 1e6) for value in seconds)])
    return format_table(["workers", *(f"us/batch, epoch of {length:,}" for length in lengths)], rows, 0)


def measure_sampler(_quick: bool) -> str:
    from rpcdataloader import RPCDataloader

    from .datasets import Integers

    num_drawn = 0

    class Lazy:
        def __len__(self) -> int:
            return 10**8

        def __iter__(self) -> Iterator[int]:
            nonlocal num_drawn
            for index in range(10**8):
                num_drawn += 1
                yield index

    _say("sampler of 10^8 indices")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = iter(RPCDataloader(Integers(), 64, sampler=Lazy(), workers="local:2"))
    start = time.perf_counter()
    for _ in range(3):
        next(batches)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    row = ["3", str(num_drawn), str(3 * 64 + 2 * 2 * 64), format_number(seconds * 1e3), format_number(grown / 1024)]
    return format_table(["batches of 64", "indices drawn", "expected", "ms after iter", "memory MiB"], [row], 0)


def measure_sessions(quick: bool) -> str:
    num_workers, index_bytes = (8, 2e8) if quick else (64, 2e9)
    _say(f"{num_workers} workers of a session that holds {index_bytes / 1e9:g} GB")
    with _served(num_workers) as measure:
        forks = Forks(**measure("forks", 64, index_bytes / _PATH_BYTES, 0.0))
    row = [
        str(num_workers),
        format_number(forks.session_bytes / 1e6),
        format_number(forks.build_seconds * 1e3),
        format_number(forks.first_seconds * 1e3),
        format_number(forks.all_seconds * 1e3),
        format_number((forks.all_bytes - forks.session_bytes) / num_workers / 1e6),
    ]
    header = ["workers", "session MB", "build ms", "first batch ms", "a batch of each ms", "MB more per worker"]
    return format_table(header, [row], 0)


PARTS: dict[str, Callable[[bool], str]] = {
    "workers": measure_workers,
    "connections": measure_connections,
    "table": measure_table,
    "sampler": measure_sampler,
    "sessions": measure_sessions,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.scale", description="Measure how costs grow.")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: all)")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it work?")
    args = parser.parse_args()
    for name in args.parts.split(","):
        if name not in PARTS:
            parser.error(f"{name!r} is none of {', '.join(PARTS)}")
    stop_by_signals()
    machine = describe_machine()
    for name in args.parts.split(","):
        print(f"{name}:\n\n{PARTS[name](args.quick)}\n", flush=True)
    print(f"On {machine['text']}.")


if __name__ == "__main__":
    main()
