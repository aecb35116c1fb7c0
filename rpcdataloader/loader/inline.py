"""A pass over a loader without workers, with the batches that one worker would make: ``workers="inline"``.

A debugger stops in the dataset, and what it sees is what a worker sees: worker info, seeds by position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rpcdataloader.loader.iterator import pin
from rpcdataloader.loader.passes import (
    PassSettings,
    Progress,
    begin_epoch,
    begin_pass,
    check_one_stream,
    loader_spec,
    warn_if_longer,
)
from rpcdataloader.loader.remote import BatchLoader, StreamLoader, StreamState
from rpcdataloader.loader.seeding import generators_restored
from rpcdataloader.wire.slabs import pinned_allocator


class InlineIterator:
    """What ``iter(loader)`` returns then.

    Args:
        saved: The state of the pass to go on with.
        reported_length: What ``len`` of the loader has said of an iterable-style dataset.
    """

    def __init__(
        self,
        settings: PassSettings,
        dataset: Any,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
    ) -> None:
        self._settings = settings
        self._name = type(dataset).__name__
        self._reported_length = reported_length
        self._pins = settings.pin_memory and pinned_allocator() is not None
        if saved is not None:
            check_one_stream(saved, "workers='inline'")
        with contextlib.nullcontext() if saved is None else generators_restored():
            self._pass = begin_pass(settings, saved)
        self._begin_streams()
        kind = StreamLoader if settings.iterable else BatchLoader
        self._loader = kind(dataset, loader_spec(settings, self._pass, 0, 1), None, inline=True)

    def _begin_streams(self) -> None:
        if self._settings.iterable and not self.progress.streams:
            self.progress.streams = [StreamState()]

    def __iter__(self) -> InlineIterator:
        return self

    def __next__(self) -> Any:
        source, progress = self._pass.source, self.progress
        try:
            indices, position, number = next(source)
            stream = None
            try:
                _seconds, batch = self._loader.load(indices, position, number)
                if self._settings.iterable:
                    batch, stream = batch
                    if stream is None:
                        raise StopIteration
            finally:
                # An exception of the dataset takes the place of its batch.
                if self._settings.iterable:
                    progress.stream_delivered(0, stream)
                else:
                    progress.delivered(number, source.num_samples(indices))
        except StopIteration:
            progress.finished = True
            raise
        warn_if_longer(progress.num_yielded, self._reported_length, self._name)
        return pin(batch) if self._pins else batch

    def __len__(self) -> int:
        return len(self._settings.sampler)

    @property
    def progress(self) -> Progress:
        """How far this pass has come; changes with it."""
        return self._pass.progress

    is_usable = True

    def reset(self, reported_length: int | None = None) -> None:
        """Begin another epoch with the same seed, as persistent workers do."""
        self._reported_length = reported_length
        self._pass = begin_epoch(self._settings, self.progress.base_seed, self.progress.epoch + 1)
        self._begin_streams()
        self._loader.start_epoch(self.progress.epoch, self._pass.order.first)
