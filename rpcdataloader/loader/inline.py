"""A pass over a loader without workers, with the batches that one worker would load: ``workers="inline"``.

A debugger stops in the dataset, which sees the same as in a worker: worker info, seeds by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rpcdataloader.fetch.batch_loader import BatchLoader, StreamState
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.loader.copying import make_carrier, pin
from rpcdataloader.loader.iterator import PassIterator
from rpcdataloader.loader.passes import begin_pass, loader_spec, undone_afterwards
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import check_one_stream
from rpcdataloader.loader.tasks import Progress, Task
from rpcdataloader.wire.slabs import PageablePool, pinned_allocator


class InlineIterator(PassIterator):
    """The result of ``iter(loader)`` for ``workers="inline"``."""

    def __init__(
        self,
        settings: PassSettings,
        dataset: Any,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
    ) -> None:
        super().__init__(settings, type(dataset).__name__, reported_length)
        self._pins = settings.pin_memory and pinned_allocator() is not None
        self._carrier = None if settings.device is None else make_carrier(settings.device, PageablePool())
        if saved is not None:
            check_one_stream(saved)
        with undone_afterwards(saved):
            self._pass = begin_pass(settings, saved)
        kind = StreamLoader if settings.iterable else BatchLoader
        stream = self.progress.streams[0] if settings.iterable else None
        self._loader = kind(dataset, loader_spec(settings, self._pass, 0, 1, stream), None, inline=True)

    def _next(self) -> Any:
        task, stream = next(self._pass.source, None), None
        if task is not None:
            try:
                _seconds, batch = self._loader.load(task.indices, task.position, task.number, last_try=True)
                if self._settings.iterable:
                    batch, stream = batch
            except Exception:
                # The exception takes the place of the batch; an interrupt does not.
                self._delivered(task, None)
                raise
        if task is None or (self._settings.iterable and stream is None):
            self.progress.finished = True
            raise StopIteration
        self._delivered(task, stream)
        return batch

    def __next__(self) -> Any:
        batch = super().__next__()
        if self._pins:
            batch = pin(batch)
        return batch if self._carrier is None else self._carrier.send(batch)

    def _delivered(self, task: Task, stream: StreamState | None) -> None:
        if self._settings.iterable:
            self.progress.stream_delivered(0, stream)
        else:
            self.progress.delivered(task.number, task.num_samples, task.sampler_state)

    @property
    def progress(self) -> Progress:
        return self._pass.progress

    is_usable = True

    def reset(self, reported_length: int | None = None) -> None:
        self._reported_length = reported_length
        self._pass = begin_pass(self._settings, before=(self.progress.base_seed, self.progress.epoch))
        self._loader.start_epoch(self.progress.epoch, self._pass.first, self._pass.pipe_seed)
