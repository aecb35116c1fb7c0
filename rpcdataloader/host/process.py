"""Settings of a process, and of its threads, that its forks inherit, and that decide what a dataset makes."""

from __future__ import annotations

import csv
import decimal
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# What numpy does at an error by a function, which is the script's.
_NUMPY_FUNCTIONS = ("call", "log")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of a process.

    Attributes:
        arguments: Those of the script, which modules may read as they are imported.
        recursion_limit: Depth of calls.
        int_digits: Limit on the digits of an integer in a text; 0 for none, None in versions of Python without one.
        csv_field_size: Limit on the characters of a field of :mod:`csv`.
        umask: Permissions that new files lack.
        socket_timeout: Default timeout of sockets, in seconds; None without.
        dtype: torch's default for floating-point numbers.
        deterministic: Whether torch's operations are deterministic or refused, and whether it only warns of others.
    """

    arguments: tuple[str, ...]
    recursion_limit: int
    int_digits: int | None
    csv_field_size: int
    umask: int
    socket_timeout: float | None
    dtype: torch.dtype
    deterministic: tuple[bool, bool]

    @classmethod
    def current(cls) -> ProcessSettings:
        """The settings of this process."""
        return cls(
            arguments=tuple(map(str, getattr(sys, "argv", ()))),  # an embedded interpreter may have none
            recursion_limit=sys.getrecursionlimit(),
            int_digits=sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None,
            csv_field_size=csv.field_size_limit(),
            umask=_umask(),
            socket_timeout=socket.getdefaulttimeout(),
            dtype=torch.get_default_dtype(),
            deterministic=_is_deterministic(),
        )

    def apply(self) -> None:
        """Make these the settings of this process."""
        sys.argv = list(self.arguments)
        sys.setrecursionlimit(self.recursion_limit)
        if self.int_digits is not None and hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(self.int_digits)
        csv.field_size_limit(self.csv_field_size)
        os.umask(self.umask)
        socket.setdefaulttimeout(self.socket_timeout)
        torch.set_default_dtype(self.dtype)
        if self.deterministic != _is_deterministic():  # it imports torch's compiler, which takes seconds
            is_deterministic, only_warns = self.deterministic
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


def _is_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _umask() -> int:
    """Read it: os.umask would change it for a moment, in which other threads make files."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _is_built_in(entry: tuple[Any, ...]) -> bool:
    """Whether the category of a filter is built in."""
    return bool(entry[2].__module__ == "builtins")


def _set_filters(filters: tuple[tuple[Any, ...], ...]) -> None:
    """Replace the filters of built-in categories; others are those of modules here."""
    others = [entry for entry in warnings.filters if not _is_built_in(entry)]
    warnings.resetwarnings()
    for action, message, category, module, line in reversed([*others, *filters]):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)


def _pattern(expression: Any) -> str:
    """That of a filter: a text where it is Python's own, and nothing for all."""
    return expression if isinstance(expression, str) else "" if expression is None else expression.pattern


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """Settings of a thread, and those of a process that must not hold while a session imports modules.

    Attributes:
        decimal: Precision and rounding of :mod:`decimal`, and what is an error there.
        numpy_errors: What numpy does at errors of floating-point numbers, by their kind.
        has_grad: Whether torch records operations for gradients.
        filters: Filters of warnings of built-in categories: others may be classes that a session lacks.
    """

    decimal: decimal.Context
    numpy_errors: Mapping[str, str]
    has_grad: bool
    filters: tuple[tuple[Any, ...], ...]

    @classmethod
    def current(cls) -> ThreadSettings:
        """The settings of this thread."""
        errors = {kind: str(action) for kind, action in np.geterr().items() if action not in _NUMPY_FUNCTIONS}
        filters = tuple(each for each in warnings.filters if _is_built_in(each))
        return cls(decimal.getcontext().copy(), errors, torch.is_grad_enabled(), filters)

    def apply(self) -> None:
        """Make these the settings of this thread."""
        decimal.setcontext(self.decimal.copy())
        np.seterr(**self.numpy_errors)  # type: ignore[arg-type]
        torch.set_grad_enabled(self.has_grad)
        _set_filters(self.filters)
