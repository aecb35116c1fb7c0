"""A pass over a loader without workers, with the batches that one worker would load: ``workers="inline"``.

A debugger stops in the dataset, which sees the same as in a worker: worker info, seeds by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import profiler

from rpcdataloader.fetch.batch_loader import BatchLoader, StreamState
from rpcdataloader.fetch.samples import Reduced
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.loader.copying import make_carrier, pin
from rpcdataloader.loader.iterator import RANGE
from rpcdataloader.loader.passes import begin_pass, loader_spec, undone_afterwards, warn_if_longer
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import check_one_stream
from rpcdataloader.loader.tasks import Progress, Task
from rpcdataloader.wire.slabs import PageablePool, pinned_allocator


class InlineIterator:
    """The result of ``iter(loader)`` for ``workers="inline"``."""

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
        self._carrier = None if settings.device is None else make_carrier(settings.device, PageablePool())
        if saved is not None:
            check_one_stream(saved)
        with undone_afterwards(saved):
            self._pass = begin_pass(settings, saved)
        kind = StreamLoader if settings.iterable else BatchLoader
        stream = self.progress.streams[0] if settings.iterable else None
        self._loader = kind(dataset, loader_spec(settings, self._pass, 0, 1, stream), None, inline=True)

    def __iter__(self) -> InlineIterator:
        return self

    def __next__(self) -> Any:
        if not profiler._is_profiler_enabled:
            return self._next()
        with torch.profiler.record_function(RANGE):
            return self._next()

    def _next(self) -> Any:
        while type(batch := self._load_next()) is Reduced:
            self.progress.account_reduced(batch, self._settings.max_skipped)
            if not batch.is_empty:
                batch = batch.batch
                break
        warn_if_longer(self.progress.num_yielded, self._reported_length, self._name)
        if self._pins:
            batch = pin(batch)
        return batch if self._carrier is None else self._carrier.send(batch)

    def _load_next(self) -> Any:
        try:
            task = next(self._pass.source)
        except StopIteration:
            self.progress.finished = True
            raise
        stream: StreamState | None = None
        try:
            _seconds, batch = self._loader.load(task.indices, task.position, task.number, last_try=True)
            if self._settings.iterable:
                batch, stream = batch
        except Exception:
            # The exception takes the place of the batch; an interrupt does not.
            self._delivered(task, None)
            raise
        if self._settings.iterable and stream is None:
            self.progress.finished = True
            raise StopIteration
        self._delivered(task, stream)
        return batch

    def _delivered(self, task: Task, stream: StreamState | None) -> None:
        if self._settings.iterable:
            self.progress.stream_delivered(0, stream)
        else:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)

    def __len__(self) -> int:
        return len(self._settings.sampler)

    @property
    def progress(self) -> Progress:
        """The progress of this pass; changes with it."""
        return self._pass.progress

    is_usable = True

    def reset(self, reported_length: int | None = None) -> None:
        """Begin another epoch with the same seed, as persistent workers do."""
        self._reported_length = reported_length
        self._pass = begin_pass(self._settings, before=(self.progress.base_seed, self.progress.epoch))
        self._loader.start_epoch(self.progress.epoch, self._pass.first, self._pass.pipe_seed)
