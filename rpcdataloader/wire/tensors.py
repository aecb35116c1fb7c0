"""Dense CPU tensors as out-of-band bytes, and back.

A tensor is a span of bytes plus a layout: dtype, shape, strides. A span of 64 KiB or more is a block of its own and is
never copied by the sender; smaller ones are gathered into *slabs*. A tensor with gaps between its elements, such as a
column of a matrix, is first copied without them, in the order of its memory.

The receiver makes tensors on the storage of their block, never as views of one base: views share a version counter, and
changing one in place would make autograd refuse another. Small tensors are copied out of their slab, so that keeping,
saving or resizing one does not touch another. In pinned memory and on a device they stay there.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rpcdataloader.wire.frames import Buffer

#: Tensors of this size travel alone, without a copy. Below it, gathering costs less than one more block.
MIN_BLOCK_BYTES = 1 << 16

#: Keeping one small tensor keeps at most this much memory, if small tensors share a slab at all.
MAX_SLAB_BYTES = 1 << 20

# Alignment of runs in a slab: the largest element, complex128, has 16 bytes.
_ALIGNMENT = 16

# Types that torch copies by the thousand; others (float8, bits) are copied as plain bytes, one by one.
_BULK_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
_BULK_DTYPES |= {torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128}

# ctypes.memmove releases the GIL; beside a busy thread, each of thousands of releases may cost a switch interval.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

# Named dimensions ended with torch 2.12.
_has_names = getattr(torch.Tensor, "has_names", None)

# dtype, shape, strides; no strides for the usual ones of a type that torch copies by the thousand.
Layout = tuple[str, tuple[int, ...], tuple[int, ...] | None]

# Tensors of one layout, without gaps between them: offset in the slab, size of each in bytes, layout, numbers.
Run = tuple[int, int, int, list[int]]


class Index(NamedTuple):
    """The receiver's instructions to rebuild the tensors of a message. Tensors are numbered in the pickler's order."""

    num_tensors: int
    layouts: list[Layout]  # the different layouts, to which the rest refers by position
    large: list[tuple[int, int]]  # number and layout of each tensor that is a block
    slabs: list[list[Run]]  # contents of each slab; slabs are the blocks after those


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


@functools.lru_cache(maxsize=4096)
def _measure(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> tuple[Layout, int, bool]:
    """The layout, the size of its span in bytes, and whether that has gaps."""
    count = math.prod(shape)
    num_spanned = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if count else 0
    usual = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    is_usual = dtype in _BULK_DTYPES and strides == usual and count > 0
    layout = str(dtype).removeprefix("torch."), tuple(shape), None if is_usual else strides
    return layout, num_spanned * dtype.itemsize, num_spanned > count


def pack(tensors: Sequence[torch.Tensor]) -> tuple[Index, list[memoryview]]:
    """Gather the bytes of the dense tensors of a message, all at once.

    Returns:
        The index of the tensors, which are numbered in this order, and the blocks, which keep the memory they show.
    """
    if len(tensors) == 1:
        tensor = tensors[0]
        layout, size_bytes, _ = _measure(tensor.dtype, tensor.shape, tensor.stride())
        if layout[2] is None and size_bytes < MIN_BLOCK_BYTES:  # at the least cost
            content = memoryview(ctypes.string_at(tensor.data_ptr(), size_bytes))
            return Index(1, [layout], [], [[(0, size_bytes, 0, [0])]]), [content]
    return _pack(tensors)


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[Index, list[memoryview]]:
    places: dict[Layout, int] = {}
    large: list[tuple[int, int]] = []
    buffers: list[memoryview] = []
    copies: list[torch.Tensor] = []  # kept until their bytes are gathered
    small: dict[tuple[int, int], list[tuple[int, int]]] = {}  # address and number, by place of the layout and size
    for number, tensor in enumerate(tensors):
        layout, size_bytes, has_gaps = _measure(tensor.dtype, tensor.shape, tensor.stride())
        if has_gaps:
            tensor = tensor.clone()  # in the order of its memory: a part of a channels-last image is channels-last
            copies.append(tensor)
            layout, size_bytes, _ = _measure(tensor.dtype, tensor.shape, tensor.stride())
        place = places.setdefault(layout, len(places))
        if size_bytes < MIN_BLOCK_BYTES:
            small.setdefault((place, size_bytes), []).append((tensor.data_ptr(), number))
        else:
            large.append((number, place))
            buffers.append(_view(tensor, size_bytes))
    slabs: list[list[Run]] = []
    for runs, content in _gather(small):
        slabs.append(runs)
        buffers.append(content)
    return Index(len(tensors), list(places), large, slabs), buffers


def _gather(small: Mapping[tuple[int, int], list[tuple[int, int]]]) -> Iterator[tuple[list[Run], memoryview]]:
    """Copy small tensors together; yields slabs with their contents."""
    runs: list[Run] = []
    moves: list[tuple[int, int, int]] = []  # offset in the slab, address, size in bytes
    end = 0
    for (place, size_bytes), members in small.items():
        num_fitting = max(1, MAX_SLAB_BYTES // max(1, size_bytes))
        for first in range(0, len(members), num_fitting):
            run = members[first : first + num_fitting]
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            if runs and offset + len(run) * size_bytes > MAX_SLAB_BYTES:
                yield runs, _copy_all(moves, end)
                runs, moves, offset = [], [], 0
            end = offset + len(run) * size_bytes
            moves += [(offset + i * size_bytes, address, size_bytes) for i, (address, _) in enumerate(run)]
            runs.append((offset, size_bytes, place, [number for _, number in run]))
    if runs:
        yield runs, _copy_all(moves, end)


def _copy_all(moves: list[tuple[int, int, int]], size_bytes: int) -> memoryview:
    # Tensors without elements need some memory, too.
    memory = bytearray(size_bytes or 1)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for offset, address, size in moves:
        _memmove(start + offset, address, size)
    return memoryview(memory)


def _view(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    """The bytes of a tensor; the view keeps its storage."""
    return _array(tensor, size_bytes).data  # type: ignore[no-any-return]


def _array(tensor: torch.Tensor, size_bytes: int) -> Any:
    # Any dtype, shape and strides in 3 us; numpy() and view() of the tensor itself refuse many.
    alias = torch.empty(0, dtype=torch.uint8, device="cpu")
    alias.set_(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, (size_bytes,), (1,))
    return alias.numpy()


def span_of(tensor: torch.Tensor) -> tuple[Layout, Any]:
    """The layout of a dense tensor, and its bytes as an array: for a tensor that is not packed with others."""
    layout, size_bytes, has_gaps = _measure(tensor.dtype, tensor.shape, tensor.stride())
    if has_gaps:
        return span_of(tensor.clone())
    return layout, _array(tensor, size_bytes)


def plan(shapes: Sequence[tuple[torch.dtype, Sequence[int]]]) -> tuple[Index, list[int]]:
    """The index of contiguous tensors that are still to be filled, as of a message, and the sizes of its blocks."""
    layouts: list[Layout] = []
    large: list[tuple[int, int]] = []
    slabs: list[list[Run]] = []
    ends: list[int] = []  # of the slabs
    sizes: list[int] = []
    for number, (dtype, shape) in enumerate(shapes):
        strides = tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        layout, size_bytes, _ = _measure(dtype, torch.Size(shape), strides)
        layouts.append(layout)
        if size_bytes >= MIN_BLOCK_BYTES:
            large.append((number, number))
            sizes.append(size_bytes)
            continue
        offset = -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT if ends else 0
        if not ends or offset + size_bytes > MAX_SLAB_BYTES:
            slabs.append([])
            ends.append(offset := 0)
        slabs[-1].append((offset, size_bytes, number, [number]))
        ends[-1] = offset + size_bytes
    return Index(len(shapes), layouts, large, slabs), sizes + ends


def place(memory: torch.Tensor, layout: Layout, offset_bytes: int = 0) -> torch.Tensor:
    """Make a tensor of that layout on the storage of its block."""
    dtype, shape, strides = layout
    return _place(memory, offset_bytes, (getattr(torch, dtype), shape, strides))


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where in memory a tensor is, and how: equal for two that cannot be told apart by their content."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def find_views(tensors: Sequence[torch.Tensor]) -> dict[tuple[Any, ...], tuple[torch.Tensor, Layout, int]]:
    """Those dense tensors that have elements in common, such as a tensor and a part of it, by :func:`place_of`.

    Of each, the memory of them all as bytes, the layout, and the offset there. Not of those that leave out more of that
    memory than they have in common, such as a few columns of a wide matrix.
    """
    spans: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
    for tensor in tensors:
        if size_bytes := _measure(tensor.dtype, tensor.shape, tensor.stride())[1]:
            start = tensor.data_ptr()
            spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, start + size_bytes, tensor))
    views: dict[tuple[Any, ...], tuple[torch.Tensor, Layout, int]] = {}
    for found in spans.values():
        found.sort(key=lambda span: span[:2])
        for start, end, members in _overlapping(found):
            if sum(each.numel() * each.itemsize for each in members) > end - start:
                views.update(_views_of(members, start, end))
    return views


def _overlapping(spans: Sequence[tuple[int, int, torch.Tensor]]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yield those of the sorted spans that overlap, two or more at a time, with what they span together."""
    first, last, members = 0, 0, list[torch.Tensor]()
    for start, end, tensor in [*spans, (sys.maxsize, sys.maxsize, _NOT_YET)]:
        if start >= last:
            if len(members) > 1:
                yield first, last, members
            first, members = start, []
        last = max(last, end)
        members.append(tensor)


def _views_of(
    tensors: Sequence[torch.Tensor], start: int, end: int
) -> Iterator[tuple[tuple[Any, ...], tuple[torch.Tensor, Layout, int]]]:
    storage = max((tensor.untyped_storage() for tensor in tensors), key=len)
    offset = (start - storage.data_ptr()) // _ALIGNMENT * _ALIGNMENT  # a multiple of the size of each element
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    memory.set_(storage, offset, (end - storage.data_ptr() - offset,), (1,))
    for tensor in tensors:
        layout = _measure(tensor.dtype, tensor.shape, tensor.stride())[0]
        yield place_of(tensor), (memory, layout, tensor.data_ptr() - memory.data_ptr())


def rebuild(index: Index, memory: Sequence[torch.Tensor], *, in_place: bool = False) -> list[torch.Tensor]:
    """Make the tensors of a message.

    Args:
        memory: Its blocks.
        in_place: True if small tensors stay in their slab.
    """
    return _make(index, memory, _own_run if in_place else _copy_run)


def _make(
    index: Index, memory: Sequence[torch.Tensor], make_run: Callable[..., Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    layouts = [(getattr(torch, dtype), shape, strides) for dtype, shape, strides in index.layouts]
    tensors = [_NOT_YET] * index.num_tensors
    num_large = len(index.large)
    for block, (number, layout) in zip(memory[:num_large], index.large, strict=True):
        tensors[number] = _place(block, 0, layouts[layout])
    for slab, runs in zip(memory[num_large:], index.slabs, strict=True):
        for offset, size_bytes, layout, numbers in runs:
            if len(runs) == len(numbers) == 1:  # alone in its slab
                tensors[numbers[0]] = _place(slab, offset, layouts[layout])
                continue
            made = make_run(slab, offset, size_bytes, layouts[layout], len(numbers))
            for number, tensor in zip(numbers, made, strict=True):
                tensors[number] = tensor
    return tensors


def rebuild_only(index: Index, content: Buffer) -> torch.Tensor:
    """The same for the only tensor of a message, whose bytes came in its payload, at the least cost."""
    dtype, shape, strides = index.layouts[index.slabs[0][0][2]]
    if strides is not None:
        return rebuild(index, [torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()])[0]
    # A view would be half of the cost, and a tensor over foreign memory cannot be resized.
    tensor = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
    return (tensor if len(shape) == 1 else tensor.view(shape)).clone()


def _place(memory: torch.Tensor, offset_bytes: int, layout: tuple[Any, ...]) -> torch.Tensor:
    """A tensor on the storage of some memory."""
    dtype, shape, strides = layout
    # torch.set_default_device may name another device, here and below.
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    first = memory.storage_offset() + offset_bytes
    return tensor.set_(memory.untyped_storage(), first // dtype.itemsize, shape, strides or ())


# Nearly every call of torch releases the GIL, which beside busy threads costs far more than the call: so a run of 2,000
# takes as few calls as one of 2. To assign a tensor's ``data`` does not release it.


def _show_run(
    slab: torch.Tensor, offset: int, size_bytes: int, layout: tuple[Any, ...], count: int
) -> Sequence[torch.Tensor]:
    """Views of a slab."""
    dtype, shape, strides = layout
    if strides is not None:
        return [_place(slab, offset + i * size_bytes, layout) for i in range(count)]
    return _place(slab, offset, (dtype, (count, *shape), None)).unbind()


def _own_run(
    slab: torch.Tensor, offset: int, size_bytes: int, layout: tuple[Any, ...], count: int
) -> Sequence[torch.Tensor]:
    """Tensors on the storage of a slab, each with a version counter of its own."""
    views = _show_run(slab, offset, size_bytes, layout, count)
    tensors: Any = torch.unbind_copy(torch.empty((count, 0), device="cpu"))  # type: ignore[func-returns-value]  # a wrong stub
    for tensor, view in zip(tensors, views, strict=True):
        tensor.data = view
    return tensors  # type: ignore[no-any-return]


def _copy_run(
    slab: torch.Tensor, offset: int, size_bytes: int, layout: tuple[Any, ...], count: int
) -> Sequence[torch.Tensor]:
    """Tensors in memory of their own."""
    dtype, shape, strides = layout
    if strides is None:
        rows = _place(slab, offset, (dtype, (count, *shape), None))
    else:
        rows = _place(slab, offset, (torch.uint8, (count, size_bytes), None))
    copies: Any = torch.unbind_copy(rows)  # type: ignore[func-returns-value]  # a wrong stub
    return copies if strides is None else [_place(copy, 0, layout) for copy in copies]


_NOT_YET = torch.empty(0, device="cpu")  # fills the list until each tensor is made


class Movable:
    """The dense tensors of a message, which get other memory after unpickling: a GPU's.

    A message is unpickled over the blocks as received, so that its classes work with tensors in plain memory meanwhile.
    Each block is copied as a whole. Every tensor then gets the same place in the copy as in the block, and stays the
    same object, wherever in the batch it is.

    ``loads`` fills it. Not thread-safe, and used once.

    Attributes:
        blocks: The blocks to copy.
    """

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self._index = Index(0, [], [], [])
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[Any, ...]] = []

    def rebuild(self, index: Index, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the tensors of the message on the blocks themselves, the small ones on their slabs."""
        self.blocks, self._index, self._tensors = list(memory), index, rebuild(index, memory, in_place=True)
        self._places = [place_of(tensor) for tensor in self._tensors]
        return self._tensors

    def move(self, copies: Sequence[torch.Tensor], device: torch.device) -> None:
        """Move the tensors to copies of :attr:`blocks`, and drop the blocks."""
        moved = _make(self._index, copies, _show_run)
        for tensor, place, target in zip(self._tensors, self._places, moved, strict=True):
            # User code may have given it other memory, or another shape.
            tensor.data = target if place_of(tensor) == place else tensor.data.to(device)
        self.blocks, self._tensors = [], []
