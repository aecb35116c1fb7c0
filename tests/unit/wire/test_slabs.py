from __future__ import annotations

import threading
from types import SimpleNamespace

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


def test_receiver_threads_pin_for_the_device_of_the_trainer(monkeypatch):
    local = threading.local()  # each thread begins on device 0
    accelerator = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: getattr(local, "index", 0),
        set_device=lambda index: setattr(local, "index", index),
    )
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


def test_free_memory_is_given_back_when_told():
    pool = PageablePool()
    used, free = pool.allocate(1 << 22), pool.allocate(1 << 22)
    del free
    pool.give_back()
    assert leased_bytes(pool) == 1 << 22
    assert pool._kept_bytes() == 0
    del used
    pool.give_back()
    assert leased_bytes(pool) == pool._kept_bytes() == 0
