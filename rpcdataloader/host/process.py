"""Settings of a process, and of its threads, that its forks inherit, and that decide what a dataset makes."""

from __future__ import annotations

import contextlib
import csv
import decimal
import itertools
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

# How to ask for a setting, and how to set it.
Setting = tuple[Callable[[], Any], Callable[[Any], object]]


_set_always = object()

_S = TypeVar("_S", bound="_Settings")


@dataclass(frozen=True, slots=True)
class _Settings:
    values: tuple[Any, ...]  # of the kind's settings, in their order

    KIND: ClassVar[tuple[Setting, ...]]

    @classmethod
    def current(cls: type[_S]) -> _S:
        """The settings of this process, or thread."""
        return cls(tuple(ask() for ask, _set in cls.KIND))

    def apply(self, before: Iterable[Any] = itertools.repeat(_set_always)) -> None:
        """Make these the settings of this process, or thread; but for values that are the same in ``before``."""
        for value, other, (_ask, set_to) in zip(self.values, before, self.KIND, strict=False):
            if value != other:
                set_to(value)


def _arguments() -> list[str]:
    """Those of the script, which modules may read as they are imported; an embedded interpreter may have none."""
    return list(map(str, getattr(sys, "argv", ())))


def _set_arguments(arguments: list[str]) -> None:
    sys.argv = list(arguments)


def _umask() -> int | None:
    """Read it: os.umask would change it for a moment, in which other threads make files. None if it is not told."""
    try:
        with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), None)
    except OSError:
        return None


def _set_umask(umask: int | None) -> None:
    if umask is not None:
        os.umask(umask)


def _determinism() -> tuple[bool, bool]:
    """Whether torch's operations are deterministic or refused, and whether it only warns of others."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(determinism: tuple[bool, bool]) -> None:
    if determinism != _determinism():  # it imports torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(determinism[0], warn_only=determinism[1])


class ProcessSettings(_Settings):
    """Settings of a process."""

    __slots__ = ()

    KIND = (
        (_arguments, _set_arguments),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        # The limit came with 3.11, and some versions of 3.10.
        (getattr(sys, "get_int_max_str_digits", bool), getattr(sys, "set_int_max_str_digits", bool)),
        (csv.field_size_limit, csv.field_size_limit),
        (_umask, _set_umask),
        (socket.getdefaulttimeout, socket.setdefaulttimeout),
        (torch.get_default_dtype, torch.set_default_dtype),
        (_determinism, _set_determinism),
    )


def _numpy_errors() -> dict[str, Any]:
    """What numpy does at errors of floating-point numbers, by their kind, but for those that go to a function."""
    return {kind: action for kind, action in np.geterr().items() if action not in ("call", "log")}


def _filters() -> list[tuple[Any, ...]]:
    """Filters of warnings, with the names of their categories: a node need not have imported these, nor have them."""
    return [(action, message, _names(category), *where) for action, message, category, *where in warnings.filters]


def _names(category: Any) -> Any:
    if isinstance(category, tuple):
        return tuple(map(_names, category))
    return category.__module__, category.__qualname__


def _named_category(names: Any) -> Any:
    """The category of these names, or an exception."""
    if isinstance(names[0], tuple):
        return tuple(map(_named_category, names))
    return attrgetter(names[1])(sys.modules[names[0]])


def _set_filters(filters: list[tuple[Any, ...]]) -> None:
    entries: list[Any] = []
    for names, entry in zip(_filters(), warnings.filters, strict=True):
        if names not in filters and not _is_built_in(names[2]):
            entries.append(entry)
    for action, message, category, *where in filters:
        with contextlib.suppress(Exception):  # it is of a module that is not imported here, or has no such name
            entries.append((action, message, _named_category(category), *where))
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(entries):
        if message is module is None:
            warnings.simplefilter(action, category, line or 0)  # which takes several categories
        else:
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line or 0)


def _is_built_in(names: Any) -> bool:
    return all(map(_is_built_in, names)) if isinstance(names[0], tuple) else names[0] == "builtins"


def _pattern(expression: Any) -> str:
    """That of a filter: a text where it is Python's own, and nothing for all."""
    return expression if isinstance(expression, str) else "" if expression is None else expression.pattern


_entered: list[Any] = []


def _set_inference_mode(is_on: bool) -> None:
    if is_on != torch.is_inference_mode_enabled():
        _entered.append(torch.inference_mode(is_on))
        _entered[-1].__enter__()  # for good: it would be left with the object


def _autocast() -> tuple[bool, torch.dtype]:
    """Whether operations of the CPU choose their types, and of these the lower."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _set_autocast(autocast: tuple[bool, torch.dtype]) -> None:
    if autocast != _autocast():
        torch.set_autocast_enabled("cpu", autocast[0])
        torch.set_autocast_dtype("cpu", autocast[1])


class ThreadSettings(_Settings):
    """Settings of a thread, and filters of warnings, which must not hold while a session imports modules."""

    __slots__ = ()

    KIND = (
        (lambda: decimal.getcontext().copy(), decimal.setcontext),
        (_numpy_errors, lambda errors: np.seterr(**errors)),
        (torch.is_inference_mode_enabled, _set_inference_mode),  # which has gradients off
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (_autocast, _set_autocast),
        (_filters, _set_filters),
    )
