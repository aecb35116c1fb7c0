"""What a sample costs in CPU time: reader, mount and store alone, without proxy, workers and training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.storage_formats import mount
from examples.storage_formats.errors import SampleError
from examples.storage_formats.plan import Format
from examples.storage_formats.readers import Sample, make_dataset
from examples.storage_formats.result import describe_machine
from examples.storage_formats.samples import Manifest
from examples.storage_formats.storage import Location
from examples.storage_formats.store import Store


def format_costs(location: Location, store: Store, manifest: Manifest, folder: Path) -> str:
    """Read all samples in each format, in this process; gives a table in Markdown, in milliseconds per sample."""
    kinds = ["objects", *(f"{kind}-{shard}" for shard in manifest.shards for kind in ("webdataset", "tfrecord"))]
    lines = [
        f"CPU time per sample, of {manifest.number} samples of {manifest.sample_bytes / 1e6:g} MB, on",
        f"{describe_machine()}:",
        "",
        "| | reader | mount | store |",
        "| --- | --- | --- | --- |",
    ]
    with ExitStack() as stack:
        mounted = None
        if mount.why_not() is None:
            kinds.append("files")
            mounted = stack.enter_context(mount.mounted(location, folder / "mount", folder / "mount.log"))
        for kind in kinds:
            what = (location, manifest, Format.parse(kind), mounted and mounted.folder)
            next(read(*what))  # connections and imports
            before = look(store, mounted)
            labels = [sample.label for sample in read(*what)]
            after = look(store, mounted)
            if labels != list(range(manifest.number)):
                raise SampleError(f"{kind} gave other samples than were written: {labels}")
            costs = [(now - then) * 1e3 / manifest.number for then, now in zip(before, after, strict=True)]
            lines.append(f"| {kind} | " + " | ".join(f"{cost:.1f} ms" for cost in costs) + " |")
    return "\n".join(lines)


def read(location: Location, manifest: Manifest, sample_format: Format, folder: str | None) -> Iterator[Sample]:
    dataset: Any = make_dataset(location, manifest, sample_format, manifest.number, folder)
    yield from dataset if sample_format.shard else map(dataset.__getitem__, range(manifest.number))


def look(store: Store, mounted: mount.Mount | None) -> list[float]:
    """CPU seconds so far of reader, mount and store."""
    return [time.process_time(), mounted.child.cpu_seconds if mounted else 0.0, store.cpu_seconds]
