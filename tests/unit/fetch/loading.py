"""Datasets and loaders that tests of what workers load have in common."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rpcdataloader.fetch import seeding
from rpcdataloader.fetch.batch_loader import BatchLoader, LoaderSpec
from rpcdataloader.wire.slabs import Block


class CountingAllocator:
    """Fresh memory, and what was asked for."""

    def __init__(self):
        self.sizes: list[int] = []

    def allocate(self, size_bytes: int) -> Block:
        self.sizes.append(size_bytes)
        return Block(torch.full((size_bytes,), 0xA5, dtype=torch.uint8))


class Augmented:
    """Draws from everything that there is."""

    def __getitem__(self, index):
        return (
            index,
            torch.rand(3),
            np.random.rand(3),
            random.random(),
            torch.tensor(seeding.get_sample_seed()),
        )


def make_spec(**changes: Any) -> LoaderSpec:
    fields: dict[str, Any] = {
        "collate_fn": None,
        "worker_init_fn": None,
        "auto_collation": True,
        "iterable": False,
        "drop_last": False,
        "base_seed": 2**62 + 5,
        "epoch": 0,
        "rank": 0,
        "world_size": 1,
        "worker_id": 0,
        "num_workers": 1,
    }
    return LoaderSpec(**{**fields, **changes})


def make_loader(dataset, allocator=None, inline=False, **changes: Any) -> BatchLoader:
    return BatchLoader(dataset, make_spec(**changes), allocator, inline=inline)


def load(dataset, indices=(0, 1, 2), position=0, batch_number=0, **options: Any):
    return make_loader(dataset, **options).load(list(indices), position, batch_number)[1]


class Bad(Augmented):
    def __init__(self, *bad, error=ValueError):
        self.bad = bad
        self.error = error

    def __getitem__(self, index):
        torch.rand(index)  # what a bad sample has drawn before it fails
        if index in self.bad:
            raise self.error(f"bad {index}")
        return super().__getitem__(index)


def floats(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
