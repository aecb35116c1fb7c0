"""What a worker is at: in numbers that outlive it, and in the words of errors.

A session reads the numbers when the worker has ended. They take two stores for a batch, and one for each sample: a
store takes 40 ns, and a message would take a system call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

# In place of a position: all samples of the batch, which the dataset was asked for at once; and none of them any more.
ALL = -1
DONE = -2

# The batch that was begun last, from 1; and the position of the sample in the epoch or, of a stream, in the stream.
here = SimpleNamespace(batch=[0], sample=[0])


def keep_whereabouts(batch: memoryview, sample: memoryview) -> None:
    """Note from now on in this memory what this process is at."""
    here.batch, here.sample = batch, sample


def stopped(what: str) -> RuntimeError:
    """The error to raise from a ``StopIteration`` that user code has raised: a ``next`` would end the epoch in silence.

    Python itself does so in generators (PEP 479), with the original as the cause.
    """
    return RuntimeError(f"{what} raised StopIteration, which would have ended the epoch")


def dataset_stopped(dataset: Any, indices: Any, *, at_once: bool = False) -> RuntimeError:
    """The same, of a map-style dataset.

    Args:
        at_once: Its ``__getitems__`` was asked, for all of them.
    """
    method = "__getitems__" if at_once else "__getitem__"
    return stopped(f"{type(dataset).__name__}.{method}({describe_indices(indices)})")


# How many indices of a batch a message shows.
MAX_SHOWN_INDICES = 16


def describe_indices(indices: Any) -> str:
    """An index, or the indices of a batch, of which the first are shown."""
    if isinstance(indices, (list, tuple)) and len(indices) > MAX_SHOWN_INDICES:
        return f"[{', '.join(map(str, indices[:MAX_SHOWN_INDICES]))}, ... {len(indices)} in all]"
    return str(indices)
