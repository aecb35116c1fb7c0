"""Datasets whose loading takes a known time, for a known reason."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

# Set in a node server whose workers are to take ten times as long.
SLOW_NODE = "RPCDATALOADER_TEST_SLOW_NODE"


def burn(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Endless(Dataset):
    """Has no end that a test meets."""

    def __len__(self) -> int:
        return 1_000_000


class Causes(Endless):
    """Samples take time on a CPU and without one; a sample has ``size`` numbers."""

    def __init__(self, cpu: float = 0.0, stall: float = 0.0, size: int = 1) -> None:
        self.cpu, self.stall, self.size = cpu, stall, size

    def __getitem__(self, index: int) -> torch.Tensor:
        factor = 10 if os.environ.get(SLOW_NODE) else 1
        time.sleep(self.stall * factor)
        burn(self.cpu * factor)
        return torch.full((self.size,), float(index))


class StreamOfCauses(IterableDataset):
    """The same samples, one after the other; so many in the streams of the workers."""

    def __init__(self, *lengths: int, **options: float) -> None:
        self.lengths, self.samples = lengths, Causes(**options)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        return map(self.samples.__getitem__, range(self.lengths[worker.id]))


class Tails(Endless):
    """Of five samples, four take 10 ms, and one takes 500 ms."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5 if (index + index // 5) % 5 == 0 else 0.01)
        return index


class Unready(Endless):
    """The first sample in each worker takes a second."""

    seconds = 1.0

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        self.seconds = 0.0
        return index


class Children(Endless):
    """Each sample is the work of a process of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> int:
        if (pid := os.fork()) == 0:
            burn(self.seconds)
            os._exit(0)
        os.waitpid(pid, 0)
        return index


def collate_hard(samples: list[torch.Tensor]) -> torch.Tensor:
    """Compute for ten milliseconds."""
    burn(0.01)
    return torch.stack(samples)


def collate_slowly(samples: list[torch.Tensor]) -> torch.Tensor:
    """Take forty milliseconds."""
    time.sleep(0.04)
    return torch.stack(samples)


class Parcel:
    """Takes CPU time to unpickle, and none to pickle."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return unpack, (self.seconds,)


def unpack(seconds: float) -> Parcel:
    """Rebuild a parcel."""
    burn(seconds)
    return Parcel(seconds)


class Parcels(Endless):
    """Samples that take the trainer some time to rebuild."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> tuple[int, Parcel]:
        return index, Parcel(self.seconds)


def init_slowly(_worker_id: int) -> None:
    """Take one second."""
    time.sleep(1.0)


class SlowSampler(Sampler[int]):
    """Takes its time for each index."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[int]:
        for index in range(1_000_000):
            time.sleep(self.seconds)
            yield index

    def __len__(self) -> int:
        return 1_000_000
