"""What processes that each build a dataset have built: whether it is the same, by its length and its lists of samples.

A constructor may choose in each process anew, from a random source of its own or by what it finds in a folder. An index
then stands for another sample in each, so that some are lost, and others come twice.

Most that a dataset has may differ all the same: buffers, noise, identities of the process, folders of the node. Only
lists with one item per sample are compared, and of these the ones of names and of integers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from rpcdataloader.host.state import built
from rpcdataloader.wire.digests import digest

# Items of a list that are looked at, from its whole length. Where it has another order, most of them differ.
_MAX_ITEMS = 1024

# Parts of an item, as of a path and a label, and characters at the end of each: a text may be a whole document.
_MAX_PARTS, _MAX_CHARACTERS = 8, 256

# Datasets within a dataset that are looked at.
_MAX_DATASETS = 64

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Built(NamedTuple):
    """What a process has built, as it was before any change; of an iterable-style dataset, nothing."""

    length: int | None  # None without one
    lists: Mapping[str, int]  # digests of its lists of samples, by the path of attributes

    @classmethod
    def of(cls, dataset: Any) -> Built:
        """Describe a dataset."""
        length, lists = None, {}
        for path, each in _datasets(dataset):
            with contextlib.suppress(Exception):  # the caller of ``len`` gets the error
                found = len(each)
                length = length if path else found
                for name, value in list(vars(each).items()):
                    with contextlib.suppress(Exception):  # other content
                        lists[path + name] = digest([found, *_samples_of(value, found)])
        return cls(length, lists)

    def differing(self, other: Built) -> list[str]:
        """Paths of the lists that both have, and that differ."""
        both = sorted(self.lists.keys() & other.lists.keys())
        return [path for path in both if self.lists[path] != other.lists[path]]


def built_here(dataset: object, key: int) -> Built | None:  # noqa: ARG001  # which is built for this call
    """What this process itself has built; None for what it has inherited."""
    return built.get(key)


def _datasets(dataset: Any) -> Iterator[tuple[str, Any]]:
    """A map-style dataset and those within it, each once, by their paths."""
    waiting, known = [("", dataset)], set[int]()
    for path, owner in waiting:
        if id(owner) in known or len(known) == _MAX_DATASETS or issubclass(type(owner), IterableDataset):
            continue
        known.add(id(owner))
        yield path, owner
        with contextlib.suppress(Exception):  # its threads change it meanwhile
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                among = value[:_MAX_DATASETS] if type(value) in (list, tuple) else ()
                places = [(name, value), *((f"{name}[{place}]", each) for place, each in enumerate(among))]
                # By its type: a proxy would make what it stands for, to tell its class.
                waiting += [(f"{path}{place}.", each) for place, each in places if issubclass(type(each), Dataset)]


def _samples_of(value: Any, number: int) -> list[Any]:
    """Items of a list with one per sample, of ``number`` samples.

    Raises:
        Exception: It is none.
    """
    if type(value) is torch.Tensor and value.dtype in _INTEGERS:
        value = value.numpy()  # fails for those of another layout or device
    is_array = type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iu"
    is_array = is_array and not isinstance(value.base, np.memmap)  # a file of which nothing is read yet
    if not (is_array or type(value) in (list, tuple)) or not 1 < number == len(value):
        raise TypeError(type(value))
    chosen = value[:: -(-number // _MAX_ITEMS)]
    return chosen.tolist() if is_array else [_item(each) for each in chosen]


def _item(value: Any, *, is_part: bool = False) -> Any:
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (list, tuple)) and not is_part and len(value) <= _MAX_PARTS:
        return [_item(each, is_part=True) for each in value]
    # The last part of a path, as nodes may have other folders. ``os.fspath`` would fetch a file from a cloud.
    if isinstance(value, os.PathLike):
        value = getattr(value, "name")  # noqa: B009  # which is in pathlib, and in what libraries make like it
    return os.path.basename(value[-_MAX_CHARACTERS:])
