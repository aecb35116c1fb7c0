"""The command line of ``check``: its questions, in their order, each answered by a line, and its exit status.

Node servers are asked first, each step by step (``way.py``), and then the dataset, on those that have answered.

All questions use the package's public interface, so the answers are what a training script would get: a
:class:`~rpcdataloader.check.probe.Probe` is the dataset, and each pass of an ``RPCDataloader`` with one worker is a new
process. The constructor runs in a worker first, and in this process only if the worker survives it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import linecache
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Before torch and numpy are imported below, as in a node server: their threads are not the dataset's.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from rpcdataloader.check.probe import Facts, Probe, Timed, find_differences  # noqa: E402
from rpcdataloader.check.way import Failure, Step, measure_link, take  # noqa: E402
from rpcdataloader.client.client import get_client  # noqa: E402
from rpcdataloader.client.discovery import Inline, Remote, Where, find_workers  # noqa: E402
from rpcdataloader.errors import RemoteTraceback, RPCError  # noqa: E402
from rpcdataloader.fetch.seeding import generators_restored  # noqa: E402
from rpcdataloader.loader.dataloader import RPCDataloader  # noqa: E402
from rpcdataloader.loader.dataset import RPCDataset  # noqa: E402
from rpcdataloader.wire.address import Address  # noqa: E402
from rpcdataloader.wire.pickling import dumps_reply  # noqa: E402

# Enough to meet variation between samples.
NUM_COMPARED = 8

# Enough for a mean, in the time that users like to wait.
MAX_TIMED = 200
MAX_SECONDS = 10.0

# Node servers that are asked at the same time.
_MOST_AT_ONCE = 32

# Workers above what the mean time of a sample asks for, as the page on waiting advises.
_SPARE = 1.2

# Ways to load a sample again with an equal seed, each with the usual cause of a difference.
_REMEDY = "draw from the global generators, or seed your own with get_sample_seed() in each sample"
AGAIN = "again in the same worker"
ELSEWHERE = "in another worker"
CAUSES = {
    AGAIN: "a generator of its own that is never seeded or made in the constructor, other state kept from sample to "
    f"sample, the time, or memory never written (np.empty): {_REMEDY}",
    ELSEWHERE: "the id of the process, the order of a set or folder (sort it), hash() of a string, or other versions, "
    f"files or paths there; or a generator that each worker makes in the constructor: {_REMEDY}",
}

# Most parts of a sample, and frames of a traceback, to show.
MAX_SHOWN = 10

ADVICE = "MODULE is imported there, and FACTORY called with no arguments: def make(): return Data(root=...)"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Exceptions of user code, without Ctrl-C.
_ERRORS = (Exception, SystemExit)

#: Takes a level (``ok``, ``FAILED``, or ``note``), a subject, a text, and the lines below it.
Report = Callable[..., None]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.check",
        allow_abbrev=False,
        description="Do these node servers answer, does this dataset work in their workers, are its samples "
        "reproducible there, and how many workers does it need?",
        epilog="Exit status: 0 if all is well, 1 if something does not work, 2 for a wrong command line.",
    )
    parser.add_argument(
        "dataset",
        nargs="?",
        type=_target,
        metavar="MODULE:FACTORY",
        help="class or function without required arguments that makes the dataset, or a dataset; MODULE is imported, "
        "also from the current folder (default: check --workers alone)",
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        metavar="ADDRESS,...",
        help="node servers to check, each of them (default: a worker of this machine)",
    )
    parser.add_argument(
        "--rate", type=_rate, metavar="R", help="samples per second that the trainer needs (default: unknown)"
    )
    return parser


def _target(text: str) -> str:
    name = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    if text.partition(":")[0].endswith(".py") or not re.fullmatch(f"{name}:{name}", text):
        raise argparse.ArgumentTypeError(f"expected MODULE:NAME, such as mydata:make_dataset, got {text!r}")
    return text


def _workers(text: str) -> Where | None:
    try:
        where = find_workers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if isinstance(where, Inline):
        raise argparse.ArgumentTypeError("inline has no workers; leave it out for a pool on this machine")
    return where


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check node servers and a dataset; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.dataset is None and not isinstance(options.workers, Remote):
        parser.error("name a dataset, as MODULE:FACTORY, or node servers, by --workers")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    failed = []

    def report(level: str, name: str, text: str, details: Sequence[str] = ()) -> None:
        if level == "FAILED":
            failed.append(name)
        print(f"{level:<7} {name:<9} {text}", *(f"{'':<18}{line}" for line in details), sep="\n", flush=True)

    try:
        examine(options.dataset, options.workers, options.rate, report)
    except Failure as failure:
        report("FAILED", *failure.args)
    except RPCError as error:
        report("FAILED", "workers", str(error))
    except KeyboardInterrupt:
        return 130
    subject = options.dataset or f"workers={str(options.workers)!r}"
    if failed:
        print(f"{subject} does not work as it is: {', '.join(failed)}")
        return 1
    print(f"{subject} works remotely" if options.dataset else f"{subject} works")
    return 0


def examine(target: str | None, workers: Where | None, rate: float | None, report: Report) -> None:
    """Ask all questions.

    Args:
        target: The dataset; None to ask nothing of it.
        workers: Node servers to ask; None for a worker of this machine.
        rate: Samples per second that the trainer needs; None if unknown.

    Raises:
        Failure: A question failed, and those after it cannot be asked.
        RPCError: The directory that ``workers`` names has no node server.
    """
    nodes, link = ["local:1"], math.inf
    module = target and target.partition(":")[0]
    if isinstance(workers, Remote):
        nodes, link = _go_to([node.address for node in get_client().nodes(workers)], module, report)
    if target is None or not nodes:
        return
    remotes, local = _build(nodes, target, report)
    _compare(remotes, local, nodes[0], report)
    _time(remotes[0], rate, link, report)


def _go_to(addresses: Iterable[Address], module: str | None, report: Report) -> tuple[list[str], float]:
    """Take all steps to each node server, to all of them at once.

    Returns:
        Those without a failure, and the bytes per second of the slowest link.
    """
    found, slowest = [], math.inf
    with ThreadPoolExecutor(_MOST_AT_ONCE, "rpcdl-check") as executor:
        ways = {address: executor.submit(list[Step], take(address, module)) for address in addresses}
        for address, way in ways.items():
            for level, name, text in way.result():
                report(level, name, f"{address}: {text}")
    for address, way in ways.items():
        if all(step.level != "FAILED" for step in way.result()):
            try:
                rate = measure_link(address)  # one after the other, as all end here
            except Failure as failure:
                name, text = failure.args
                report("FAILED", name, f"{address}: {text}")
                continue
            found.append(str(address))
            slowest = min(slowest, rate)
            report("ok", "link", f"{address}: {rate / 1e6:,.0f} MB/s to one worker, or {rate * 8e-9:,.2g} Gbit/s")
    return found, slowest


def _build(nodes: Sequence[str], target: str, report: Report) -> tuple[list[RPCDataset], Probe | None]:
    """The dataset on each node; and in this process, if it can be built here."""
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
                raise Failure("builds", "it differs between nodes: is the data complete, and its order fixed?")
    if reason := built[nodes[0]].facts.not_shared:
        advice = "open files and connections, and start threads, on first use"
        report("note", "inherits", f"each worker builds its own: {reason}; {advice}")
    elif peers := built[nodes[0]].facts.connections:
        report("note", "inherits", f"workers share its connections to {peers}: connect on first use")
    return [built[node] for node in nodes], built.get("inline")


def _choose(facts: Facts, number: int) -> list[int]:
    """Indices spread over the dataset, from the first to the last; the first ones of a stream."""
    length = facts.length or number
    return [int(index) for index in np.linspace(0, length - 1, min(number, length))]


def _load(dataset: Any, indices: Sequence[int], workers: str | None = None) -> Iterator[Any]:
    """The probe's answers for these indices, in a new worker process.

    Raises:
        Failure: A sample cannot be loaded.
    """
    seed = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": list, "generator": seed, "partition": None}
    number = 0
    try:
        for answer in RPCDataloader(dataset, batch_size=None, sampler=indices, workers=workers, **options):
            yield from answer
            number += 1
    except _ERRORS as error:
        # The probe around the dataset is hidden from the user.
        text = _words(error).replace("dataset.dataset", "dataset")
        raise Failure("samples", f"sample {indices[number]}: {text}", _frames(error)) from None


def _compare(remotes: Sequence[RPCDataset], local: Probe | None, node: str, report: Report) -> None:
    """Load some samples twice in one worker, and once in others, and compare them."""
    indices = _choose(remotes[0].facts, NUM_COMPARED)
    samples = list(_load(remotes[0], indices))
    if not samples:
        raise Failure("samples", "iterating over it gives nothing: is the path right, and are there files below it?")
    report("ok", "samples", f"{len(samples)} of them arrive")
    _collate(samples, report)
    twice = list(_load(remotes[0], [*indices, *indices]))
    once, again = twice[: len(samples)], twice[len(samples) :]
    others = [once, *(list(_load(remote, indices)) for remote in remotes[1:])]
    if local is not None:
        # A factory may work although its dataset cannot be sent.
        try:
            others.append(list(_load(local, indices, node)))
        except Failure as failure:
            name, text, frames = failure.args
            report("note", name, f"not sent as an instance: {text}", frames)
    details = []
    for run, mine, found in (AGAIN, once, [again]), (ELSEWHERE, samples, others):
        differences: dict[str, str] = {}
        for loaded in found:
            pairs = [("sample", *pair) for pair in zip(mine, loaded, strict=False)]
            for name, first, second in [("number of samples", len(mine), len(loaded)), *pairs]:
                for path, what in find_differences(first, second, name):
                    differences.setdefault(path, what)
        if differences:
            lines = [f"    {path}: {what}" for path, what in differences.items()]
            more = [f"    and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
            details += [f"not the same {run}:", *lines[:MAX_SHOWN], *more, f"    usually: {CAUSES[run]}"]
            break  # what differs in one worker differs in others
    if details:
        report("FAILED", "repeats", "equal seeds do not give equal samples", details)
    else:
        report("ok", "repeats", f"equal seeds give equal samples {AGAIN} and {ELSEWHERE}")


def _collate(samples: list[Any], report: Report) -> None:
    """Make a batch of some samples, as a loader without ``collate_fn`` does."""
    try:
        encoded = dumps_reply(default_collate(samples), name="batch")
    except _ERRORS as error:
        advice = "return tensors, arrays or numbers of equal shapes, or give the loader a collate_fn"
        report("note", "batch", f"torch's default collate fails, {_words(error)}: {advice}")
    else:
        report("ok", "batch", f"{len(samples)} of them make one of {encoded.size_bytes:,} bytes")


def _time(remote: RPCDataset, rate: float | None, link: float, report: Report) -> None:
    """Measure how many samples one worker makes, and what follows from it.

    Args:
        rate: Samples per second that the trainer needs; None if unknown.
        link: Bytes per second from the nodes; infinity for this machine.
    """
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
    if link < math.inf:
        report("ok", "most", f"workers that the slowest link can carry: {max(1, int(link * seconds / size_bytes)):,}")
    if rate is not None:
        workers, gigabits = math.ceil(_SPARE * rate * seconds), rate * size_bytes * 8 / 1e9
        need = f"workers: {workers:,}, network: more than {gigabits:.3g} Gbit/s"
        report("ok", "rate", f"{rate:,.0f} samples/s need {need}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _frames(error: BaseException) -> list[str]:
    """Frames of the user's code in the traceback, innermost last."""
    cause = error.__cause__
    text = str(cause) if isinstance(cause, RemoteTraceback) else "".join(traceback.format_tb(error.__traceback__))
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)\n    (.+)', text)
    frames = [frame for frame in frames if not _says_nothing(*frame)][-MAX_SHOWN:]
    return [
        line for file, number, name, code in frames for line in (f"{file}, line {number}, in {name}", f"    {code}")
    ]


def _says_nothing(file: str, number: str, name: str, code: str) -> bool:
    """Whether a frame says nothing about a dataset: it imports its module, or belongs to this package.

    The package lies somewhere else on a node, and the user's folders may have the same names.
    """
    if name == "import_module" and file.endswith("/importlib/__init__.py"):
        return True
    place = file.rpartition("/rpcdataloader/")[2]
    return linecache.getline(f"{_PACKAGE}/{place}", int(number)).strip() == code


if __name__ == "__main__":
    # Prints the stack of a constructor that crashes in this process, too.
    faulthandler.enable()
    sys.exit(main())
