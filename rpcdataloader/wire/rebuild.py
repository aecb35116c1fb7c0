"""Out-of-band bytes as tensors; ``tensors.py`` is the way there.

Tensors that did not share memory get a storage each, so that keeping, saving or resizing one does not touch another;
only more than 64 small ones in pinned memory share their slab, and those that go to a device. Tensors are made on the
storage of their block with ``set_``, never as views of one base: views share a version counter, and changing one in
place would make autograd refuse another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rpcdataloader.wire.frames import Buffer
from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.tensors import Index, Place, Region, SlabIndex

#: Up to this number of small tensors per message get their own pinned memory, which costs some microseconds each.
MAX_PINNED_COPIES = 64


def rebuild(
    index: Index, memory: Sequence[torch.Tensor], pinned: Allocator | None, *, in_place: bool = False
) -> list[torch.Tensor]:
    """Make the tensors of a message.

    Args:
        memory: Its blocks.
        pinned: Allocator of the blocks, if they are pinned, so that small tensors are, too. None for plain memory.
        in_place: True if all small tensors share their slab.
    """
    rebuilder = _Rebuilder(index)
    num_large = len(index.blocks)
    for block, places in zip(memory[:num_large], index.blocks, strict=True):
        rebuilder.place(block, 0, places)
    num_small = sum(map(_num_regions, index.slabs))
    for block, slab in zip(memory[num_large:], index.slabs, strict=True):
        if in_place or _num_regions(slab) == 1 or (pinned and num_small > MAX_PINNED_COPIES):
            rebuilder.share(block, slab)
        elif pinned:
            rebuilder.copy_to(pinned, block, slab)
        else:
            rebuilder.copy(block, slab)
    return rebuilder.tensors


def rebuild_inline(index: Index, content: Buffer, pinned: Allocator | None) -> list[torch.Tensor]:
    """The same for a message whose only slab came in its payload."""
    if not pinned and index.num_tensors == 1 and index.slabs[0][1]:
        # For a batch this small, this is most of the cost, and the view would be half of it.
        dtype, shape, _ = index.layouts[0]
        tensor = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
        return [(tensor if len(shape) == 1 else tensor.view(shape)).clone()]
    return rebuild(index, [inline_memory(content, pinned)], pinned)


def inline_memory(content: Buffer, pinned: Allocator | None) -> torch.Tensor:
    """The slab in the payload, as memory for tensors."""
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # A tensor over foreign memory cannot be resized.
    return pinned.allocate(len(content)).tensor.copy_(memory) if pinned else memory.clone()


def _num_regions(slab: SlabIndex) -> int:
    regions, runs = slab
    return len(regions) + sum(len(numbers) for _, _, numbers in runs)


class _Rebuilder:
    def __init__(self, index: Index) -> None:
        self._layouts = [(getattr(torch, dtype), shape, strides) for dtype, shape, strides in index.layouts]
        self.tensors: list[torch.Tensor] = [_NOT_YET] * index.num_tensors
        for number, layout in index.empty:
            dtype, shape, strides = self._layouts[layout]
            # torch.set_default_device may name another device, here and below.
            self.tensors[number] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")

    def place(self, memory: torch.Tensor, offset_bytes: int, places: list[Place]) -> None:
        """Make tensors on the storage of some memory."""
        storage = memory.untyped_storage()
        for number, layout, offset in places:
            dtype, shape, strides = self._layouts[layout]
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            self.tensors[number] = tensor.set_(storage, offset_bytes // dtype.itemsize + offset, shape, strides)

    def share(self, memory: torch.Tensor, slab: SlabIndex) -> None:
        """Leave the tensors where they were received."""
        for offset, _, places in self._regions(slab):
            self.place(memory, offset, places)

    def copy_to(self, allocator: Allocator, memory: torch.Tensor, slab: SlabIndex) -> None:
        """Give each region memory of the allocator."""
        for offset, size_bytes, places in self._regions(slab):
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

    def _regions(self, slab: SlabIndex) -> Iterator[Region]:
        """All regions, those of runs included."""
        regions, runs = slab
        yield from regions
        for offset, layout, numbers in runs:
            dtype, shape, _ = self._layouts[layout]
            size_bytes = dtype.itemsize * math.prod(shape)
            for i, number in enumerate(numbers):
                yield offset + i * size_bytes, size_bytes, [(number, layout, 0)]


_NOT_YET = torch.empty(0, device="cpu")  # fills the list until each tensor is made


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
        self._memory: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._fixed: set[int] = set()  # ids of those that stay

    def rebuild(self, index: Index, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the tensors of the message on the blocks themselves, the small ones on their slabs."""
        self._memory, self._tensors = list(memory), rebuild(index, memory, None, in_place=True)
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
        used = {_storage_of(tensor) for tensor in self._tensors if id(tensor) not in self._fixed}
        return [block for block in self._memory if _storage_of(block) in used]

    def move(self, copies: Sequence[torch.Tensor], device: torch.device) -> None:
        """Move the tensors to copies of :attr:`blocks`, and drop the blocks."""
        copied = {_storage_of(block): copy for block, copy in zip(self.blocks, copies, strict=True)}
        for tensor in self._tensors:
            if id(tensor) in self._fixed:
                continue
            copy = copied.get(_storage_of(tensor))
            if copy is None and tensor.numel():  # user code gave it other memory
                tensor.data = tensor.data.to(device)
            elif copy is None:
                tensor.data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            else:
                moved = torch.empty(0, dtype=tensor.dtype, device=device)
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = moved.set_(copy.untyped_storage(), *place)
        self._memory, self._tensors, self._fixed = [], [], set()


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
