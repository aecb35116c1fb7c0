"""The questions, in their order, each a line of the report.

Everything is asked by the public face of the package, so an answer is what a training script would get: the dataset is
an ``RPCDataset`` wrapped in a :class:`~rpcdataloader.check.probe.Probe`, and each pass of an ``RPCDataloader`` with one
worker is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from rpcdataloader.check import probe
from rpcdataloader.check.compare import (
    AGAIN,
    HERE,
    OTHER_NODE,
    OTHER_ORDER,
    OTHER_WORKER,
    Differences,
    explain,
    find_uncollatable,
    kind_of,
)
from rpcdataloader.check.here import Local, build_here, check_length, import_object, shown_as, split_name
from rpcdataloader.check.probe import Description, Failure, Measured, Probe, Wanted, failure_of
from rpcdataloader.check.report import (
    LINKS,
    Report,
    Stop,
    in_bytes,
    in_digits,
    in_seconds,
    workers_to_feed,
    workers_to_fill,
)
from rpcdataloader.client.discovery import Inline, Registered, Remote, find_workers
from rpcdataloader.client.pool import get_client
from rpcdataloader.errors import RPCError
from rpcdataloader.loader.dataloader import RPCDataloader
from rpcdataloader.loader.dataset import RPCDataset
from rpcdataloader.wire.diagnose import USER_ERRORS
from rpcdataloader.wire.pickling import dumps_reply

# Enough to meet what varies from sample to sample; each is loaded five times.
NUM_COMPARED = 8

# How many paths that differ are shown.
MAX_SHOWN = 10


@dataclass(frozen=True)
class Question:
    """What is to be checked.

    Attributes:
        dataset: ``MODULE:FACTORY``.
        workers: Node servers, as for ``RPCDataset``; None for a pool of its own.
        collate_fn: ``MODULE:FUNCTION``; None for torch's default.
        num_samples: At most so many are measured.
        seconds: For at most about so long.
        rate: Samples per second that the trainer wants; None if nobody knows.

    Raises:
        ValueError: Something is malformed or out of range.
    """

    dataset: str
    workers: str | None = None
    collate_fn: str | None = None
    num_samples: int = 200
    seconds: float = 10.0
    rate: float | None = None

    def __post_init__(self) -> None:
        split_name(self.dataset, "MODULE:FACTORY")
        if self.collate_fn is not None:
            split_name(self.collate_fn, "MODULE:FUNCTION")
        if self.workers is not None and isinstance(find_workers(self.workers), Inline):
            raise ValueError("--workers inline has no workers; leave it out for a pool on this machine")
        if self.num_samples < 1:
            raise ValueError(f"--samples must be at least 1, but is {self.num_samples}")
        for option, value in ("--seconds", self.seconds), ("--rate", self.rate):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{option} must be a number above 0, but is {value:g}")

    @property
    def nodes(self) -> list[str]:
        """Where workers are, each as ``workers=`` of an ``RPCDataset``.

        Raises:
            RPCError: None has registered in the directory that was named.
        """
        where = None if self.workers is None else find_workers(self.workers)
        if isinstance(where, Registered):
            return [str(node.address) for node in get_client().nodes(where)]
        return [str(address) for address in where.addresses] if isinstance(where, Remote) else ["local:1"]


def examine(question: Question, report: Report) -> None:
    """Ask everything.

    Raises:
        Stop: There was nothing more to ask.
    """
    local = build_here(question.dataset, report, may_fail=question.workers is not None)
    collate = default_collate
    if question.collate_fn is not None:
        collate = import_object(question.collate_fn, "collates", report)
    try:
        nodes = question.nodes
    except RPCError as error:
        raise report.stop("remote", str(error)) from None
    remotes, description = _build_remotely(local, nodes, report)
    _check_loader(local, description, report)
    samples = _compare(remotes, local, description, report)
    _collate(samples, collate, report)
    _measure(remotes[0], description, question, report)


def _run(remote: RPCDataset, *functions: Callable[[Any], Any]) -> list[Any]:
    """What they return for the dataset, in one worker process that is new."""
    return list(
        RPCDataloader(
            remote,
            batch_size=None,
            sampler=functions,
            num_workers=1,
            collate_fn=probe.unchanged,
            # The state of torch's default generator goes to the constructors of datasets.
            generator=torch.Generator().manual_seed(0),
            partition=None,
        )
    )


def _build_remotely(local: Local, nodes: Sequence[str], report: Report) -> tuple[list[RPCDataset], Description]:
    """The dataset on each node, and what it is."""
    remotes: list[RPCDataset] = []
    expected = probe.describe(*local.built) if local.built else None
    for node in nodes:
        where = "in a worker process of this machine" if node == "local:1" else f"on {node}"
        start = time.perf_counter()
        try:
            remote = RPCDataset(node, Probe, local.make, build=local.build)
            (found,) = _run(remote, probe.describe)
        except USER_ERRORS as error:
            raise report.stop("remote", f"not {where}: {failure_of(error).what}") from None
        seconds = time.perf_counter() - start
        if isinstance(found, Failure):
            raise report.stop("remote", f"not {where}: building it there raised {found.what}", found.frames)
        check_length(found, report)
        if expected is not None and found != expected:
            raise report.stop("remote", f"{where} it is {shown_as(found)} and elsewhere {shown_as(expected)}")
        expected = found
        report.ok("remote", f"{where}, after {in_seconds(seconds)}")
        remotes.append(remote)
    assert isinstance(expected, Description)
    return remotes, expected


def _check_loader(local: Local, description: Description, report: Report) -> None:
    """Whether the loader takes it; the probe itself is always map-style."""
    if description.length is None and description.style == "map":
        report.note("loader", "it has no length: give RPCDataloader a sampler")
    if local.built and description.style == "iterable":
        try:
            RPCDataloader(local.built[0], batch_size=None, workers="local:1")
        except TypeError as error:
            report.fail("loader", str(error))


def _choose(description: Description, number: int) -> list[Wanted]:
    """Samples from all over the dataset, the first and the last among them, with their positions."""
    length = number if description.length is None else description.length
    number = min(number, length)
    return [(place * (length - 1) // max(1, number - 1), place) for place in range(number)]


def _compare(remotes: Sequence[RPCDataset], local: Local, description: Description, report: Report) -> list[Any]:
    """Load some samples in several ways; returns them."""
    wanted = _choose(description, NUM_COMPARED)
    is_stream = description.style == "iterable"
    # One by one, so that none can be made over the memory of another.
    tasks = [probe.Load(part) for part in ([wanted] if is_stream else [[one] for one in wanted])]
    passes = [(OTHER_WORKER, remotes[0], 1)]
    if not is_stream and len(tasks) > 1:
        passes.append((OTHER_ORDER, remotes[0], -1))
    passes += [(OTHER_NODE, remote, 1) for remote in remotes[1:]]
    if local.built:
        passes.append((HERE, RPCDataset("inline", Probe, lambda: local.built[0]), 1))
    differences = Differences()
    try:
        results = _run(remotes[0], *tasks, *tasks)
        samples = _samples_of(results[: len(tasks)], report)
        differences.add(AGAIN, samples, _samples_of(results[len(tasks) :], report, AGAIN))
        for name, remote, step in passes:
            results = _run(remote, *tasks[::step])[::step]
            differences.add(name, samples, _samples_of(results, report, name))
    except Stop:
        raise
    except USER_ERRORS as error:
        raise report.stop("samples", failure_of(error).what) from None
    if not samples:
        raise report.stop("samples", f"{description.kind} is empty: iterating over it gives nothing")
    report.ok("samples", f"{len(samples)} of them arrive: {_outline(samples[0])}")
    _report_differences(differences, len(samples), [AGAIN, *dict.fromkeys(name for name, _, _ in passes)], report)
    return samples


def _samples_of(results: Sequence[Any], report: Report, name: str = "") -> list[Any]:
    samples = []
    for result in results:
        if isinstance(result, Failure):
            raise report.stop("samples", ", ".join(filter(None, [result.what, name])), result.frames)
        samples += result
    return samples


def _outline(value: Any, depth: int = 2) -> str:
    """A sample in few words: ``(uint8 tensor 3x32x32, int)``."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        shape = "x".join(map(str, value.shape))
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return f"{str(value.dtype).removeprefix('torch.')} {kind} {shape}".rstrip() if shape else str(value.dtype)
    if isinstance(value, Mapping) and depth:
        parts = [f"{key!r}: {_outline(part, depth - 1)}" for key, part in list(value.items())[:MAX_SHOWN]]
        return "{" + ", ".join(parts) + (", ...}" if len(value) > MAX_SHOWN else "}")
    if isinstance(value, (list, tuple)) and depth:
        parts = [_outline(part, depth - 1) for part in value[:MAX_SHOWN]]
        return "(" + ", ".join(parts) + (", ...)" if len(value) > MAX_SHOWN else ")")
    return kind_of(value)


def _report_differences(differences: Differences, num_samples: int, runs: Sequence[str], report: Report) -> None:
    found = differences.found
    if not found:
        report.ok("repeats", f"equal seeds give equal bytes {', '.join(runs)}", differences=[])
        return
    details = []
    for names, paths in differences.by_runs().items():
        details.append(f"not the same {', '.join(names)}:")
        for path in paths[:MAX_SHOWN]:
            number = len(differences.places[path])
            count = f", in {number} of {num_samples} samples" if number else ""
            details.append(f"    {path}: {found[path][names[0]]}{count}")
        if len(paths) > MAX_SHOWN:
            details.append(f"    and {len(paths) - MAX_SHOWN} more")
        details.append(f"    usually: {explain(names)}")
    shown = ", ".join([*found][:3]) + (", ..." if len(found) > 3 else "")
    facts = [{"path": path, "runs": by_run} for path, by_run in found.items()]
    report.fail("repeats", f"equal seeds do not give equal bytes: {shown}", details, differences=facts)


def _collate(samples: list[Any], collate: Callable[[Any], Any], report: Report) -> None:
    name = "the default collate function" if collate is default_collate else "the collate function"
    try:
        dumps_reply(collate(samples), name="batch")
    except USER_ERRORS as error:
        failure = failure_of(error)
        if collate is default_collate:
            path, what = find_uncollatable(samples, collate)
            what = what or failure.what  # of the batch, which cannot be sent
            remedy = "give a collate_fn to RPCDataloader, and as --collate-fn MODULE:FUNCTION to this command"
            report.fail("collates", f"{name} cannot make a batch of {path}: {what}", [remedy])
        else:
            report.fail("collates", f"{name} fails with {len(samples)} samples: {failure.what}", failure.frames)
    else:
        report.ok("collates", f"{name} makes a batch of {len(samples)} samples")


def _measure(remote: RPCDataset, description: Description, question: Question, report: Report) -> None:
    wanted = _choose(description, question.num_samples)
    try:
        (measured,) = _run(remote, probe.Measure(wanted, question.seconds))
    except USER_ERRORS as error:
        raise report.stop("speed", failure_of(error).what) from None
    if isinstance(measured, Failure):
        raise report.stop("speed", measured.what, measured.frames)
    assert isinstance(measured, Measured)
    rate, size = measured.samples_per_second, measured.mean_bytes
    spread = ""
    if measured.largest_bytes > 1.1 * measured.smallest_bytes:
        spread = f" on average, from {in_bytes(measured.smallest_bytes)} to {in_bytes(measured.largest_bytes)}"
    report.ok("size", f"{in_bytes(size)} per sample on the wire{spread}", bytes_per_sample=size)
    report.ok(
        "speed",
        f"{in_digits(rate)} samples/s and worker, or {in_bytes(rate * size)}/s (measured with {measured.num_samples})",
        samples_per_second=rate,
        bytes_per_second=rate * size,
        num_measured=measured.num_samples,
    )
    fill = {f"{link} Gbit/s": workers_to_fill(link, rate * size) for link in LINKS}
    shown = ", ".join(f"{number:,} for {link}" for link, number in fill.items())
    report.ok("network", f"workers that fill it: {shown}", workers_to_fill=fill)
    if question.rate is not None:
        needed = workers_to_feed(question.rate, rate)
        gbit = question.rate * size * 8 / 1e9
        text = f"{in_digits(question.rate)} samples/s need {needed:,} {'worker' if needed == 1 else 'workers'}"
        report.ok(
            "rate",
            f"{text} and a network of more than {in_digits(gbit)} Gbit/s",
            workers_to_feed=needed,
            gbit_needed=gbit,
        )
