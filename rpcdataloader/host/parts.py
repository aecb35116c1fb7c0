"""Parts of a dataset: objects that are in it here, and in its copy in a worker. Pure.

A function of a loader may be a method of the dataset, of one that it is a part of (``Subset``), or of what it has as an
attribute. Sent with the function, that object would be another one in the worker than the dataset's own.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

# Enough for what users nest. An item of a long list of samples is not looked for.
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 1000

# Bytes of a tensor by which a script tells something; others hold data.
_MAX_SHARED = 1 << 12

_WITHOUT_PARTS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType)

# How objects are pickled that do not choose another way.
_USUAL = {name: getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")}


def find_parts(whole: Any, *, with_all: bool = False) -> dict[int, tuple[Any, Any]]:
    """The objects in ``whole``, by their ids: each with its path, for :func:`follow` in a copy made by pickle.

    Args:
        with_all: Also look at what an object leaves out of its pickle, or puts together itself: a copy may lack that.
    """
    found: dict[int, tuple[Any, Any]] = {id(whole): (whole, ())}
    waiting: deque[tuple[Any, Any]] = deque([(whole, ())])
    while waiting and len(found) < _MAX_OBJECTS:
        owner, path = waiting.popleft()
        for step, part in _steps(owner, with_all):
            if id(part) not in found and not isinstance(part, _WITHOUT_PARTS):
                found[id(part)] = part, (*path, step)
                waiting.append((part, (*path, step)))
    return found


def _steps(owner: Any, with_all: bool) -> list[tuple[tuple[bool, Any], Any]]:
    kind: Any = type(owner)
    if kind is dict:
        return [((False, key), value) for key, value in owner.items() if type(key) in (str, int)][:_MAX_ITEMS]
    if kind in (list, tuple):
        return [((False, number), value) for number, value in enumerate(owner[:_MAX_ITEMS])]
    is_usual = all(getattr(kind, name, None) is usual for name, usual in _USUAL.items())
    if not with_all and (hasattr(kind, "__setstate__") or not is_usual):
        return []
    return [((True, name), value) for name, value in getattr(owner, "__dict__", {}).items()]


def follow(whole: Any, path: Any) -> Any:
    """The object at the end of a path."""
    for is_attribute, key in path:
        whole = vars(whole)[key] if is_attribute else whole[key]
    return whole


def find_shared(whole: Any) -> dict[Any, torch.Tensor]:
    """Copies of the small tensors in shared memory in ``whole``, by their paths.

    By such a tensor, a script tells torch's persistent workers of their epoch, for example.
    """
    parts = find_parts(whole, with_all=True).values()
    return {path: part.clone() for part, path in parts if type(part) is torch.Tensor and _tells(part)}


def _tells(tensor: torch.Tensor) -> bool:
    is_shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor.device.type == "cpu" and is_shared and tensor.nbytes <= _MAX_SHARED


def set_shared(whole: Any, values: Mapping[Any, torch.Tensor]) -> None:
    """Give the tensors of a copy of ``whole`` other values."""
    for path, value in values.items():
        with contextlib.suppress(LookupError, TypeError):  # the copy has another form
            part = follow(whole, path)
            if isinstance(part, torch.Tensor) and part.shape == value.shape:
                part.copy_(value)
