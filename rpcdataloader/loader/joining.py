"""Parts of a batch, each collated by a worker, joined to what torch's default collate makes of all of their samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpcdataloader.fetch.collate import is_named_tuple
from rpcdataloader.wire.slabs import PinnedAllocator
from rpcdataloader.wire.tensors import Movable, is_dense, plan, rebuild


def join(parts: Sequence[tuple[Any, Any]], pinned: PinnedAllocator | None, movable: Movable | None = None) -> Any:
    """Return the batch.

    Args:
        parts: Kind of the samples of each part, and what they were collated to.
        pinned: Memory for the tensors of the batch; None for fresh memory. Only both ends of a pass are in parts, and
            a pool would keep it in between.
        movable: An empty one, to move the tensors afterwards; None if they stay.

    Raises:
        ValueError: The parts do not fit together.
    """
    _check(all(kind == parts[0][0] for kind, _batch in parts))
    batches = [batch for _kind, batch in parts]
    columns: list[list[torch.Tensor]] = []
    _join(batches, columns.append)
    index, sizes = plan([(column[0].dtype, (sum(map(len, column)), *column[0].shape[1:])) for column in columns])
    empty = functools.partial(torch.empty, dtype=torch.uint8, device="cpu")
    memory = [empty(size) if pinned is None else pinned.allocate(size).tensor for size in sizes]
    tensors = rebuild(index, memory, in_place=pinned is not None) if movable is None else movable.rebuild(index, memory)
    for tensor, column in zip(tensors, columns, strict=True):
        # Not by torch.cat: this thread receives the replies of one worker, and OpenMP would start threads for each of
        # these, one less than this machine has cores, which stay for as long.
        np.concatenate([_bytes_of(part) for part in column], out=_bytes_of(tensor))
    following = iter(tensors)
    return _join(batches, lambda _column: next(following))


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _join(batches: list[Any], join_tensors: Callable[[list[torch.Tensor]], Any]) -> Any:
    first, kind = batches[0], type(batches[0])
    _check(all(type(batch) is kind for batch in batches))
    if kind is torch.Tensor:
        _check(all(is_dense(each) and each.is_contiguous() for each in batches))
        _check(all((each.dtype, each.shape[1:]) == (first.dtype, first.shape[1:]) for each in batches))
        return join_tensors(batches)
    if kind is dict:
        _check(all(list(batch) == list(first) for batch in batches))
        return {key: _join([batch[key] for batch in batches], join_tensors) for key in first}
    _check(kind in (list, tuple) or is_named_tuple(kind))
    if first and type(first[0]) in (str, bytes):
        return kind(each for batch in batches for each in batch)
    fields = [_join(list(field), join_tensors) for field in zip(*batches, strict=True)]
    return fields if kind is list else kind(*fields)


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError("the parts of a batch do not fit together")
