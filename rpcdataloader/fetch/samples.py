"""The samples of a batch: which one a worker loads now, and which were left out (``on_error="skip"``).

The present sample is kept as numbers that outlive the process: a session reads them when the worker has ended. They
take two stores for a batch, and one for each sample: a store takes 40 ns, a message would take a system call.

Samples are left out because the dataset raised an exception: the batch gets smaller. The process that loads it collects
what is missing in a :class:`Reduced`, which replaces the batch on its way to the consumer. Complete batches carry
nothing extra.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from rpcdataloader.wire.exceptions import dumps_exception, loads_exception

# Special positions: all samples of the batch, which the dataset was asked for at once; and none.
ALL = -1
DONE = -2

# The last batch that was begun, from 1; and the position of the sample in the epoch or, for a stream, in the stream.
whereabouts = SimpleNamespace(batch=[0], sample=[0])


def keep_whereabouts(batch: memoryview, sample: memoryview) -> None:
    """Record the present sample of this process in this memory from now on."""
    whereabouts.batch, whereabouts.sample = batch, sample


def stopped(what: str) -> RuntimeError:
    """The error in place of user code's ``StopIteration``, which would end the epoch in silence in a ``next``.

    Python does the same in generators (PEP 479), with the original as the cause.
    """
    return RuntimeError(f"{what} raised StopIteration, which would have ended the epoch")


# Number of indices or samples that a message shows.
MAX_SHOWN = 16


def describe_indices(indices: Any) -> str:
    """An index, or the first indices of a batch, as text."""
    if isinstance(indices, (list, tuple)) and len(indices) > MAX_SHOWN:
        return f"[{', '.join(map(str, indices[:MAX_SHOWN]))}, ... {len(indices)} in all]"
    return str(indices)


@dataclass(slots=True, eq=False)
class Reduced:
    """A batch without some of its samples."""

    stream: int | None = None  # stream of the batch; None for a map-style dataset
    num_skipped: int = 0  # number of missing samples
    # First missing samples, in words: indices or, of a stream, places in it, from 0.
    shown: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)  # first and last exception, which may be the same
    ends_stream: bool = False  # True if the stream ended right after an exception
    is_empty: bool = True
    batch: Any = None
    where: str = "this process"  # process that loaded the batch, in words

    def leave_out(self, indices: Sequence[Any], error: Exception) -> None:
        """Note that the dataset raised ``error`` for these samples."""
        self.num_skipped += len(indices)
        self.shown += map(str, indices[: MAX_SHOWN - len(self.shown)])
        self.errors[1:] = [error]

    def pin_memory(self) -> Reduced:
        """Pin the batch; torch calls this for types that it does not know."""
        self.batch = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions may be of any type. Like raised ones they always arrive, as themselves or in words.
        where = f"process {os.getpid()} on {socket.gethostname()}"
        errors = [dumps_exception(error, where) for error in self.errors]
        fields = (self.stream, self.num_skipped, self.shown, self.ends_stream, self.is_empty)
        return _rebuild, (fields, errors, self.batch)

    def __str__(self) -> str:
        """Name the missing samples, and the reasons."""
        parts = []
        if self.num_skipped:
            indices = ", ".join(self.shown) + (", ..." if self.num_skipped > len(self.shown) else "")
            where = "indices" if self.stream is None else f"in stream {self.stream}:"
            samples = "1 sample" if self.num_skipped == 1 else f"{self.num_skipped} samples"
            error = "".join(traceback.format_exception_only(self.errors[0])).strip()
            parts.append(f"{samples} ({where} {indices}): {error}")
        if self.ends_stream:
            parts.append(f"stream {self.stream} has ended right after an exception, as a generator does that raises")
        return "; ".join(parts)


def _rebuild(fields: tuple[int | None, int, list[str], bool, bool], errors: list[bytes], batch: Any) -> Reduced:
    stream, num_skipped, shown, ends_stream, is_empty = fields
    found = [loads_exception(error) for error in errors]
    return Reduced(stream, num_skipped, shown, found, ends_stream, is_empty, batch)
