"""Parts of a dataset: objects that are in it here, and in its copy in a worker. Pure.

A function of a loader may be a method of the dataset, of one that it is a part of (``Subset``), or of what it has as an
attribute; or share with it what both refer to, such as a vocabulary, or a variable of a closure. Sent with the
function, that object would be another one in the worker than the dataset's own.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

# Enough for what users nest. An item of a long list of samples is not looked for.
_MAX_OBJECTS = 10_000
_MAX_ITEMS = 1000

# Bytes of a tensor by which a script tells something; others hold data.
_MAX_SHARED = 1 << 12

_WITHOUT_PARTS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)

# Steps of a path: to an item, into the attributes that ``vars`` has, by ``getattr``, and to a variable of a closure.
_ITEM, _OWN, _ATTRIBUTE, _VARIABLE = range(4)

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
            if id(part) not in found and not isinstance(part, _WITHOUT_PARTS) and not _has_name(part):
                found[id(part)] = part, (*path, step)
                waiting.append((part, (*path, step)))
    return found


def _has_name(part: Any) -> bool:
    """Whether this is a function that a worker finds by its name."""
    return isinstance(part, types.FunctionType) and "<locals>" not in part.__qualname__


def _steps(owner: Any, with_all: bool) -> Iterable[tuple[tuple[int, Any], Any]]:
    kind: Any = type(owner)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        return _items(owner)
    if kind in (list, tuple, deque):
        return _elements(owner)
    if kind is functools.partial:
        return _attributes(owner, ("func", "args", "keywords"))
    if kind is types.MethodType:
        return _attributes(owner, ("__self__",))
    if kind is types.FunctionType:
        return [((_VARIABLE, number), cell) for number, cell in enumerate(owner.__closure__ or ())]
    if kind is types.CellType:
        return _attributes(owner, ("cell_contents",))
    is_usual = all(getattr(kind, name, None) is usual for name, usual in _USUAL.items())
    if not with_all and (hasattr(kind, "__setstate__") or not is_usual):
        return []
    return _of_object(owner)


def _of_object(owner: Any) -> Iterator[tuple[tuple[int, Any], Any]]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        yield (_OWN, name), value
    for base in type(owner).__mro__:
        if "__slots__" in vars(base):
            members = [name for name, each in vars(base).items() if isinstance(each, types.MemberDescriptorType)]
            yield from _attributes(owner, members)
    if isinstance(owner, dict):
        yield from _items(owner)
    elif isinstance(owner, list):
        yield from _elements(owner)


def _items(owner: Mapping[Any, Any]) -> list[tuple[tuple[int, Any], Any]]:
    return [((_ITEM, key), value) for key, value in islice(owner.items(), _MAX_ITEMS) if type(key) in (str, int)]


def _elements(owner: Iterable[Any]) -> list[tuple[tuple[int, Any], Any]]:
    return [((_ITEM, number), value) for number, value in enumerate(islice(owner, _MAX_ITEMS))]


def _attributes(owner: Any, names: Iterable[str]) -> Iterator[tuple[tuple[int, Any], Any]]:
    for name in names:
        with contextlib.suppress(AttributeError, ValueError):  # a slot, or a variable, without a value
            yield (_ATTRIBUTE, name), getattr(owner, name)


def follow(whole: Any, path: Any) -> Any:
    """The object at the end of a path."""
    for kind, key in path:
        if kind == _ITEM:
            whole = whole[key]
        elif kind == _OWN:
            whole = vars(whole)[key]
        else:
            whole = getattr(whole, key) if kind == _ATTRIBUTE else whole.__closure__[key]
    return whole


def find_shared(namespace: Mapping[str, Any], *wholes: Any) -> dict[Any, torch.Tensor]:
    """Copies of the small tensors in shared memory that are globals or in one of ``wholes``, by their paths.

    By such a tensor, a script tells torch's persistent workers of their epoch, for example.
    """
    found = {((_ITEM, 0), (_ITEM, name)): value for name, value in list(namespace.items())}
    for number, whole in enumerate(wholes, 1):
        found |= {((_ITEM, number), *path): part for part, path in find_parts(whole, with_all=True).values()}
    kinds = torch.Tensor, torch.nn.Parameter
    return {path: part.detach().clone() for path, part in found.items() if type(part) in kinds and _tells(part)}


def _tells(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:  # a sparse one has no memory of its own
        return False
    is_shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return is_shared and tensor.nbytes <= _MAX_SHARED


def set_shared(values: Mapping[Any, torch.Tensor], *copies: Any) -> None:
    """Give the tensors in copies of what :func:`find_shared` has searched other values."""
    for path, value in values.items():
        with contextlib.suppress(LookupError, TypeError):  # a copy has another form, or a global is not used there
            part = follow(copies, path)
            if isinstance(part, torch.Tensor) and part.shape == value.shape:
                part.detach().copy_(value)
