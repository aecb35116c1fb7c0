"""Iterable-style datasets for tests: how many samples each worker has is given, and a sample says where it is from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.datasets import note


def stream_number() -> int:
    """Of this worker; without one, the first."""
    info: Any = get_worker_info()
    return 0 if info is None else info.id


class Parts(IterableDataset[Any]):
    """``sizes[k]`` samples for worker k: ``100 * k + number``. Noted in ``log`` when they are made."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        self.sizes = list(sizes)
        self.log = log

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.sizes[stream_number()]):
            yield self.make(number)

    def make(self, number: int) -> Any:
        if self.log is not None:
            note(self.log, stream_number(), number)
        return 100 * stream_number() + number


class Drawn(Parts):
    """Shuffled when it begins, and with random numbers in each sample."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.sizes[stream_number()]).tolist()
        return ((stream_number(), number, random.random(), np.random.rand(), torch.rand(())) for number in order)


class Buffered(Parts):
    """Has a state: what is in its shuffle buffer, and how much it has read. The state is the object it works with."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.state: dict[str, Any] = {}
        self.loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.state = {"buffer": [], "read": 0}
        self.loaded = False
        state, size = self.state, self.sizes[stream_number()]
        while state["read"] < size or state["buffer"]:
            while state["read"] < size and len(state["buffer"]) < 4:
                state["buffer"].append(self.make(state["read"]))
                state["read"] += 1
            yield state["buffer"].pop(random.randrange(len(state["buffer"])))

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = state, True


class Steps:
    """An iterator."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.number = 0

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if self.number == self.parts.sizes[stream_number()]:
            raise StopIteration
        self.number += 1
        return self.parts.make(self.number - 1)


class Cursor(Steps):
    """With a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Stumbling(Steps):
    """With a bad record in the middle."""

    def __next__(self) -> Any:
        sample = super().__next__()
        if sample % 100 == 2:
            raise LookupError("a bad record")
        return sample


class Seekable(Parts):
    """Its iterator has a state."""

    def __iter__(self) -> Iterator[Any]:
        return Cursor(self)


class Placed(Parts):
    """Has a state: its epoch, which it counts itself, and its place in it. What is loaded holds for the next iteration.

    With ``holds_for_all``, the loaded place holds for all that follow, as those of Hugging Face's streams do.
    """

    holds_for_all = False

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.epoch = self.first = self.place = 0

    def __iter__(self) -> Iterator[Any]:
        first = self.first
        if not self.holds_for_all:
            self.first = 0
        order = random.Random(self.epoch).sample(range(self.sizes[stream_number()]), self.sizes[stream_number()])
        for place in range(first, len(order)):
            self.place = place + 1
            yield self.make(order[place])
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.first = state["epoch"], state["place"]


class Lasting(Placed):
    """See above."""

    holds_for_all = True


class Running(Lasting):
    """With a count of all samples, and its generator, from which each sample has a number."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.given, self.generator = 0, random.Random(3)

    def make(self, number: int) -> Any:
        self.given += 1
        return super().make(number), self.given, self.generator.random()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"given": self.given, "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.given = state["given"]
        self.generator.setstate(state["generator"])


class Sharded(Parts):
    """Has a state of two parts, shard and row, whose loaded values hold for all iterations."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.start = self.state = {"shard": 0, "row": 0}

    def __iter__(self) -> Iterator[Any]:
        self.state = dict(self.start)
        for number in range(5 * self.start["shard"] + self.start["row"], self.sizes[stream_number()]):
            self.state["shard"], self.state["row"] = divmod(number + 1, 5)
            yield self.make(number)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state


class Tallied(Placed):
    """Has a state with a count for each epoch, and its seed."""

    def __init__(self, sizes: Sequence[int], log: str | None = None, seed: int = 0) -> None:
        super().__init__(sizes, log)
        self.seed, self.counts = seed, {0: 0}

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        size = self.sizes[stream_number()]
        order = random.Random(f"{self.seed} {self.epoch}").sample(range(size), size)
        self.counts[self.epoch] = first
        for number in order[first:]:
            self.counts[self.epoch] += 1
            yield self.make(number)
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "epoch": self.epoch, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.epoch, self.counts = state["seed"], state["epoch"], dict(state["counts"])
        self.first = self.counts.get(self.epoch, 0)


class Wrapped(IterableDataset[Any]):
    """Has its state inside."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


class Own(Parts):
    """Its own iterator, which goes on where its state says, as its iteration begins."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.first = self.place = 0

    def __iter__(self) -> Iterator[Any]:
        self.place, self.first = self.first, 0
        return self

    def __next__(self) -> Any:
        if self.place == self.sizes[stream_number()]:
            raise StopIteration
        self.place += 1
        return self.make(self.place - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["place"]


class Paired(Parts):
    """Has a state, its epoch, and so has its iterator: its place in that."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.next_epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.next_epoch += 1
        return _Pair(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.next_epoch - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_epoch = state["epoch"]


class _Pair(Cursor):
    def __init__(self, parts: Paired) -> None:
        super().__init__(parts)
        size = parts.sizes[stream_number()]
        self.order = random.Random(parts.next_epoch).sample(range(size), size)

    def __next__(self) -> Any:
        return self.parts.make(self.order[super().__next__() % 100])


class Entered(Parts):
    """Has a state: its epoch, which it counts as an iteration begins, and its place in that."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.epoch, self.place, self.goes_on = -1, 0, False

    def __iter__(self) -> Iterator[Any]:
        if not self.goes_on:
            self.epoch, self.place = self.epoch + 1, 0
        self.goes_on = False
        size = self.sizes[stream_number()]
        for number in random.Random(self.epoch).sample(range(size), size)[self.place :]:
            self.place += 1
            yield self.make(number)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place, self.goes_on = state["epoch"], state["place"], True


class Telling(Parts):
    """Its iterator has the state: the epoch, which it tells the dataset when it is loaded, and the place in that."""

    def __init__(self, sizes: Sequence[int], log: str | None = None) -> None:
        super().__init__(sizes, log)
        self.epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return _Teller(self)


class _Teller(Cursor):
    def __next__(self) -> Any:
        size = self.parts.sizes[stream_number()]
        order = random.Random(self.parts.epoch).sample(range(size), size)  # type: ignore[attr-defined]
        return self.parts.make(order[super().__next__() % 100])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"epoch": self.parts.epoch}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.parts.epoch = state["epoch"]  # type: ignore[attr-defined]


class Told(Parts):
    """Its methods are of another protocol: its own loader tells it how many samples were taken."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"num_samples": num_samples, "from_beginning": from_beginning}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        raise AssertionError("nobody has its state")


class Unloadable(Placed):
    """Its state cannot be loaded, as that of a shuffled stream of Hugging Face by several workers."""

    def __iter__(self) -> Iterator[Any]:
        if self.first:
            raise IndexError("list index out of range")
        return super().__iter__()
