"""What the tests run on workers. Small, so that a worker imports it quickly; the client's import path leads there."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def add(*numbers: int, scale: int = 1) -> int:
    return scale * sum(numbers)


def whereabouts() -> tuple[int, int]:
    """Process and session."""
    return os.getpid(), os.getppid()


def read_all(path: str) -> bytes:
    """Wait for somebody to open the FIFO at ``path`` for writing, and for the end of what they write."""
    with open(path, "rb") as file:
        return file.read()


def make_array(size: int = 1 << 19, path: str = "", _sent: object = None) -> Any:
    """Return so many bytes; before that, wait for the FIFO at ``path``."""
    import numpy as np

    if path:
        read_all(path)
    return np.ones(size, np.uint8)


# --- state of the worker

log: list[Any] = []


def append(item: Any) -> None:
    log.append(item)


def read_log() -> list[Any]:
    return log


def busy_in(marker: str, how: str) -> None:
    """Say that this began by making the file ``marker``, then be busy for a minute."""
    Path(marker).touch()
    if how == "hold_gil":  # in C, without letting other threads run
        ctypes.PyDLL(None).usleep(60_000_000)
    else:
        time.sleep(60)


# --- objects

_probes: weakref.WeakSet[Probe] = weakref.WeakSet()


class Probe:
    """An object that can be counted."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        _probes.add(self)


def num_probes() -> int:
    gc.collect()
    return len(_probes)


def identity(value: Any) -> Any:
    return value


def is_same(one: object, other: object) -> bool:
    return one is other


class Box:
    """Has attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


# --- faults


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in this process: a method of this class."""

    kind: str

    def happen(self) -> None:
        getattr(self, self.kind)()

    def exception(self) -> None:
        raise ValueError("a fault")

    def system_exit(self) -> None:
        raise SystemExit(3)

    def cancelled(self) -> None:
        raise asyncio.CancelledError("a fault")

    def exit_process(self) -> None:
        os._exit(3)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def peer_closes(self) -> None:
        with socket.socket(fileno=os.dup(connection_descriptor())) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def peer_stalls(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Trap:
    """Has a fault happen when it is pickled or when it is rebuilt."""

    def __init__(self, when: str, fault: Fault) -> None:
        self.when = when
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        if self.when == "pickled":
            self.fault.happen()
        return _rebuild, (self.when, self.fault)


def set_trap(trap: tuple[str, Fault]) -> Trap:
    return Trap(*trap)


def _rebuild(when: str, fault: Fault) -> Trap:
    if when == "rebuilt":
        fault.happen()
    return Trap(when, fault)


def connection_descriptor() -> int:
    """This worker's end of its connection."""
    for name in os.listdir("/proc/self/fd"):
        # One of them is that of the list.
        if os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    return int(name)
    raise LookupError("no connection")


# --- modules


def define_module(name: str) -> Any:
    """An instance of a class in a module that exists in this process alone."""
    module = type(sys)(name)
    exec("class Thing: pass", module.__dict__)
    sys.modules[name] = module
    return module.Thing()
