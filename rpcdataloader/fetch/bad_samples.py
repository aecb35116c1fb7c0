"""Samples that are left out because the dataset raised an exception (``on_error="skip"``): the batch gets smaller.

Who loads a batch collects what is missing in a :class:`Reduced`, which then takes the place of the batch on its way to
the consumer. So nothing is added to a batch that is whole.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from rpcdataloader.wire.exceptions import dumps_exception, loads_exception

# How many samples a message names.
MAX_SHOWN = 16


@dataclass(slots=True, eq=False)
class Reduced:
    """A batch without some of its samples.

    Attributes:
        stream: That it is of; None for a map-style dataset.
        num_skipped: So many are missing.
        shown: The first of them, in words: indices or, of a stream, places in it, from 0.
        errors: The first exception and the last one, which may be the same.
        ends_stream: The stream was at its end right after an exception.
        where: It was made, in words.
    """

    stream: int | None = None
    num_skipped: int = 0
    shown: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    ends_stream: bool = False
    is_empty: bool = True
    batch: Any = None
    where: str = "this process"

    def leave_out(self, indices: Sequence[Any], error: Exception) -> None:
        """The dataset raised ``error`` when it was asked for these."""
        self.num_skipped += len(indices)
        self.shown += map(str, indices[: MAX_SHOWN - len(self.shown)])
        self.errors[1:] = [error]

    def hold(self, batch: Any) -> None:
        """Take the batch."""
        self.batch, self.is_empty = batch, False

    def pin_memory(self) -> Reduced:
        """What torch calls to pin a batch of a type that it does not know."""
        self.batch = pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception may be anything. As those that are raised, it always arrives, as itself or in words.
        where = f"process {os.getpid()} on {socket.gethostname()}"
        errors = [dumps_exception(error, where) for error in self.errors]
        fields = (self.stream, self.num_skipped, self.shown, self.ends_stream, self.is_empty)
        return _rebuild, (fields, errors, self.batch)

    def __str__(self) -> str:
        """What is missing, and why."""
        parts = []
        if self.num_skipped:
            indices = ", ".join(self.shown) + (", ..." if self.num_skipped > len(self.shown) else "")
            where = "indices" if self.stream is None else f"in stream {self.stream}:"
            samples = "1 sample" if self.num_skipped == 1 else f"{self.num_skipped} samples"
            parts.append(f"{samples} ({where} {indices}): {_text(self.errors[0])}")
        if self.ends_stream:
            parts.append(f"stream {self.stream} has ended right after an exception, as a generator does that raises")
        return "; ".join(parts)


def _rebuild(fields: tuple[int | None, int, list[str], bool, bool], errors: list[bytes], batch: Any) -> Reduced:
    stream, num_skipped, shown, ends_stream, is_empty = fields
    found = [loads_exception(error) for error in errors]
    return Reduced(stream, num_skipped, shown, found, ends_stream, is_empty, batch)


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
