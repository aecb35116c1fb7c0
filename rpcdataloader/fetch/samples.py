"""The samples of a batch: which one a worker loads now, and which were left out (``on_error="skip"``).

The present sample is kept as numbers that outlive the process: a session reads them when the worker has ended. They
take two stores for a batch, and one for each sample: a store takes 40 ns, a message would take a system call.

Samples are left out because the dataset raised an exception: the batch gets smaller, and a :class:`Skipped` beside it
says what is missing. The worker has exceptions until then; the trainer counts once the batch is delivered.
"""

from __future__ import annotations

import os
import socket
import types
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from rpcdataloader.wire.exceptions import dumps_exception, summarize

# Special positions: all samples of the batch, which the dataset was asked for at once; and none.
ALL = -1
DONE = -2

# What a request is for: all samples of a batch, or a part. Of the parts of a batch, the first one counts as a batch.
WHOLE, FIRST_PART, OTHER_PART = range(3)

# The last batch that was begun, from 1; the position of the sample in the epoch or, for a stream, in the stream; and a
# function to call when all samples of the present batch are here, or None.
whereabouts = SimpleNamespace(batch=[0], sample=[0], fetched=None)


def keep_whereabouts(batch: memoryview, sample: memoryview) -> None:
    """Record the present sample of this process in this memory from now on."""
    whereabouts.batch, whereabouts.sample = batch, sample


def stopped(what: str) -> RuntimeError:
    """The error in place of user code's ``StopIteration``, which would end the epoch in silence in a ``next``.

    Python does the same in generators (PEP 479), with the original as the cause. Each caller catches it where it calls
    user code: a context manager would cost a microsecond per sample.
    """
    return RuntimeError(f"{what} raised StopIteration, which would have ended the epoch")


# Number of indices or samples that a message shows.
MAX_SHOWN = 16


def is_batch(indices: Any) -> bool:
    """Whether these are the indices of a batch, of which each has a number."""
    if isinstance(indices, (list, tuple, range)):
        return True
    return isinstance(indices, (np.ndarray, torch.Tensor)) and indices.ndim > 0


def describe_indices(indices: Any) -> str:
    """An index, or the first indices of a batch, as text."""
    try:
        if is_batch(indices) and len(indices) > MAX_SHOWN:
            return f"[{', '.join(map(str, indices[:MAX_SHOWN]))}, ... {len(indices)} in all]"
        return str(indices)
    except Exception:  # of the user's __repr__, for whose sake no error may get lost
        return f"of type {type(indices).__name__}"


def loads_batches(getitems: Any) -> bool:
    """Whether this ``__getitems__`` loads whole batches, rather than passing the question on to a dataset behind it.

    torch's wrappers of datasets always have the method, and call it where the datasets have it. Their subclasses with
    another ``__getitem__`` must have one of their own, which may only call that in a loop. What loads single samples is
    asked for one at a time, which has its own seed and may fail alone.
    """
    wrapper: Any = getattr(getitems, "__self__", None)  # not the dataset itself where that passes attributes on
    kinds = [kind for kind in type(wrapper).__mro__ if "__getitems__" in vars(kind)]
    if not any(map(_is_torchs, kinds)):
        return True
    if not _is_torchs(kinds[0]) and _code_of(vars(kinds[0])["__getitems__"]) not in map(_code_of, _LOOPS):
        return True
    behind = [wrapper.dataset] if hasattr(wrapper, "dataset") else getattr(wrapper, "datasets", ())
    if isinstance(behind, Mapping):
        behind = behind.values()
    found = [getattr(dataset, "__getitems__", None) for dataset in behind]
    return all(callable(each) and loads_batches(each) for each in found)


def _code_of(function: Any) -> tuple[Any, ...]:
    """What a function does, whatever it and its variables are called; an empty tuple for other objects."""
    if isinstance(function, types.FunctionType):
        function = function.__code__
    if not isinstance(function, types.CodeType):
        return ()
    return function.co_code, function.co_names, *filter(None, map(_code_of, function.co_consts))


def _call_getitem(self: Any, indices: Any) -> Any:
    return [self.__getitem__(index) for index in indices]


def _subscript(self: Any, indices: Any) -> Any:
    return [self[index] for index in indices]


# What torch's documentation of ``Subset`` gives, in two spellings: it asks for single samples.
_LOOPS = _call_getitem, _subscript


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.utils.data.")


class Skipped(NamedTuple):
    """What a batch lacks because of exceptions of the dataset."""

    num_samples: int
    text: str  # the missing samples, and the first exception
    error: bytes  # last exception, see ``loads_exception``; empty if only the stream has ended
    is_whole: bool  # nothing of the batch is left
    # Of which the text of a batch in parts is made: the names of the first missing samples, and the first exception.
    names: tuple[str, ...] = ()
    reason: str = ""


def skipped(
    missing: Sequence[tuple[Any, Exception]], *, is_whole: bool, stream: int | None = None, ends: bool = False
) -> Skipped:
    """Describe missing samples.

    Args:
        missing: Index of each sample or, of a stream, its position from 0; and the exception.
        is_whole: True if nothing of the batch is left.
        stream: Number of the stream; None for a map-style dataset.
        ends: True if the stream has ended right after an exception.
    """
    parts, error, reason = [], b"", ""
    names: tuple[str, ...] = ()
    if missing:
        where = "indices" if stream is None else f"in stream {stream}:"
        names, reason = tuple(str(index) for index, _error in missing[:MAX_SHOWN]), summarize(missing[0][1])
        parts.append(_describe_missing(len(missing), where, names, reason))
        # It may be of any type. Like a raised one it always arrives, as itself or in words.
        error = dumps_exception(missing[-1][1], f"process {os.getpid()} on {socket.gethostname()}")
    if ends:
        parts.append(f"stream {stream} has ended right after an exception, as a generator does that raises")
    return Skipped(len(missing), "; ".join(parts), error, is_whole, names, reason)


def _describe_missing(number: int, where: str, names: Sequence[str], reason: str) -> str:
    samples = "1 sample" if number == 1 else f"{number} samples"
    return f"{samples} ({where} {', '.join([*names[:MAX_SHOWN], *['...'] * (number > MAX_SHOWN)])}): {reason}"


def join_skipped(lacking: Sequence[Skipped], *, is_whole: bool) -> Skipped:
    """Describe what the parts of a batch lack together."""
    number, names = sum(each.num_samples for each in lacking), [name for each in lacking for name in each.names]
    text = _describe_missing(number, "indices", names, lacking[0].reason)
    return Skipped(number, text, lacking[-1].error, is_whole)
