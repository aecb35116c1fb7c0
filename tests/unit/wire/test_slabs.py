from __future__ import annotations

import threading

import torch

from rpcdataloader.wire.slabs import Block, PageablePool, pinned_allocator
from tests.conftest import leased_bytes
from tests.support.forks import status_of_fork

MIB = 1 << 20
LARGE = 3 * MIB


def address(block: Block) -> int:
    return block.tensor.data_ptr()


def test_free_memory_is_limited_and_that_of_one_giant_batch_is_given_back():
    """Not at once: blocks of other sizes that are used now and then are kept."""
    pool = PageablePool(max_bytes=150 * MIB)
    for size, content in (100, 7), (9, 8):
        pool.allocate(size * MIB).tensor.fill_(content)
    for number in range(600):
        if number % 100 == 0:
            assert pool.allocate(9 * MIB).view[0] == 8
        pool.allocate(LARGE)
    assert pool.allocate(100 * MIB).view[0] == 0  # fresh from the kernel
    blocks = [pool.allocate(100 * MIB) for _ in range(3)]
    blocks.clear()
    assert pool._kept_bytes() <= 150 * MIB


def test_pool_of_a_forked_child_starts_empty_even_if_a_thread_held_its_lock():
    pool = PageablePool()
    kept = pool.allocate(LARGE)
    free = address(pool.allocate(LARGE))
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            release.wait(20)

    def check() -> None:
        assert (leased_bytes(pool), pool._kept_bytes()) == (0, 0)
        assert address(pool.allocate(LARGE)) not in (free, address(kept))

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    status = status_of_fork(check)
    release.set()
    thread.join()
    assert status == 0


class Accelerator:
    """Stands for torch.accelerator, and its device module, with two devices; each thread begins on device 0."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._thread = threading.local()

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device(self._kind)

    def current_device(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device(self, index: int) -> None:
        self._thread.index = index


def test_receiver_threads_pin_for_the_device_of_the_trainer(monkeypatch):
    accelerator = Accelerator("cuda")
    monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda: accelerator)
    devices: list[int] = []

    def empty(size_bytes: int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (dtype, device, pin_memory) == (torch.uint8, "cpu", True)
        devices.append(accelerator.current_device())
        return torch.zeros(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    accelerator.set_device(1)
    allocator = pinned_allocator()
    assert allocator is not None
    thread = threading.Thread(target=lambda: [allocator.allocate(8), allocator.allocate(8)])
    thread.start()
    thread.join()
    accelerator.set_device(0)
    allocator.allocate(8)  # in the trainer's own thread, the trainer decides
    assert devices == [1, 1, 0]
