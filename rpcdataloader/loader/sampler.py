"""Samplers: a distributed one whose pass other ranks can resume; and a pass over a stream as the sampler of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from rpcdataloader.errors import BadSamplesError
from rpcdataloader.fetch.raw import FailedSample, RawIndices
from rpcdataloader.host.state import has_state


class ResumableDistributedSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler``, in the same order, that can begin in the middle of an epoch.

    The ranks take the samples of one global order in turn. A checkpoint keeps the number of samples delivered on all
    ranks together, so any number of ranks with any batch size can resume: every unseen sample is seen once (apart from
    the padding at the end, as in torch), with the random numbers it would have had.

    :class:`~rpcdataloader.RPCDataloader` includes this sampler in its ``state_dict()``; all ranks load the state of any
    one of them.

    Args:
        dataset: Any object with a length.
        num_replicas: Number of ranks; by default that of torch.distributed.
        rank: Rank of this process.
        shuffle: Another order in each epoch, see ``set_epoch``; False for the order of the dataset.
        seed: Seed of the order, the same on all ranks.
        drop_last: Leave out the tail that is too short for all ranks, instead of repeating samples.

    Attributes:
        start: Position in the global order at which the next pass begins; 0 except after :meth:`load_state_dict`.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.start = 0
        self._length = len(dataset)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self._length, generator=generator, device="cpu")
        else:
            order = torch.arange(self._length, device="cpu")
        total = len(self) * self.num_replicas
        rest = order[self.start :]
        self.start = 0
        while len(rest) < total:  # repeatedly, if there are more ranks than samples
            rest = torch.cat([rest, order[: total - len(rest)]])
        return iter(rest[self.rank : total : self.num_replicas].tolist())

    def __len__(self) -> int:
        """Number of this rank's samples in the next pass."""
        rest = self._length - self.start
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; a new epoch begins at its start."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def state_dict(self, start: int | None = None) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict` to begin at position ``start`` of this epoch's order.

        The default is the start of the next pass: only the loader knows what was delivered.
        """
        return order_of(self, self._length, self.start if start is None else min(start, self._length))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass resume from the saved position.

        Raises:
            ValueError: The state belongs to a dataset of another length.
        """
        if state["length"] != self._length:
            raise ValueError(
                f"this state belongs to a dataset of {state['length']} samples, but there are {self._length} now: "
                "the order would be another one"
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        super().set_epoch(state["epoch"])
        self.start = state["start"]


def order_of(sampler: DistributedSampler[Any], length: int, start: int) -> dict[str, Any]:
    """Return the order that all ranks of torch's sampler or ours share, with a position in it, as a state of ours."""
    return {"epoch": sampler.epoch, "seed": sampler.seed, "shuffle": sampler.shuffle, "length": length, "start": start}


def is_stateful(sampler: Any) -> bool:
    """Whether a sampler, or its iterator, has a state of its own; our distributed sampler has a position instead."""
    return has_state(sampler) and not isinstance(sampler, ResumableDistributedSampler)


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of a pass at the time and in the way of torch's loader, so that both leave the same state."""
    # torch.set_default_device may name another device than the generator's.
    device = None if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())


class _RawSamples(Iterator[Any]):
    """The samples of packed batches, as indices; the batches have one sample each where single indices are wanted."""

    def __init__(self, batches: Any, *, auto_collation: bool) -> None:
        self._batches = batches
        self._auto_collation = auto_collation
        self._taken: list[Any] = []  # the next batch or its exception, from when it is taken until it is returned

    def __next__(self) -> Any:
        if not self._taken:
            progress = self._batches.progress
            num_yielded = progress.num_yielded
            try:
                # In one step, see ``tasks``.
                self._taken.extend(map(next, (self._batches,)))
            except Exception as error:
                if progress.num_yielded == num_yielded or isinstance(error, BadSamplesError):
                    raise  # it takes the place of no batch
                self._taken.append(error)
        if not self._taken:
            raise StopIteration
        taken = self._taken[0]
        indices: list[Any] = [FailedSample(taken)] if isinstance(taken, Exception) else RawIndices(taken)
        result = indices if self._auto_collation else indices[0]
        # In one step.
        self._taken = []
        return result

    def is_ready(self) -> bool:
        """Whether the next call need not wait."""
        return self._batches.is_ready()  # type: ignore[no-any-return]

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Let a function be called, in any thread, each time that :meth:`is_ready` may have become true."""
        self._batches.when_ready(wake)


class Source:
    """The sampler of a loader with a ``transform``: the raw samples of a stream, from a pass of its own.

    Args:
        loader: Loader of the stream, whose batches are packed (``fetch/raw.py``), with a generator of its own.
        name: Name of the stream in messages.
        auto_collation: False to yield single samples.

    Attributes:
        loader: Loader of the stream, whose arguments follow those of the loader with the ``transform``.
        generator: Generator of the loader with the ``transform``.
    """

    def __init__(self, loader: Any, name: str, *, auto_collation: bool) -> None:
        self.name = name
        self.generator: torch.Generator | None = None
        self.loader = loader
        self._auto_collation = auto_collation

    def __iter__(self) -> Iterator[Any]:
        self.loader.generator.manual_seed(draw_base_seed(self.generator))
        return _RawSamples(self.loader._begin_quietly(), auto_collation=self._auto_collation)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch."""
        return self.capture()()

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Return a function that gives the state of this moment; cheap, as it is called for every batch."""
        return self.loader._captured_state()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from a state."""
        self.loader.load_state_dict(state)
