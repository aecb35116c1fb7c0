"""A pass over a loader without workers, with the batches that workers would make: ``workers="inline"``.

A debugger stops in the dataset, and what it sees is what a worker sees: worker info, seeds by position.
"""

from __future__ import annotations

from typing import Any

from rpcdataloader.loader.iterator import PassSettings, TaskSource, draw_base_seed, pin
from rpcdataloader.loader.remote import BatchLoader, LoaderSpec
from rpcdataloader.wire.slabs import pinned_allocator


class InlineIterator:
    """What ``iter(loader)`` returns then."""

    def __init__(self, settings: PassSettings, dataset: Any) -> None:
        self._settings = settings
        self._pins = settings.pin_memory and pinned_allocator() is not None
        samples = iter(settings.sampler)
        self._epoch = 0
        spec = LoaderSpec(
            collate_fn=settings.collate_fn,
            worker_init_fn=settings.worker_init_fn,
            auto_collation=settings.auto_collation,
            base_seed=draw_base_seed(settings.generator),
            epoch=0,
            rank=settings.partition.rank,
            world_size=settings.partition.world_size,
            worker_id=0,
            num_workers=1,
        )
        self._loader = BatchLoader(dataset, spec, None, inline=True)
        self._source = TaskSource(settings, samples)

    def __iter__(self) -> InlineIterator:
        return self

    def __next__(self) -> Any:
        indices, position, number = next(self._source)
        _timings, batch = self._loader.load(indices, position, number)
        return pin(batch) if self._pins else batch

    def __len__(self) -> int:
        return len(self._settings.sampler)

    is_usable = True

    def reset(self) -> None:
        """Begin another epoch with the same seed, as persistent workers do."""
        samples = iter(self._settings.sampler)
        self._epoch += 1
        self._loader.start_epoch(self._epoch)
        self._source = TaskSource(self._settings, samples)
