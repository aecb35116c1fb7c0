"""Out-of-band bytes as tensors; ``tensors.py`` is the way there.

Tensors that did not share memory get a storage each, so that keeping, saving or resizing one does not touch another;
only more than 64 small ones in pinned memory share their slab, and those that go to a device. Tensors are made on the
storage of their block with ``set_``, never as views of one base: views share a version counter, and changing one in
place would make autograd refuse another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcdataloader.wire.buffers import Buffer
from rpcdataloader.wire.picklers import Unpickler, make_packed_sequence
from rpcdataloader.wire.slabs import Allocator, PageablePool
from rpcdataloader.wire.tensors import Index, Layout, Place, Region, Run, SlabIndex

#: Up to this number of small tensors per message get their own pinned memory, which costs some microseconds each.
MAX_PINNED_COPIES = 64


def rebuild(index: Index, memory: Sequence[torch.Tensor], allocator: Allocator | None) -> list[torch.Tensor]:
    """Make the tensors of a message.

    Args:
        allocator: Allocator of the blocks, and of small tensors, so that pinned stays pinned. None for plain memory.
    """
    rebuilder = _Rebuilder(index.layouts, index.num_tensors)
    num_large = len(index.blocks)
    for block, places in zip(memory[:num_large], index.blocks, strict=True):
        rebuilder.place(block, 0, places)
    num_small = sum(map(_num_regions, index.slabs))
    for block, slab in zip(memory[num_large:], index.slabs, strict=True):
        if _num_regions(slab) == 1:
            rebuilder.share(block, slab)
        elif allocator is None or isinstance(allocator, PageablePool):
            rebuilder.copy(block, slab)
        elif num_small <= MAX_PINNED_COPIES:
            rebuilder.copy_to(allocator, block, slab)
        else:
            rebuilder.share(block, slab)
    rebuilder.make_empty(index.empty, torch.device("cpu"))
    return rebuilder.tensors


def rebuild_in_place(index: Index, memory: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Make the tensors of a message on its blocks; small ones then share their slab.

    Args:
        memory: Its blocks, on any device.
        device: Device of tensors without elements.
    """
    rebuilder = _Rebuilder(index.layouts, index.num_tensors)
    num_large = len(index.blocks)
    for block, places in zip(memory[:num_large], index.blocks, strict=True):
        rebuilder.place(block, 0, places)
    for block, slab in zip(memory[num_large:], index.slabs, strict=True):
        rebuilder.share(block, slab)
    rebuilder.make_empty(index.empty, device)
    return rebuilder.tensors


def rebuild_inline(index: Index, content: Buffer, allocator: Allocator | None) -> list[torch.Tensor]:
    """The same for a message whose only slab came in its payload."""
    is_plain = allocator is None or isinstance(allocator, PageablePool)
    if is_plain and index.num_tensors == 1 and index.slabs[0][1]:
        # For a batch this small, this is most of the cost, and the view would be half of it.
        dtype, shape, _ = index.layouts[0]
        tensor = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
        return [(tensor if len(shape) == 1 else tensor.view(shape)).clone()]
    return rebuild(index, [inline_memory(content, allocator)], allocator)


def inline_memory(content: Buffer, allocator: Allocator | None) -> torch.Tensor:
    """The slab in the payload, as memory for tensors."""
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if allocator is None or isinstance(allocator, PageablePool):
        # A tensor over foreign memory cannot be resized.
        return memory.clone()
    return allocator.allocate(len(content)).tensor.copy_(memory)


def _num_regions(slab: SlabIndex) -> int:
    regions, runs = slab
    return len(regions) + sum(len(numbers) for _, _, numbers in runs)


class _Rebuilder:
    def __init__(self, layouts: list[Layout], num_tensors: int) -> None:
        self._layouts = [(getattr(torch, dtype), shape, strides) for dtype, shape, strides in layouts]
        self.tensors: list[torch.Tensor] = [_NOT_YET] * num_tensors

    def place(self, memory: torch.Tensor, offset_bytes: int, places: list[Place]) -> None:
        """Make tensors on the storage of some memory."""
        storage, device = memory.untyped_storage(), memory.device
        for number, layout, offset in places:
            dtype, shape, strides = self._layouts[layout]
            tensor = torch.empty(0, dtype=dtype, device=device)  # torch.set_default_device may name another
            self.tensors[number] = tensor.set_(storage, offset_bytes // dtype.itemsize + offset, shape, strides)

    def share(self, memory: torch.Tensor, slab: SlabIndex) -> None:
        """Leave the tensors where they were received."""
        for offset, _, places in self._all_regions(slab):
            self.place(memory, offset, places)

    def copy_to(self, allocator: Allocator, memory: torch.Tensor, slab: SlabIndex) -> None:
        """Give each region memory of the allocator."""
        for offset, size_bytes, places in self._all_regions(slab):
            own = allocator.allocate(size_bytes).tensor
            self.place(own.copy_(memory[offset : offset + size_bytes]), 0, places)

    def copy(self, memory: torch.Tensor, slab: SlabIndex) -> None:
        """Give each region plain memory, with the same few calls for a run of 2 or 2,000."""
        regions, runs = slab
        for offset, size_bytes, places in regions:
            self.place(memory[offset : offset + size_bytes].clone(), 0, places)
        storage = memory.untyped_storage()
        for offset, layout, numbers in runs:
            dtype, shape, strides = self._layouts[layout]
            stacked = torch.empty(0, dtype=dtype, device="cpu")
            first = offset // dtype.itemsize
            stacked.set_(storage, first, (len(numbers), *shape), (math.prod(shape), *strides))
            copies: Any = torch.unbind_copy(stacked)  # type: ignore[func-returns-value]  # a wrong stub
            for number, tensor in zip(numbers, copies, strict=True):
                self.tensors[number] = tensor

    def make_empty(self, empty: list[tuple[int, int]], device: torch.device) -> None:
        """Make the tensors without elements."""
        for number, layout in empty:
            dtype, shape, strides = self._layouts[layout]
            self.tensors[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)

    def _all_regions(self, slab: SlabIndex) -> list[Region]:
        regions, runs = slab
        return regions + [region for run in runs for region in self._regions(run)]

    def _regions(self, run: Run) -> list[Region]:
        offset, layout, numbers = run
        dtype, shape, _ = self._layouts[layout]
        size_bytes = dtype.itemsize * math.prod(shape)
        return [(offset + i * size_bytes, size_bytes, [(number, layout, 0)]) for i, number in enumerate(numbers)]


_NOT_YET = torch.empty(0, device="cpu")  # fills the list until each tensor is made


_CPU = torch.device("cpu")


class Movable:
    """The dense tensors of a message, which get other memory after unpickling: a GPU's.

    A message is unpickled over the blocks as received, so that its classes work with tensors in plain memory meanwhile.
    Each block is copied as a whole. Every tensor then gets the same place in the copy as in the block, and stays the
    same object, wherever in the batch it is.

    A tensor of another kind (sparse, nested, of a subclass) that torch makes from tensors would not notice. So such a
    tensor and its parts stay where they are.

    ``loads`` fills it. Not thread-safe, and used once.
    """

    def __init__(self) -> None:
        self._index: Index | None = None
        self._memory: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._fixed: set[int] = set()  # ids of those that stay

    def rebuild(self, index: Index, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the tensors of the message on the blocks themselves, the small ones on their slabs."""
        self._index, self._memory = index, list(memory)
        self._tensors = rebuild_in_place(index, self._memory, _CPU)
        return self._tensors

    def fix(self, value: Any) -> None:
        """Leave tensors where they are: ``value``, or those in it if it is a container."""
        if isinstance(value, torch.Tensor):
            self._fixed.add(id(value))
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.fix(item)
        elif isinstance(value, dict):
            self.fix(tuple(value.values()))

    @property
    def blocks(self) -> list[torch.Tensor]:
        """The blocks to copy: those with a tensor that moves."""
        return [self._memory[position] for position in self._moving()]

    def move(self, copies: Sequence[torch.Tensor], device: torch.device) -> None:
        """Move the tensors to copies of :attr:`blocks`, and drop the blocks."""
        if self._index is None:
            return
        memory = list(self._memory)
        for position, copy in zip(self._moving(), copies, strict=True):
            memory[position] = copy
        for tensor, moved in zip(self._tensors, rebuild_in_place(self._index, memory, device), strict=True):
            if id(tensor) not in self._fixed:
                tensor.data = moved
        self._index, self._memory, self._tensors, self._fixed = None, [], [], set()

    def _moving(self) -> list[int]:
        if self._index is None or not self._fixed:
            return list(range(len(self._memory)))
        return [
            position
            for position, numbers in enumerate(_numbers_by_block(self._index))
            if any(id(self._tensors[number]) not in self._fixed for number in numbers)
        ]


def _numbers_by_block(index: Index) -> list[list[int]]:
    """The tensors on each block."""
    found = [[number for number, _, _ in places] for places in index.blocks]
    for regions, runs in index.slabs:
        numbers = [number for _, _, places in regions for number, _, _ in places]
        found.append(numbers + [number for _, _, run in runs for number in run])
    return found


class MovableUnpickler(Unpickler):
    """Notes which tensors must stay.

    Attributes:
        movable: Receiver of the notes; set before ``load``.
    """

    movable: Movable

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is make_packed_sequence:
            # The CPU reads the sizes; torch refuses others.
            return functools.partial(_call_with_fixed, self.movable, found, slice(1, 2))
        if module.startswith("torch.") and name.startswith("_rebuild"):
            return functools.partial(_call_with_fixed, self.movable, found, slice(None))
        return found


# Not a method: the unpickler remembers the functions it has found, and would refer to itself.
def _call_with_fixed(movable: Movable, function: Callable[..., Any], which: slice, *args: Any) -> Any:
    movable.fix(args[which])
    return function(*args)
