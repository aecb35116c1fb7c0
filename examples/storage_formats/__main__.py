"""The command: ``python -m examples.storage_formats``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.storage_formats import mount
from examples.storage_formats.cost import format_costs
from examples.storage_formats.errors import StudyError
from examples.storage_formats.plan import Format, Link, Loader, Run, default_runs, multiply, size_epochs
from examples.storage_formats.processes import Child
from examples.storage_formats.proxy import Proxy
from examples.storage_formats.result import Report
from examples.storage_formats.samples import Manifest, read_manifest, side_of
from examples.storage_formats.storage import Location
from examples.storage_formats.store import BUCKET, Store, environment, running
from examples.storage_formats.train import Job
from examples.storage_formats.writing import write_samples

ROOT = Path(__file__).parents[2]

# Node servers that are started here: two, as there would be several machines.
SERVERS = 2

# What workers import, once per server.
READERS = "examples.storage_formats.readers"

LINKS = ["0.01:20e6:100e6", "0.05:50e6:400e6"]

DEFAULTS: dict[str, Any] = {
    "samples": 800,
    "sample_bytes": 1.5e6,
    "shards": [8, 50],
    "samples_per_worker": 75,
    "longest_epoch": 1600,
}
COST: dict[str, Any] = {"samples": 200, "shards": [8]}
COMBINATIONS: dict[str, Any] = {
    "ranks": [1],
    "loaders": ["torch:0", "torch:4", "torch:16", "rpc:4", "rpc:16", "rpc:64"],
    "formats": ["objects", "threads", "webdataset-8", "webdataset-50", "tfrecord-8", "tfrecord-50"],
}
QUICK: dict[str, Any] = {
    "samples": 80,
    "sample_bytes": 60e3,
    "shards": [8, 40],
    "samples_per_worker": 20,
    "longest_epoch": 80,
    "links": LINKS[:1],
    "ranks": [2],
    "loaders": ["torch:2", "rpc:4"],
    "formats": ["objects", "threads", "files", "webdataset-8", "tfrecord-8"],
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.storage_formats",
        description="Write samples to an object store in several formats, train on each, and compare.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small defaults: a study of a minute, to see that everything works")
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default="storage-formats",
        help="folder of the result (default: %(default)s)",
    )
    add("--cost", action="store_true", help="print how much CPU time a sample takes in reader, mount and store, and "
        "measure nothing else (defaults: --samples 200 --shards 8)")  # fmt: skip
    add = parser.add_argument_group("storage").add_argument
    add("--endpoint", metavar="URL", help="S3 service (default: SeaweedFS, started here, behind a proxy that slows it)")
    add("--bucket", metavar="NAME", help="bucket of --endpoint, which must exist")
    add("--prefix", metavar="TEXT", default="", help="beginning of all keys, such as study/ (default: none)")
    add("--data", metavar="DIR", type=Path, help="folder of SeaweedFS, kept for next time (default: a temporary one)")
    links = " ".join(LINKS)
    add("--links", nargs="+", metavar="SECONDS:BYTES:BYTES", help="latency, rate per connection and rate of all "
        f"connections of the proxy (default: {links})")  # fmt: skip
    add("--workers", nargs="+", metavar="HOST:PORT", help="node servers of rpc loaders (default: started here)")
    add = parser.add_argument_group("what is stored").add_argument
    add("--samples", metavar="N", type=int, help="samples in each format (default: 800)")
    add("--sample-bytes", metavar="BYTES", type=float, help="size of an image (default: 1.5e6)")
    add("--shards", metavar="N", nargs="+", type=int, help="samples per shard, divisors of --samples (default: 8 50)")
    add("--write-only", action="store_true", help="write the samples if they are not there, and measure nothing")
    add("--read-only", action="store_true", help="measure samples that are there, and write nothing to the storage")
    add = parser.add_argument_group(
        "what is measured",
        "Without the next three, the runs of the published table; with any of them, all their combinations.",
    ).add_argument
    add("--ranks", metavar="N", nargs="+", type=int, help="training processes")
    add("--loaders", metavar="KIND:N", nargs="+", help="torch:WORKERS, rpc:WORKERS (of each rank) or tensorflow:READS")
    add("--formats", metavar="KIND", nargs="+",
        help="objects, threads, files, webdataset-SHARD or tfrecord-SHARD")  # fmt: skip
    add("--step", metavar="SECONDS", type=float, default=0.02, help="of the network; 0 for none (default: %(default)s)")
    add("--batch-size", metavar="N", type=int, default=16, help="of each rank (default: %(default)s)")
    add("--samples-per-worker", metavar="N", type=int, help="length of an epoch, which grows with the workers of all "
        "ranks (default: 75)")  # fmt: skip
    add("--longest-epoch", metavar="N", type=int, help="but not beyond this; samples are read again if there are fewer "
        "(default: 1600)")  # fmt: skip
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Check what can be checked before anything is started."""
    args = make_parser().parse_args(argv)
    if args.endpoint and not args.bucket:
        raise StudyError("--endpoint needs --bucket")
    for name, other, why in (
        ("links", "endpoint", "that storage is measured as it is"),
        ("data", "endpoint", "it is the folder of a store that is started here"),
        ("write_only", "read_only", "nothing would be done"),
        ("cost", "endpoint", "the store is measured, too"),
        ("cost", "write_only", "nothing would be measured"),
        ("cost", "quick", "it is as quick"),
        *(("cost", name, "one process reads, and nothing trains") for name in ("links", "ranks", "loaders", "formats")),
    ):
        if getattr(args, name) and getattr(args, other):
            raise StudyError(f"--{name.replace('_', '-')} and --{other.replace('_', '-')} exclude each other: {why}")
    if args.bucket and not args.endpoint:
        raise StudyError("--bucket needs --endpoint: a store that is started here has one bucket")
    if args.read_only and not (args.endpoint or args.data):
        raise StudyError("--read-only needs --endpoint or --data: a temporary store is empty")
    args.planned = not (args.quick or args.ranks or args.loaders or args.formats)
    defaults = {
        **DEFAULTS,
        "links": LINKS if args.planned else LINKS[:1],
        **COMBINATIONS,
        **(QUICK if args.quick else COST if args.cost else {}),
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("samples", "samples_per_worker", "longest_epoch", "batch_size", "sample_bytes"):
        if not getattr(args, name) >= 1:
            raise StudyError(f"--{name.replace('_', '-')} must be 1 or more, but is {getattr(args, name)}")
    if not 0 <= args.step < 10:
        raise StudyError(f"--step must be 0 or more seconds, and less than 10, but is {args.step}")
    for shard in args.shards:
        if shard < 1 or args.samples % shard:
            raise StudyError(f"--shards must divide --samples, but {shard} does not divide {args.samples}")
    if min(args.ranks) < 1:
        raise StudyError(f"--ranks must be 1 or more, but are {args.ranks}")
    args.links = [None] if args.endpoint else [Link.parse(link) for link in args.links]
    args.runs = choose_runs(args)
    return args


def choose_runs(args: argparse.Namespace) -> list[Run]:
    if args.planned:
        runs = default_runs(args.links, args.shards, args.step)
    else:
        loaders, formats = list(map(Loader.parse, args.loaders)), list(map(Format.parse, args.formats))
        for chosen in formats:
            if chosen.shard and chosen.shard not in args.shards:
                raise StudyError(f"--formats has {chosen}, but --shards has {args.shards}")
        runs = multiply(args.links, args.ranks, [args.step], loaders, formats)
    return size_epochs(runs, args.shards, args.samples_per_worker, args.longest_epoch)


def leave_out(runs: list[Run], workers: list[str] | None) -> tuple[list[Run], list[str]]:
    """The runs that can be run here, and why the others cannot."""
    kept, reasons = [], []
    no_mount = mount.why_not()
    for run in runs:
        if run.loader.kind == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
            reasons.append("tf.data, as tensorflow is not installed")
        elif run.needs_mount and no_mount:
            reasons.append(f"runs through a mount, as {no_mount}")
        elif run.format.kind == "files" and run.loader.kind == "rpc" and workers:
            reasons.append("this loader through a mount, as the mount is on this machine alone")
        elif not run.is_possible:
            reasons.append(f"{run.loader} with {run.format}, for which there are too few shards or no reader")
        else:
            kept.append(run)
    return kept, list(dict.fromkeys(reasons))


def prepare_samples(location: Location, args: argparse.Namespace) -> Manifest:
    """Read the manifest, or write the samples; what is there must be what is asked for."""
    manifest = read_manifest(location)
    if manifest is None and args.read_only:
        raise StudyError(
            f"there are no samples at {location.url('')} of {location.endpoint}: write them with --write-only first"
        )
    if manifest is None:
        return write_samples(location, args.samples, args.sample_bytes, args.shards)
    there = (manifest.number, manifest.side, manifest.shards)
    if there != (args.samples, side_of(args.sample_bytes), args.shards):
        raise StudyError(
            f"{location.url('')} holds {manifest.number} samples of {manifest.sample_bytes} bytes in shards of "
            f"{manifest.shards}: ask for these with --samples, --sample-bytes and --shards, or choose another --prefix"
        )
    return manifest


@contextlib.contextmanager
def node_servers(num_workers: int, folder: Path) -> Iterator[list[str]]:
    """Start node servers on this machine with ``num_workers`` in all; gives their addresses."""
    share = -(-num_workers // SERVERS)
    launch = [sys.executable, "-m", "rpcdataloader.launch"]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    [*launch, "--port", "0", "--num-workers", str(share), "--preload", READERS],
                    folder / f"server-{place}.log",
                    piped=True,
                )
            )
            for place in range(SERVERS)
        ]
        yield [read_address(child) for child in children]


def read_address(server: Child) -> str:
    words = server.output.readline().split()  # rpcdataloader ready HOST:PORT ...
    if words[:2] != ["rpcdataloader", "ready"]:
        raise server.fail("a node server did not start")
    return words[2]


def run_job(job: Job, ranks: int, folder: Path) -> Generator[dict[str, Any], None, None]:
    """Start the ranks; yields what they measured, run by run."""
    path = folder / "job.json"
    path.write_text(job.dumps())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with Child(
        [*command, "-m", "examples.storage_formats.train", str(path)], folder / "train.log", piped=True
    ) as child:
        number = 0
        for line in child.output:
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            if "error" in answer:
                raise StudyError(f"a training process failed:\n{answer['error']}")
            yield answer
            number += 1
        if child.wait() or number != len(job.runs):
            raise child.fail("a training process failed")


def measure(
    runs: list[Run], location: Location, store: Store | None, manifest: Manifest, args: argparse.Namespace, folder: Path
) -> Generator[tuple[Run, dict[str, Any]], None, None]:
    """Measure all runs, those of one link and number of ranks in the same training processes."""
    most = max((run.ranks * run.loader.workers for run in runs if run.loader.kind == "rpc"), default=0)
    with ExitStack() as outer:
        workers = args.workers or (outer.enter_context(node_servers(most, folder)) if most else [])
        progress = outer.enter_context(tqdm(total=len(runs), desc="measuring", unit="run", disable=None))
        groups = itertools.groupby(runs, lambda run: (run.link, run.ranks, run.loader.kind == "tensorflow"))
        for place, ((link, ranks, _), group) in enumerate(groups):
            chosen = list(group)
            with ExitStack() as stack:
                place_of = location
                if link is not None:
                    assert store is not None
                    proxy = stack.enter_context(Proxy(store.port, link))
                    place_of = Location(proxy.endpoint, location.bucket, location.prefix)
                folder_of = None
                if any(run.needs_mount for run in chosen):
                    mounting = mount.mounted(place_of, folder / f"mount-{place}", folder / "mount.log")
                    folder_of = stack.enter_context(mounting).folder
                job = Job(place_of, manifest, chosen, workers, args.batch_size, folder_of)
                results = stack.enter_context(closing(run_job(job, ranks, folder)))
                for run, result in zip(chosen, results, strict=True):
                    speed = f"{result['samples_per_second']:.1f} samples/s"
                    progress.write(f"{run.ranks} x {run.loader}, {run.format}: {speed}")
                    progress.update()
                    yield run, result


def study(args: argparse.Namespace, stack: ExitStack) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="storage-formats-")))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    stack.enter_context(environment(PYTHONPATH=paths, OMP_NUM_THREADS="1"))
    runs, left_out = ([], []) if args.cost else leave_out(args.runs, args.workers)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not (runs or args.write_only or args.cost):
        raise StudyError("no run is left")
    store = None
    if args.endpoint:
        location = Location(args.endpoint, args.bucket, args.prefix)
    else:
        store = stack.enter_context(running(Store(args.data or folder / "store", folder / "store.log")))
        location = Location(store.endpoint, BUCKET, args.prefix)
    manifest = prepare_samples(location, args)
    if args.write_only:
        return
    if args.cost:
        assert store is not None
        print(format_costs(location, store, manifest, folder))
        return
    command = ["python", "-m", "examples.storage_formats", *args.argv]
    report = Report(command, manifest.sample_bytes, manifest.number, args.batch_size, [], left_out)
    try:
        with contextlib.closing(measure(runs, location, store, manifest, args, folder)) as rows:
            for row in rows:
                report.rows.append(row)
    finally:
        if report.rows:
            if len(report.rows) < len(runs):
                report.left_out.append(f"{len(runs) - len(report.rows)} runs, as the command ended before")
            files = report.write(args.output)
            print(files[1].read_text())
            print("written:", *files)


def end(*_: object) -> None:
    """End at the first SIGTERM; timeout(1) and service managers send it again to the group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, end)
    try:
        args = parse_arguments(argv)
        args.argv = sys.argv[1:] if argv is None else argv
        with ExitStack() as stack:
            study(args, stack)
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything that was started has ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
