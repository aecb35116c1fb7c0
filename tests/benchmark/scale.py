"""Many workers, many connections, long epochs, large indices: does a batch cost the same?

::

    python -m tests.benchmark.scale            # everything: about 5 minutes on 2 cores, and 4 GB of memory
    python -m tests.benchmark.scale --quick    # few workers, short epochs, a small index: does it work?
    python -m tests.benchmark.scale --parts workers table

**Parts**

- ``workers``: 1 to 256 workers whose samples take 20 ms in which they sleep, so that as many as one likes fit on few
  cores. *of ideal* is the rate divided by what so many sleepers could do: the goal is 0.97 with up to 64. Batches of 1
  sample and of 8: with single samples, 64 workers make 3,200 batches per second, and the cores of a small machine are
  the limit: look at the CPU time.
- ``connections``: one trainer fed with batches of 8 MiB, which are ready, by 1 to 16 connections.
- ``table``: the table of tasks alone, without sockets, threads and torch: CPU time per batch with 2 to 256 workers in
  epochs of 10^3 and of 10^6 batches. This is what dispatching a batch costs.
- ``sessions``: 64 workers forked from a session that holds a list of paths of 2 GB: time, and memory beside the list.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table

from .__main__ import describe_machine
from .loaders import LOADERS, node_server
from .processes import ask_trainer, stop_by_signals
from .scale_trainer import Forks
from .table import format_number, format_table
from .taking import Phase

_TIMEOUT = 600.0
_NAP_SECONDS = 0.020
_BATCH_BYTES = 8 * 2**20
# Of an element of the list: a str of 42 characters and the pointer to it.
_PATH_BYTES = 104


def _measure(what: str, num_workers: int, **arguments: Any) -> dict[str, Any]:
    """Run a trainer with a node server of its own, whose process id it is given to look at forks."""
    print(f"{what}, {num_workers} workers, {arguments}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="rpcdl-bench-") as name:
        folder = Path(name)
        env = LOADERS["ours-tcp"].make_environment(folder)
        with node_server(num_workers, env, folder) as (address, pid):
            arguments |= {"address": address, "num_workers": num_workers} | ({"server": pid} if what == "forks" else {})
            return ask_trainer(f"scale_trainer.measure_{what}", arguments, env, folder, _TIMEOUT)


def _measure_flow(what: str, num_workers: int, **arguments: Any) -> tuple[Phase, list[str]]:
    """Return what flowed, and the cells of the last two columns."""
    found = _measure(what, num_workers, **arguments)
    return Phase(**found["phase"]), [str(found["num_threads"]), str(found["num_descriptors"])]


def measure_workers(quick: bool) -> str:
    rows = []
    for batch_size in 8, 1:
        for num_workers in (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256):
            seconds = 1.0 if quick else 4.0
            flow, last = _measure_flow("naps", num_workers, batch_size=batch_size, nap=_NAP_SECONDS, seconds=seconds)
            ideal = num_workers / (batch_size * _NAP_SECONDS)
            cells = [format_number(value) for value in (flow.rate, flow.cpu * 1e6, flow.thread * 1e6)]
            cells.insert(1, f"{flow.rate / ideal:.3f}")
            rows.append([str(num_workers), str(batch_size), *cells, f"{flow.cpu_seconds / flow.seconds:.2f}", *last])
    header = ["workers", "batch size", "batches/s", "of ideal", "trainer CPU us/batch", "its loop's CPU us/batch"]
    return format_table([*header, "CPUs used by it", "threads", "descriptors"], rows, 0)


def measure_connections(quick: bool) -> str:
    rows = []
    for num_workers in (1, 2, 4, 16):
        flow, last = _measure_flow("bytes", num_workers, batch_bytes=_BATCH_BYTES, seconds=0.5 if quick else 4.0)
        gigabytes = flow.num_batches * _BATCH_BYTES / 1e9
        per_batch = flow.voluntary / flow.num_batches, flow.involuntary / flow.num_batches
        numbers = (gigabytes / flow.seconds, flow.cpu_seconds / gigabytes, *per_batch)
        rows.append([str(num_workers), *map(format_number, numbers), *last])
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
        in_flight += [(worker, number) for worker, number, _payload in scheduler.assign(now)]
        if scheduler.finished:
            return (time.thread_time() - start) / num_batches
        worker, number = in_flight.popleft()
        now += _NAP_SECONDS / num_workers
        scheduler.replied(worker, number, size_bytes=8, task_seconds=_NAP_SECONDS, now=now)


def measure_table(quick: bool) -> str:
    lengths = (10**3, 10**4) if quick else (10**3, 10**6)
    rows = []
    for num_workers in 2, 16, 64, 256:
        # A short epoch says little at once.
        seconds = [min(time_table(num_workers, length) for _ in range(10**4 // length or 1)) for length in lengths]
        rows.append([str(num_workers), *(format_number(value * 1e6) for value in seconds)])
    return format_table(["workers", *(f"us/batch, epoch of {length:,}" for length in lengths)], rows, 0)


def measure_sessions(quick: bool) -> str:
    num_workers, index_bytes = (8, 2e8) if quick else (64, 2e9)
    forks = Forks(**_measure("forks", num_workers, num_paths=int(index_bytes / _PATH_BYTES)))
    more_bytes = (forks.all_bytes - forks.session_bytes) / num_workers
    seconds = forks.build_seconds, forks.first_seconds, forks.all_seconds
    numbers = (forks.session_bytes / 1e6, *(value * 1e3 for value in seconds), more_bytes / 1e6)
    header = ["workers", "session MB", "build ms", "first batch ms", "a batch of each ms", "MB more per worker"]
    return format_table(header, [[str(num_workers), *map(format_number, numbers)]], 0)


PARTS: dict[str, Callable[[bool], str]] = {
    "workers": measure_workers,
    "connections": measure_connections,
    "table": measure_table,
    "sessions": measure_sessions,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.scale", description="Measure how costs grow.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of them (default: all)")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it work?")
    args = parser.parse_args()
    stop_by_signals()
    machine = describe_machine()
    for name in args.parts:
        print(f"{name}:\n\n{PARTS[name](args.quick)}\n", flush=True)
    print(f"On {machine}.")


if __name__ == "__main__":
    main()
