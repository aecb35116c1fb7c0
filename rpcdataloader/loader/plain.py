"""States of users' objects as plain values, which JSON gives back as they were.

JSON turns keys of a mapping into text, and tuples into lists: a sampler that counts by epoch would not find its counts
again. Such values get a form of their own, and so do arrays and tensors. All others stay as they are.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import numpy as np
import torch

ATOMS = frozenset({bool, int, float, str, type(None)})

# The key of a value in another form.
_KIND = "__kind__"

_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}

# What makes missing values of a ``defaultdict``.
_FACTORIES = {"None": None, **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}}

# Larger arrays stay as they are: their form takes twice the memory, and JSON is not for them.
_MAX_BYTES = 1 << 20


def to_plain(value: Any) -> Any:
    """Return a copy of a value, in other forms where needed."""
    kind = type(value)
    if kind is list:
        return value.copy() if set(map(type, value)) <= ATOMS else list(map(to_plain, value))
    if kind is tuple:
        return {_KIND: "tuple", "items": list(map(to_plain, value))}
    if isinstance(value, dict):
        form = _form_of(value)
        if form == {_KIND: "dict"} and all(type(key) is str for key in value) and _KIND not in value:
            return {key: to_plain(each) for key, each in value.items()} if kind is dict else copy.deepcopy(value)
        if form == {_KIND: "dict"} and kind is not dict:
            form["empty"] = _emptied(value)  # of which JSON makes a dictionary
        return {**form, "items": [[to_plain(key), to_plain(each)] for key, each in value.items()]}
    if _is_plain_array(value) and value.nbytes <= _MAX_BYTES:
        shape = None if isinstance(value, np.generic) else list(value.shape)
        return {_KIND: "array", "dtype": value.dtype.str, "shape": shape, "bytes": value.tobytes().hex()}
    if kind is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        if flat.nbytes <= _MAX_BYTES:
            dtype = str(value.dtype).removeprefix("torch.")
            return {_KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "bytes": flat.tobytes().hex()}
    return value if kind in ATOMS else copy.deepcopy(value)


def _emptied(value: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a mapping, of its own kind and with its attributes, without items; a dictionary if that fails."""
    try:
        empty = copy.copy(value)
        empty.clear()
        return copy.deepcopy(empty)
    except Exception:  # of the user's class
        return {}


def _form_of(value: dict[Any, Any]) -> dict[str, Any]:
    """What tells the kind of a mapping; a dictionary for kinds that are not known here."""
    if type(value) is collections.defaultdict:
        for factory, makes in _FACTORIES.items():
            if value.default_factory is makes:
                return {_KIND: "defaultdict", "factory": factory}
    return {_KIND: type(value).__name__ if type(value) in _MAPPINGS.values() else "dict"}


def _is_plain_array(value: Any) -> bool:
    """Whether it is an array or a number of numpy's, of no subclass, and of a dtype that a short text tells."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    return not value.dtype.hasobject and np.dtype(value.dtype.str) == value.dtype


def from_plain(value: Any) -> Any:
    """Return a copy of the value of which this is the result of :func:`to_plain`."""
    kind = type(value)
    if kind is list:
        return value.copy() if set(map(type, value)) <= ATOMS else list(map(from_plain, value))
    if kind is not dict:
        return value if kind in ATOMS else copy.deepcopy(value)
    name = value.get(_KIND)
    if name is None:
        return {key: from_plain(each) for key, each in value.items()}
    if name == "tuple":
        return tuple(map(from_plain, value["items"]))
    if "items" in value:
        mapping = {from_plain(key): from_plain(each) for key, each in value["items"]}
        if "empty" in value:
            empty = copy.deepcopy(value["empty"])
            empty.update(mapping)
            return empty
        if name == "defaultdict":
            return collections.defaultdict(_FACTORIES[value["factory"]], mapping)
        return _MAPPINGS[name](mapping)
    data, shape = bytearray.fromhex(value["bytes"]), value["shape"]
    if name == "array":
        flat = np.frombuffer(data, value["dtype"])
        return flat[0] if shape is None else flat.reshape(shape)
    # Of no element, there is no buffer.
    flat_tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat_tensor.view(getattr(torch, value["dtype"])).reshape(shape)


def is_plain(value: Any) -> bool:
    """Whether the result of :func:`to_plain` consists of mappings, lists, text and numbers."""
    if type(value) is list:
        return set(map(type, value)) <= ATOMS or all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return type(value) in ATOMS


class StateCopier:
    """Copies of the state of an object, one after the other.

    Long lists of numbers, such as the order of an epoch, are shared by the copies as long as they do not change: a deep
    copy of a million takes 0.15 s, a comparison 1 ms. So the copies must not be changed.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[Any, ...], list[Any]] = {}  # the last copy of each, by the keys that lead to it

    def copy(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return a copy."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is dict:
            return {key: self.copy(each, (*path, key)) for key, each in value.items()}
        if kind is list:
            before = self._lists.get(path)
            if before is not None and _is_equal(value, before):
                return before
            if set(map(type, value)) <= ATOMS:
                self._lists[path] = value.copy()
                return self._lists[path]
        return copy.deepcopy(value)


def _is_equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return bool(one == other)
    except Exception:  # elements that cannot be compared
        return False
