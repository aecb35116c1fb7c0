"""The questions, in their order, each answered by a line.

Everything is asked by the public face of the package, so an answer is what a training script would get: a
:class:`~rpcdataloader.check.probe.Probe` is the dataset, and each pass of an ``RPCDataloader`` with one worker is a
process of its own. The constructor runs in a worker first, and in this process only when it has survived that.
"""

from __future__ import annotations

import math
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rpcdataloader.check.compare import AGAIN, HERE, OTHER_NODE, OTHER_WORKER, SENT, explain, find_differences
from rpcdataloader.check.probe import Facts, Probe, Timed
from rpcdataloader.client.client import get_client
from rpcdataloader.client.discovery import Elastic, Remote, Where
from rpcdataloader.errors import RemoteTraceback, RPCError
from rpcdataloader.fetch.seeding import generators_restored
from rpcdataloader.loader.dataloader import RPCDataloader
from rpcdataloader.loader.dataset import RPCDataset

# Enough to meet what varies from sample to sample; each is loaded five times.
NUM_COMPARED = 8

# Enough for a mean, and as long as people like to wait.
MAX_TIMED = 200
MAX_SECONDS = 10.0

# How many parts of a sample, and frames of a traceback, are shown.
MAX_SHOWN = 10

ADVICE = "MODULE is imported there, and FACTORY called with no arguments: def make(): return Data(root=...)"

# Files whose frames say nothing about a dataset, here or on a node.
_OURS = re.compile("/importlib/|/rpcdataloader/(check|client|fetch|loader|server|wire)/")

# What code of the user raises; Ctrl-C is the user's own.
_ERRORS = (Exception, SystemExit)

#: Takes a level (``ok``, ``FAILED``, or ``note`` for something to know), a subject, a text, and lines below that.
Report = Callable[..., None]


class Failure(Exception):
    """Something does not work, and nothing more can be asked. The arguments are for the report, after the level."""


def examine(target: str, workers: Where | None, rate: float | None, report: Report) -> None:
    """Ask everything.

    Args:
        workers: Node servers to ask; None for a pool of its own.
        rate: Samples per second that the trainer wants; None if nobody knows.

    Raises:
        Failure: There was nothing more to ask.
        RPCError: No node server has registered in the directory that ``workers`` names.
    """
    nodes = ["local:1"]
    if isinstance(workers, Elastic):
        nodes = [str(node.address) for node in get_client().nodes(workers)]
    elif isinstance(workers, Remote):
        nodes = [str(address) for address in workers.addresses]
    remotes, local = _build(nodes, target, report)
    _compare(remotes, local, nodes[0], report)
    _time(remotes[0], rate, report)


def _build(nodes: Sequence[str], target: str, report: Report) -> tuple[list[RPCDataset], Probe | None]:
    """The dataset on each node; and in this process, unless it cannot be built here."""
    built: dict[str, Any] = {}
    for node in [*nodes, "inline"]:
        where = {"local:1": "in a worker of this machine", "inline": "in this process"}.get(node, f"on {node}")
        start = time.perf_counter()
        try:
            # Constructors find the generators in the same state everywhere.
            with generators_restored():
                built[node] = Probe(target) if node == "inline" else RPCDataset(node, Probe, target)
            facts: Facts = built[node].facts
        except _ERRORS as error:
            text, frames = f"not {where}: {_words(error)}", _frames(error)
            if node != "inline":
                raise Failure("builds", text, frames if isinstance(error, RPCError) else [*frames, ADVICE]) from None
            report("note", "builds", text, frames)
        else:
            report("ok", "builds", f"{facts.text} {where}, after {time.perf_counter() - start:.1f} s")
            if facts.text != built[nodes[0]].facts.text:
                raise Failure("builds", "it is not the same everywhere: is the data complete, and its order fixed?")
    if reason := built[nodes[0]].facts.not_shared:
        remedy = 'RPCDataset(..., build="worker") says so on purpose, or do that on first use'
        report("note", "inherits", f"each worker builds its own: {reason}; {remedy}")
    return [built[node] for node in nodes], built.get("inline")


def _choose(facts: Facts, number: int) -> list[int]:
    """Indices from all over the dataset, the first and the last among them; the first ones of a stream."""
    length = facts.length or number
    return [int(index) for index in np.linspace(0, length - 1, min(number, length))]


def _load(dataset: Any, indices: Sequence[int], workers: str | None = None) -> Iterator[Any]:
    """What the probe gives for these indices, in one worker process that is new.

    Raises:
        Failure: A sample cannot be had.
    """
    seed = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": list, "generator": seed, "partition": None}
    number = 0
    try:
        for answer in RPCDataloader(dataset, batch_size=None, sampler=indices, workers=workers, **options):
            yield from answer
            number += 1
    except _ERRORS as error:
        # The user knows of no probe around the dataset.
        text = _words(error).replace("dataset.dataset", "dataset")
        raise Failure("samples", f"sample {indices[number]}: {text}", _frames(error)) from None


def _compare(remotes: Sequence[RPCDataset], local: Probe | None, node: str, report: Report) -> None:
    """Load some samples in several ways, and compare them."""
    indices = _choose(remotes[0].facts, NUM_COMPARED)
    samples = list(_load(remotes[0], indices))
    if not samples:
        raise Failure("samples", "iterating over it gives nothing: is the path right, and are there files below it?")
    report("ok", "samples", f"{len(samples)} of them arrive")
    twice = list(_load(remotes[0], [*indices, *indices]))
    once, again = twice[: len(samples)], twice[len(samples) :]
    runs = [(AGAIN, once, again), (OTHER_WORKER, samples, once)]
    runs += [(OTHER_NODE, samples, list(_load(remote, indices))) for remote in remotes[1:]]
    # Nodes may have files that are missing here, and a factory works even if what it makes cannot be sent.
    for run, workers in [(SENT, node), (HERE, "inline")] if local is not None else []:
        try:
            runs.append((run, samples, list(_load(local, indices, workers))))
        except Failure as failure:
            name, text, frames = failure.args
            report("note", name, f"not {run}: {text}", frames)
    found: dict[str, dict[str, str]] = {}
    for run, mine, others in runs:
        pairs = [("sample", *pair) for pair in zip(mine, others, strict=False)]
        for name, first, second in [("number of samples", len(mine), len(others)), *pairs]:
            for path, what in find_differences(first, second, name):
                found.setdefault(path, {}).setdefault(run, what)
    by_runs: dict[tuple[str, ...], list[str]] = {}
    for path, whats in found.items():
        by_runs.setdefault(tuple(whats), []).append(f"    {path}: {next(iter(whats.values()))}")
    details = []
    for names, lines in by_runs.items():
        more = [f"    and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
        details += [f"not the same {', '.join(names)}:", *lines[:MAX_SHOWN], *more, f"    usually: {explain(names)}"]
    if found:
        report("FAILED", "repeats", "equal seeds do not give equal bytes", details)
    else:
        report("ok", "repeats", f"equal seeds give equal bytes {', '.join(dict.fromkeys(run for run, *_ in runs))}")


def _time(remote: RPCDataset, rate: float | None, report: Report) -> None:
    """How many samples one worker makes, and what that means."""
    measured: list[tuple[float, int]] = []
    for answer in _load(remote, [Timed(index) for index in _choose(remote.facts, MAX_TIMED)]):
        measured.append(answer)
        if sum(seconds for seconds, _size in measured) > MAX_SECONDS:
            break
    times, sizes = zip(*measured, strict=True)
    # The first one opens files and fills caches.
    seconds = statistics.mean(times[1:] or times)
    size_bytes = statistics.mean(sizes)
    report("ok", "size", f"{size_bytes:,.0f} bytes per sample on the wire")
    speed = f"{1000 * seconds:,.3f} ms per sample, so {1 / seconds:,.1f} samples/s and worker"
    report("ok", "speed", f"{speed}, or {size_bytes / seconds / 1e6:,.1f} MB/s (measured with {len(times)})")
    if rate is not None:
        need = f"workers: {math.ceil(rate * seconds):,}, network: more than {rate * size_bytes * 8 / 1e9:.3g} Gbit/s"
        report("ok", "rate", f"what {rate:,.0f} samples/s need: {need}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _frames(error: BaseException) -> list[str]:
    """Where in the code of the user that happened, innermost last."""
    cause = error.__cause__
    text = str(cause) if isinstance(cause, RemoteTraceback) else "".join(traceback.format_tb(error.__traceback__))
    # Below the probe, if it is shown; nothing is left where the package itself has failed.
    below = text.rpartition("rpcdataloader/check/probe.py")[2]
    frames = re.findall(r'File "(.+)", (line \d+, in .+)\n    (.+)', below)
    frames = [frame for frame in frames if not _OURS.search(frame[0])]
    return [line for file, place, code in frames[-MAX_SHOWN:] for line in (f"{file}, {place}", f"    {code}")]
