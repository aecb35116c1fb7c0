"""Memory for received blocks and collated batches.

A :class:`Block` owns its memory through a one-dimensional ``uint8`` tensor. Objects over that memory (tensors, numpy
arrays) keep it alive, and an allocator reuses the memory only after the last of them is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.shelf import MAX_KEPT_BYTES, Shelf, round_up

#: Below this, malloc reuses its own memory without page faults, and a lease would cost more than it saves.
_MIN_POOLED_BYTES = 1 << 20

#: One huge page; smaller mappings cannot contain any.
_HUGE_PAGE_BYTES = 1 << 21


class Block:
    """Contiguous memory of one out-of-band buffer.

    Attributes:
        tensor: ``uint8``, 1-D, the whole block. Tensors are built on *its storage*: the caching allocator of pinned
            memory recognises a block by its storage, and forgets to wait for copies of any other.
        view: The same bytes, writable, format ``"B"``; a reference keeps the memory, too.
    """

    __slots__ = ("tensor", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.view = tensor.numpy().data


class Allocator(Protocol):
    """Source of blocks, called from receiver threads."""

    def allocate(self, size_bytes: int) -> Block:
        """Return a block of exactly ``size_bytes`` uninitialised bytes; 0 is allowed."""


class PageablePool:
    """Recycles large anonymous mappings, because the page faults of fresh ones cost as much as receiving into them.

    A block goes back once its memory has no references left, in whichever thread that happens.
    Thread-safe. In a forked child the pool starts empty.

    Args:
        max_bytes: Most *free* memory to keep. Beyond it, the oldest returns are unmapped, and so is memory unused for
            many leases: the pool follows a change of batch size.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._start_empty()
        _pools.add(self)

    def _start_empty(self) -> None:
        self._lock = Lock()
        # Finalizers run in any thread at any point, also inside this lock: they only append here.
        self._returned: deque[mmap.mmap] = deque()
        self._shelf: Shelf[mmap.mmap] = Shelf(self._max_bytes)  # guarded by _lock

    def allocate(self, size_bytes: int) -> Block:
        """Lend a block of exactly ``size_bytes`` uninitialised bytes."""
        if size_bytes < _MIN_POOLED_BYTES:
            return Block(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
        capacity = round_up(size_bytes, _HUGE_PAGE_BYTES)
        with self._lock:
            self._collect()
            memory = self._shelf.take(capacity)
        memory = memory or _map(capacity)
        # A new exporter of the buffer for each lease: its end, unlike a memoryview's, means that neither a tensor nor a
        # numpy array uses the memory. Capacities are few, so ctypes makes few array types.
        lease = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return Block(torch.frombuffer(lease, dtype=torch.uint8, count=size_bytes))

    def _collect(self) -> None:
        """Take back what finalizers returned. Called with the lock held."""
        while self._returned:
            memory = self._returned.popleft()
            self._shelf.put(memory, len(memory))
        self._shelf.take_unused()  # unmapped with its last reference

    def give_back(self) -> None:
        """Give the kernel all free memory."""
        with self._lock:
            self._collect()
            self._shelf.take_all()

    def _kept_bytes(self) -> int:
        return self._shelf.kept_bytes


class PageLock:
    """Page-locks memory that torch has not allocated, so that a device copies from it without the CPU.

    Torch's allocator does not know of such memory: its owner keeps it until copies have read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = getattr(torch, device.type)

    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock memory.

        Raises:
            AttributeError: Torch cannot do that for devices of this type.
            RuntimeError: The driver refuses.
        """
        with self._module.device(self._device):
            status = int(self._module.cudart().cudaHostRegister(address, size_bytes, 1))  # for all contexts
            if status:
                with suppress(RuntimeError):  # which would be raised by this thread's next kernel: now by this one
                    torch.ones(1, device=self._device)
        if status:
            raise RuntimeError(f"cudaHostRegister of {size_bytes} bytes has failed with status {status}")

    def unregister(self, address: int) -> None:
        """Undo that, before the memory is unmapped."""
        with self._module.device(self._device):
            self._module.cudart().cudaHostUnregister(address)


class PinnedAllocator:
    """Blocks of page-locked memory, which an accelerator copies from without waiting for the CPU.

    PyTorch's caching host allocator recycles them: it alone knows when a copy has finished reading.

    Args:
        empty: Function that makes an uninitialised 1-D ``uint8`` tensor of a given size. By default pinned, for the
            current device of the thread that makes this allocator.
        device_index: Index of another device, in place of the current one.
        page_lock: Makes memory of workers on this machine such memory, too; None if their blocks are copied.
    """

    def __init__(
        self,
        empty: Callable[[int], torch.Tensor] | None = None,
        device_index: int | None = None,
        page_lock: PageLock | None = None,
    ) -> None:
        self._empty = empty or _pinned_empty(device_index)
        self.page_lock = page_lock

    def allocate(self, size_bytes: int) -> Block:
        """Return a pinned block of exactly ``size_bytes`` uninitialised bytes."""
        return Block(self._empty(size_bytes))


def pinned_allocator() -> PinnedAllocator | None:
    """Return the allocator for ``pin_memory=True``, or warn as torch does and return None without an accelerator."""
    if _has_accelerator():
        return PinnedAllocator()
    text = "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
    warnings.warn(text, stacklevel=_depth_of_caller())
    return None


def pinned_allocator_for(device: torch.device) -> PinnedAllocator | None:
    """The allocator for copies to ``device``; None if torch cannot pin memory for it."""
    return PinnedAllocator(device_index=device.index, page_lock=PageLock(device)) if _has_accelerator() else None


def _depth_of_caller() -> int:
    """The ``stacklevel`` at which the calling function's warning names the line that called this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rpcdataloader."):
        depth, frame = depth + 1, frame.f_back
    return depth


def _pinned_empty(device_index: int | None) -> Callable[[int], torch.Tensor]:
    # Pinning may create the context of the thread's current device. In a receiver thread that is device 0, on which
    # every rank of a node would then occupy some hundred MB.
    module = torch.get_device_module()  # torch.accelerator has functions for this from torch 2.8 on
    device = module.current_device() if device_index is None else device_index
    thread = threading.local()
    thread.has_device = True  # this one; the user may choose another later

    def empty(size_bytes: int) -> torch.Tensor:
        if not hasattr(thread, "has_device"):
            module.set_device(device)
            thread.has_device = True
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    return empty


def _has_accelerator() -> bool:
    return bool(getattr(torch, "accelerator", torch.cuda).is_available())  # torch.accelerator came with torch 2.6


def _map(capacity: int) -> mmap.mmap:
    # The default, MAP_SHARED, gets no huge pages and would let a forked child write into this process's batches.
    memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_pools: weakref.WeakSet[PageablePool] = weakref.WeakSet()


def give_back_free_memory() -> None:
    """Give the kernel the free memory of all pools of this process."""
    for pool in list(_pools):
        pool.give_back()


def _start_pools_empty() -> None:
    for pool in list(_pools):
        pool._start_empty()


# A thread that the child lacks may hold the lock. The parent's leases end in the child's copy of the old deque.
at_fork(Part.POOLS, in_child=_start_pools_empty)
