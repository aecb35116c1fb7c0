"""Losses after a kill and after a resumption: real runs, recorded in ``docs/figures/losses.json``.

- *killed*: 4 node servers with 4 workers each. One is killed with its workers, and started again some seconds later.
  Checksums of the batches are compared with those of a run in peace.
- *resumed*: 4 ranks with 2 workers each stop in the middle of an epoch; 2 ranks with 3 workers in all continue it. The
  samples are compared with those of an uninterrupted epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset
from tests.benchmark.__main__ import describe_machine
from tests.benchmark.loaders import LOADERS
from tests.benchmark.processes import Child, running

from .svg import BLUE, GREEN, RED, Picture, Scale, Series, draw_lines

_NUM_NODES, _WORKERS_PER_NODE = 4, 4
_BATCH_SIZE, _NUM_BATCHES = 8, 2500
_KILL_SECONDS, _RESTART_SECONDS, _BIN_SECONDS = 8.0, 12.0, 0.5
_NUM_SAMPLES = 10_000
_TIMEOUT = 120.0


class Waits(Dataset[torch.Tensor]):
    """Random numbers, each after a wait of 10 to 30 ms as for storage, or at once."""

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def __len__(self) -> int:
        return _BATCH_SIZE * _NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = random.uniform(0.010, 0.030)
        if self.waits:
            time.sleep(seconds)
        return index + torch.rand(16)


class Numbers(Dataset[torch.Tensor]):
    """Each index, and a random number of its own."""

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def record() -> dict[str, Any]:
    """Both runs, one after the other: a minute."""
    with tempfile.TemporaryDirectory(prefix="rpcdl-pictures-") as name:
        folder = Path(name)
        env = LOADERS["ours-tcp"].make_environment(folder)
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]

        def start(num_workers: int, port: str = "0") -> contextlib.AbstractContextManager[Child]:
            args = ["--port", port, "--num-workers", str(num_workers)]
            return running("rpcdataloader.launch", args, env, folder)

        return {"machine": describe_machine(), "killed": record_kill(start), "resumed": record_resume(start)}


def _address(server: Child) -> str:
    return server.read_line("rpcdataloader ready ", _TIMEOUT).split()[0]


def record_kill(start: Callable[..., contextlib.AbstractContextManager[Child]]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start(_WORKERS_PER_NODE)) for _ in range(_NUM_NODES)]
        addresses = [_address(server) for server in servers]
        torch.manual_seed(0)
        loader = RPCDataloader(RPCDataset(addresses, Waits, True), _BATCH_SIZE)
        marks: list[dict[str, Any]] = []
        begun = time.perf_counter()

        def mark(text: str) -> None:
            marks.append({"seconds": round(time.perf_counter() - begun, 2), "text": text})

        def wait_for(server: Child) -> None:
            _address(server)
            mark("node started again")

        waiting: threading.Thread | None = None
        digests, seconds = [], []
        for batch in loader:
            seconds.append(time.perf_counter() - begun)
            digests.append(_digest(batch))
            if not marks and seconds[-1] > _KILL_SECONDS:
                os.killpg(servers[-1].pid, signal.SIGKILL)
                mark("node killed")
            if waiting is None and seconds[-1] > _RESTART_SECONDS:
                # Not in that thread: a child of the harness ends with the thread that has started it.
                again = stack.enter_context(start(_WORKERS_PER_NODE, addresses[-1].rpartition(":")[2]))
                waiting = threading.Thread(target=wait_for, args=[again])
                waiting.start()
        assert waiting is not None, "the run was over before the node was started again"
        waiting.join()
    torch.manual_seed(0)
    wanted = [_digest(batch) for batch in RPCDataloader(RPCDataset("inline", Waits, False), _BATCH_SIZE)]
    counts = Counter(int(moment / _BIN_SECONDS) for moment in seconds)
    return {
        "workers": _NUM_NODES * _WORKERS_PER_NODE,
        "killed": _WORKERS_PER_NODE,
        "batches": len(wanted),
        "lost": len(wanted) - len(digests),
        "changed": sum(one != other for one, other in zip(digests, wanted, strict=False)),
        "marks": marks,
        "bin_seconds": _BIN_SECONDS,
        # The last bin is not whole.
        "counts": [counts[number] for number in range(int(seconds[-1] / _BIN_SECONDS))],
    }


def _digest(batch: torch.Tensor) -> str:
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()


def record_resume(start: Callable[..., contextlib.AbstractContextManager[Child]]) -> dict[str, Any]:
    before, after = (4, 2), (2, 3)  # ranks, and workers of each rank or of all
    with start(before[0] * before[1]) as first, start(after[1]) as second:
        addresses = [_address(first)], [_address(second)]

        def epoch_of(
            rank: int, num_ranks: int, where: str | list[str], batch_size: int, **options: Any
        ) -> RPCDataloader:
            torch.manual_seed(0)
            dataset = RPCDataset(where, Numbers)
            sampler = ResumableDistributedSampler(dataset, num_ranks, rank)
            return RPCDataloader(dataset, batch_size, sampler=sampler, **options)

        seen: list[torch.Tensor] = []
        for rank in range(before[0]):
            loader = epoch_of(rank, before[0], addresses[0], 20, num_workers=before[1])
            seen += islice(loader, 50)
            state = loader.state_dict()
        num_before = sum(map(len, seen))
        for rank in range(after[0]):
            loader = epoch_of(rank, after[0], addresses[1], 40)
            loader.load_state_dict(state)
            seen += loader
    whole = torch.cat(list(epoch_of(0, 1, "inline", 100)))
    counts = Counter(map(tuple, torch.cat(seen).tolist()))
    return {
        "ranks": [before[0], after[0]],
        "workers": [before[0] * before[1], after[1]],
        "samples": len(whole),
        "before": num_before,
        "once": sum(counts[tuple(sample)] == 1 for sample in whole.tolist()),
    }


def draw_killed(found: dict[str, Any]) -> Picture:
    """A line of batches per second, in which it is marked what was done to the workers."""
    width = found["bin_seconds"]
    rates = [count / width for count in found["counts"]]
    title = f"Batches per second while {found['killed']} of {found['workers']} workers are killed"
    text = f"{title}: the rate falls by about a quarter, and comes back when the node does. No batch is lost."
    x = Scale(0, len(rates) * width, 50, 584)
    y = Scale(0, 1.1 * max(rates), 280, 90)
    steps = [((number + end) * width, rate) for number, rate in enumerate(rates) for end in (0, 1)]
    series = [Series("all workers together", BLUE, steps, has_dots=False)]
    picture = draw_lines(title, text, series, x, y, ("seconds", "batches/s"), range(0, int(x.high) + 1, 2))
    for number, mark in enumerate(found["marks"]):
        colour, at = (GREEN if number else RED), x.at(mark["seconds"])
        picture.line([(at, y.start), (at, y.end)], more=f'stroke="{colour}" stroke-width="2" stroke-dasharray="5 4"')
        picture.text(at, y.end - 6, mark["text"], "start" if number else "end")
    return picture
