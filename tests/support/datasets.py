"""The datasets that tests load. Small, so that a node imports them quickly; the client's import path leads there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rpcdataloader import get_sample_seed


def note(path: str, *words: object) -> None:
    """Append a line to a file that processes share: one write, so that lines do not mix."""
    line = " ".join(str(word) for word in words) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def notes(path: str) -> list[str]:
    """The lines so far."""
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def wait_for(path: str) -> None:
    """Wait for somebody to open the FIFO at ``path`` for writing, and to close it."""
    with open(path) as file:
        file.read()


def node_server() -> int:
    """The process of the node server that this worker belongs to: the parent of its session."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


class Numbers(Dataset[Any]):
    """Each index as a tensor."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is not below {self.size}")
        return torch.tensor(index)


class Batched(Numbers):
    """Asked for a batch at once."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(index, type(indices).__name__, len(indices)) for index in indices]


class Sliced(Numbers):
    """Takes lists of indices, for samplers that yield batches."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices) * 10


class Augmented(Numbers):
    """Draws from everything that there is."""

    def __getitem__(self, index: int) -> Any:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.randn())]
        return {"index": index, "draws": torch.tensor(draws, dtype=torch.float64), "seed": get_sample_seed()}


class AugmentedBatches(Augmented):
    """Asked for a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def augment_batch(samples: list[Any]) -> Any:
    """Collate, and draw once more for the batch."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "mixing": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])}


class Processes(Numbers):
    """Where each sample comes from: worker and session."""

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid(), os.getppid()


class Hosted(Numbers):
    """Which node server each sample comes from."""

    def __getitem__(self, index: int) -> Any:
        return index, node_server()


class State(Numbers):
    """Has attributes, which its samples tell."""

    classes = ("cat", "dog")

    def __init__(self, size: int = 20, log: str | None = None) -> None:
        super().__init__(size)
        self.epoch = 0
        self.changes = 0
        self.made_in = os.getpid()
        if log is not None:
            note(log, "built", os.getpid())

    @property
    def session(self) -> int:
        return os.getppid()

    def set_epoch(self, epoch: int) -> int:
        self.epoch = epoch
        return epoch + 1

    @property
    def broken(self) -> None:
        raise LookupError("this property is broken")

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, self.changes, os.getpid()


def increment(state: State) -> int:
    state.changes += 1
    return state.changes


def refuse(state: State) -> None:
    state.changes += 100
    raise ValueError("this change is refused")


class Copied(Numbers):
    """An instance that notes where it is rebuilt."""

    def __init__(self, log: str, factor: int = 1) -> None:
        super().__init__(20)
        self.log = log
        self.factor = factor

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        note(self.log, "rebuilt", os.getpid())

    def __getitem__(self, index: int) -> Any:
        return index * self.factor


class Filled(Numbers):
    """So many bytes, each of them the index."""

    def __init__(self, size: int, num_bytes: int) -> None:
        super().__init__(size)
        self.num_bytes = num_bytes

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.num_bytes,), index % 256, dtype=torch.uint8)


class Recorded(Filled):
    """Notes each sample when it is there."""

    def __init__(self, size: int, log: str, num_bytes: int) -> None:
        super().__init__(size, num_bytes)
        self.log = log

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        note(self.log, index, time.monotonic())
        return sample


class Gated(Numbers):
    """The sample at ``index`` waits for the FIFO."""

    def __init__(self, size: int, index: int, fifo: str) -> None:
        super().__init__(size)
        self.index = index
        self.fifo = fifo

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            wait_for(self.fifo)
        return index


class Failing(Numbers):
    """Raises at some indices."""

    def __init__(self, size: int, errors: dict[int, tuple[Any, ...]]) -> None:
        super().__init__(size)
        self.errors = errors

    def __getitem__(self, index: int) -> Any:
        if index in self.errors:
            error, *args = self.errors[index]
            raise error(*args)
        return index


class Deadly(Numbers):
    """Ends its process at some indices, after a while, or hangs; once if there is a file to remember it by."""

    def __init__(self, size: int, deadly: Collection[Any], how: str, seconds: float = 0.0, marker: str = "") -> None:
        super().__init__(size)
        self.deadly = deadly
        self.how = how
        self.seconds = seconds
        self.marker = marker

    def __getitem__(self, index: int) -> Any:
        if index in self.deadly and not (self.marker and os.path.exists(self.marker)):
            if self.marker:
                Path(self.marker).touch()
            end_here(self.how, self.seconds)
        return index


def end_here(how: str, seconds: float) -> None:
    """End this process by a signal; or hang until it is ended."""
    time.sleep(seconds)
    while how == "hang":
        signal.pause()
    os.kill(os.getpid(), signal.Signals[how])


class Holder(Numbers):
    """Holds a FIFO open: who reads it sees the end of file when nobody has the dataset any more. Cannot be pickled."""

    def __init__(self, fifo: str) -> None:
        super().__init__(20)
        self.lock = threading.Lock()
        self.descriptor = os.open(fifo, os.O_WRONLY)

    def __del__(self) -> None:
        os.close(self.descriptor)


class Threaded(Numbers):
    """Its samples come from a thread that the constructor starts."""

    def __init__(self) -> None:
        super().__init__(20)
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        self.index = -1
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while self.asked.acquire():
            self.index *= 2
            self.answered.release()

    def __getitem__(self, index: int) -> Any:
        self.index = index
        self.asked.release()
        assert self.answered.acquire(timeout=20)
        return self.index


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def draw() -> list[float]:
    """A number from each generator that there is."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Process(int):
    """The number of a process, which does not make a sample another one: digests know its class alone."""


class Fields(Numbers):
    """What a sample is, and which process made it."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, *draw()], dtype=torch.float64), Process(os.getpid())


class FieldStream(IterableDataset[Any]):
    """The same, iterable-style: ``size`` samples for worker 0, and ``more`` for each one after it."""

    def __init__(self, size: int = 30, more: int = 1) -> None:
        self.size = size
        self.more = more

    def part(self) -> tuple[int, int]:
        """Which one this worker has, and how many samples there are in it."""
        info: Any = get_worker_info()
        return info.id, self.size + self.more * info.id

    def __iter__(self) -> Any:
        part, length = self.part()
        for number in range(length):
            yield torch.tensor([number, part, *draw()], dtype=torch.float64), Process(os.getpid())


class StatefulFieldStream(FieldStream):
    """Remembers its place, and tells where it was iterated over from."""

    def __init__(self, size: int = 30, more: int = 1) -> None:
        super().__init__(size, more)
        self.number = 0

    def __iter__(self) -> Any:
        part, length = self.part()
        first = self.number
        for self.number in range(first + 1, length + 1):
            yield torch.tensor([self.number - 1, part, *draw()], dtype=torch.float64), os.getpid(), first
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def is_first(marker: str) -> bool:
    """Whether nobody has asked before, of all processes that do so with this path."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def build_slowly_once(marker: str, fifo: str) -> Numbers:
    """One of the nodes that are asked waits for the FIFO."""
    if is_first(marker):
        wait_for(fifo)
    return Processes()
