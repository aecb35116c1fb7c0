"""What an iterator takes from its loader, whichever kind of iterator it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.host.memory import default_in_flight_bytes
from rpcdataloader.loader.sampler import ResumableDistributedSampler


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The arguments of a loader, checked.

    Attributes:
        dataset: What the loader was given; a function of the user may refer to it, as a bound method does.
        sampler: The batch sampler or, without automatic batching, the sampler.
        iterable: The dataset is iterable-style.
        generator: Where the base seed is drawn; None for torch's default.
        timeout: Seconds to wait for a batch; 0 for no limit.
        max_retries: A batch at which so many workers in a row died is an error.
        reconnect_timeout: Seconds to wait for a worker when none is left.
        task_timeout: Seconds that a worker may take for a batch; None for any time.
        retry_on: Exceptions of the dataset after which a batch is tried again.
        device: Where batches are brought; None for the memory of this process.
        skips: Samples whose dataset raises an exception are left out.
        max_skipped: More of them in a pass are an error.
        partition: This process among the trainers, for the seeds.
    """

    dataset: Any
    sampler: Any
    auto_collation: bool
    iterable: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    timeout: float = 0.0
    prefetch_factor: int = 2
    in_order: bool = True
    max_in_flight_bytes: int = field(default_factory=default_in_flight_bytes)
    pin_memory: bool = False
    device: torch.device | None = None
    persistent_workers: bool = False
    max_retries: int = 3
    reconnect_timeout: float = 300.0
    task_timeout: float | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    skips: bool = False
    max_skipped: int = 100
    partition: Partition = field(default_factory=current_partition)

    @property
    def marks_last_try(self) -> bool:
        """Whether the last try of a batch is another request: only then are samples left out that may still come."""
        return self.skips and bool(self.retry_on)

    @property
    def samplers(self) -> tuple[Any, ...]:
        """The sampler, and what it draws from."""
        return self.sampler, getattr(self.sampler, "sampler", None)

    @property
    def chain(self) -> list[Any]:
        """The sampler, what it draws from, and so on: other libraries put samplers around samplers."""
        found, sampler = [], self.sampler
        while sampler is not None:
            found.append(sampler)
            # Lightning's for distributed jobs has the one inside as a dataset. One that is not here must not be asked.
            inside = vars(sampler).get("dataset") if hasattr(sampler, "__dict__") else None
            inside = vars(inside).get("_sampler") if hasattr(inside, "__dict__") else None
            sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", inside))
        return found

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The sampler of which all ranks take samples in turn, torch's own or ours, if batches keep its order."""
        batches, sampler = self.samplers
        if type(batches).__iter__ is not BatchSampler.__iter__:
            sampler = batches
        is_known = type(sampler) is DistributedSampler or isinstance(sampler, ResumableDistributedSampler)
        return sampler if is_known else None

    @property
    def resumable(self) -> ResumableDistributedSampler | None:
        """The same, if it is ours: its place is computed."""
        sampler = self.distributed
        return sampler if isinstance(sampler, ResumableDistributedSampler) else None

    @property
    def own_generators(self) -> list[torch.Generator]:
        """Generators that belong to loader and samplers, each once; who has none draws from the global ones."""
        found = [getattr(owner, "generator", None) for owner in (self, *self.chain)]
        return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))
