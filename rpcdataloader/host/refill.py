"""Gives an object the content of another one: more than its module may refer to it, so it must stay the same object."""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copyreg
import functools
import random
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def refill(obj: Any, other: Any) -> bool:
    """Give an object the content of another one, as more than its module may refer to it; False if it has none."""
    if (copy_content := refilling(obj, other)) is None:
        return False
    try:
        copy_content()
    except Exception:  # it cannot be changed, as an expanded tensor
        return False
    return True


def refilling(obj: Any, other: Any) -> Callable[[], object] | None:
    """What gives an object the content of another one; None if nothing does."""
    if type(obj) is not type(other):
        return None
    if obj is other:
        return lambda: None
    if isinstance(obj, types.MethodType):
        return refilling(obj.__self__, other.__self__)
    if isinstance(obj, contextvars.ContextVar):
        return lambda: _set_variable(obj, other)
    for kind, copy_content in _COPIES.items():
        if isinstance(obj, kind):
            return functools.partial(_copy_with_attributes, copy_content, obj, other)
    if isinstance(obj, torch.Tensor):
        is_alike = (obj.shape, obj.dtype, obj.layout) == (other.shape, other.dtype, other.layout)
        return (lambda: _set_tensor(obj, other)) if is_alike else None
    if isinstance(obj, np.ndarray):
        is_alike = (obj.shape, obj.dtype) == (other.shape, other.dtype) and obj.flags.writeable
        return (lambda: np.copyto(obj, other)) if is_alike else None
    if hasattr(obj, "__dict__") and _has_attributes_alone(type(obj)):
        return lambda: _set_attributes(obj, vars(other))
    with contextlib.suppress(Exception):  # it cannot be copied
        make, arguments, *rest = other.__reduce_ex__(2)
        if make is copyreg.__newobj__ and len(arguments) == 1 and not any(rest[1:]):  # type: ignore[attr-defined]
            return functools.partial(_set_state, obj, rest[0] if rest else None)
    return None


# How objects get the content of others, by their classes; those of the standard library without a subclass's methods.
_COPIES: dict[type, Callable[[Any, Any], object]] = {
    collections.OrderedDict: lambda obj, other: (
        collections.OrderedDict.clear(obj),
        collections.OrderedDict.update(obj, other),
    ),
    dict: lambda obj, other: (dict.clear(obj), dict.update(obj, other)),
    list: lambda obj, other: (list.clear(obj), list.extend(obj, other)),
    set: lambda obj, other: (set.clear(obj), set.update(obj, other)),
    collections.deque: lambda obj, other: (collections.deque.clear(obj), collections.deque.extend(obj, other)),
    bytearray: lambda obj, other: (bytearray.clear(obj), bytearray.extend(obj, other)),
    array.array: lambda obj, other: array.array.__setitem__(obj, slice(None), other),
    random.Random: lambda obj, other: obj.setstate(other.getstate()),
    np.random.Generator: lambda obj, other: setattr(obj.bit_generator, "state", other.bit_generator.state),
    np.random.RandomState: lambda obj, other: obj.set_state(other.get_state()),
    torch.Generator: lambda obj, other: obj.set_state(other.get_state()),
    BaseException: lambda obj, other: setattr(obj, "args", other.args),
}


def _copy_with_attributes(copy_content: Callable[[Any, Any], object], obj: Any, other: Any) -> None:
    copy_content(obj, other)
    if hasattr(obj, "__dict__"):
        _set_attributes(obj, vars(other))


def _set_attributes(obj: Any, attributes: Mapping[str, Any]) -> None:
    content = dict(attributes)
    vars(obj).clear()
    vars(obj).update(content)


def _set_tensor(obj: torch.Tensor, other: torch.Tensor) -> None:
    obj.detach().copy_(other.detach())
    _set_attributes(obj, vars(other))


def _set_variable(obj: contextvars.ContextVar[Any], other: contextvars.ContextVar[Any]) -> None:
    with contextlib.suppress(LookupError):
        obj.set(other.get())


def _set_state(obj: Any, state: Any) -> None:
    """Let an object have a state as of pickle; of its own methods, those that leave something out let that stay."""
    if hasattr(obj, "__setstate__"):
        obj.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, {})
    if getattr(type(obj), "__getstate__", None) is getattr(object, "__getstate__", None):
        if hasattr(obj, "__dict__"):
            vars(obj).clear()
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            with contextlib.suppress(AttributeError):
                object.__delattr__(obj, name)
    if attributes:
        vars(obj).update(attributes)
    for name, value in slots.items():
        object.__setattr__(obj, name, value)


def _has_attributes_alone(kind: type) -> bool:
    """Whether all that objects of a class have is in their dictionary: pickle copies them by that."""
    if issubclass(kind, types.SimpleNamespace):
        return True
    ways = "__reduce__", "__reduce_ex__", "__getstate__"
    is_default = all(getattr(kind, way, None) is getattr(object, way, None) for way in ways)
    return is_default and not copyreg._slotnames(kind)  # type: ignore[attr-defined]
