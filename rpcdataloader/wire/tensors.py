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
from collections.abc import Sequence
from dataclasses import dataclass, field
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

# Types that torch copies by the thousand; others (float8, bits) are copied as plain bytes, one by one.
_BULK_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16}
_BULK_DTYPES |= {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}

# Types that numpy and memoryview turn into bytes.
_NUMPY_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}

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
    """The receiver's instructions to rebuild the tensors of a message. Tensors are numbered in the pickler's order.

    Attributes:
        layouts: The different layouts, to which the rest refers by position.
        blocks: Tensors of each region that is a block of its own.
        slabs: Contents of each slab; slabs are the blocks after those. *Regions* hold any tensors, also several that
            share memory. *Runs* are contiguous tensors of equal layout, each with its own memory, without gaps between
            them: there may be thousands, and the receiver copies them with a few calls.
        empty: Tensors without elements, and the layout of each.
    """

    num_tensors: int
    layouts: list[Layout]
    blocks: list[list[Place]]
    slabs: list[SlabIndex]
    empty: list[tuple[int, int]]


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


@dataclass(slots=True, eq=False)
class _Geometry:
    """A layout of a message, with the sender's derived values and the small tensors that have it."""

    number: int
    itemsize: int
    data_bytes: int
    span_bytes: int
    is_sparse: bool  # most of the span is gaps: a column of a matrix, every tenth row
    in_bulk: bool
    run: list[tuple[int, int]] = field(default_factory=list)  # address, number


@functools.lru_cache(maxsize=4096)
def _measure(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int, int, bool, bool]:
    itemsize = dtype.itemsize
    data_bytes = math.prod(shape) * itemsize
    span_bytes = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * itemsize
    in_bulk = dtype in _BULK_DTYPES and strides == _contiguous_strides(shape)
    return itemsize, data_bytes, span_bytes, span_bytes > 2 * data_bytes, in_bulk


def _layout(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Layout:
    return str(dtype).removeprefix("torch."), tuple(shape), strides


# One tensor in its storage: address of its first byte and behind its last, number.
_Member = tuple[int, int, int, _Geometry]


@dataclass(slots=True, eq=False)
class _Group:
    """Tensors on one storage, whose spans each overlap another's."""

    start: int  # address of the first byte
    end: int  # address behind the last byte
    members: list[_Member]

    @property
    def is_filled(self) -> bool:
        """Whether data fill at least half of the bytes."""
        data_bytes = {(start, geometry.number): geometry.data_bytes for start, _, _, geometry in self.members}
        return self.end - self.start <= 2 * sum(data_bytes.values())


def _overlapping(members: list[_Member]) -> list[_Group]:
    groups: list[_Group] = []
    for member in sorted(members, key=itemgetter(0)):
        start, end, _, _ = member
        if groups and start < groups[-1].end:
            groups[-1].end = max(groups[-1].end, end)
            groups[-1].members.append(member)
        else:
            groups.append(_Group(start, end, [member]))
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
    _, data_bytes, _, _, in_bulk = _measure(tensor.dtype, tensor.shape, tensor.stride())
    if not in_bulk or not 0 < data_bytes < MIN_BLOCK_BYTES:
        return None
    layout = _layout(tensor.dtype, tensor.shape, tensor.stride())
    content = memoryview(ctypes.string_at(tensor.data_ptr(), data_bytes))
    return Index(1, [layout], [], [([], [(0, 0, [0])])], []), [content]


class _Packer:
    def __init__(self, tensors: Sequence[torch.Tensor | Stack]) -> None:
        self._num_tensors = len(tensors)
        self._tensors = {number: tensor for number, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)}
        self._stacks = {number: stack for number, stack in enumerate(tensors) if isinstance(stack, Stack)}
        self._layouts: list[Layout] = []
        self._geometries: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], _Geometry] = {}
        self._blocks: list[list[Place]] = []
        self._buffers: list[BlockBytes] = []
        self._small: list[tuple[int, int, list[Place]]] = []  # address, size in bytes, the tensors on it
        self._empty: list[tuple[int, int]] = []

    def pack(self) -> tuple[Index, list[BlockBytes]]:
        storages: dict[int, list[_Member]] = {}  # by the address of their first byte
        for number, tensor in self._tensors.items():
            geometry = self._geometry(tensor.dtype, tensor.shape, tensor.stride())
            if geometry.data_bytes == 0:
                self._empty.append((number, geometry.number))
                continue
            start = tensor.data_ptr()
            first_byte = start - int(tensor.storage_offset()) * geometry.itemsize
            member = (start, start + geometry.span_bytes, number, geometry)
            storages.setdefault(first_byte, []).append(member)
        for first_byte, members in storages.items():
            if len(members) == 1:
                self._pack_alone(members[0])
            else:
                self._pack_storage(first_byte, members)
        for number, stack in self._stacks.items():
            self._pack_stack(number, stack.tensors)
        slabs = self._fill_slabs()
        return Index(self._num_tensors, self._layouts, self._blocks, slabs, self._empty), self._buffers

    def _geometry(self, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> _Geometry:
        geometry = self._geometries.get((dtype, shape, strides))
        if geometry is None:
            geometry = _Geometry(len(self._layouts), *_measure(dtype, shape, strides))
            self._geometries[dtype, shape, strides] = geometry
            self._layouts.append(_layout(dtype, shape, strides))
        return geometry

    def _pack_alone(self, member: _Member) -> None:
        start, end, number, geometry = member
        if geometry.is_sparse:
            self._pack_compact([number])
        elif geometry.in_bulk and end - start < MIN_BLOCK_BYTES:
            geometry.run.append((start, number))
        else:
            self._pack_region(start, end, [(number, geometry.number, 0)])

    def _pack_storage(self, first_byte: int, members: list[_Member]) -> None:
        """Make one region of each group of overlapping spans in one storage."""
        for group in _overlapping(members):
            if group.is_filled:
                self._pack_group(first_byte, group)
            else:
                self._pack_scattered(first_byte, group.members)

    def _pack_scattered(self, first_byte: int, members: list[_Member]) -> None:
        """Send sparse spans compact, unless other tensors fill their gaps anyway."""
        groups = _overlapping([member for member in members if not member[3].is_sparse])
        compact: dict[tuple[int, int], list[int]] = {}
        for member in members:
            start, end, number, geometry = member
            if not geometry.is_sparse:
                continue
            for group in groups:
                if group.start <= start and end <= group.end:
                    group.members.append(member)
                    break
            else:
                compact.setdefault((start, geometry.number), []).append(number)
        for numbers in compact.values():
            self._pack_compact(numbers)
        for group in groups:
            self._pack_group(first_byte, group)

    def _pack_group(self, first_byte: int, group: _Group) -> None:
        if len(group.members) == 1:
            self._pack_alone(group.members[0])
            return
        group_start = group.start
        if len({geometry.itemsize for _, _, _, geometry in group.members}) > 1:
            # Offsets in the storage are whole numbers of elements of the type: keep them so in the region.
            group_start -= (group_start - first_byte) % _ALIGNMENT
        places = [
            (number, geometry.number, (start - group_start) // geometry.itemsize)
            for start, _, number, geometry in group.members
        ]
        self._pack_region(group_start, group.end, places)

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
            slab_with_room(size_bytes).add_region(address, size_bytes, places)
        for geometry in self._geometries.values():
            left = geometry.run
            while left:
                left = slab_with_room(geometry.data_bytes).add_run(geometry, left)
        self._buffers += [slab.gather() for slab in slabs]
        return [slab.index for slab in slabs]


class _Slab:
    """A slab while it is being filled."""

    def __init__(self) -> None:
        self.index: SlabIndex = ([], [])
        self._size_bytes = 0
        self._moves: list[tuple[int, int, int]] = []  # offset in the slab, address, size in bytes

    @property
    def next_offset(self) -> int:
        return -(-self._size_bytes // _ALIGNMENT) * _ALIGNMENT

    def add_region(self, address: int, size_bytes: int, places: list[Place]) -> None:
        offset = self.next_offset
        self.index[0].append((offset, size_bytes, places))
        self._moves.append((offset, address, size_bytes))
        self._size_bytes = offset + size_bytes

    def add_run(self, geometry: _Geometry, run: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Add as much of a run as fits, and return the rest."""
        offset, size_bytes = self.next_offset, geometry.data_bytes
        num_fitting = (MAX_SLAB_BYTES - offset) // size_bytes
        fitting, rest = run[:num_fitting], run[num_fitting:]
        self.index[1].append((offset, geometry.number, [number for _, number in fitting]))
        for address, _ in fitting:
            self._moves.append((offset, address, size_bytes))
            offset += size_bytes
        self._size_bytes = offset
        return rest

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
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
