"""What an iterator takes from its loader, whichever kind of iterator it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.loader.memory import default_in_flight_bytes
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
    def resumable(self) -> ResumableDistributedSampler | None:
        """Our own sampler, if it is used: its place is computed."""
        return next((found for found in self.samplers if isinstance(found, ResumableDistributedSampler)), None)

    @property
    def own_generators(self) -> list[torch.Generator]:
        """Generators that belong to loader and samplers, each once; who has none draws from the global ones."""
        owners, owner = [self], self.sampler
        while owner is not None:  # other libraries put batch samplers around batch samplers
            owners.append(owner)
            owner = getattr(owner, "sampler", getattr(owner, "batch_sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list(dict.fromkeys(generator for generator in found if isinstance(generator, torch.Generator)))
