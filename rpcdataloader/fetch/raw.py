"""Raw samples of a stream, on their way from the workers that iterate over it to those that transform them.

The trainer deals them out as if they were indices of a map-style dataset. It never unpickles them: a batch is a pickle
beside the memory of its large byte strings, arrays and tensors, and both are passed on as they came.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from rpcdataloader.wire.pickling import dumps, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES


class RawBatch:
    """Raw samples as bytes.

    Attributes:
        num_samples: Number of samples.
        source: Number of the worker that they come from.
    """

    __slots__ = ("_blocks", "_pickled", "_samples", "num_samples", "source")

    def __init__(self, num_samples: int, source: int, pickled: bytes, *blocks: Any) -> None:
        self.num_samples, self.source = num_samples, source
        self._pickled, self._blocks = pickled, blocks
        self._samples: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return RawBatch, (self.num_samples, self.source, self._pickled, *map(pickle.PickleBuffer, self._blocks))

    @property
    def indices(self) -> list[RawSample]:
        """One index for each sample."""
        return [RawSample(self, number) for number in range(self.num_samples)]

    def take(self, number: int) -> Any:
        """Return a sample, rebuilt anew if it was taken before."""
        if not self._samples or self._samples[number] is None:
            blocks = [Block(torch.frombuffer(block, dtype=torch.uint8)) for block in self._blocks]
            self._samples = [(sample,) for sample in loads(self._pickled, blocks, adopt_main=True)]
        (sample,), self._samples[number] = self._samples[number], None
        return sample


class RawSample:
    """A raw sample, which takes the place of an index."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: RawBatch, number: int) -> None:
        self._batch, self._number = batch, number

    def __reduce__(self) -> tuple[Any, ...]:
        return RawSample, (self._batch, self._number)

    def __repr__(self) -> str:
        return f"a sample of source worker {self._batch.source}"

    def take(self) -> Any:
        """Return the sample itself."""
        return self._batch.take(self._number)


class FailedSample:
    """Takes the place of samples of a stream that has raised an exception: transforming it raises that in its turn."""

    def __init__(self, error: Exception) -> None:
        self._error, self._cause = error, error.__cause__

    def __repr__(self) -> str:
        return "a sample that the stream has failed to give"

    def take(self) -> Any:
        """Raise the exception."""
        raise self._error from self._cause


def pack(samples: Sequence[Any]) -> RawBatch:
    """Collate raw samples.

    Raises:
        SerializationError: One cannot be pickled.
    """
    worker = get_worker_info()
    encoded = dumps(list(map(_set_apart, samples)), name="samples")
    return RawBatch(len(samples), 0 if worker is None else worker.id, encoded.payload, *encoded.buffers)


def _set_apart(value: Any) -> Any:
    """Replace large byte strings, which pickle copies, in the containers of a sample."""
    kind = type(value)
    if kind is bytes and len(value) >= MIN_BLOCK_BYTES:
        return _Bytes(value)
    if kind is dict:
        return {key: _set_apart(each) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind(map(_set_apart, value))
    return value


class _Bytes:
    """A byte string whose memory stays out of the pickle."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(bytearray(self._value)),)  # what arrives over memory can be written


class Transformed(Dataset[Any]):
    """The map-style dataset whose indices are raw samples."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __getitem__(self, index: RawSample | FailedSample) -> Any:
        return self.transform(index.take())
