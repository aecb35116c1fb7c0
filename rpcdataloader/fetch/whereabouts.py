"""The present sample of a worker: as numbers that outlive the process, and in the texts of errors.

A session reads the numbers when the worker has ended. They take two stores for a batch, and one for each sample: a
store takes 40 ns, a message would take a system call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

# Special positions: all samples of the batch, which the dataset was asked for at once; and none.
ALL = -1
DONE = -2

# The last batch that was begun, from 1; and the position of the sample in the epoch or, for a stream, in the stream.
here = SimpleNamespace(batch=[0], sample=[0])


def keep_whereabouts(batch: memoryview, sample: memoryview) -> None:
    """Record the present sample of this process in this memory from now on."""
    here.batch, here.sample = batch, sample


def stopped(what: str) -> RuntimeError:
    """The error in place of user code's ``StopIteration``, which would end the epoch in silence in a ``next``.

    Python does the same in generators (PEP 479), with the original as the cause.
    """
    return RuntimeError(f"{what} raised StopIteration, which would have ended the epoch")


def dataset_stopped(dataset: Any, indices: Any, *, at_once: bool = False) -> RuntimeError:
    """The error in place of a map-style dataset's ``StopIteration``.

    Args:
        at_once: True if ``__getitems__`` was asked for all of them.
    """
    method = "__getitems__" if at_once else "__getitem__"
    return stopped(f"{type(dataset).__name__}.{method}({describe_indices(indices)})")


# Number of a batch's indices that a message shows.
MAX_SHOWN_INDICES = 16


def describe_indices(indices: Any) -> str:
    """An index, or the first indices of a batch, as text."""
    if isinstance(indices, (list, tuple)) and len(indices) > MAX_SHOWN_INDICES:
        return f"[{', '.join(map(str, indices[:MAX_SHOWN_INDICES]))}, ... {len(indices)} in all]"
    return str(indices)
