"""What is loaded: the workloads, by name. Imports no torch, because the harness has no other use for it.

The datasets themselves are in ``datasets.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of batch.

    Attributes:
        title: For the table.
        dataset: Name of a class in ``datasets.py``.
        args: Arguments of that class.
        batch_size: Samples in a batch.
        batch_bytes: Bytes in the tensors of a batch; the trainer checks this.
        collate: Name of a function in ``datasets.py``, or None for the default collation.
        min_batches: A phase lasts at least so many batches, however long that takes.
    """

    title: str
    dataset: str
    args: tuple[object, ...]
    batch_size: int
    batch_bytes: int
    collate: str | None = None
    min_batches: int = 4


# Variable of the environment: the folder of a reader's own JPEGs, for the workload ``jpeg``.
JPEGS = "BENCHMARK_JPEGS"

_IMAGE = 3 * 224 * 224

WORKLOADS = {
    "float32": Workload("64x3x224x224 float32", "Images", ("float32",), 64, 64 * _IMAGE * 4),
    "uint8": Workload("64x3x224x224 uint8", "Images", ("uint8",), 64, 64 * _IMAGE),
    "integer": Workload("one integer", "Integers", (), 1, 8),
    # A batch of a recommendation model: collated already, as such datasets do it.
    "tensors": Workload("dict of 2,000 tensors of 64 int64", "Features", (2000, 64), 1, 2000 * 64 * 8, "get_only"),
    # What the wire can do: nobody makes anything.
    "ready": Workload("38.5 MB that are ready", "Ready", (64 * _IMAGE * 4,), 1, 64 * _IMAGE * 4, collate="get_only"),
    # A few hundred images per second are some ten batches, which two workers finish in pairs.
    "jpeg": Workload("64 JPEGs decoded, cropped", "Photographs", (), 64, 64 * _IMAGE, min_batches=40),
}
