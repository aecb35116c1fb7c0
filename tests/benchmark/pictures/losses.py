"""Losses after a kill and after a resumption: real runs, recorded in ``docs/figures/losses.json``.

- *killed*: 4 node servers with 4 workers each. One is killed with its workers, and started again some seconds later.
  The batches are compared with those of a run in peace.
- *resumed*: 4 ranks with 2 workers each stop in the middle of an epoch; 2 ranks with 3 workers in all continue it. The
  samples are compared with those of an uninterrupted epoch.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset
from tests.benchmark.loaders import environment, node_server
from tests.benchmark.processes import describe_machine, running

from .svg import BLUE, GREEN, RED, Picture, Scale

_NUM_NODES, _WORKERS_PER_NODE = 4, 4
_BATCH_SIZE, _NUM_BATCHES = 8, 2500
_KILL_SECONDS, _RESTART_SECONDS, _BIN_SECONDS = 8.0, 12.0, 0.5
_NUM_SAMPLES = 10_000


class Waits(Dataset[torch.Tensor]):
    """Random numbers, each after a wait of 10 to 30 ms as for storage, or at once."""

    def __init__(self, waits: bool, size: int = _BATCH_SIZE * _NUM_BATCHES) -> None:
        self.waits, self.size = waits, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = random.uniform(0.010, 0.030)
        if self.waits:
            time.sleep(seconds)
        return index + torch.rand(16)


def record() -> dict[str, Any]:
    """Both runs, one after the other: a minute."""
    with environment() as (folder, env):
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        return {
            "machine": describe_machine(),
            "killed": record_kill(env, folder),
            "resumed": record_resume(env, folder),
        }


def record_kill(env: dict[str, str], folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(node_server(_WORKERS_PER_NODE, env, folder)) for _ in range(_NUM_NODES)]
        victim, pid = servers[-1]
        torch.manual_seed(0)
        loader = RPCDataloader(RPCDataset([address for address, _pid in servers], Waits, True), _BATCH_SIZE)
        marks: list[dict[str, Any]] = []
        batches, seconds = [], []
        begun = time.perf_counter()
        for batch in loader:
            seconds.append(time.perf_counter() - begun)
            batches.append(batch)
            if not marks and seconds[-1] > _KILL_SECONDS:
                os.killpg(pid, signal.SIGKILL)
                marks.append({"seconds": round(time.perf_counter() - begun, 2), "text": "node killed"})
            if len(marks) == 1 and seconds[-1] > _RESTART_SECONDS:
                options = ["--port", victim.rpartition(":")[2], "--num-workers", str(_WORKERS_PER_NODE)]
                stack.enter_context(running("rpcdataloader.launch", options, env, folder))  # in a second or two
                marks.append({"seconds": round(time.perf_counter() - begun, 2), "text": "node started again"})
    torch.manual_seed(0)
    wanted = list(RPCDataloader(RPCDataset("inline", Waits, False), _BATCH_SIZE))
    counts = Counter(int(moment / _BIN_SECONDS) for moment in seconds)
    return {
        "workers": _NUM_NODES * _WORKERS_PER_NODE,
        "killed": _WORKERS_PER_NODE,
        "batches": len(wanted),
        "lost": len(wanted) - len(batches),
        "changed": sum(not one.equal(other) for one, other in zip(batches, wanted, strict=False)),
        "marks": marks,
        "bin_seconds": _BIN_SECONDS,
        # The last bin is not whole.
        "counts": [counts[number] for number in range(int(seconds[-1] / _BIN_SECONDS))],
    }


def record_resume(env: dict[str, str], folder: Path) -> dict[str, Any]:
    ranks, workers = (4, 2), (8, 3)  # before and after, of all ranks
    with node_server(workers[0], env, folder) as (first, _), node_server(workers[1], env, folder) as (second, _):

        def epoch_of(rank: int, num_ranks: int, where: str, batch_size: int, **options: Any) -> RPCDataloader:
            torch.manual_seed(0)
            dataset = RPCDataset(where, Waits, False, _NUM_SAMPLES)
            sampler = ResumableDistributedSampler(dataset, num_ranks, rank)
            return RPCDataloader(dataset, batch_size, sampler=sampler, **options)

        seen: list[torch.Tensor] = []
        for rank in range(ranks[0]):
            loader = epoch_of(rank, ranks[0], first, 20, num_workers=workers[0] // ranks[0])
            seen += islice(loader, 50)
            state = loader.state_dict()
        for rank in range(ranks[1]):
            loader = epoch_of(rank, ranks[1], second, 40)
            loader.load_state_dict(state)
            seen += loader
    whole = torch.cat(list(epoch_of(0, 1, "inline", 100)))
    counts = Counter(map(tuple, torch.cat(seen).tolist()))
    once = sum(counts[tuple(sample)] == 1 for sample in whole.tolist())
    return {"ranks": ranks, "workers": workers, "samples": len(whole), "once": once}


def draw_killed(found: dict[str, Any]) -> Picture:
    """A line of batches per second, in which it is marked what was done to the workers."""
    width = found["bin_seconds"]
    rates = [count / width for count in found["counts"]]
    title = f"Batches per second while {found['killed']} of {found['workers']} workers are killed"
    text = f"{title}: the rate falls by about a quarter, and comes back when the node does. No batch is lost."
    picture = Picture(title, text, 600, 312)
    picture.text(12, 28, title)
    x, y = Scale(0, len(rates) * width, 50, 584), Scale(0, 1.1 * max(rates), 260, 70)
    for rate in range(0, int(y.high) + 1, 20):
        picture.line([(x.start, y.at(rate)), (x.end, y.at(rate))], "grid")
        picture.text(x.start - 8, y.at(rate) + 5, str(rate), "end", "soft")
    for second in range(0, int(x.high) + 1, 2):
        picture.text(x.at(second), y.start + 20, str(second), "middle", "soft")
    picture.text((x.start + x.end) / 2, y.start + 42, "seconds", "middle", "soft")
    steps = [(x.at((number + end) * width), y.at(rate)) for number, rate in enumerate(rates) for end in (0, 1)]
    picture.line(steps, more=f'fill="none" stroke="{BLUE}" stroke-width="2.5"')
    for number, mark in enumerate(found["marks"]):
        colour, at = (GREEN if number else RED), x.at(mark["seconds"])
        picture.line([(at, y.start), (at, y.end)], more=f'stroke="{colour}" stroke-width="2" stroke-dasharray="5 4"')
        picture.text(at, y.end - 6, mark["text"], "start" if number else "end")
    return picture
