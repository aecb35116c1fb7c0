"""Parts of a dataset: objects that are in it here, and in its copy in a worker, or that it holds at all. Pure.

A function of a loader may be a method of the dataset, of one that it is a part of (``Subset``), or of what it has as an
attribute; or share with it what both refer to, such as a vocabulary, or a variable of a closure. Sent with the
function, that object would be another one in the worker than the dataset's own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

# Enough for what users nest. An item of a long list of samples is not looked for.
_MAX_OBJECTS = 20_000
_MAX_ITEMS = 1000

_WITHOUT_PARTS = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)

# They lead out of a dataset, to all that the process has.
_OUTSIDE = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType, logging.Logger)
_LEAVES = (type(None), bool, int, float, complex, str, bytes)

# Steps of a path: to an item, into the attributes that ``vars`` has, by ``getattr``, and to a variable of a closure.
_ITEM, _OWN, _ATTRIBUTE, _VARIABLE = range(4)

# How objects are pickled that do not choose another way.
_USUAL = {name: getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")}


def find_parts(whole: Any) -> dict[int, tuple[Any, Any]]:
    """The objects in ``whole``, by their ids: each with its path, for :func:`follow` in a copy made by pickle.

    Not those that an object may leave out of its pickle, or puts together itself: a copy may lack them.
    """

    def steps(owner: Any) -> Iterator[tuple[Any, Any]]:
        found = _steps(owner)
        return ((step, part) for step, part in found if not isinstance(part, _WITHOUT_PARTS) and not _has_name(part))

    return _search(whole, steps)


def find_held(whole: Any) -> list[Any]:
    """The objects that ``whole`` holds in any way, itself first, but for those in the middle of long lists."""

    def steps(owner: Any) -> Iterator[tuple[Any, Any]]:
        found = [owner.base] if isinstance(owner, np.ndarray) else gc.get_referents(owner)
        # Those of a dictionary are its keys and its values.
        some = found if len(found) <= 2 * _MAX_ITEMS else (*found[:_MAX_ITEMS], *found[-_MAX_ITEMS:])
        return ((None, part) for part in some if not isinstance(part, (*_LEAVES, *_OUTSIDE)))

    return [part for part, _path in _search(whole, steps).values()]


def _search(whole: Any, steps: Callable[[Any], Iterable[tuple[Any, Any]]]) -> dict[int, tuple[Any, Any]]:
    """What ``steps`` finds in ``whole``, and in each of these in turn, nearest first: each with its path, by id.

    Its length is limited, and that of each list, so that a long one does not hide what comes after it.
    """
    found: dict[int, tuple[Any, Any]] = {id(whole): (whole, ())}
    waiting: deque[tuple[Any, Any]] = deque([(whole, ())])
    while waiting and len(found) < _MAX_OBJECTS:
        owner, path = waiting.popleft()
        for step, part in steps(owner):
            if id(part) not in found:
                found[id(part)] = part, (*path, step)
                waiting.append((part, (*path, step)))
    return found


def _has_name(part: Any) -> bool:
    """Whether this is a function that a worker finds by its name."""
    return isinstance(part, types.FunctionType) and "<locals>" not in part.__qualname__


def _steps(owner: Any) -> Iterable[tuple[tuple[int, Any], Any]]:
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
    if hasattr(kind, "__setstate__") or not is_usual:
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
