"""Memory maps of files in a client's messages: the worker opens the file, in place of receiving what is in it."""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from rpcdataloader.errors import SerializationError

#: From this size on, an array or tensor may be in a map, whatever it was made by. To look costs a millisecond, far less
#: than to send it.
MIN_SOUGHT_BYTES = 16 << 20

_ADVICE = "let each node build the dataset: RPCDataset(workers, MyDataset, *args); or send a copy in memory"

# What else has a name in /proc/self/maps: memory that processes share, and devices.
_NO_FILE = re.compile(r"/memfd:|/SYSV|/dev/(?!shm/)|/dev/shm/.* \(deleted\)$|\[|$")

_Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
_Version = tuple[int, int]


class _Map(NamedTuple):
    """A line of ``/proc/self/maps`` (proc_pid_maps(5))."""

    start: int
    end: int
    mode: str  # of ``numpy.memmap``
    offset: int
    path: str


def _maps_at(addresses: Iterable[int]) -> Iterator[_Map]:
    """The maps of files that have one of these addresses."""
    wanted = sorted(addresses)
    with open("/proc/self/maps") as lines:
        for line in lines:
            place, rights, offset, _device, _inode, *rest = line.rstrip("\n").split(maxsplit=5)
            start, end = (int(number, 16) for number in place.split("-"))
            if bisect_left(wanted, start) == bisect_left(wanted, end):
                continue
            path = rest[0].replace("\\012", "\n") if rest else ""
            mode = "r" if "w" not in rights else "c" if "p" in rights else "r+"
            if not _NO_FILE.match(path):
                yield _Map(start, end, mode, int(offset, 16), path)


def count_maps(objects: Iterable[object]) -> Counter[str]:
    """How many maps these objects are in or have made, by the path of the file."""
    made = [address for each in objects if (address := _address_of(each, mmap.mmap)) is not None]
    others = [address for each in objects if (address := _address_of(each, (np.ndarray, torch.Tensor))) is not None]
    found: Counter[str] = Counter()
    for each in _maps_at([*made, *others]):
        # Those of one file may be one for the kernel, if they are side by side.
        found[each.path] += max(1, sum(each.start <= address < each.end for address in made))
    return found


def _address_of(part: Any, kinds: Any) -> int | None:
    """The address of what an object of one of these kinds has in memory; None for others, and if it has nothing."""
    if not isinstance(part, kinds):
        return None
    try:
        array = np.frombuffer(part, np.uint8) if isinstance(part, mmap.mmap) else part
        return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    except (ValueError, RuntimeError):  # closed, or of another layout
        return None


def reduce_array(array: np.ndarray[Any, Any]) -> _Reduced | None:
    """Reduce an array in a map to a call that opens the file; None for an array in other memory.

    Raises:
        SerializationError: A worker could not open the same content.
    """
    whole: Any = array
    while type(whole) in (np.ndarray, memoryview):
        whole = whole.base if isinstance(whole, np.ndarray) else whole.obj
    if not isinstance(whole, (np.memmap, mmap.mmap)) and array.nbytes < MIN_SOUGHT_BYTES:
        return None
    address = array.ctypes.data
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    low = address + sum(step for step in steps if step < 0)
    high = address + sum(step for step in steps if step > 0) + array.itemsize
    if (place := _place_of(low, high)) is None:
        return None
    mode = place[3] if array.flags.writeable else "r"
    kind = np.memmap if isinstance(array, np.memmap) else np.ndarray
    return open_array, (*place[:3], mode, *place[4:], kind, array.shape, array.dtype, address - low, array.strides)


def reduce_tensor(tensor: torch.Tensor) -> _Reduced | None:
    """The same for a dense tensor in memory of the CPU."""
    low = tensor.data_ptr()
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if (place := _place_of(low, low + (sum(steps) + 1) * tensor.element_size())) is None:
        return None
    return open_tensor, (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _place_of(low: int, high: int) -> tuple[str, int, _Version, str, int, int] | None:
    """The first arguments of :func:`open_array` for a range of addresses; None if it is in no map of a file."""
    if (found := next(_maps_at([low]), None)) is None or high > found.end:
        return None
    try:
        status = os.stat(found.path)
    except OSError as error:
        raise SerializationError(f"memory map of {found.path}: {error.strerror}; {_ADVICE}") from error
    if found.mode == "c" and _has_changes(low):
        text = "has changes that are not in the file, as it is private (mode 'c')"
        raise SerializationError(f"memory map of {found.path} {text}; {_ADVICE}")
    # What is written through a map is in the maps of the nodes, too, and changes the time.
    version = status.st_ino, 0 if found.mode == "r+" else status.st_mtime_ns
    return found.path, status.st_size, version, found.mode, found.offset + low - found.start, high - low


def open_array(
    path: str,
    file_bytes: int,
    version: _Version,  # noqa: ARG001
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
        version: Inode and time of the file at the client. Not compared here, where the file system may give others:
            it makes another pickle of the same dataset once its file was replaced, so that this is built anew.
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


def open_tensor(
    path: str,
    file_bytes: int,
    version: _Version,
    mode: str,
    offset: int,
    size_bytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """The same as a tensor, which is writable."""
    mode = "c" if mode == "r" else mode
    args = path, file_bytes, version, mode, offset, size_bytes
    part = open_array(*args, np.ndarray, (size_bytes,), np.dtype("u1"), 0, (1,))
    return torch.from_numpy(part).view(dtype).as_strided(shape, strides)


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
