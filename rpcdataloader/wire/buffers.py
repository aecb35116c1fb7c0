"""Blocks of messages: the bytes to send, and the memory to receive into. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview


class Pieces:
    """A block whose bytes lie in several places, which the kernel gathers when sending it.

    Args:
        pieces: Parts in order, each as a block of its own would be.
    """

    __slots__ = ("nbytes", "pieces")

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self.pieces = [as_bytes(piece) for piece in pieces]
        self.nbytes = sum(map(len, self.pieces))


BlockBytes = memoryview | Pieces
"""The bytes of a block to send."""


def pieces_of(block: Buffer | Pieces) -> list[memoryview]:
    """The bytes of a block, in order, wherever they are."""
    return block.pieces if isinstance(block, Pieces) else [as_bytes(block)]


def as_bytes(buffer: Buffer) -> memoryview:
    """A view of format ``"B"`` and one dimension; TypeError when the buffer is not contiguous."""
    view = memoryview(buffer)
    # An empty view of another shape or format cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


class Block(Protocol):
    """Memory to receive one block of a message into."""

    @property
    def view(self) -> memoryview:
        """Writable, contiguous, format ``"B"``, of exactly the requested size, which may be 0."""


Allocate = Callable[[int, Sequence[int]], list[Any]]
"""``allocate(request_id, sizes in bytes)`` returns one :class:`Block` per size, in order."""


class HeapBlock:
    """A block of ordinary memory, for messages that need no pool."""

    __slots__ = ("view",)

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))


def heap_blocks(_request_id: int, sizes: Sequence[int]) -> list[Any]:
    """Allocate blocks of ordinary memory (an ``Allocate``)."""
    return [HeapBlock(size) for size in sizes]
