"""Memory maps of files in a client's messages: the worker opens the file, in place of receiving what is in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from rpcdataloader.errors import SerializationError

_ADVICE = (
    "let each node build the dataset: RPCDataset(workers, MyDataset, *args); or send a copy in memory: numpy.array(...)"
)

_Open = tuple[Callable[..., Any], tuple[Any, ...]]


def reduce_map(array: np.ndarray[Any, Any]) -> _Open | None:
    """Reduce an array in a memory map to a call of :func:`open_map`; None for an array in other memory.

    Raises:
        SerializationError: A worker could not open the same content.
    """
    whole: Any = array
    while type(whole) in (np.ndarray, memoryview):
        whole = whole.base if isinstance(whole, np.ndarray) else whole.obj
    if not isinstance(whole, np.memmap) or (memory := getattr(whole, "_mmap", None)) is None:
        return None
    path = None if whole.filename is None else os.path.abspath(os.fspath(whole.filename))
    try:
        size_bytes = os.stat(path or "").st_size
    except OSError as error:
        raise SerializationError(
            f"memory map of {path or 'a file without name'}: {error.strerror}; {_ADVICE}"
        ) from error
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    if whole.mode == "c" and _has_changes(begin):
        raise SerializationError(f"memory map of {path} has changes that are not in the file (mode 'c'); {_ADVICE}")
    if whole.mode in ("r+", "w+"):
        whole.flush()  # for the nodes that see the file by a network
    address = array.ctypes.data
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    low = address + sum(step for step in steps if step < 0)
    high = address + sum(step for step in steps if step > 0) + array.itemsize
    # The map begins where a page does.
    offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY + low - begin
    mode = "r" if not array.flags.writeable else "c" if whole.mode == "c" else "r+"
    place = path, size_bytes, mode, offset, high - low
    return open_map, (*place, type(array), array.shape, array.dtype, address - low, array.strides)


def open_map(
    path: str,
    file_bytes: int,
    mode: Any,
    offset: int,
    size_bytes: int,
    kind: type[np.ndarray[Any, Any]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    start: int,
    strides: tuple[int, ...],
) -> np.ndarray[Any, Any]:
    """Open a part of a file as an array.

    Args:
        file_bytes: Size of the file at the client.
        mode: That of ``numpy.memmap``.
        offset: Position of the part in the file.
        size_bytes: Size of the part.
        kind: ``numpy.memmap``, or an array over one.
        start: Position of the first element in the part.

    Raises:
        SerializationError: There is no such file here.
    """
    try:
        here_bytes = os.stat(path).st_size
        if here_bytes != file_bytes:
            raise OSError(0, f"it has {here_bytes} bytes here, and {file_bytes} at the client")
        part = np.memmap(path, np.uint8, mode, offset, (size_bytes,))
    except OSError as error:
        where = f"cannot be opened on {os.uname().nodename}"
        raise SerializationError(f"memory map of {path} {where}: {error.strerror}; {_ADVICE}") from error
    found: Any = np.ndarray.__new__(kind, shape, dtype, part, start, strides)
    if kind is np.memmap:
        found.__array_finalize__(part)  # takes its attributes
    return found  # type: ignore[no-any-return]


def _has_changes(address: int) -> bool:
    """Whether a private map has pages of its own (``/proc/self/smaps``, proc_pid_smaps(5))."""
    is_inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                first, _, last = name.partition("-")
                is_inside = int(first, 16) <= address < int(last, 16)
            elif is_inside and name == "Anonymous:":
                return int(rest.split()[0]) > 0
    return False
