"""The dataset's stand-in, in a worker or in this process, and the differences between two samples that it loads."""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rpcdataloader.fetch import seeding
from rpcdataloader.server.datasets import name_shared_connections, why_not_shared
from rpcdataloader.server.processes import num_threads, open_connections, open_files
from rpcdataloader.wire.picklers import USER_ERRORS
from rpcdataloader.wire.pickling import dumps_reply, kind_of


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
        threads, files, connections = num_threads(), open_files(), open_connections()
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
        self.facts = Facts(text, length, why_not_shared(threads, files), name_shared_connections(connections))
        self._is_iterable = is_iterable
        self._stream: Iterator[Any] = iter(())
        self._place = -2

    def __getitem__(self, index: int) -> list[Any]:
        """The sample in a list, or its seconds and bytes; an empty list at the end of a stream."""
        start = time.perf_counter()
        seeding.begin_sample(seeding.derive_seeds(seeding.SAMPLE, base_seed=0, epoch=0, number=index))
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


#: Ways to load a sample again, with equal seeds.
AGAIN = "again in the same worker"
OTHER_WORKER = "in another worker"
OTHER_NODE = "on another node"
SENT = "sent as an instance"
HERE = "in this process"

# Ids of the objects above the two at hand, which may lead back to them.
_Above = frozenset[tuple[int, int]]


def find_differences(
    first: Any, second: Any, path: str = "sample", above: _Above = frozenset()
) -> Iterator[tuple[str, str]]:
    """Compare two samples bit by bit, so that a NaN equals itself.

    Yields:
        Path of an innermost differing part (``sample[0]['image']``), and the difference (``12 of 4096 values``).
    """
    if first is second or (id(first), id(second)) in above:
        return
    above |= {(id(first), id(second))}
    if type(first) is not type(second):
        yield path, f"{kind_of(first)} and {kind_of(second)}"
    elif isinstance(first, torch.Tensor) and first.layout is torch.strided and not first.is_nested:
        yield from _compare_tensors(first, second, path)
    elif isinstance(first, np.generic) or type(first) is np.ndarray:
        try:
            yield from _compare_tensors(torch.tensor(first), torch.tensor(second), path)
        except (TypeError, ValueError):  # text, objects, structures
            yield from find_differences(first.tolist(), second.tolist(), path, above)
    elif isinstance(first, dict) and first.keys() == second.keys():
        for key in first:
            yield from find_differences(first[key], second[key], f"{path}[{key!r}]", above)
    elif isinstance(first, (list, tuple)) and len(first) == len(second):
        fields = getattr(first, "_fields", None)
        for i, (mine, other) in enumerate(zip(first, second, strict=True)):
            yield from find_differences(mine, other, f"{path}.{fields[i]}" if fields else f"{path}[{i}]", above)
    elif isinstance(first, (list, tuple)):
        yield path, f"{len(first)} and {len(second)} items"
    elif isinstance(first, dict):
        yield path, f"keys {list(first)} and {list(second)}"
    elif isinstance(first, (str, bytes, bytearray, int, float, complex, set, frozenset)):
        # The text of a number tells 0.0 from -0.0, and equates all NaN; the text of a set has an order.
        if repr(first) != repr(second) and (isinstance(first, (float, complex)) or first != second):
            shown = f"{first!r} and {second!r}"
            yield path, shown if len(shown) < 120 else f"two {kind_of(first)} that are not the same"
    else:
        try:
            # What pickle saves, and so what was sent: attributes, slots, and the class's own state.
            parts = [
                [list(part) if isinstance(part, Iterator) else part for part in obj.__reduce_ex__(4)]
                for obj in (first, second)
            ]
        except USER_ERRORS:
            return  # sent by name (functions, classes), or not at all
        yield from find_differences(parts[0], parts[1], f"{path}.__reduce__()", above)


def _compare_tensors(first: torch.Tensor, second: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
    if first.dtype != second.dtype:
        yield path, f"dtype {first.dtype} and {second.dtype}"
    elif first.shape != second.shape:
        yield path, f"shape {tuple(first.shape)} and {tuple(second.shape)}"
    elif first.numel():
        mine, other = (
            tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
            for tensor in (first, second)
        )
        differing = (mine.view(torch.uint8) != other.view(torch.uint8)).view(-1, first.element_size()).any(dim=1)
        if differing.any():
            largest = math.nan if first.is_complex() else (mine.double() - other.double()).abs().max().item()
            by = f", by up to {largest:.3g}" if math.isfinite(largest) else ""
            yield path, f"{int(differing.sum())} of {first.numel()} values{by}"


def explain(runs: Collection[str]) -> str:
    """The usual cause of a difference in these runs, and its remedy."""
    if AGAIN in runs and OTHER_WORKER in runs:
        cause = "a random generator of its own that is never seeded, the time, or memory never written (np.empty)"
    elif OTHER_WORKER in runs:
        cause = "the id of the process, or a generator made in the constructor where each worker builds for itself"
    elif AGAIN in runs:
        cause = "state kept from sample to sample: a generator made in the constructor, a cache that changes"
    else:
        return "the order of a set or folder (sort it), hash() of a string, or other versions, files or paths there"
    return f"{cause}: draw from the global generators, or seed your own with get_sample_seed() in each sample"
