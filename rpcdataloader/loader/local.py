"""A pass in this process (``num_workers=0``): torch's own iterator, with a state that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpcdataloader.loader.copying import make_carrier
from rpcdataloader.loader.indices import describe_indices
from rpcdataloader.loader.progress import Progress
from rpcdataloader.loader.seeding import generators_restored
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import (
    capture_start,
    check_one_stream,
    progress_of,
    restore_start,
    sampler_state,
    skip_delivered,
)
from rpcdataloader.loader.stopping import stopped
from rpcdataloader.loader.stream_state import (
    StreamState,
    load_dataset_state,
    load_iterator_state,
    skip_sample,
    state_of,
)
from rpcdataloader.wire.slabs import PageablePool


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
        self._dataset = dataset
        self._carrier = None if settings.device is None else make_carrier(settings.device, PageablePool())
        self._iterator: Any
        if saved is None:
            start = capture_start(settings)
            self._iterator = make()
            self.progress = Progress(self._iterator._base_seed, 0, start=start)
            if settings.iterable:
                self.progress.streams = [StreamState()]
                self._count_samples()
            self._record_indices(sampler_state(settings, self._iterator._sampler_iter))
        else:
            check_one_stream(saved, "num_workers=0")
            with generators_restored():
                self._go_on(make, saved)

    def _go_on(self, make: Callable[[], Iterator[Any]], saved: Mapping[str, Any]) -> None:
        settings = self._settings
        self.progress = progress_of(saved, restore_start(settings, saved))
        stream = self.progress.streams[0] if settings.iterable else StreamState()
        load_dataset_state(self._dataset, stream)
        self._iterator = make()
        samples = self._iterator._sampler_iter
        if saved["epoch"] > 0:
            # torch's iterator has drawn a seed, but persistent workers, whose pass this is, draw only one.
            restore_start(settings, saved)
            samples = iter(settings.sampler)
        get_state = sampler_state(settings, samples)
        samples, self.progress.num_samples = skip_delivered(settings, saved, samples)
        self._iterator._sampler_iter = samples
        self._record_indices(get_state)
        if settings.iterable:
            self._skip_stream(stream)

    def _skip_stream(self, stream: StreamState) -> None:
        fetcher = self._iterator._dataset_fetcher
        load_iterator_state(fetcher.dataset_iter, stream)
        for _ in range(0 if stream.owner else stream.num_samples):
            skip_sample(fetcher.dataset_iter)
        fetcher.ended = stream.ended
        self._count_samples(stream.num_samples)

    def _count_samples(self, number: int = 0) -> None:
        fetcher = self._iterator._dataset_fetcher
        self._samples = fetcher.dataset_iter = _Counted(fetcher.dataset_iter, number)

    def _record_indices(self, get_state: Callable[[], Any]) -> None:
        # Nothing is prefetched, so what was drawn last is what is delivered next.
        self._indices = self._iterator._sampler_iter = _Recorded(
            self._iterator._sampler_iter, self.progress.num_batches, self.progress.ahead, get_state
        )

    def __iter__(self) -> LocalIterator:
        return self

    def __next__(self) -> Any:
        number = self._indices.number
        num_samples = self._samples.number if self._settings.iterable else 0
        try:
            batch = next(self._iterator)
        except StopIteration as stop:
            if self._is_end(number, num_samples):
                self.progress.finished = True
                raise
            self._delivered(failed=True)
            if self._settings.iterable:
                raise stopped("collate_fn") from stop
            raise stopped(
                f"{type(self._dataset).__name__} or collate_fn, at indices {describe_indices(self._indices.last)},"
            ) from stop
        except Exception:
            # It takes the place of a batch, unless it is the sampler's. An interrupt does not.
            if self._indices.number != number:
                self._delivered(failed=True)
            raise
        self._delivered()
        return batch if self._carrier is None else self._carrier.send(batch)

    def _is_end(self, number: int, num_samples: int) -> bool:
        """Whether the sampler or the stream has ended, and not user code raised what looks like it.

        Args:
            number: Of the batch that was asked for.
            num_samples: Taken from the stream before.
        """
        if not self._settings.iterable:
            return self._indices.number == number
        # A rest that drop_last leaves out is taken, too.
        was_dropped = self._settings.drop_last and self._iterator._dataset_fetcher.ended
        return self._samples.number == num_samples or was_dropped

    def __len__(self) -> int:
        return len(self._iterator)

    def _delivered(self, failed: bool = False) -> None:
        """A batch, or an exception in its place, was handed out."""
        progress = self.progress
        if self._settings.iterable:
            progress.stream_delivered(0, None if failed else self._stream_state())
        else:
            indices = self._indices.last
            num_samples = len(indices) if self._settings.auto_collation and hasattr(indices, "__len__") else 1
            progress.delivered(self._indices.number - 1, num_samples, self._indices.state)

    def _stream_state(self) -> StreamState:
        samples, num_batches = self._samples, self.progress.streams[0].num_batches + 1
        owner, state = state_of(samples.iterator, self._dataset)
        ended = self._iterator._dataset_fetcher.ended
        return StreamState(samples.number, num_batches, owner, copy.deepcopy(state), ended)


class _Counted:
    """An iterator over samples that knows how many were asked for and were there, or failed."""

    def __init__(self, iterator: Iterator[Any], number: int) -> None:
        self.iterator = iterator
        self.number = number

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self.number += 1
        try:
            return next(self.iterator)
        except StopIteration:
            self.number -= 1
            raise


class _Recorded:
    """An iterator over batches that knows what it gave last.

    Attributes:
        number: Of the next batch.
        last: Indices of the one before.
        state: Of the sampler after it, if it has one.
    """

    def __init__(
        self, batches: Iterator[Any], number: int, leave_out: Mapping[int, Any], get_state: Callable[[], Any]
    ) -> None:
        self._batches = batches
        self._leave_out = frozenset(leave_out)
        self._get_state = get_state
        self.number = number
        self.last: Any = None
        self.state: Any = None

    def __iter__(self) -> _Recorded:
        return self

    def __next__(self) -> Any:
        number, batch = self.number, next(self._batches)
        while number in self._leave_out:
            number, batch = number + 1, next(self._batches)
        self.number, self.last, self.state = number + 1, batch, self._get_state()
        return batch
