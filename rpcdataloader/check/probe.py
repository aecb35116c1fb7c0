"""The dataset's stand-in, in a worker or in this process, and the differences between two samples that it loads."""

from __future__ import annotations

import importlib
import itertools
import pickle
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from rpcdataloader.fetch import seeding
from rpcdataloader.server.datasets import name_shared_connections, open_connections, open_files, why_not_shared
from rpcdataloader.wire.pickling import dumps_reply, kind_of

# Characters of the path to a part. A sample may contain itself.
_MAX_PATH = 1000


class Facts(NamedTuple):
    """Properties of a dataset."""

    text: str  # its kind and length: ``photos.Photos of 1,000 samples``
    length: int | None  # number of samples; None without ``__len__``
    not_shared: str | None  # reason why workers cannot inherit it by a fork; None if they can
    connections: str  # peers of connections that workers would share


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
        files, connections = open_files(), open_connections()
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
        self.facts = Facts(text, length, why_not_shared(made, files), name_shared_connections(connections))
        self._is_iterable = is_iterable
        self._stream: Iterator[Any] = iter(())
        self._place = -2

    def __getitem__(self, index: int) -> list[Any]:
        """The sample in a list, or its seconds and bytes; an empty list at the end of a stream."""
        start = time.perf_counter()
        seeds = seeding.derive_seeds(seeding.SAMPLE, base_seed=0, epoch=0, number=index)
        seeding.begin_sample(seeds, reads_ahead=self._is_iterable)
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


def find_differences(
    first: Any, second: Any, path: str = "sample", seen: dict[tuple[int, int], Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Compare two samples exactly; a NaN equals itself.

    Args:
        seen: Pairs compared before, by their ids: samples may have cycles.

    Yields:
        Path of an innermost differing part (``sample[0]['image']``), and the difference.
    """
    seen, pair = {} if seen is None else seen, (id(first), id(second))
    if len(path) > _MAX_PATH or first is second or pair in seen:
        return
    seen[pair] = first, second  # no other objects get their ids
    if type(first) is not type(second):
        yield path, f"{kind_of(first)} and {kind_of(second)}"
    elif isinstance(first, dict) and first.keys() == second.keys():
        for key in first:
            yield from find_differences(first[key], second[key], f"{path}[{key!r}]", seen)
    elif isinstance(first, (list, tuple)) and len(first) == len(second):
        names = [f".{name}" for name in getattr(first, "_fields", ())] or [f"[{i}]" for i in range(len(first))]
        for name, mine, other in zip(names, first, second, strict=True):
            yield from find_differences(mine, other, path + name, seen)
    else:
        try:
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            # Below a headline, how many values differ, and by how much.
            lines = list(filter(None, str(error).splitlines()))
            yield path, " ".join(lines[1:3] or lines)
        except (Exception, SystemExit):  # neither tensors nor numbers
            if not _is_equal(first, second):
                if attributes := getattr(first, "__dict__", None):
                    yield from find_differences(attributes, vars(second), f"{path}.__dict__", seen)
                else:
                    shown = f"{first!r} and {second!r}"
                    yield path, shown if len(shown) < 120 else f"two {kind_of(first)} that are not the same"


def _is_equal(first: Any, second: Any) -> bool:
    try:
        return pickle.dumps(first) == pickle.dumps(second) or bool(first == second)
    except (Exception, SystemExit):  # such as a dataclass with tensors in it
        return False
