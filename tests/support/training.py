"""What the tests of libraries that train share: samples and batches that say where they come from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.datasets import Numbers, node_server
from tests.support.origins import own_processes


def make_sample(index: int) -> dict[str, Any]:
    return {"x": torch.tensor([index / 10]), "index": index, "fetched": os.getpid(), "unused": "a column of text"}


class Points(Numbers):
    """Numbers with the process that fetched them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_sample(int(super().__getitem__(index)))


class PointStream(IterableDataset[Any]):
    """The same, iterable-style: each worker gives its part."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return map(make_sample, range(worker.id, self.size, worker.num_workers))


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with the process that makes it, its node server, and how many columns samples have."""
    here = {"collated": os.getpid(), "server": node_server(), "num_columns": len(samples[0])}
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        **{name: torch.tensor([sample[name] for sample in samples]) for name in ("index", "fetched")},
        **{name: torch.tensor([value] * len(samples)) for name, value in here.items()},
    }


def flat(batches: Iterable[list[int]]) -> list[int]:
    """The indices of all batches."""
    return list(itertools.chain.from_iterable(batches))


class Seen:
    """The batches that a training loop was given, and whether our workers made them.

    Args:
        server: Process of the node server whose workers are expected.

    Attributes:
        indices: Of each batch.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._processes = own_processes()
        self.indices: list[list[int]] = []

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        """Look at a batch.

        Raises:
            AssertionError: It was not fetched and collated by a worker of the server, or this process has started one.
        """
        assert batch["fetched"].equal(batch["collated"])
        assert batch["server"].unique().tolist() == [self._server]
        assert os.getpid() not in batch["collated"]
        assert own_processes() == self._processes
        self.indices.append(batch["index"].tolist())

    def add_all(self, batches: Any) -> list[list[int]]:
        """Look at the batches of a pass; returns their indices."""
        before = len(self.indices)
        for batch in batches:
            self.add(batch)
        return self.indices[before:]
