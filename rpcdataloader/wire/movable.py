"""The tensors of a message, which get other memory after it was unpickled: that of a GPU.

A message is unpickled over the blocks as they were received, so that whatever its classes do then, they do with
tensors in plain memory. Each block is copied as a whole. Every tensor is then given the place in the copy that it has
in the block, and stays the same object, wherever in the batch it is.

What torch makes of tensors when it unpickles a tensor of another kind (sparse, nested, of a subclass) would not notice.
So such a tensor stays where it is, and so do its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcdataloader.wire.picklers import Unpickler, make_packed_sequence
from rpcdataloader.wire.rebuild import rebuild_in_place
from rpcdataloader.wire.tensors import Index

_CPU = torch.device("cpu")


class Movable:
    """The dense tensors of one message. ``loads`` fills it in. Not thread-safe, and used once."""

    def __init__(self) -> None:
        self._index: Index | None = None
        self._memory: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._fixed: set[int] = set()  # ids of those that stay

    def rebuild(self, index: Index, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Make the tensors of the message on the blocks themselves, the small ones on their slabs.

        Args:
            index: Of the message.
            memory: Its blocks, as received, each as a ``uint8`` tensor of its own storage.
        """
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
        """What is to be copied: the blocks with a tensor that moves."""
        return [self._memory[position] for position in self._moving()]

    def move(self, copies: Sequence[torch.Tensor], device: torch.device) -> None:
        """Let the tensors lie on copies of :attr:`blocks`, and the blocks go."""
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
        movable: Told of them; set before ``load``.
    """

    movable: Movable

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is make_packed_sequence:
            # The sizes are read by the CPU; torch refuses others.
            return functools.partial(_call_with_fixed, self.movable, found, slice(1, 2))
        if module.startswith("torch.") and name.startswith("_rebuild"):
            return functools.partial(_call_with_fixed, self.movable, found, slice(None))
        return found


# Not a method: the unpickler remembers what it has found, and would refer to itself.
def _call_with_fixed(movable: Movable, function: Callable[..., Any], which: slice, *args: Any) -> Any:
    movable.fix(args[which])
    return function(*args)
