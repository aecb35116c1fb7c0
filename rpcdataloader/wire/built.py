"""What processes that each build a dataset have built: whether it is the same, by its length and its lists.

A constructor may choose in each process anew, from a random source of its own or by what it finds in a folder. An index
then stands for another sample in each, so that some are lost, and others come twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from rpcdataloader.host.state import built
from rpcdataloader.wire.digests import digest

# Elements of a list that are looked at, and of each of these. Where a list has another order, or one element more, most
# of them differ.
_MAX_ELEMENTS, _MAX_INNER = 1024, 8

# Datasets within a dataset that are looked at.
_MAX_DATASETS = 64


class Built(NamedTuple):
    """What a process has built, as it was before any change."""

    length: int | None  # None without one
    lists: Mapping[str, int]  # digests of its lists, tuples, arrays and tensors, by the path of attributes

    @classmethod
    def of(cls, dataset: Any) -> Built:
        """Describe a dataset."""
        length = None
        with contextlib.suppress(Exception):  # the caller of ``len`` gets the error
            length = len(dataset)
        return cls(length, {path: digest(_some_of(value, _MAX_ELEMENTS)) for path, value in _lists(dataset)})

    def differing(self, other: Built) -> list[str]:
        """Paths of the lists that both have, and that differ."""
        both = sorted(self.lists.keys() & other.lists.keys())
        return [path for path in both if self.lists[path] != other.lists[path]]


def built_here(dataset: object, key: int) -> Built | None:  # noqa: ARG001  # which is built for this call
    """What this process itself has built; None for what it has inherited."""
    return built.get(key)


def _lists(dataset: object) -> Iterator[tuple[str, Any]]:
    """The lists of a dataset, and of those within it, by their paths."""
    waiting = [("", dataset)]
    for number in range(_MAX_DATASETS):
        if number == len(waiting):
            return
        path, owner = waiting[number]
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, Dataset):
                waiting.append((f"{path}{name}.", value))
            elif type(value) in (list, tuple) and any(isinstance(each, Dataset) for each in value[:_MAX_DATASETS]):
                waiting += [(f"{path}{name}[{place}].", each) for place, each in enumerate(value)]
            elif _is_list(value) and len(value) > 1:
                yield path + name, value


def _is_list(value: object) -> bool:
    if isinstance(value, np.ndarray):
        base: Any = value
        while isinstance(base, np.ndarray):
            base = base.base
        return value.ndim > 0 and not isinstance(base, mmap.mmap)  # a file of which nothing is read yet
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.ndim > 0 and value.device.type == "cpu"
    return type(value) in (list, tuple)


def _some_of(value: Any, most: int) -> Any:
    """Up to ``most`` elements of a list, from its whole length, and some of each of these; other values as they are."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and value.startswith(folder := tempfile.gettempdir() + "/"):
        return value.removeprefix(folder).partition("/")[2]  # each process may have a folder of its own there
    if isinstance(value, dict):
        value = list(value.items())
    if type(value) in (list, tuple):
        return [len(value), *(_some_of(each, _MAX_INNER) for each in value[:: _step(len(value), most)])]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if not _is_list(value):
            return type(value).__name__
        limits = [most, *[_MAX_INNER] * (value.ndim - 1)]
        chosen = value[tuple(slice(None, None, _step(*each)) for each in zip(value.shape, limits, strict=False))]
        return [list(value.shape), chosen]
    return value


def _step(number: int, most: int) -> int:
    return max(1, -(-number // most))
