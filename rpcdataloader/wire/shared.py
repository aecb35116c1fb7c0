"""Memory that a worker and its trainer on one machine both see, so that no batch is copied between them.

The worker (:class:`Lender`) makes the memory with memfd_create(2), in a few large *mappings*, and hands each descriptor
to the trainer (:class:`Borrower`) once. A block in a message is then a mapping, an offset and a size. The trainer
builds tensors on it, and returns it when the last of them is gone; only then does the worker use it again. Memory lives
as long as one side maps it: batches outlive their worker.

Nothing is shared until the trainer has said that it has mapped the memory. So a peer to which a descriptor does not
get, behind a forwarded socket for example, receives the bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import functools
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.frames import SharedBlock
from rpcdataloader.wire.memory import (
    F_ADD_SEALS,
    F_GET_SEALS,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    before_unmapping,
    create_memory,
    map_memory,
)
from rpcdataloader.wire.shelf import Shelf, round_up
from rpcdataloader.wire.slabs import Block, PageablePool, PageLock

logger = logging.getLogger("rpcdataloader.client")

#: Least size of a shared block. The kernel copies smaller ones in less time than it takes to lend them.
MIN_SHARED_BYTES = 1 << 18

# Address space, no memory, unless a device reads it: the kernel gives that when it is written. Few mappings serve any
# number of small blocks: each has twice the size of the one before, from the least to the most.
_LEAST_MAPPING_BYTES, _MOST_MAPPING_BYTES = 1 << 25, 1 << 28

# Every dtype's alignment. Pages are the unit of the worker.
_ALIGNMENT = 64

_MADV_REMOVE = 9
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class _Mapping:
    """A mapping of a worker, of which pieces are cut, one behind the other.

    Args:
        announce: As for :class:`Lender`.

    Attributes:
        is_mapped: True once the trainer has mapped it.
        is_registered: True if a device of the trainer reads its pages themselves, whatever lies at their addresses.
    """

    def __init__(self, number: int, size_bytes: int, announce: Callable[[int, int], None]) -> None:
        self.number = number
        descriptor = create_memory(size_bytes)
        try:
            self.memory = map_memory(descriptor, size_bytes)
            announce(number, descriptor)  # the trainer maps it while the first block is filled
        finally:
            os.close(descriptor)
        self.address = _address_of(self.memory)
        self.is_mapped = self.is_registered = False
        self._end = 0  # of the last piece

    def cut(self, size_bytes: int) -> _Piece | None:
        """A new piece; None without room for it."""
        start, end = self._end, self._end + size_bytes
        if end > len(self.memory):
            return None
        self._end = end
        return _Piece(self, start, size_bytes)


@dataclass(slots=True, eq=False)
class _Piece:
    """A range of a mapping, which is in use, on the shelf, or put aside."""

    mapping: _Mapping
    offset: int
    size_bytes: int
    num_uses: int = 0  # by the lease, while this process has a reference to the memory, and by the trainer
    is_lent: bool = False
    lease: Callable[[], memoryview | None] = field(default=lambda: None)  # weak reference

    @property
    def address(self) -> int:
        return self.mapping.address + self.offset

    def free_pages(self) -> None:
        """Give the kernel the pages, unless a device reads them, or may be about to."""
        if self.mapping.is_mapped and not self.mapping.is_registered:
            _libc.madvise(self.address, self.size_bytes, _MADV_REMOVE)


class Lender:
    """A worker's allocator of memory that its trainer sees too. Thread-safe; in a forked child, it lends nothing.

    Args:
        announce: Function that sends the trainer the number and the descriptor of a mapping.
        look: Function that calls :meth:`mapped` and :meth:`returned` for what the trainer has sent. So a block that
            came back while samples were fetched serves the batch made of them.
    """

    def __init__(self, announce: Callable[[int, int], None], look: Callable[[], None] = lambda: None) -> None:
        _take_part_in_forks()
        self._announce = announce
        self._look = look
        self._start_empty()
        _lenders.add(self)

    def _start_empty(self) -> None:
        self._pool = PageablePool()  # where shared memory cannot be had
        self._can_share = True
        self._lock = Lock()
        # Uses that have ended. Finalizers run in any thread at any point, also inside this lock: they only append here.
        self._ended: deque[_Piece] = deque()
        # Guarded by the lock:
        self._mappings: list[_Mapping] = []
        self._used: dict[int, _Piece] = {}  # by address
        self._shelf: Shelf[_Piece] = Shelf()
        self._aside: defaultdict[int, list[_Piece]] = defaultdict(list)  # by size; as a rule without pages

    def forget(self) -> None:
        """Begin anew in a forked child, whose parent goes on to use the memory."""
        self._start_empty()
        self._can_share = False

    def allocate(self, size_bytes: int) -> Block:
        """Lend a block of exactly ``size_bytes`` uninitialised bytes to this process."""
        piece = None
        if self._can_share and size_bytes >= MIN_SHARED_BYTES:
            self._look()
            piece = self._take(round_up(size_bytes, mmap.PAGESIZE))
        if piece is None:
            return self._pool.allocate(size_bytes)
        lease = piece.mapping.memory[piece.offset : piece.offset + size_bytes]
        piece.lease = weakref.ref(lease)
        weakref.finalize(lease, self._ended.append, piece).atexit = False
        return Block(torch.frombuffer(lease, dtype=torch.uint8))

    def _take(self, size_bytes: int) -> _Piece | None:
        """A piece that is in use from now on; None if no memory can be shared."""
        with self._lock:
            self._collect()
            piece = self._shelf.take(size_bytes)
            if piece is None:
                aside = self._aside[size_bytes]
                piece = aside.pop() if aside else self._cut(size_bytes)
            if piece is not None:
                piece.num_uses, piece.is_lent = 1, False
                self._used[piece.address] = piece
            return piece

    def _cut(self, size_bytes: int) -> _Piece | None:
        for mapping in self._mappings:
            if (piece := mapping.cut(size_bytes)) is not None:
                return piece
        usual = min(_LEAST_MAPPING_BYTES << len(self._mappings), _MOST_MAPPING_BYTES)
        try:
            mapping = _Mapping(len(self._mappings) + 1, max(size_bytes, usual), self._announce)
        except OSError:
            self._can_share = False
            return None
        self._mappings.append(mapping)
        return mapping.cut(size_bytes)

    def _collect(self) -> None:
        """Free what has no user left. Called with the lock held."""
        while self._ended:
            piece = self._ended.popleft()
            piece.num_uses -= 1
            if not piece.num_uses:
                del self._used[piece.address]
                self._shelf.put(piece, piece.size_bytes)
        self._set_aside(self._shelf.take_unused())

    def _set_aside(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            piece.free_pages()
            self._aside[piece.size_bytes].append(piece)

    def give_back(self) -> None:
        """Give the kernel the pages of all free memory."""
        with self._lock:
            self._collect()
            self._set_aside(self._shelf.take_all())

    def lend(self, buffers: list[Any]) -> None:
        """Replace the large buffers of a message that is about to be sent by shared blocks.

        Memory that nothing in this process refers to but ``buffers`` is lent as it is. Everything else is copied: its
        other owner might change it, or see the trainer's changes.
        """
        for i in range(len(buffers)):
            if self._can_share and buffers[i].nbytes >= MIN_SHARED_BYTES:
                self._lend(buffers, i)

    def _lend(self, buffers: list[Any], i: int) -> None:
        size_bytes = buffers[i].nbytes
        piece = self._piece_of(buffers[i])
        if piece is not None:
            if not self._is_mapped(piece.mapping):
                return
            with self._lock:
                piece.num_uses += 1
            buffers[i] = None
            if (rest := piece.lease()) is None:
                piece.is_lent = True
                buffers[i] = SharedBlock(piece.mapping.number, piece.offset, size_bytes)
                return
            self._ended.append(piece)
            buffers[i] = rest[:size_bytes]
            del rest
        block = self.allocate(size_bytes)
        piece = self._piece_of(block.view)
        if piece is None or not self._is_mapped(piece.mapping):
            return
        np.copyto(np.frombuffer(block.view, np.uint8), np.frombuffer(buffers[i], np.uint8))
        with self._lock:
            piece.num_uses += 1
            piece.is_lent = True
        buffers[i] = SharedBlock(piece.mapping.number, piece.offset, size_bytes)

    def _piece_of(self, buffer: memoryview) -> _Piece | None:
        """The piece that begins where the buffer does, if it is free to be lent."""
        piece = self._used.get(_address_of(buffer))
        return None if piece is None or piece.is_lent else piece

    def _is_mapped(self, mapping: _Mapping) -> bool:
        """Whether the trainer has mapped it."""
        if not mapping.is_mapped:
            self._look()
        return mapping.is_mapped

    def mapped(self, number: int, is_registered: bool = False) -> None:
        """Note that the trainer has mapped a mapping, and perhaps registered it with a device."""
        if not 0 < number <= len(self._mappings):
            raise RemoteProtocolError(f"the peer has mapped shared memory {number}, which it was never given")
        mapping = self._mappings[number - 1]
        mapping.is_mapped, mapping.is_registered = True, is_registered

    def returned(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Take back blocks from the trainer, each given by mapping and offset."""
        for number, offset in blocks:
            mapping = self._mappings[number - 1] if 0 < number <= len(self._mappings) else None
            piece = self._used.get(mapping.address + offset) if mapping is not None else None
            if piece is None or not piece.is_lent:
                raise RemoteProtocolError(f"the peer returned a block of shared memory {number} that it did not have")
            piece.is_lent = False
            self._ended.append(piece)


class _Children:
    """Processes forked at one moment. They map a page that this process then unmaps.

    The writing end of a pipe would end with the descriptors that a child closes, as daemons close all.
    """

    def __init__(self) -> None:
        self._page: memoryview | None = None
        self._descriptor: int | None = None  # without one, they count as alive to the end
        with contextlib.suppress(OSError):
            descriptor = create_memory(mmap.PAGESIZE)
            weakref.finalize(self, os.close, descriptor).atexit = False
            self._page = map_memory(descriptor, mmap.PAGESIZE)
            self._descriptor = descriptor

    def unmap(self) -> None:
        """Leave the page to the children; for the parent."""
        self._page = None

    def have_ended(self) -> bool:
        """Whether the children, and theirs, have ended or run other programs."""
        if self._descriptor is None:
            return False
        try:
            fcntl.fcntl(self._descriptor, F_ADD_SEALS, F_SEAL_WRITE)
        except OSError:  # EBUSY: it is mapped
            return False
        return True


@dataclass(slots=True)
class _Borrowed:
    """A mapping of a worker, as its trainer sees it."""

    memory: memoryview
    used: list[tuple[int, int]] = field(default_factory=list)  # offset and end of the blocks not returned yet, in order
    is_registered: bool = False  # a device reads it without the CPU


class Borrower:
    """A trainer's side of the memory of one worker. Thread-safe."""

    def __init__(self) -> None:
        _take_part_in_forks()
        # Blocks without tensors. Finalizers run in any thread at any point, also inside the lock: they only append.
        self._ended: deque[SharedBlock] = deque()
        self._lock = Lock()
        # Guarded by the lock:
        self._mappings: dict[int, _Borrowed] = {}  # by number
        self._children: list[tuple[_Children, frozenset[tuple[int, int]]]] = []  # and the blocks that they inherited
        _borrowers.add(self)

    def map(self, number: int, descriptor: int) -> bool:
        """Map a worker's memory, and close the descriptor; returns False if there is no room for it.

        Raises:
            RemoteProtocolError: The memory could shrink, or has a number that was given before.
        """
        try:
            if number in self._mappings:
                raise RemoteProtocolError(f"the peer gave shared memory {number} twice")
            seals = 0
            with contextlib.suppress(OSError):  # an ordinary file has none
                seals = fcntl.fcntl(descriptor, F_GET_SEALS)
            size_bytes = os.fstat(descriptor).st_size
            if not seals & F_SEAL_SHRINK or not size_bytes:
                raise RemoteProtocolError(f"the peer gave shared memory {number} that is not sealed against shrinking")
            try:
                memory = map_memory(descriptor, size_bytes)
            except OSError as error:
                logger.warning("cannot map the memory of a worker, which sends batches instead: %s", error)
                return False
        finally:
            os.close(descriptor)
        with self._lock:
            self._mappings[number] = _Borrowed(memory)
        return True

    def register(self, number: int, page_lock: PageLock) -> bool:
        """Let a device read a mapping without the CPU; returns False if that is refused."""
        mapping = self._mappings[number]
        memory, address = mapping.memory, _address_of(mapping.memory)
        try:
            page_lock.register(address, len(memory))
        except (AttributeError, RuntimeError) as error:
            _tell_of_copies(str(error))
            return False
        before_unmapping(memory, _unregister, page_lock, address, os.getpid())
        mapping.is_registered = True
        return True

    def is_registered(self, block: SharedBlock) -> bool:
        """Whether a device may read a block without the CPU."""
        return self._mappings[block.mapping].is_registered

    def borrow(self, block: SharedBlock) -> Block:
        """Return a block of the worker's memory.

        Raises:
            RemoteProtocolError: There is no such block, or it was not returned since it was last borrowed.
        """
        number, offset, size_bytes = block
        if (mapping := self._mappings.get(number)) is None:
            raise RemoteProtocolError(f"the peer sent a block of shared memory {number}, which it never gave")
        end, memory, used = offset + size_bytes, mapping.memory, mapping.used
        if not 0 < size_bytes <= len(memory) - offset or offset % _ALIGNMENT:
            raise RemoteProtocolError(
                f"the peer sent bytes {offset} to {end} of shared memory {number}, which has {len(memory)}"
            )
        with self._lock:
            at = bisect.bisect(used, (offset,))
            if (at > 0 and used[at - 1][1] > offset) or (at < len(used) and used[at][0] < end):
                raise RemoteProtocolError(
                    f"the peer sent bytes {offset} to {end} of shared memory {number}, which are in use"
                )
            used.insert(at, (offset, end))
        lease = memory[offset:end]
        weakref.finalize(lease, self._ended.append, block).atexit = False
        return Block(torch.frombuffer(lease, dtype=torch.uint8))

    def take_ended(self) -> list[tuple[int, int]]:
        """The blocks to return to the worker: mapping and offset of each."""
        if not self._ended:
            return []
        returned = []
        with self._lock:
            if self._children:
                self._children = [each for each in self._children if not each[0].have_ended()]
            for _ in range(len(self._ended)):
                block = self._ended.popleft()
                place = block.mapping, block.offset
                if any(place in blocks for _children, blocks in self._children):
                    self._ended.append(block)  # a child may read it
                    continue
                used = self._mappings[block.mapping].used
                del used[bisect.bisect(used, (block.offset,))]
                returned.append(place)
        return returned

    def keep_for(self, children: _Children) -> None:
        """Return the present blocks no sooner than these have ended."""
        with self._lock:
            mappings = self._mappings.items()
            blocks = frozenset((number, offset) for number, mapping in mappings for offset, _end in mapping.used)
            self._children = [each for each in self._children if not each[0].have_ended()]
            if blocks:
                self._children.append((children, blocks))

    @property
    def has_blocks(self) -> bool:
        """Whether there are blocks that were not returned."""
        with self._lock:  # receivers add mappings
            return any(mapping.used for mapping in self._mappings.values())


@functools.cache
def _tell_of_copies(reason: str) -> None:
    logger.info("batches of workers on this machine are copied into pinned memory: %s", reason)


def _unregister(page_lock: PageLock, address: int, pid: int) -> None:
    if os.getpid() == pid:  # the driver does not know a forked child
        page_lock.unregister(address)


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()
_borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()


# A child sees its parent's memory, which the worker must not overwrite while the child lives.
class _Forking(threading.local):
    """The fork that a thread makes; several may fork at once."""

    reads_nothing = False
    children: _Children | None = None


_forking = _Forking()
_inherited: list[_Children | None] = []  # that this process is one of, whose pages it keeps


@contextlib.contextmanager
def forks_read_nothing() -> Iterator[None]:
    """Keep no memory back for forks that this thread makes in the block: they do not look at this process's batches."""
    _forking.reads_nothing = True
    try:
        yield
    finally:
        _forking.reads_nothing = False


def _living_borrowers() -> list[Borrower]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_borrowers)


def _before_fork() -> None:
    _forking.children = None
    borrowers = [] if _forking.reads_nothing else _living_borrowers()
    if holders := [borrower for borrower in borrowers if borrower.has_blocks]:
        _forking.children = children = _Children()
        for borrower in holders:  # now: other threads may drop batches while this one forks
            borrower.keep_for(children)


def _after_fork_in_parent() -> None:
    if _forking.children is not None:
        _forking.children.unmap()
        _forking.children = None  # its descriptor is open as long as the children of this fork are waited for


def _after_fork_in_child() -> None:
    _inherited.append(_forking.children)
    _forking.children = None
    for lender in list(_lenders):
        lender.forget()
    _borrowers.clear()


@functools.cache
def _take_part_in_forks() -> None:
    at_fork(Part.SHARED_MEMORY, before=_before_fork, in_parent=_after_fork_in_parent, in_child=_after_fork_in_child)
