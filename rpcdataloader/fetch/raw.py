"""Raw samples of a stream, on their way from the workers that iterate over it to those that transform them.

The trainer deals them out as if they were indices of a map-style dataset. It never unpickles them: a batch is a pickle
beside the contents of its large byte strings, arrays and tensors, in one block, and both are passed on as they came.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, get_worker_info

from rpcdataloader.errors import RemoteTraceback, RPCError
from rpcdataloader.fetch.samples import stopped
from rpcdataloader.wire.memory import end_of, split
from rpcdataloader.wire.picklers import Frozen
from rpcdataloader.wire.pickling import dumps, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.strings import set_apart
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES, is_dense

_IMMUTABLE = {bytes, str, int, float, complex, bool, type(None)}

# That of the largest element, complex256.
_ALIGNMENT = 32


class RawBatch:
    """Raw samples as bytes.

    Attributes:
        num_samples: Number of samples.
        source: Number of the worker that they come from.
    """

    __slots__ = ("_block", "_pickled", "_samples", "_sizes", "num_samples", "source")

    def __init__(self, num_samples: int, source: int, pickled: bytes, sizes: tuple[int, ...], block: Any) -> None:
        self.num_samples = num_samples
        self.source = source
        # An array, not a memoryview, for the garbage collector: see ``picklers.py``.
        self._pickled = pickled
        self._sizes = sizes
        self._block = np.frombuffer(block, np.uint8)
        self._samples: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        block = pickle.PickleBuffer(self._block)  # type: ignore[arg-type]  # numpy says so from Python 3.12 on
        return RawBatch, (self.num_samples, self.source, self._pickled, self._sizes, block)

    def take(self, number: int, may_repeat: bool) -> Any:
        """Return a sample, rebuilt anew if it was taken before.

        Args:
            may_repeat: True if it may be taken again, after the caller has changed it.
        """
        if not self._samples or self._samples[number] is None:
            memory = self._block.copy() if may_repeat else self._block
            blocks = [Block(torch.from_numpy(part)) for part in split(memory, self._sizes)]
            self._samples = [(sample,) for sample in loads(self._pickled, blocks, adopt_main=True)]
        (sample,), self._samples[number] = self._samples[number], None
        return sample


class RawSample(NamedTuple):
    """A raw sample, which takes the place of an index."""

    batch: RawBatch
    number: int

    def __repr__(self) -> str:
        return f"sample {self.number} of a batch of source worker {self.batch.source}"

    def take(self, may_repeat: bool) -> Any:
        """Return the sample itself; see :meth:`RawBatch.take`."""
        return self.batch.take(self.number, may_repeat)


class RawIndices(list[RawSample]):
    """The samples of a batch, pickled as that."""

    def __init__(self, batch: RawBatch) -> None:
        super().__init__(map(RawSample, itertools.repeat(batch), range(batch.num_samples)))
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        return RawIndices, (self._batch,)


class FailedSample:
    """Takes the place of samples of a stream that has raised an exception: transforming it raises that in its turn."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self._cause = error.__cause__
        if isinstance(self._cause, RemoteTraceback) or isinstance(error, RPCError):
            # The relevant frames are the worker's, if any. Those here refer to the pass, and would keep it.
            error.__traceback__ = error.__context__ = None

    def __repr__(self) -> str:
        return "a sample that the stream has failed to give"

    def take(self, may_repeat: bool) -> Any:  # noqa: ARG002
        """Raise the exception."""
        raise self._error from self._cause


class Kept:
    """A raw sample that stays as it is, also if the stream goes on to fill the same buffer."""

    __slots__ = ("sample",)

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class Keeper:
    """Copies raw samples as soon as they are taken: large arrays into memory that is used again for the next batch."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._end = 0  # of what is used of it

    def begin(self) -> None:
        """Begin a batch; the one before is packed."""
        self._end = 0

    def keep(self, sample: Any) -> Any:
        """Copy a sample; one that cannot be copied comes back, and is refused when packed."""
        try:
            return Kept(self._copied(sample))
        except Exception:
            return sample

    def _copied(self, value: Any) -> Any:
        """What nothing can change: most samples are a few byte strings and numbers, which need no copy."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if kind is dict:
            return {key: self._copied(each) for key, each in value.items()}
        if kind is list or kind is tuple:
            return kind(map(self._copied, value))
        if kind is bytearray:
            return value.copy()
        if kind is np.ndarray and not value.dtype.hasobject:
            if value.nbytes < MIN_BLOCK_BYTES or not is_without_gaps(value):
                return value.copy(order="K")
            copied = np.ndarray(value.shape, value.dtype, self._take(value.nbytes), 0, value.strides)
            copied[...] = value
            return copied
        if kind is torch.Tensor and is_dense(value):
            if value.nbytes < MIN_BLOCK_BYTES or not is_without_gaps(value):
                return value.clone()
            flat = torch.from_numpy(self._take(value.nbytes)).view(value.dtype)
            return flat.as_strided(value.shape, value.stride()).copy_(value)
        encoded = dumps(value, name="sample", in_band=True)
        return Frozen(encoded.payload, encoded.modules, encoded.definitions)

    def _take(self, size_bytes: int) -> NDArray[np.uint8]:
        if self._end + size_bytes > len(self._memory):
            # What is in use keeps the one before.
            self._memory, self._end = np.empty(2 * (self._end + size_bytes), np.uint8), 0
        start, self._end = self._end, -(-(self._end + size_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start : start + size_bytes]


def pack(samples: Sequence[Any]) -> RawBatch:
    """Collate raw samples.

    Raises:
        SerializationError: One cannot be pickled.
    """
    worker = get_worker_info()
    kept = set_apart([each.sample if type(each) is Kept else each for each in samples])
    encoded = dumps(kept, name="samples").with_definitions()
    # One block: each costs the trainer an allocation, and a good part of a system call.
    sizes = tuple(buffer.nbytes for buffer in encoded.buffers)
    block = np.empty(end_of(sizes), np.uint8)
    for part, buffer in zip(split(block, sizes), encoded.buffers, strict=True):
        part[:] = buffer
    return RawBatch(len(samples), 0 if worker is None else worker.id, encoded.payload, sizes, block)


def is_without_gaps(value: Any) -> bool:
    """Whether an array or tensor uses each byte between its first and its last once."""
    strides = value.strides if isinstance(value, np.ndarray) else [step * value.itemsize for step in value.stride()]
    end = value.itemsize
    for stride, size in sorted(zip(strides, value.shape, strict=True)):
        if size != 1:
            if stride != end:
                return False
            end *= size
    return True


class Transformed(Dataset[Any]):
    """The map-style dataset whose indices are raw samples.

    Args:
        name: Its name in messages.
        may_repeat: True if ``transform`` may be called again for a sample, after an exception.
    """

    def __init__(self, transform: Callable[[Any], Any], name: str, *, may_repeat: bool) -> None:
        self.transform = transform
        self.name = name
        self._may_repeat = may_repeat

    def __getitem__(self, index: RawSample | FailedSample) -> Any:
        sample = index.take(self._may_repeat)
        try:
            return self.transform(sample)
        except StopIteration as stop:
            raise stopped("transform") from stop
