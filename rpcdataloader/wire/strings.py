"""Large byte strings, and lists of byte strings or texts, out of the pickle of a message.

Pickle copies them into the message, of which the receiver copies them again: for encoded images, that is most of the
work. Out of it they are a block, which workers of the same machine write into memory that both sides see.
"""

from __future__ import annotations

import gc
import pickle
import types
from collections.abc import Iterable
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np
import torch

from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES

# Members of a list and of a dict that are looked at to know what the others are: the keys of a sample differ. And depth
# to which strings are looked for: a reply has a batch, that its samples, these their fields, and a field is a list.
_NUM_PROBED, _NUM_KEYS = 8, 64
_DEPTH = 5

_CONTAINERS = (list, tuple, dict)

# What refers to nothing that a message may have twice; and what each process has of its own.
_LEAVES = {bool, int, float, complex, str, bytes, types.NoneType, torch.Tensor}
_DEFINITIONS = (type, types.ModuleType, types.FunctionType)

_MAX_KEPT = 10_000  # objects that others refer to
_LOOKED_INTO = {bytes, *_CONTAINERS}


class _CycleError(Exception):
    """A container leads back to itself."""


def set_apart(value: Any) -> Any:
    """Replace byte strings and texts in lists, tuples and dicts, which are copied, by what pickles as a block.

    The receiver of the pickle gets equal ones. Other containers are left as they are.
    """
    if not _has_large(value, _DEPTH) or (kept := _kept_by_others(value)) is None:
        return value
    try:
        return _replaced(value, kept)
    except _CycleError:
        return value


def _kept_by_others(value: Any) -> dict[int, Any] | None:
    """What other objects than lists, tuples and dicts refer to, such as named tuples and dataclasses, by identity.

    It stays in the pickle, where it is one object with what the containers have. None if these are too many.
    """
    containers, others = [value], list[Any]()
    seen, kept = {id(value)}, dict[int, Any]()
    while containers:
        container = containers.pop()
        if all(map(_is_leaf, _probed(container))):
            continue  # and so are the rest
        for each in _parts_of(container):
            if id(each) not in seen:
                seen.add(id(each))
                (containers if type(each) in _CONTAINERS else others).append(each)
    while others:
        for each in _parts_of(others.pop()):
            if id(each) not in kept and not issubclass(type(each), _DEFINITIONS):
                kept[id(each)] = each
                others.append(each)
        if len(kept) > _MAX_KEPT:
            return None
    return kept


def _parts_of(value: Any) -> list[Any]:
    """What an object refers to, without strings, numbers, and arrays of these."""
    if type(value) is np.ndarray:  # of objects, which the garbage collector does not see
        return value.tolist() if value.dtype.hasobject and value.ndim else []
    parts = gc.get_referents(value)
    if _LEAVES.issuperset(map(type, parts)):
        return []
    return [each for each in parts if not _is_leaf(each)]


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    # The garbage collector sees no numbers of NumPy, and no dicts and tuples of strings.
    return kind in _LEAVES or not (gc.is_tracked(value) or kind in _CONTAINERS or kind is np.ndarray)


def _has_large(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind is bytes:
        return len(value) >= MIN_BLOCK_BYTES
    if kind not in _CONTAINERS or not value or not depth:
        return False
    if kind is not dict and _is_joined(value):
        return True
    return any(_has_large(each, depth - 1) for each in _probed(value))


def _probed(value: Any) -> Iterable[Any]:
    """The first members of a container."""
    return islice(value.values(), _NUM_KEYS) if type(value) is dict else value[:_NUM_PROBED]


def _is_joined(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether these are many strings of one kind; pickle writes the same object only once."""
    kind, probed = type(value[0]), value[:_NUM_PROBED]
    if kind not in (bytes, str) or {*map(type, probed)} != {kind}:
        return False
    if sum(map(len, probed)) * len(value) < MIN_BLOCK_BYTES * len(probed):
        return False
    return {*map(type, value)} == {kind} and len({*map(id, value)}) == len(value)


def _replaced(value: Any, replaced: dict[int, Any]) -> Any:
    """The value with stand-ins; ``replaced`` has those of objects that may be met again, and None for those around."""
    kind = type(value)
    if kind is not bytes and kind not in _CONTAINERS:
        return value
    if id(value) in replaced:
        if (found := replaced[id(value)]) is None:
            raise _CycleError
        return found
    replaced[id(value)] = None
    made: Any
    if kind is bytes:
        made = _Bytes(value) if len(value) >= MIN_BLOCK_BYTES else value
    elif _LOOKED_INTO.isdisjoint(map(type, _probed(value))):
        made = _Joined(value) if kind is not dict and value and _is_joined(value) else value  # texts
    elif kind is dict:
        made = {key: _replaced(each, replaced) for key, each in value.items()}
    elif _is_joined(value):
        made = _Joined(value)
    else:
        made = kind([_replaced(each, replaced) for each in value])
    replaced[id(value)] = made
    return made


class _Bytes:
    """A byte string whose memory stays out of the pickle."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self._value),)


class _Joined:
    """Strings of one kind in a list or tuple, as one block."""

    __slots__ = ("_strings",)

    def __init__(self, strings: list[Any] | tuple[Any, ...]) -> None:
        self._strings = strings

    def __reduce__(self) -> tuple[Any, ...]:
        strings = self._strings
        is_text = type(strings[0]) is str
        parts = [each.encode("utf-8", "surrogatepass") for each in strings] if is_text else strings
        sizes = tuple(map(len, parts))
        return split, (pickle.PickleBuffer(b"".join(parts)), sizes, type(strings) is list, is_text)


def split(joined: memoryview, sizes: tuple[int, ...], is_list: bool, is_text: bool) -> list[Any] | tuple[Any, ...]:
    """Make the strings again."""
    view = memoryview(joined)
    parts = [view[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
    strings = [str(part, "utf-8", "surrogatepass") for part in parts] if is_text else list(map(bytes, parts))
    return strings if is_list else tuple(strings)
