"""Dense CPU tensors as out-of-band bytes; ``rebuild.py`` is the way back.

A tensor is a span of bytes plus a layout: dtype, shape, strides. Spans of one storage that overlap travel as one
*region*, so that tensors which shared memory share it again. A region of 64 KiB or more is a block of its own and is
never copied; smaller ones are gathered into *slabs*. A span more than twice as large as its data travels compact, in
the order of its memory, unless other tensors fill the gaps.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from rpcdataloader.wire.frames import BlockBytes, Pieces

#: Regions of this size travel alone, without a copy. Below it, gathering costs less than one more block.
MIN_BLOCK_BYTES = 1 << 16

#: Keeping one small tensor keeps at most this much memory, if small tensors share a slab at all.
MAX_SLAB_BYTES = 1 << 20

# Alignment of regions in a slab: the largest element, complex128, has 16 bytes.
_ALIGNMENT = 16

# Types that numpy and memoryview turn into bytes.
_NUMPY_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

# Types that torch copies by the thousand; others (float8, bits) are copied as plain bytes, one by one.
_BULK_DTYPES = _NUMPY_DTYPES | {torch.bool, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}

# ctypes.memmove releases the GIL; beside a busy thread, each of thousands of releases may cost a switch interval.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

# Named dimensions ended with torch 2.12.
_has_names = getattr(torch.Tensor, "has_names", None)

Place = tuple[int, int, int]  # which tensor, its layout, its offset in the region in elements
Layout = tuple[str, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides
Region = tuple[int, int, list[Place]]  # offset in the slab and size in bytes, the tensors on it
Run = tuple[int, int, list[int]]  # offset in the slab in bytes, layout, the tensors that have it
SlabIndex = tuple[list[Region], list[Run]]


class Index(NamedTuple):
    """The receiver's instructions to rebuild the tensors of a message. Tensors are numbered in the pickler's order."""

    num_tensors: int
    layouts: list[Layout]  # the different layouts, to which the rest refers by position
    blocks: list[list[Place]]  # tensors of each region that is a block of its own
    # Contents of each slab; slabs are the blocks after those. *Regions* hold any tensors, also several that share
    # memory. *Runs* are contiguous tensors of equal layout, each with its own memory, without gaps between them: there
    # may be thousands, and the receiver copies them with a few calls.
    slabs: list[SlabIndex]
    empty: list[tuple[int, int]]  # tensors without elements, and the layout of each


class Stack:
    """Tensors that travel as one, ``torch.stack(tensors)``, without being copied together first.

    Args:
        tensors: One or more; dense, contiguous, of one dtype and shape, and at least 64 KiB together.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.stack, (list(self.tensors),)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether bytes, dtype, shape and strides are all there is to this object, of exactly the class Tensor."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.__dict__
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized or tensor.is_nested)
        and not (_has_names is not None and _has_names(tensor))
        # Without memory: an efficient zero tensor, or one whose storage was freed, as FSDP does.
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


class _Geometry:
    """A layout of a message, with the sender's derived values and the small tensors that have it."""

    __slots__ = ("data_bytes", "in_bulk", "is_sparse", "itemsize", "layout", "number", "run", "span_bytes")

    def __init__(self, number: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> None:
        self.number = number
        self.layout, self.itemsize, self.data_bytes, self.span_bytes, self.in_bulk = _measure(dtype, shape, strides)
        # Most of the span is gaps: a column of a matrix, every tenth row.
        self.is_sparse = self.span_bytes > 2 * self.data_bytes
        self.run: list[tuple[int, int]] = []  # address, number


@functools.lru_cache(maxsize=4096)
def _measure(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> tuple[Layout, int, int, int, bool]:
    layout = str(dtype).removeprefix("torch."), tuple(shape), strides
    num_spanned = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    in_bulk = dtype in _BULK_DTYPES and strides == _contiguous_strides(shape)
    return layout, dtype.itemsize, math.prod(shape) * dtype.itemsize, num_spanned * dtype.itemsize, in_bulk


# One tensor in its storage: address of its first byte and behind its last, number.
_Member = tuple[int, int, int, _Geometry]


def _overlapping(members: Iterable[_Member]) -> list[list[_Member]]:
    """Groups of tensors on one storage whose spans each overlap another's, in the order of their addresses."""
    groups: list[list[_Member]] = []
    group_end = 0
    for member in sorted(members, key=itemgetter(0)):
        start, end, _, _ = member
        if start >= group_end:
            groups.append([])
        groups[-1].append(member)
        group_end = max(group_end, end)
    return groups


def pack(tensors: Sequence[torch.Tensor | Stack]) -> tuple[Index, list[BlockBytes]]:
    """Gather the bytes of the dense tensors of a message, all at once.

    Returns:
        The index of the tensors, which are numbered in this order, and the blocks, which keep the memory they show.
    """
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        small = _pack_only(tensors[0])
        if small is not None:
            return small
    return _Packer(tensors).pack()


def _pack_only(tensor: torch.Tensor) -> tuple[Index, list[BlockBytes]] | None:
    """The same for the only tensor of a message, if it is small, at the least cost."""
    layout, _, data_bytes, _, in_bulk = _measure(tensor.dtype, tensor.shape, tensor.stride())
    if not in_bulk or not 0 < data_bytes < MIN_BLOCK_BYTES:
        return None
    content = memoryview(ctypes.string_at(tensor.data_ptr(), data_bytes))
    return Index(1, [layout], [], [([], [(0, 0, [0])])], []), [content]


class _Packer:
    def __init__(self, tensors: Sequence[torch.Tensor | Stack]) -> None:
        self._tensors: list[Any] = list(tensors)
        self._geometries: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], _Geometry] = {}
        self._blocks: list[list[Place]] = []
        self._buffers: list[BlockBytes] = []
        self._small: list[tuple[int, int, list[Place]]] = []  # address, size in bytes, the tensors on it

    def pack(self) -> tuple[Index, list[BlockBytes]]:
        storages: dict[int, list[_Member]] = {}  # by the address of their first byte
        empty: list[tuple[int, int]] = []
        for number, tensor in enumerate(self._tensors):
            if type(tensor) is Stack:
                self._pack_stack(number, tensor.tensors)
                continue
            geometry = self._geometry(tensor.dtype, tensor.shape, tensor.stride())
            if geometry.data_bytes == 0:
                empty.append((number, geometry.number))
                continue
            start = tensor.data_ptr()
            first_byte = start - int(tensor.storage_offset()) * geometry.itemsize
            member = (start, start + geometry.span_bytes, number, geometry)
            storages.setdefault(first_byte, []).append(member)
        for members in storages.values():
            for group in _overlapping(members) if len(members) > 1 else [members]:
                self._pack_group(group)
        slabs = self._fill_slabs()
        layouts = [geometry.layout for geometry in self._geometries.values()]
        return Index(len(self._tensors), layouts, self._blocks, slabs, empty), self._buffers

    def _geometry(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> _Geometry:
        geometry = self._geometries.get((dtype, shape, strides))
        if geometry is None:
            geometry = _Geometry(len(self._geometries), dtype, shape, strides)
            self._geometries[dtype, shape, strides] = geometry
        return geometry

    def _pack_group(self, group: list[_Member]) -> None:
        """Make one region of tensors that overlap; without the sparse ones, if the others do not fill their gaps."""
        start, end, number, geometry = group[0]
        if len(group) == 1 and not geometry.is_sparse:
            if geometry.in_bulk and end - start < MIN_BLOCK_BYTES:
                geometry.run.append((start, number))
            else:
                self._pack_region(start, end, [(number, geometry.number, 0)])
            return
        end = max(end for _, end, _, _ in group)
        distinct: dict[tuple[int, _Geometry], list[int]] = {}
        for first, _, number, geometry in group:
            distinct.setdefault((first, geometry), []).append(number)
        if end - start <= 2 * sum(geometry.data_bytes for _, geometry in distinct):
            # Offsets in the storage are whole numbers of elements of the type: keep them so in the region.
            widest = max(group, key=lambda member: member[3].itemsize)
            start -= (start - widest[0]) % widest[3].itemsize
            places = [
                (number, geometry.number, (first - start) // geometry.itemsize) for first, _, number, geometry in group
            ]
            self._pack_region(start, end, places)
            return
        dense = _overlapping(member for member in group if not member[3].is_sparse)
        filled = [(part[0][0], max(end for _, end, _, _ in part)) for part in dense]
        left: list[_Member] = []
        for (first, geometry), numbers in distinct.items():
            last = first + geometry.span_bytes
            if geometry.is_sparse and not any(start <= first and last <= end for start, end in filled):
                self._pack_compact(numbers)
            else:
                left += [(first, last, number, geometry) for number in numbers]
        for part in _overlapping(left):
            self._pack_group(part)

    def _pack_compact(self, numbers: list[int]) -> None:
        """Send the elements of a tensor, which may have several numbers, without gaps."""
        tensor = self._tensors[numbers[0]]
        # In the order of its memory, so that a part of a channels-last image is channels-last.
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=strides.__getitem__, reverse=True)
        copy = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.ndim)])
        for number in numbers:
            self._tensors[number] = copy  # kept until its bytes are gathered
        start, geometry = copy.data_ptr(), self._geometry(copy.dtype, copy.shape, copy.stride())
        self._pack_region(start, start + geometry.span_bytes, [(number, geometry.number, 0) for number in numbers])

    def _pack_region(self, start: int, end: int, places: list[Place]) -> None:
        if end - start < MIN_BLOCK_BYTES:
            self._small.append((start, end - start, places))
            return
        self._blocks.append(places)
        self._buffers.append(_view(self._tensors[places[0][0]], start, end))

    def _pack_stack(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        shape = torch.Size((len(tensors), *tensors[0].shape))
        geometry = self._geometry(tensors[0].dtype, shape, _contiguous_strides(shape))
        self._blocks.append([(number, geometry.number, 0)])
        self._buffers.append(Pieces([_view_all(tensor) for tensor in tensors]))

    def _fill_slabs(self) -> list[SlabIndex]:
        slabs: list[_Slab] = []

        def slab_with_room(size_bytes: int) -> _Slab:
            if not slabs or slabs[-1].next_offset + size_bytes > MAX_SLAB_BYTES:
                slabs.append(_Slab())
            return slabs[-1]

        for address, size_bytes, places in self._small:
            slab = slab_with_room(size_bytes)
            slab.regions.append((slab.add([address], size_bytes), size_bytes, places))
        for geometry in self._geometries.values():
            size_bytes = geometry.data_bytes
            left = geometry.run
            while left:
                num_fitting = max(1, MAX_SLAB_BYTES // size_bytes)
                fitting, left = left[:num_fitting], left[num_fitting:]
                slab = slab_with_room(len(fitting) * size_bytes)
                offset = slab.add([address for address, _ in fitting], size_bytes)
                slab.runs.append((offset, geometry.number, [number for _, number in fitting]))
        self._buffers += [slab.gather() for slab in slabs]
        return [(slab.regions, slab.runs) for slab in slabs]


class _Slab:
    """A slab while it is being filled."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.runs: list[Run] = []
        self._size_bytes = 0
        self._moves: list[tuple[int, int, int]] = []  # offset in the slab, address, size in bytes

    @property
    def next_offset(self) -> int:
        return -(-self._size_bytes // _ALIGNMENT) * _ALIGNMENT

    def add(self, addresses: Sequence[int], size_bytes: int) -> int:
        """Take memory of one size from each address, without gaps between; returns the offset of the first."""
        first = offset = self.next_offset
        for address in addresses:
            self._moves.append((offset, address, size_bytes))
            offset += size_bytes
        self._size_bytes = offset
        return first

    def gather(self) -> memoryview:
        memory = bytearray(self._size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for offset, source, size_bytes in self._moves:
            _memmove(address + offset, source, size_bytes)
        return memoryview(memory)


def _view(tensor: torch.Tensor, start: int, end: int) -> memoryview:
    """The bytes between two addresses on the storage of ``tensor``; the view keeps the storage."""
    storage = tensor.untyped_storage()
    # Any dtype, shape and strides in 3 us; numpy() and view() of the tensor itself refuse many.
    alias = torch.empty(0, dtype=torch.uint8, device="cpu")
    alias.set_(storage, start - storage.data_ptr(), (end - start,), (1,))
    return alias.numpy().data


def _view_all(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor; the view keeps the tensor."""
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy().data  # a quarter of the time, and a batch may have hundreds of these
    start = tensor.data_ptr()
    return _view(tensor, start, start + tensor.nbytes)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
