"""Memory that two processes of a machine map, and large buffers that travel through it instead of a socket.

A gigabyte over a socket is copied twice, into memory that the kernel clears first, and digested on both sides. Here the
sender writes it once into memory of memfd_create(2), seals that against changes, and the receiver opens it
under /proc. If it cannot, as in another container, the sender hears so and sends the bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rpcdataloader.wire.slabs import Block

#: Less is sent in a few milliseconds.
MIN_COPIED_BYTES = 1 << 24

# Every dtype's alignment.
_ALIGNMENT = 64

# Numbers of Linux: the Pythons of conda and uv are built against headers without these (memfd_create(2), fcntl(2)).
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK = 2
_SEALS = 1 | F_SEAL_SHRINK | 4 | 8  # of F_SEAL_SEAL, _SHRINK, _GROW and _WRITE

# The most that one call writes.
_PIECE_BYTES = 1 << 30


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
        fcntl.fcntl(descriptor, _F_ADD_SEALS, F_SEAL_SHRINK)
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


class Copies(NamedTuple):
    """Where copies of buffers are."""

    pid: int
    descriptor: int
    inode: int  # another process of this number, in another container, has another file there
    sizes: tuple[int, ...]  # bytes of each


class Copied:
    """Copies of buffers, which another process can map while this object is alive.

    Attributes:
        place: Address of the copies.

    Raises:
        OSError: There is no memory for that, or the kernel or a sandbox does not allow it.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        sizes = tuple(buffer.nbytes for buffer in buffers)
        descriptor = create_memory(0)
        weakref.finalize(self, os.close, descriptor)
        for buffer, start in zip(buffers, _starts(sizes), strict=False):
            written = 0
            while written < buffer.nbytes:
                written += os.pwrite(descriptor, buffer[written : written + _PIECE_BYTES], start + written)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
        self.place = Copies(os.getpid(), descriptor, os.fstat(descriptor).st_ino, sizes)

    def map(self) -> list[memoryview]:
        """The copies."""
        # Not by way of its place: /proc may be that of another namespace.
        memory = map_memory(self.place.descriptor, os.fstat(self.place.descriptor).st_size, mmap.MAP_PRIVATE)
        return [part.data for part in split(memory, self.place.sizes)]


def map_copies(copies: Copies) -> list[Block]:
    """Map the copies of another process's buffers; changes stay in this process and its children.

    Raises:
        OSError: This process cannot open them, or they are not there.
    """
    descriptor = os.open(f"/proc/{copies.pid}/fd/{copies.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if os.fstat(descriptor).st_ino != copies.inode or fcntl.fcntl(descriptor, F_GET_SEALS) != _SEALS:
            raise OSError(f"another file is at descriptor {copies.descriptor} of process {copies.pid}")
        memory = map_memory(descriptor, size_bytes, mmap.MAP_PRIVATE)
    finally:
        os.close(descriptor)
    if end_of(copies.sizes) > -(-size_bytes // _ALIGNMENT) * _ALIGNMENT:
        raise OSError(f"buffers of {copies.sizes} bytes are not in memory of {size_bytes}")
    return [Block(torch.from_numpy(part)) for part in split(memory, copies.sizes)]


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
