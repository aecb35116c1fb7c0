"""Datasets that draw from every source of random numbers, and that the adversary can set traps in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rpcdataloader import get_sample_seed


class Traps:
    """A folder in which a file lets the next worker that looks crash, or hang; each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def set(self, how: str) -> None:
        """``how`` is ``"segfault"`` or ``"hang"``."""
        Path(self.folder, how).touch()

    def look(self) -> None:
        """In a worker: step into a trap that is set."""
        if self._spring("segfault"):
            ctypes.string_at(0)
        if self._spring("hang"):
            while True:
                signal.pause()

    def _spring(self, how: str) -> bool:
        """Whether there is one; only one process gets it."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{self.folder}/{how}", f"{self.folder}/{how}-{os.getpid()}-{time.monotonic_ns()}")
            return True
        return False


def draw() -> torch.Tensor:
    """From python, numpy and torch."""
    numbers = [random.random(), np.random.rand(), np.random.randn(), *torch.rand(2).tolist()]
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass
class Images(Dataset[Any]):
    """Map-style."""

    size: int
    seconds: float  # that each sample takes
    traps: Traps

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        first = draw()
        self.traps.look()
        time.sleep(self.seconds)
        return {
            "id": index,
            "draws": torch.cat([first, draw()]),
            "pixels": torch.rand(64, 64),
            "seed": get_sample_seed(),
        }


@dataclass
class Records(IterableDataset[Any]):
    """Divides itself among ranks and workers."""

    size: int
    seconds: float
    traps: Traps
    position: int = 0

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        part = int(os.environ["RANK"]) * info.num_workers + info.id
        num_parts = int(os.environ["WORLD_SIZE"]) * info.num_workers
        for record in range(part + self.position * num_parts, self.size, num_parts):
            first = draw()
            self.traps.look()
            time.sleep(self.seconds)
            self.position += 1
            yield {"id": record, "draws": torch.cat([first, draw()]), "pixels": np.random.rand(64)}
        self.position = 0


class StatefulRecords(Records):
    """Goes on where it was, without reading again."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
