"""The result of ``iter(loader)`` for ``workers="inline"``: this process loads what a worker would."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.fetch.batch_loader import BatchLoader, StreamState
from rpcdataloader.fetch.stream_loader import StreamLoader
from rpcdataloader.loader.copying import make_carrier, pin
from rpcdataloader.loader.iterator import PassIterator
from rpcdataloader.loader.passes import begin_pass, functions_of, loader_spec, undone_afterwards
from rpcdataloader.loader.seat import Answer
from rpcdataloader.loader.settings import PassSettings, name_of
from rpcdataloader.loader.states import check_one_stream
from rpcdataloader.loader.tasks import Progress, Returned, Task
from rpcdataloader.loader.waits import diagnose, tell
from rpcdataloader.wire.exceptions import copy_to_raise, take_state
from rpcdataloader.wire.slabs import PageablePool, pinned_allocator


class InlineIterator(PassIterator):
    """The result of ``iter(loader)`` for ``workers="inline"``: the batches that one worker would load.

    A debugger stops in the dataset, which sees the same as in a worker: worker info, seeds by position.

    Args:
        streams_before: Streams at the end of the pass before.
        is_elsewhere: True if that pass was another process's, which has brought its own dataset there.
        num_left_out: Number of batches that a new pass leaves out.

    Attributes:
        recorder: Record of the waits, for the diagnosis.
    """

    recorder: Recorder

    def __init__(
        self,
        settings: PassSettings,
        dataset: Any,
        saved: Mapping[str, Any] | None = None,
        reported_length: int | None = None,
        streams_before: Sequence[StreamState] = (),
        *,
        is_elsewhere: bool = False,
        num_left_out: int = 0,
    ) -> None:
        super().__init__(settings, name_of(dataset), reported_length)
        self._pins = settings.pin_memory and pinned_allocator() is not None
        self._carrier = None if settings.device is None else make_carrier(settings.device, PageablePool())
        if saved is not None:
            check_one_stream(saved)
        self._failure: Exception | None = None
        with undone_afterwards(saved):
            self._pass = begin_pass(settings, saved, streams_before=streams_before, num_left_out=num_left_out)
            if self._pass.source.knows_states:
                self._draw()
        kind = StreamLoader if settings.iterable else BatchLoader
        stream = self.progress.streams[0] if settings.iterable else None
        spec = dataclasses.replace(loader_spec(settings, self._pass, 0, 1, stream), **functions_of(settings))
        if saved is None and not is_elsewhere:
            spec = dataclasses.replace(spec, before=None)
        self.progress.is_elsewhere = is_elsewhere or saved is not None
        self._loader = kind(dataset, spec, None, inline=True)
        self._loads = self._pass  # that the loader knows of

    def _next(self) -> tuple[Answer, Returned]:
        if self._failure is not None:
            raise copy_to_raise(self._failure)
        began, source, progress = time.monotonic(), self._pass.source, self.progress
        self._draw()
        answer = Answer()
        if (task := source.task) is not None:
            progress.is_midway = self._settings.iterable  # a sample of a map-style dataset may be loaded again
            answer = self._load(task)
            progress.is_midway = True
        if task is None or (self._settings.iterable and answer.error is None and answer.stream is None):
            progress.is_midway = False
            source.check_end()
            if self.recorder.batches:
                tell(self.recorder, lambda: diagnose(self.recorder.records()), self._name, self._settings.partition)
            raise StopIteration
        if answer.error is None:
            try:
                answer.result = self._put(answer.result)
            except Exception as error:
                answer.error = error
            else:
                self.recorder.took(time.monotonic(), began)
        source.task = None
        counted = task.number, task.num_samples, task.digest, task.sampler_state
        return answer, Returned(*counted, 0 if self._settings.iterable else None, answer.stream, answer.lacks)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _draw(self) -> None:
        """Draw the next task, and learn whether it is the last one, for a state."""
        self._pass.source.draw()
        self._pass.source.find_end()

    def _load(self, task: Task) -> Answer:
        if self._loads is not self._pass:
            self._loader.start_epoch(self.progress.epoch, self._pass.first)
            self._loads = self._pass
        answer = Answer()
        if (streams := self.progress.streams) and not streams[0].ended:
            self.progress.is_elsewhere = False  # which loads what was saved
        try:
            _seconds, answer.result, answer.lacks, answer.stream = self._loader.load(
                task.indices, task.position, task.number
            )
        except Exception as error:
            # In place of the batch. What is no Exception is raised by ``next``.
            answer.error, answer.stream = error, take_state(error)
        return answer

    def is_ready(self) -> bool:
        """Always: a call of ``next`` loads the batch itself."""
        return True

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Do nothing, as this is always ready."""

    def _put(self, batch: Any) -> Any:
        """Return a batch in the memory that the user has chosen."""
        if self._pins:
            batch = pin(batch)
        return batch if self._carrier is None else self._carrier.send(batch)

    @property
    def progress(self) -> Progress:
        return self._pass.progress

    def reset(self, reported_length: int | None) -> bool:
        before, is_elsewhere = (self.progress.base_seed, self.progress.epoch), self.progress.is_elsewhere
        begun = begin_pass(self._settings, before=before, streams_before=self.progress.last_streams())
        begun.progress.is_elsewhere = is_elsewhere
        # In one step, see ``tasks``.
        self._reported_length, self._pass, self._failure = reported_length, begun, None
        if self._pass.source.knows_states:
            self._draw()
        return True

    def _shutdown_workers(self) -> None:
        """End no workers: there are none."""
