"""What messages consist of: bytes of any kind, and blocks whose bytes lie in several places. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


class Pieces:
    """A block whose bytes lie in several places, which the kernel gathers when it is sent.

    Args:
        pieces: In order, each as a block of its own would be.
    """

    __slots__ = ("nbytes", "pieces")

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self.pieces = [as_bytes(piece) for piece in pieces]
        self.nbytes = sum(map(len, self.pieces))


BlockBytes = memoryview | Pieces
"""What a block that is sent consists of."""


def pieces_of(block: Buffer | Pieces) -> list[memoryview]:
    """The bytes of a block, wherever they are, in order."""
    return block.pieces if isinstance(block, Pieces) else [as_bytes(block)]


def as_bytes(buffer: Buffer) -> memoryview:
    """A view of format ``"B"`` and one dimension; TypeError when the buffer is not contiguous."""
    view = memoryview(buffer)
    # An empty view of another shape or format cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
