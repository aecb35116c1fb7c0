"""A device for tests that have none: its memory is that of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rpcdataloader.host.locks import Lock
from rpcdataloader.loader import inline, iterating, seat, settings
from rpcdataloader.loader.copying import Carrier, DeviceCopies
from rpcdataloader.wire.slabs import PinnedAllocator


class FakePageLock:
    """A driver that page-locks memory, and may refuse.

    Attributes:
        ranges: What is page-locked: start and end of each.
        num_unregistered: How many were.
        error: Type of what is raised in place of the next ones.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.num_unregistered = 0
        self.error: type[Exception] | None = None

    def register(self, address: int, size_bytes: int) -> None:
        if self.error is not None:
            raise self.error(f"{self.error.__name__}, says the driver")
        self.ranges[address] = address + size_bytes

    def unregister(self, address: int) -> None:
        if not _is_mapped(address):
            raise ValueError(f"{address:x} is not mapped any more")
        del self.ranges[address]
        self.num_unregistered += 1

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.ranges.items())


class FakePinned(PinnedAllocator):
    """Pinned memory; remembers what it gave out.

    Args:
        registers: It may page-lock memory of workers, too.

    Attributes:
        blocks: All of it.
    """

    page_lock: FakePageLock  # type: ignore[assignment]

    def __init__(self, registers: bool = True) -> None:
        self.blocks: list[torch.Tensor] = []
        super().__init__(self._remember, page_lock=FakePageLock() if registers else None)  # type: ignore[arg-type]

    def _remember(self, size_bytes: int) -> torch.Tensor:
        self.blocks.append(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
        return self.blocks[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in it."""
        return _is_in(tensor, self.blocks)


class FakeDevice(Carrier):
    """A device whose copies are as late as they may be: each is made when somebody waits for it.

    Attributes:
        pinned: Where batches are received.
        copied: For each copy, the blocks.
        waits: For each wait, the number of the copy and the thread.
        computes: Whether it has work left, whenever that is asked.
        seconds: What it says of the time of each copy, and of its stall for it; None if it does not know.
    """

    def __init__(self) -> None:
        self.pinned = FakePinned()
        super().__init__(torch.device("cpu"), self.pinned, Mock())
        self.copied: list[list[torch.Tensor]] = []
        self.waits: list[tuple[int, threading.Thread]] = []
        self.computes = False
        self.seconds: tuple[float, float] | None = None
        self._memory: list[torch.Tensor] = []
        self._lock = Lock()

    def copy(self, blocks: Sequence[torch.Tensor], is_timed: bool = False) -> _LateCopies:  # noqa: ARG002
        with self._lock:
            number = len(self.copied)
            self.copied.append(list(blocks))
            memory = [torch.full_like(block, 0xEE) for block in blocks]
            self._memory += memory
            return _LateCopies(self, number, memory)

    def is_device_busy(self) -> bool:
        return self.computes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in its memory."""
        return _is_in(tensor, self._memory)


class _LateCopies(DeviceCopies):
    def __init__(self, device: FakeDevice, number: int, memory: list[torch.Tensor]) -> None:
        self.memory = memory
        self._device: Any = device
        self._number = number

    def wait(self) -> None:
        self._device.waits.append((self._number, threading.current_thread()))
        for copy, block in zip(self.memory, self._device.copied[self._number], strict=True):
            copy.copy_(block)

    def times(self) -> tuple[float, float] | None:
        return self._device.seconds


def _is_mapped(address: int) -> bool:
    """Whether there is memory at an address of this process."""
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in maps)


def _is_in(tensor: torch.Tensor, memory: Sequence[torch.Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(block.untyped_storage()._cdata == storage for block in memory)


def plug_in(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let loaders deliver to such a device, whatever the name in their ``device``."""
    device = FakeDevice()
    for module in iterating, settings:
        monkeypatch.setattr(module, "find_device", lambda name: name and torch.device(name))
    for module in seat, inline, iterating:
        monkeypatch.setattr(module, "make_carrier", lambda _found, _pageable: device)
    return device


def plug_in_pinned(monkeypatch: pytest.MonkeyPatch) -> tuple[FakePinned, list[Any]]:
    """Let loaders pin such memory; gives it, and the batches that torch is asked to pin, which is done then."""
    pinned, asked = FakePinned(registers=False), list[Any]()

    def pin(batch: Any) -> Any:
        asked.append(batch)
        return batch

    monkeypatch.setattr(seat, "pinned_allocator", lambda: pinned)
    monkeypatch.setattr(seat, "pin", pin)
    return pinned, asked
