"""Which tensors of a batch can be sent as they are, in place of a copy of all of them together.

The kernel gathers the samples of a batch as well as ``torch.stack`` does, and a worker that collates 64x3x224x224
float32 spends a third of its time on that copy. But a batch is sent while the next one is made, so whoever still has
one of the tensors could change it meanwhile: a dataset that keeps its samples, or uses its buffers again. Only tensors
that nothing but the batch refers to are sent as they are. Of the others a copy is made, as by torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rpcdataloader.fetch.collate import are_alike
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES, Stack

# Copying less than this costs no more than one more piece for the kernel.
MIN_PIECE_BYTES = 1 << 14

# Containers that torch's default collate takes apart and that have no code of the user's in them.
_CONTAINERS = (list, tuple)

_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


def find_stacks(samples: Sequence[Any]) -> dict[int, Stack]:
    """The tensors of the default collate's batch that can be sent without being made.

    Args:
        samples: Of one batch, in a list that nobody else has. Nothing is found in anything but a list.

    Returns:
        What stands for such a tensor, by the ``id`` of the part of it that is in the first sample.
    """
    if not _FRESH or type(samples) is not list or not samples:
        return {}
    found: dict[int, Stack] = {}
    for path in list(_paths_of_large_tensors(samples[0])):  # which refers to what it has come to
        tensors = _find_pieces(samples, path)
        if tensors is not None:
            found[id(_follow(samples[0], path))] = Stack(tensors)
    return found


def _paths_of_large_tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    kind = type(value)
    if kind is torch.Tensor:
        if value.layout is torch.strided and value.nbytes >= MIN_PIECE_BYTES:
            yield path
    elif kind is dict:
        for key, item in value.items():
            yield from _paths_of_large_tensors(item, (*path, key))
    elif kind in _CONTAINERS:
        for position, item in enumerate(value):
            yield from _paths_of_large_tensors(item, (*path, position))


def _follow(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _find_pieces(samples: Sequence[Any], path: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """The tensors under ``path``, or copies of a few that others have as well; None where stacking is better."""
    try:
        tensors = [_follow(sample, path) for sample in samples]
    except (LookupError, TypeError):
        return None  # not alike, for which torch's collate has an error
    if not are_alike(tensors) or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    if tensors[0].nbytes * len(tensors) < MIN_BLOCK_BYTES:
        return None
    del tensors  # before references are counted
    owned = [_is_owned(samples, position, path) for position in range(len(samples))]
    # The one that a generator has yielded last, for example, which its frame still has.
    if 2 * sum(owned) < len(owned):
        return None
    tensors = [_follow(sample, path) for sample in samples]
    return [tensor if mine else tensor.clone() for tensor, mine in zip(tensors, owned, strict=True)]


def _is_owned(samples: Sequence[Any], position: int, path: tuple[Any, ...]) -> bool:
    """Whether nobody else can get at this tensor or at its memory, through a sample that holds it or otherwise."""
    value: Any = samples
    for key in (position, *path):
        if sys.getrefcount(value[key]) != _ONE_REFERENCE:
            return False
        value = value[key]
    return _uses(value) in _FRESH


def _uses(tensor: Any) -> tuple[Any, ...]:
    """How many have the tensor inside torch, its storage, the storage's object, and what it is a view of; whether the
    memory is torch's own."""
    storage, base = tensor.untyped_storage(), tensor._base
    return (
        tensor._use_count(),
        _storage_uses(storage._cdata),  # type: ignore[misc]
        sys.getrefcount(storage),
        None if base is None else (base._use_count(), sys.getrefcount(base)),
        storage.resizable(),
        storage.is_shared(),
    )


def _measure_fresh() -> list[tuple[Any, ...]]:
    """What :func:`_uses` says of tensors that are nobody else's; nothing where torch does not tell."""
    if _storage_uses is None or not hasattr(torch.Tensor, "_use_count"):
        return []
    return [_uses(torch.empty(1, device="cpu")), _uses(torch.empty(1, device="cpu").view(1))]


def _count_one(references: list[Any]) -> int:
    return sys.getrefcount(references[0])


# Measured, because what an expression itself refers to depends on the version of Python.
_ONE_REFERENCE = _count_one([object()])
_FRESH = _measure_fresh()
