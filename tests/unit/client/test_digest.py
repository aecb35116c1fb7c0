"""Digests of large memory."""

from __future__ import annotations

import numpy as np
import pytest

from rpcdataloader.client.digest import digest

SIZE = (1 << 26) + 12345


@pytest.fixture(scope="module")
def memory():
    return np.random.default_rng(1).standard_normal(SIZE // 8 + 1).view(np.uint8)[:SIZE]


def found(memory):
    return digest([memoryview(b"something else"), memoryview(memory)])


@pytest.mark.parametrize("place", [0, 7, 1 << 16, (1 << 25) - 1, 1 << 25, SIZE - 1])
def test_every_byte_counts(memory, place):
    before = found(memory)
    memory[place] ^= 0x80
    try:
        assert found(memory) != before
    finally:
        memory[place] ^= 0x80
    assert found(memory) == before


def test_signs_and_order_count():
    numbers = np.random.default_rng(2).standard_normal(1 << 20)
    swapped = numbers.copy()
    swapped[[0, 1 << 19]] = numbers[[1 << 19, 0]]
    kinds = [numbers, -numbers, swapped, numbers[::-1].copy(), np.zeros(1 << 20), np.zeros((1 << 20) + 1)]
    assert len({found(kind.view(np.uint8)) for kind in kinds}) == len(kinds)
