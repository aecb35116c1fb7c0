"""Everything that user code may raise, by name, and where it may raise it. Small, so that a node imports it quickly."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import importlib
import json
import os
import subprocess
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

# Python 3.10 has none.
Group: Any = getattr(builtins, "ExceptionGroup", None)


class Reason(enum.Enum):
    TRUNCATED = 1


class RequiredArguments(Exception):
    def __init__(self, name: str, reason: Reason) -> None:
        super().__init__(f"{name}: {reason.name}")
        self.name = name
        self.reason = reason


class KeywordOnly(ValueError):
    def __init__(self, *, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return f"because {self.reason}"


class WithArray(Exception):
    def __init__(self, where: str, pixels: Any) -> None:
        super().__init__(where, pixels)
        self.brightest = pixels.max()


@dataclasses.dataclass
class AsDataclass(Exception):
    code: int
    text: str = "text"


class NoSample(FileNotFoundError):
    def __init__(self, path: str, split: str) -> None:
        super().__init__(2, "no such sample", path)
        self.split = split


class Decoding(Exception):
    """Makes its text, as most classes of exceptions do."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot decode {path}")
        self.path = path


class WithSlots(ValueError):
    __slots__ = ("empty", "offset")

    def __init__(self, *, offset: int) -> None:
        super().__init__("at", offset)
        self.offset = offset


class WithLock(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.lock = threading.Lock()


def of_a_local_class() -> BaseException:
    class LocalError(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(first + second)

    return LocalError(1, 2)


def of_a_class_that_cannot_be_sent() -> BaseException:
    class LockedError(Exception):
        lock = threading.Lock()

    return LockedError("text")


def raise_a_chain() -> None:
    try:
        try:
            raise KeyError("the innermost")
        except KeyError as error:
            raise TypeError("the one between") from error
    except TypeError:
        outer = ValueError("the outermost")
        if hasattr(outer, "add_note"):  # Python 3.11
            outer.add_note("while reading\nsample 17")
        raise outer  # noqa: B904


def warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("a deprecated format", FutureWarning, stacklevel=1)


def call(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], BaseException]:
    """What a call raises."""

    def make() -> BaseException:
        try:
            function(*args, **kwargs)
        except Exception as exc:
            return exc
        raise AssertionError

    return make


def recurse() -> None:
    recurse()


MAKERS: dict[str, Callable[[], BaseException]] = {
    "several lines as a key": lambda: KeyError("first line\nsecond line"),
    "several arguments": lambda: RuntimeError("text", 3, None),
    "required arguments": lambda: RequiredArguments("cat.jpg", Reason.TRUNCATED),
    "keyword": lambda: KeywordOnly(reason="it rained"),
    "made text": lambda: Decoding("cat.jpg"),
    "slots": lambda: WithSlots(offset=3),
    "array": lambda: WithArray("here", np.arange(5)),
    "dataclass": lambda: AsDataclass(3),
    "of the system": call(open, "/no/such/file"),
    "of the system, two files": call(os.rename, "/no/such/file", "/nor/this"),
    "of the system, only text": lambda: OSError("text"),
    "of the system, own class": lambda: NoSample("/a/b", "train"),
    "text": call(b"\xff\xfe".decode, "utf-8"),
    "text the other way": call("\udcff".encode, "utf-8"),
    "json": call(json.loads, "{"),
    "subprocess": lambda: subprocess.CalledProcessError(3, ["ls", "-l"], b"out", b"err"),
    "syntax": call(compile, "a b", "<config>", "exec"),
    "import": call(importlib.import_module, "no_such_module"),
    "recursion": call(recurse),
    "warning": call(warn),
    "out of memory": lambda: torch.cuda.OutOfMemoryError("out of memory"),
    "numpy": call(np.zeros(2).sum, axis=4),
    "numpy types": call(np.add, "a", 3),
    "stop": lambda: StopIteration({"value": 1}),
    "chain": call(raise_a_chain),
    # Those before are the same everywhere; torch's loader waits for ever for the next one.
    "lock": lambda: WithLock("cat.jpg"),
    "local class": of_a_local_class,
    "class with a lock": of_a_class_that_cannot_be_sent,
}
if Group:
    MAKERS["group"] = lambda: Group("several", [KeyError("k"), Group("inner", [ValueError("r"), Decoding("cat.jpg")])])
    MAKERS["group of locks"] = lambda: Group("several", [WithLock("cat.jpg"), Group("inner", [NoSample("/a", "b")])])

#: Those that cannot be sent.
AS_TEXT = {"class with a lock"}

#: Attributes that cannot be sent.
LEFT_OUT = {"lock"}

#: What is no ``Exception``.
EXITS: dict[str, Callable[[], BaseException]] = {
    "SystemExit: 3": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit: text": lambda: GeneratorExit("text"),
}


def fail(name: str) -> Any:
    """Raise it."""
    raise (MAKERS | EXITS)[name]()


class Failures(Dataset[Any]):
    """Raises what it is asked for by name, and returns every other index."""

    def __getitem__(self, index: Any) -> Any:
        return fail(index) if isinstance(index, str) else index
