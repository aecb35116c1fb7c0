"""A ``StopIteration`` of user code is an error: raised by ``next`` of an iterator, it would end the epoch in silence.

So it becomes a ``RuntimeError`` with the original as its cause, as Python itself does in generators (PEP 479).
"""

from __future__ import annotations

from typing import Any


def stopped(what: str) -> RuntimeError:
    """The error to raise from a ``StopIteration`` that user code has raised."""
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
