"""Free memory that is used again: pieces of few sizes, which are never joined or split. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

P = TypeVar("P")

#: Free memory kept for reuse: a prefetch window of a few dozen image batches. Memory in use is not limited here.
MAX_KEPT_BYTES = 1 << 30

# A piece that so many leases did not use goes: sooner if they were all of its size, as there are more pieces than
# batches then, or if its size was leased once only. Or, if that is more, after as many turns as all pieces have. One
# giant batch must not stay with every worker of a node; a size that is used now and then, and pieces that take turns,
# must.
MAX_UNUSED_LEASES, MAX_SURPLUS_LEASES = 128, 32
_TURNS = 2

# A piece serves a lease of at least this part of its size.
_LEAST_PART = 0.5


def round_up(size_bytes: int, unit_bytes: int) -> int:
    """Round up to a multiple of the unit, and to one of four sizes per power of two.

    So batches of similar size share pieces. Only address space is rounded up: the kernel gives no memory that is never
    touched.
    """
    step = max(1 << max(0, size_bytes.bit_length() - 3), unit_bytes)
    return -(-size_bytes // step) * step


class Shelf(Generic[P]):
    """Free pieces by size. Its user has a lock, and one shelf for all that it lends.

    Args:
        max_bytes: Most memory to keep.

    Attributes:
        kept_bytes: Size of all pieces here.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        # By size, the last return last, with the numbers of leases before it: all, and those of the size. No list is
        # empty.
        self._free: dict[int, deque[tuple[P, int, int]]] = {}
        self._num_free = self._num_lent = self._num_leases = 0
        self._num_of_size: Counter[int] = Counter()
        self.kept_bytes = 0

    def take(self, size_bytes: int) -> P | None:
        """Lend a piece of a size from :func:`round_up`, or of up to twice that; None if the caller makes a new one."""
        self._num_leases += 1
        self._num_lent += 1
        if size_bytes not in self._free:
            larger = [other for other in self._free if size_bytes < other <= size_bytes / _LEAST_PART]
            size_bytes = min(larger, default=size_bytes)
        self._num_of_size[size_bytes] += 1
        if size_bytes not in self._free:
            return None
        piece, *_leases = self._free[size_bytes].pop()  # warm in the cache
        self._removed(size_bytes)
        return piece

    def put(self, piece: P, size_bytes: int) -> None:
        """Take back a piece that was lent."""
        self._num_lent -= 1
        self._num_free += 1
        self.kept_bytes += size_bytes
        leases = self._num_leases, self._num_of_size[size_bytes]
        self._free.setdefault(size_bytes, deque()).append((piece, *leases))

    def take_unused(self) -> list[P]:
        """Take out the pieces that are too much, or were not used for long; the longest unused first."""
        unused = []
        while sizes := [size for size in self._free if self.kept_bytes > self._max_bytes or self._is_unused(size)]:
            size_bytes = min(sizes, key=lambda size: self._free[size][0][1])
            piece, *_leases = self._free[size_bytes].popleft()
            self._removed(size_bytes)
            unused.append(piece)
        return unused

    def _is_unused(self, size_bytes: int) -> bool:
        """Whether no lease has used the piece that has been here for longest, for long."""
        _piece, num_leases, num_of_size = self._free[size_bytes][0]
        turns = _TURNS * (self._num_free + self._num_lent)
        limit = MAX_UNUSED_LEASES if self._num_of_size[size_bytes] > 1 else MAX_SURPLUS_LEASES
        if self._num_leases - num_leases > max(limit, turns):
            return True
        return self._num_of_size[size_bytes] - num_of_size > max(MAX_SURPLUS_LEASES, turns)

    def take_all(self) -> list[P]:
        """Take out all pieces."""
        pieces = [piece for each in self._free.values() for piece, *_leases in each]
        self._free.clear()
        self._num_free = self.kept_bytes = 0
        return pieces

    def _removed(self, size_bytes: int) -> None:
        self._num_free -= 1
        self.kept_bytes -= size_bytes
        if not self._free[size_bytes]:
            del self._free[size_bytes]
