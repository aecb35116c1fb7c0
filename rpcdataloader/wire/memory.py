"""Memory that two processes of a machine map, made with memfd_create(2), and buffers one after the other in it."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Every dtype's alignment.
_ALIGNMENT = 64

# Numbers of Linux: the Pythons of conda and uv are built against headers without these (memfd_create(2), fcntl(2)).
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_WRITE = 2, 8

# Python's mmap would keep a descriptor for each mapping.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_MAP_FAILED = ctypes.c_void_p(-1).value


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory; raises ``OSError`` where that is not allowed."""
    descriptor: int = _libc.memfd_create(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def create_memory(size_bytes: int) -> int:
    """Return the descriptor of new memory that cannot shrink, so that a process that maps it can read all of it.

    Raises:
        OSError: The kernel, or a sandbox, does not allow it.
    """
    descriptor = memory_file("rpcdataloader")
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, size_bytes: int, flags: int = mmap.MAP_SHARED) -> memoryview:
    """Map memory for as long as the result, or a part of it, is alive; the descriptor may be closed.

    Raises:
        OSError: There is no room in the address space, or there are too many mappings.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size_bytes, access, flags, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8).data


def before_unmapping(memory: memoryview, function: Callable[..., object], *args: object) -> None:
    """Call a function at the end of memory from :func:`map_memory`, or of the process, while it is still mapped."""
    # Of one object, the youngest finalizer is called first. NumPy 2.5 frees what an array shows before the array.
    weakref.finalize(memory.obj.base.obj, function, *args)  # type: ignore[attr-defined]  # array, memoryview, its memory


def split(memory: Any, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The buffers of these sizes in memory that has them one after the other, aligned for every dtype."""
    whole = np.frombuffer(memory, np.uint8)
    return [whole[start : start + size] for size, start in zip(sizes, _starts(sizes), strict=False)]


def end_of(sizes: Sequence[int]) -> int:
    """The size of memory for buffers of these sizes, in bytes."""
    return max(_starts(sizes))


def _starts(sizes: Sequence[int]) -> Iterator[int]:
    """Where each buffer begins; then the end."""
    return itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
