"""What a sample costs in CPU time: reader and store alone, without proxy, workers and training."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from examples.storage_formats.errors import SampleError
from examples.storage_formats.plan import Format
from examples.storage_formats.readers import Sample, make_dataset
from examples.storage_formats.result import describe_machine
from examples.storage_formats.samples import Manifest
from examples.storage_formats.storage import Location
from examples.storage_formats.store import Store


def format_costs(location: Location, store: Store, manifest: Manifest) -> str:
    """Read all samples in each format, in this process; gives a table in Markdown, in milliseconds per sample."""
    formats = [Format("objects"), *(Format(k, shard) for shard in manifest.shards for k in ("webdataset", "tfrecord"))]
    lines = [
        f"CPU time per sample, of {manifest.number} samples of {manifest.sample_bytes / 1e6:g} MB, on",
        f"{describe_machine()}:",
        "",
        "| | reader | store |",
        "| --- | --- | --- |",
    ]
    for sample_format in formats:
        reader, storing = (
            seconds * 1e3 / manifest.number for seconds in measure(location, store, manifest, sample_format)
        )
        lines.append(f"| {sample_format} | {reader:.1f} ms | {storing:.1f} ms |")
    return "\n".join(lines)


def measure(location: Location, store: Store, manifest: Manifest, sample_format: Format) -> tuple[float, float]:
    """CPU seconds of reader and store for all samples."""
    next(read(location, manifest, sample_format))  # connections and imports
    reader, storing = time.process_time(), store.cpu_seconds
    labels = [sample.label for sample in read(location, manifest, sample_format)]
    reader, storing = time.process_time() - reader, store.cpu_seconds - storing
    if labels != list(range(manifest.number)):
        raise SampleError(f"{sample_format} gave other samples than were written: {labels}")
    return reader, storing


def read(location: Location, manifest: Manifest, sample_format: Format) -> Iterator[Sample]:
    dataset = make_dataset(location, manifest, sample_format, manifest.number, None)
    samples: Iterable[Sample] = dataset if sample_format.shard else map(dataset.__getitem__, range(manifest.number))
    yield from samples
