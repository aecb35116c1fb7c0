"""Datasets over the stored samples, the same ones for torch's loader and for this package's.

Each sample comes with the seconds that reading it took. Their sum, divided by the seconds of the epoch, is the number
of samples that were being read, whatever the storage (Little's law).
"""

from __future__ import annotations

import functools
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from examples.storage_formats.errors import SampleError
from examples.storage_formats.plan import Format
from examples.storage_formats.samples import Manifest, image_key, label_key
from examples.storage_formats.storage import Location, explain, get_client, open_object, read_object


class Sample(NamedTuple):
    """One sample, or a batch of them with tensors of labels and seconds."""

    image: Tensor
    label: Any
    seconds: Any


class Objects(Dataset[Sample]):
    """Two objects per sample, in any order.

    Args:
        location: Where the samples are.
        stored: How many there are.
        number: Samples of an epoch; those that are stored are read again if there are more.
        folder: Where the bucket is mounted, to read files instead of objects.
    """

    def __init__(self, location: Location, stored: int, number: int, folder: str | None = None) -> None:
        self.location, self.stored, self.number = location, stored, number
        self.folder = None if folder is None else Path(folder, location.prefix)
        get_client(location.endpoint)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Sample:
        begin = time.perf_counter()
        sample = index % self.stored
        image = self._read_array(image_key(sample), sample)
        label = self._read_array(label_key(sample), sample)
        return Sample(torch.from_numpy(image), int(label), time.perf_counter() - begin)

    def _read_array(self, key: str, sample: int) -> np.ndarray:
        try:
            content = read_object(self.location, key) if self.folder is None else (self.folder / key).read_bytes()
            return np.load(io.BytesIO(content))
        except Exception as error:
            raise explain(error, self.location.url(key), f"sample {sample}") from error


class ThreadedObjects(Objects):
    """The same, with all samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return list(_make_threads(len(indices)).map(self.__getitem__, indices))


@functools.lru_cache
def _make_threads(number: int) -> ThreadPoolExecutor:
    """Threads of this process for batches of that size."""
    return ThreadPoolExecutor(number)


# Forks do not inherit threads.
os.register_at_fork(after_in_child=_make_threads.cache_clear)


class Shards(IterableDataset[Sample]):
    """Shards from their beginning to their end, each of them by one worker of one rank."""

    def __init__(self, location: Location, manifest: Manifest, shard_format: Format, number: int) -> None:
        self.location, self.shard_format = location, shard_format
        urls = [location.url(key) for key in manifest.shard_keys(shard_format)]
        self.first_samples = {url: place * shard_format.shard for place, url in enumerate(urls)}
        # As often as the epoch is longer than what is stored; its length is a multiple of the shard's.
        self.urls = list(islice(cycle(urls), number // shard_format.shard))
        self._url, self._num_read = "", 0  # of the shard that is open
        get_client(location.endpoint)

    def __iter__(self) -> Iterator[Sample]:
        read = {"webdataset": self._read_webdataset, "tfrecord": self._read_tfrecord}[self.shard_format.kind]
        self._url = ""
        samples = read()
        while True:
            begin = time.perf_counter()
            try:
                found = next(samples, None)
                if found is None:
                    self._check_end()
                    return
            except SampleError:
                raise
            except Exception as error:
                raise explain(error, self._url, self._rest()) from error
            self._num_read += 1
            image, label = found
            yield Sample(torch.from_numpy(image), int(label), time.perf_counter() - begin)

    def _read_webdataset(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        wds.gopen_schemes["s3"] = self._open
        dataset = wds.WebDataset(self.urls, nodesplitter=wds.split_by_node, shardshuffle=False)
        yield from dataset.decode().to_tuple("image.npy", "label.npy")

    def _read_tfrecord(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        from examples.storage_formats.records import decode_example, read_records

        for url in wds.split_by_worker(wds.split_by_node(self.urls)):
            for record in read_records(self._open(url)):
                arrays = decode_example(record)
                yield arrays["image"], arrays["label"]

    def _open(self, url: str, *_: Any) -> BinaryIO:
        self._check_end()
        self._url, self._num_read = url, 0
        return open_object(self.location, url.removeprefix(self.location.url("")))

    def _check_end(self) -> None:
        """A shard that ends between two samples is no error to its format."""
        if self._url and self._num_read < self.shard_format.shard:
            raise SampleError(f"{self._rest()} cannot be read from {self._url}: it ends before them")

    def _rest(self) -> str:
        """WebDataset gives a sample when it has seen the next one, so the damage may be in either."""
        first = self.first_samples[self._url]
        return f"samples {first + self._num_read} to {first + self.shard_format.shard - 1}"


def make_dataset(
    location: Location, manifest: Manifest, sample_format: Format, number: int, mount: str | None
) -> Dataset[Sample]:
    """The dataset of an epoch of ``number`` samples."""
    match sample_format.kind:
        case "objects":
            return Objects(location, manifest.number, number)
        case "threads":
            return ThreadedObjects(location, manifest.number, number)
        case "files":
            return Objects(location, manifest.number, number, mount)
    return Shards(location, manifest, sample_format, number)
