"""Samplers with states of their own, of the kinds that libraries and scripts have. Each says what its state is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler


class Ordered:
    """Has another order in each epoch, by its number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def order(self, epoch: int) -> list[int]:
        return random.Random(epoch).sample(range(self.size), self.size)


class Position(Ordered):
    """Position within the epoch, which the script chooses by ``set_epoch``."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for index in self.order(self.epoch)[self.position :]:
            self.position += 1
            yield index
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Staying(Ordered):
    """Position within the epoch; one that is loaded holds for all that follow."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.first = self.position = 0
        self.generator = torch.Generator().manual_seed(size)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=self.generator).tolist()
        for position in range(self.first, self.size):
            self.position = position + 1
            yield order[position]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["position"]


class Total(Ordered):
    """Number of samples given in all epochs, as Megatron's; the end of an epoch is the beginning of the next one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        epoch, position = divmod(self.given, self.size)
        for index in self.order(epoch)[position:]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Drawing(Ordered):
    """Its generator, as Python gives its state, and what is left of the epoch; the next one begins when none is."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.random = random.Random(7)
        self.left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        if not self.left:
            self.left = self.random.sample(range(self.size), self.size)
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.random.getstate(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate(state["generator"])
        self.left = state["left"]


class Counted(Ordered):
    """Epoch, which it counts itself, and numbers given, by epoch. Until the first one, it says what was in the last."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch, self.given, self.first = 0, {0: 0}, 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        self.given[self.epoch] = first
        for index in self.order(self.epoch)[first:]:
            self.given[self.epoch] += 1
            yield index
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given = state["epoch"], dict(state["given"])
        self.first = self.given.get(self.epoch, 0)


class Iterating(Ordered):
    """Its iterator has the state, a generator of torch with it, as those of torchdata."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        return _Iterator(self)


class _Iterator:
    def __init__(self, sampler: Iterating) -> None:
        self.sampler = sampler
        self.state, self.given = sampler.generator.get_state(), 0
        self.order: list[int] | None = None

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.order is None:
            self.sampler.generator.set_state(self.state)
            self.order = torch.randperm(self.sampler.size, generator=self.sampler.generator).tolist()
        if self.given == self.sampler.size:
            raise StopIteration
        self.given += 1
        return self.order[self.given - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.state, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.given = state["generator"], state["given"]


class Rewound(Ordered):
    """Epoch, which it counts itself, and position, which it sets back when its next iteration begins."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = self.position = self.first = 0

    def __iter__(self) -> Iterator[int]:
        self.position, self.first = self.first, 0
        for index in self.order(self.epoch)[self.position :]:
            self.position += 1
            yield index
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.first = state["epoch"], state["position"]


class Twofold(Ordered):
    """Its epoch, which it counts when an iteration begins; the position in that is its iterator's."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return _Half(self)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class _Half:
    def __init__(self, sampler: Twofold) -> None:
        self.order, self.position = sampler.order(sampler.epoch), 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == len(self.order):
            raise StopIteration
        self.position += 1
        return self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Pooled:
    """Batches of similar indices, from a pool of which it has read all before it gives the first; without a state."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        while pool := sorted(itertools.islice(samples, 2 * self.batch_size + 1)):
            for first in range(0, len(pool), self.batch_size):
                batch = pool[first : first + self.batch_size]
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch


class Covered:
    """Batches of a batch sampler that it hides."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        self.sampler = self.batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batch_sampler


class Unplaced(Ordered):
    """Its state has no position."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.epoch)
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


SAMPLERS = {kind.__name__: kind for kind in (Position, Staying, Total, Drawing, Counted, Iterating, Rewound)}
