"""A pass in this process (``num_workers=0``): torch's own iterator, with a state that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpcdataloader.loader.passes import (
    PassSettings,
    Progress,
    capture_start,
    check_one_stream,
    progress_of,
    restore_start,
    skip_delivered,
)
from rpcdataloader.loader.remote import StreamState
from rpcdataloader.loader.seeding import generators_restored


class LocalIterator:
    """What ``iter(loader)`` returns then.

    Random numbers of samples are those of this process, as with torch, so they belong to the trainer's state and not
    to this one.

    Args:
        make: Makes torch's iterator.
        dataset: Of the loader.
        saved: The state of the pass to go on with.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        settings: PassSettings,
        dataset: Any,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._stateful = dataset if settings.iterable and hasattr(dataset, "state_dict") else None
        self._iterator: Any
        if saved is None:
            start = capture_start(settings)
            self._iterator = make()
            self.progress = Progress(self._iterator._base_seed, 0, start=start)
            if settings.iterable:
                self.progress.streams = [StreamState()]
            self._record_indices()
        else:
            check_one_stream(saved, "num_workers=0")
            with generators_restored():
                self._go_on(make, saved)

    def _go_on(self, make: Callable[[], Iterator[Any]], saved: Mapping[str, Any]) -> None:
        self.progress = progress_of(saved, restore_start(self._settings, saved))
        streams = self.progress.streams
        has_state = bool(streams) and (streams[0].owner == "dataset" or streams[0].ended)
        if has_state and self._stateful is not None and not streams[0].ended:
            self._stateful.load_state_dict(streams[0].state)
        self._iterator = make()
        samples, self.progress.num_samples = skip_delivered(self._settings, saved, self._iterator._sampler_iter)
        self._iterator._sampler_iter = samples
        if streams and streams[0].ended:
            self._iterator._dataset_fetcher.ended = True
        if streams and not has_state:
            for _ in range(self.progress.num_batches):
                next(self._iterator)
        self._record_indices()

    def _record_indices(self) -> None:
        # Nothing is prefetched, so what was drawn last is what is delivered next.
        self._indices = self._iterator._sampler_iter = _Recorded(
            self._iterator._sampler_iter, self.progress.num_batches, self.progress.ahead
        )

    def __iter__(self) -> LocalIterator:
        return self

    def __next__(self) -> Any:
        number = self._indices.number
        try:
            return next(self._iterator)
        except StopIteration:
            self.progress.finished = True
            raise
        finally:
            if self._indices.number != number:
                self._delivered()

    def __len__(self) -> int:
        return len(self._iterator)

    def _delivered(self) -> None:
        """A batch, or an exception in its place, was handed out."""
        progress, indices = self.progress, self._indices.last
        num_samples = len(indices) if self._settings.auto_collation and hasattr(indices, "__len__") else 1
        if not self._settings.iterable:
            progress.delivered(self._indices.number - 1, num_samples)
            return
        owner, state = "", None
        if self._stateful is not None:
            owner, state = "dataset", copy.deepcopy(self._stateful.state_dict())
        before = progress.streams[0]
        ended = self._iterator._dataset_fetcher.ended
        after = StreamState(before.num_samples + num_samples, before.num_batches + 1, owner, state, ended)
        progress.stream_delivered(0, after)


class _Recorded:
    """An iterator over batches that knows what it gave last.

    Attributes:
        number: Of the next batch.
        last: Indices of the one before.
    """

    def __init__(self, batches: Iterator[Any], number: int, leave_out: Mapping[int, int]) -> None:
        self._batches = batches
        self._leave_out = frozenset(leave_out)
        self.number = number
        self.last: Any = None

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        self.last = next(self._batches)
        while self.number in self._leave_out:
            self.number += 1
            self.last = next(self._batches)
        self.number += 1
        return self.last
