"""What runs beside the dataset: in a worker, or in this process.

The dataset is wrapped in a :class:`Probe`, whose indices are functions to run with it. So whatever the loader does with
a map-style dataset can be asked of any dataset.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.utils.data import IterableDataset

from rpcdataloader.check.compare import kind_of
from rpcdataloader.loader import seeding
from rpcdataloader.wire.diagnose import USER_ERRORS
from rpcdataloader.wire.pickling import dumps_reply

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_IMPORT_FOLDER = os.path.dirname(importlib.__file__)
_NUM_FRAMES = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of user code, or of what it returned.

    Attributes:
        what: ``ValueError: image 3 is broken``.
        frames: Where that happened: lines of text, innermost last, without the frames of this package.
    """

    what: str
    frames: tuple[str, ...] = ()


def failure_of(error: BaseException) -> Failure:
    """Describe an exception."""
    what = f"{type(error).__name__}: {error}".removesuffix(": ").strip()
    return Failure(what, tuple(_frames(error.__traceback__)))


def _frames(where: TracebackType | None) -> list[str]:
    frames = [
        frame
        for frame in traceback.extract_tb(where)
        if not frame.filename.startswith((_PACKAGE_FOLDER, _IMPORT_FOLDER, "<frozen importlib"))
    ]
    lines = []
    for frame in frames[-_NUM_FRAMES:]:
        lines += [f"{frame.filename}, line {frame.lineno}, in {frame.name}", f"    {frame.line}"]
    return lines


@dataclass(frozen=True, slots=True)
class Description:
    """What a dataset is.

    Attributes:
        style: ``map``, ``iterable``, or empty if it is neither.
        length: None if it has none.
    """

    kind: str
    style: str
    length: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one worker does with samples.

    Attributes:
        num_samples: How many the sizes are of.
        smallest_bytes: Of the encoded sample; likewise the others.
        samples_per_second: Loaded and encoded, after the first sample if there are more.
    """

    num_samples: int
    mean_bytes: float
    smallest_bytes: int
    largest_bytes: int
    samples_per_second: float


#: A sample to load: its index, and its position in the epoch, from which its seed comes.
Wanted = tuple[int, int]


class Probe:
    """A dataset, with functions as its indices.

    Args:
        make: Makes the dataset; what it raises is the answer to every function.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._dataset: Any = None
        self._failure: Failure | None = None
        try:
            self._dataset = make()
        except USER_ERRORS as error:
            self._failure = failure_of(error)

    def __getitem__(self, function: Callable[[Any], Any]) -> Any:
        if self._failure is not None:
            return self._failure
        with seeding.sample_scope():
            return function(self._dataset)


def unchanged(value: Any) -> Any:
    """A collate function that leaves things as they are."""
    return value


def describe(dataset: Any) -> Description | Failure:
    """What it is, as the loader sees it."""
    style, length = "", None
    try:
        if isinstance(dataset, IterableDataset):
            style = "iterable"
        elif hasattr(dataset, "__getitem__"):
            style = "map"
            if hasattr(dataset, "__len__"):
                length = len(dataset)
    except USER_ERRORS as error:
        failure = failure_of(error)
        return Failure(f"len(dataset) raised {failure.what}", failure.frames)
    return Description(kind_of(dataset), style, length)


@dataclass(frozen=True)
class Load:
    """Load samples; of an iterable dataset, the first ``len(wanted)``."""

    wanted: Sequence[Wanted]

    def __call__(self, dataset: Any) -> list[Any] | Failure:
        """The samples."""
        samples: list[Any] = []
        try:
            for sample in _walk(dataset, self.wanted):
                dumps_reply(sample, name="sample")
                samples.append(sample)
        except USER_ERRORS as error:
            return _failed(dataset, self.wanted, len(samples), error)
        return samples

    def __repr__(self) -> str:
        # In the error of a loader whose worker has died.
        return ", ".join(str(index) for index, _position in self.wanted)


@dataclass(frozen=True)
class Measure:
    """Load and encode samples as :class:`Load` does, for about ``seconds``, but at least one."""

    wanted: Sequence[Wanted]
    seconds: float

    def __call__(self, dataset: Any) -> Measured | Failure:
        """Sizes and speed."""
        sizes: list[int] = []
        start = first = end = time.perf_counter()
        try:
            for sample in _walk(dataset, self.wanted):
                sizes.append(dumps_reply(sample, name="sample").size_bytes)
                end = time.perf_counter()
                if len(sizes) == 1:
                    first = end
                if end - start >= self.seconds:
                    break
        except USER_ERRORS as error:
            return _failed(dataset, self.wanted, len(sizes), error)
        if not sizes:
            return Failure("it has no samples")
        # The first one opens files and fills caches.
        number, elapsed = (len(sizes) - 1, end - first) if len(sizes) > 1 else (1, end - start)
        return Measured(len(sizes), sum(sizes) / len(sizes), min(sizes), max(sizes), number / max(elapsed, 1e-9))

    def __repr__(self) -> str:
        return f"some from {self.wanted[0][0]} to {self.wanted[-1][0]}"


def _walk(dataset: Any, wanted: Sequence[Wanted]) -> Iterator[Any]:
    if not isinstance(dataset, IterableDataset):
        for index, position in wanted:
            _seed(position)
            # As the loader asks, for a batch of one.
            yield dataset.__getitems__([index])[0] if getattr(dataset, "__getitems__", None) else dataset[index]
        return
    _seed(0)
    samples = iter(dataset)
    for _index, position in wanted:
        _seed(position)
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


def _seed(position: int) -> None:
    seeding.begin_sample(seeding.sample_seeds(base_seed=0, epoch=0, position=position))


def _failed(dataset: Any, wanted: Sequence[Wanted], place: int, error: BaseException) -> Failure:
    is_stream = isinstance(dataset, IterableDataset)
    name = f"sample {place} of the dataset" if is_stream else f"dataset[{wanted[place][0]!r}]"
    failure = failure_of(error)
    return Failure(f"{name}: {failure.what}", failure.frames)
