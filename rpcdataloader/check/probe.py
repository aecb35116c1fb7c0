"""The dataset's stand-in, in a worker or in this process: makes the dataset, loads samples and times them."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from rpcdataloader.check.compare import kind_of
from rpcdataloader.fetch import seeding
from rpcdataloader.server.datasets import why_not_shared
from rpcdataloader.server.processes import num_threads, open_files
from rpcdataloader.wire.pickling import dumps_reply


class Facts(NamedTuple):
    """Properties of a dataset.

    Attributes:
        text: Its kind and length: ``photos.Photos of 1,000 samples``.
        length: Number of samples; None without ``__len__``.
        not_shared: Reason why workers cannot inherit it by a fork; None if they can.
    """

    text: str
    length: int | None
    not_shared: str | None


class Timed(int):
    """An index whose sample is timed, and stays in its worker."""


class Probe:
    """Makes the dataset and loads its samples as the loader would, seeded by their indices.

    Args:
        target: ``MODULE:FACTORY``.

    Raises:
        TypeError: The target makes no dataset.
        ValueError: The dataset is empty.
        Exception: Importing the module or making the dataset failed.
    """

    def __init__(self, target: str) -> None:
        # Importing may start threads, too.
        threads, files = num_threads(), open_files()
        module, _colon, name = target.partition(":")
        made = attrgetter(name)(importlib.import_module(module))
        if callable(made) and (isinstance(made, type) or not hasattr(made, "__getitem__")):
            made = made()
        kind, is_iterable = kind_of(made), isinstance(made, IterableDataset)
        if not hasattr(made, "__getitem__"):  # torch's iterable ones have it, too
            raise TypeError(
                f"{target} gives {kind}, which has no __getitem__ and is no IterableDataset; is a return missing?"
            )
        length = None if is_iterable or not hasattr(made, "__len__") else len(made)
        if length == 0:
            raise ValueError(f"{kind} is empty: its length is 0. Is the path right, and are there files below it?")
        what = "is iterable" if is_iterable else "has no length (RPCDataloader needs a sampler)"
        text = f"{kind}, which {what}," if length is None else f"{kind} of {length:,} samples"
        self.dataset = made
        self.facts = Facts(text, length, why_not_shared(threads, files))
        self._is_iterable = is_iterable
        self._stream: Iterator[Any] = iter(())
        self._place = -2

    def __getitem__(self, index: int) -> list[Any]:
        """The sample in a list, or its seconds and bytes; an empty list at the end of a stream."""
        start = time.perf_counter()
        seeding.begin_sample(seeding.sample_seeds(base_seed=0, epoch=0, position=index))
        try:
            sample = self._next(index) if self._is_iterable else self._get(int(index))
        except StopIteration:
            return []
        # Encoded in either case, so that errors call it a sample.
        size_bytes = dumps_reply(sample, name="sample").size_bytes
        return [(time.perf_counter() - start, size_bytes) if isinstance(index, Timed) else sample]

    def _get(self, index: int) -> Any:
        # As the loader does, for a batch of one.
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch([index])[0] if fetch else self.dataset[index]

    def _next(self, place: int) -> Any:
        if place != self._place + 1:
            # A stream begins again, or continues in place of a dead worker's.
            self._stream = itertools.islice(iter(self.dataset), int(place), None)
        self._place = place
        return next(self._stream)
