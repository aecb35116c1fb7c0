"""Ray Data and tf.data service beside torch's loader and ours, on the same JPEGs, with two workers each.

::

    python -m venv --system-site-packages /tmp/others    # of an environment that has torch, numpy and Pillow
    /tmp/others/bin/pip install 'ray[data]' tensorflow-cpu scikit-learn
    /tmp/others/bin/python -m tests.benchmark.others             # about four minutes
    /tmp/others/bin/python -m tests.benchmark.others --quick     # a short round: does it work?
    /tmp/others/bin/python -m tests.benchmark.others --record    # writes docs/figures/others.md

The work is that of ``elsewhere.py``, in batches of 64 and without steps. Ray Data calls the same function of Python and
Pillow, in two tasks at a time, each for a batch. tf.data has operations of its own, channels last: ``decode_jpeg``, and
then a random crop, or ``decode_and_crop_jpeg``, which decodes only the part that is used; its two workers are
processes, with one decoding thread each. All processes share all CPUs. *CPU s* is that of the trainer process with all
its threads. What others print in between is theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import datasets
from .claims import median_ratio
from .loaders import environment, node_server
from .processes import PACKAGE, ask_trainer, describe_machine, measure_rounds, read_line, running, stop_by_signals
from .table import format_number, format_ratio, format_spread, format_table
from .trainer import Phase, take

_BATCH_SIZE = 64
_NUM_WORKERS = 2
_NUM_FILES = 256
_SIZE = 224
_NUM_BLOCKS = 1000  # of Ray: more batches than any measurement takes
_START_TIMEOUT = 60.0
_FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "others.md"

TITLES = {
    "torch": "torch DataLoader",
    "torch-malloc": "torch, malloc as in ours",
    "ours-local": "ours, this machine",
    "ours-tcp": "ours, TCP",
    "ray": "Ray Data",
    "tf": "tf.data service, `decode_jpeg`",
    "tf-crop": "tf.data service, `decode_and_crop_jpeg`",
}


# --- the trainer


def _take_from_ray(folder: str) -> Iterator[Any]:
    import numpy as np
    import ray

    ray.init(num_cpus=_NUM_WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    images = datasets.Files(folder)

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.stack([images[int(index)].numpy() for index in batch["id"]])}

    numbers = ray.data.range(_NUM_BLOCKS * _BATCH_SIZE, override_num_blocks=_NUM_BLOCKS)
    decoded = numbers.map_batches(decode, batch_size=_BATCH_SIZE, num_cpus=1)
    return iter(decoded.iter_torch_batches(batch_size=_BATCH_SIZE, prefetch_batches=2 * _NUM_WORKERS))


def _take_from_tf(folder: str, address: str, *, is_crop: bool) -> Iterator[Any]:
    import tensorflow as tf

    def decode(path: Any) -> Any:
        content = tf.io.read_file(path)
        if not is_crop:
            image = tf.image.random_crop(tf.io.decode_jpeg(content, channels=3), [_SIZE, _SIZE, 3])
            return tf.image.random_flip_left_right(image)
        height, width = tf.unstack(tf.image.extract_jpeg_shape(content)[:2])
        top = tf.random.uniform([], 0, height - _SIZE + 1, tf.int32)
        left = tf.random.uniform([], 0, width - _SIZE + 1, tf.int32)
        image = tf.io.decode_and_crop_jpeg(content, tf.stack([top, left, _SIZE, _SIZE]), channels=3)
        return tf.image.random_flip_left_right(image)

    service = tf.data.experimental.service
    paths = tf.data.Dataset.from_tensor_slices(sorted(map(str, Path(folder).glob("*.jpg")))).repeat()
    batches = paths.map(decode, num_parallel_calls=1).batch(_BATCH_SIZE).prefetch(2)
    batches = batches.apply(service.distribute(service.ShardingPolicy.OFF, f"grpc://{address}"))
    return iter(batches.prefetch(2 * _NUM_WORKERS).as_numpy_iterator())


def _take_from(loader: str, folder: str, address: str) -> Iterator[Any]:
    if loader == "ray":
        return _take_from_ray(folder)
    if loader.startswith("tf"):
        return _take_from_tf(folder, address, is_crop=loader == "tf-crop")
    from torch.utils.data import DataLoader

    from rpcdataloader import RPCDataloader, RPCDataset

    if loader == "ours-tcp":
        return iter(RPCDataloader(RPCDataset([address], datasets.Files, folder), _BATCH_SIZE))
    kind: Any = RPCDataloader if loader == "ours-local" else DataLoader
    return iter(kind(datasets.Files(folder), _BATCH_SIZE, num_workers=_NUM_WORKERS))


def measure(loader: str, folder: str, address: str, seconds: float) -> Phase:
    """Take batches, first to warm up."""
    batches = _take_from(loader, folder, address)
    first = next(batches)
    if loader == "ray":
        batches, first = (batch["image"] for batch in batches), first["image"]
    shape = (_SIZE, _SIZE, 3) if loader.startswith("tf") else (3, _SIZE, _SIZE)
    if tuple(first.shape) != (_BATCH_SIZE, *shape) or "uint8" not in str(first.dtype):
        raise ValueError(f"a batch of {tuple(first.shape)} and {first.dtype}")
    del first
    take(batches, seconds / 2, min_batches=4 * _NUM_WORKERS)
    return take(batches, seconds)


def serve(dispatcher: str) -> None:
    """Be a dispatcher of tf.data service, or a worker of the one at this address, until a signal comes."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if dispatcher:
        tf.config.threading.set_inter_op_parallelism_threads(1)
        server = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher))
        print("ready worker", flush=True)
    else:
        server = service.DispatchServer()
        print(f"ready {server.target.partition('://')[2]}", flush=True)
    server.join()


# --- the harness


def ask(loader: str, images: str, seconds: float) -> Phase:
    """Start servers and trainer, wait for the figures, stop both."""
    with contextlib.ExitStack() as stack:
        folder, env = stack.enter_context(environment(loader))
        env |= {
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_TMPDIR": str(folder),
        }
        address = ""
        if loader == "ours-tcp":
            address, _pid = stack.enter_context(node_server(_NUM_WORKERS, env, folder))
        if loader.startswith("tf"):
            server = stack.enter_context(running(f"{PACKAGE}.others", ["--serve"], env, folder))
            address = read_line(server, "ready ", _START_TIMEOUT)
            for _ in range(_NUM_WORKERS):
                worker = stack.enter_context(running(f"{PACKAGE}.others", ["--serve", address], env, folder))
                read_line(worker, "ready ", _START_TIMEOUT)
        arguments = {"loader": loader, "folder": images, "address": address, "seconds": seconds}
        return Phase(**ask_trainer("others.measure", arguments, env, folder, 120 + 4 * seconds))


def describe_others() -> str:
    """Return the versions of the other projects; says what to install if one is missing."""
    distributions = importlib.metadata.packages_distributions()
    if missing := [name for name in ("ray", "tensorflow") if name not in distributions]:
        sys.exit(f"{' and '.join(missing)} not found: tests/benchmark/others.py begins with what to install, and where")
    return ", ".join(f"{name} {importlib.metadata.version(distributions[name][0])}" for name in ("ray", "tensorflow"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.others", description=__doc__.splitlines()[0])
    parser.add_argument("--loaders", nargs="+", choices=TITLES, default=list(TITLES), help="some of them")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, interleaved (default: 3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each, after a warm-up (default: 4)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quick", action="store_true", help="one round of 0.5 s: does it work?")
    group.add_argument("--record", action="store_true", help=f"write the table to {_FIGURE.name}")
    parser.add_argument("--serve", nargs="?", const="", metavar="DISPATCHER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    rounds, seconds = (1, 0.5) if args.quick else (args.rounds, args.seconds)
    stop_by_signals()
    versions = describe_others()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="rpcdl-images-") as images:
        datasets.write_files(Path(images), _NUM_FILES)
        found = measure_rounds(
            {"JPEGs": args.loaders},
            rounds,
            lambda _subject, loader: ask(loader, images, seconds),
            lambda figures: f"{_BATCH_SIZE * figures.rate:.0f} images/s",
        )
    rows = []
    for (subject, loader), of_rounds in found.items():
        cells = ["failed", *"--"]
        if of_rounds:
            rates = [_BATCH_SIZE * one.rate for one in of_rounds.values()]
            cpu = statistics.median(1000 * one.cpu / _BATCH_SIZE for one in of_rounds.values())
            ratio = median_ratio(found, subject, loader, "torch", "rate")
            cells = [format_spread(rates), format_ratio(ratio), format_number(cpu)]
        rows.append([TITLES[loader], *cells])
    table = format_table(["loader", "images/s", "x torch", "trainer's CPU s per 1,000"], rows, 1)
    text = (
        f"{table}\n\n"
        f"Medians of {rounds} interleaved rounds of {seconds:g} s, {_NUM_WORKERS} workers; {versions}; {machine}.\n"
    )
    print(text)
    if args.record:
        _FIGURE.write_text(text)


if __name__ == "__main__":
    main()
