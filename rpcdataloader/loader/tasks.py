"""The tasks of a pass: what a sampler gives, numbered, as requests to workers, and in words."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rpcdataloader.fetch import remote
from rpcdataloader.fetch.indices import describe_indices
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import NO_TENSORS, dumps

logger = logging.getLogger("rpcdataloader.loader")


@dataclass(slots=True)
class Task:
    """A batch to load: what the sampler gave, and the request made of it.

    Attributes:
        number: In the whole pass, of which this process may have taken up only the rest.
        sampler_state: After this batch, if the sampler has one.
        last_request: That of the last try, which may be another one.
        stack: Where the last worker was that took too long.
    """

    indices: Any
    number: int
    num_samples: int
    sampler_state: Any
    request: bytes
    last_request: bytes
    stack: str = ""


class TaskSource:
    """Tasks from a sampler, numbered by batch and by the position of their first sample in the epoch.

    Args:
        samples: Iterator over the sampler.
        number: Of the first batch.
        position: Of its first sample.
        leave_out: Numbers of batches that are not needed.
        sampler_state: Called after each batch.

    Attributes:
        sampler_state: What it returned last.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        *,
        auto_collation: bool,
        number: int = 0,
        position: int = 0,
        leave_out: Iterable[int] = (),
        sampler_state: Callable[[], Any] = lambda: None,
    ) -> None:
        self._samples = samples
        self._auto_collation = auto_collation
        self._number = number
        self._position = position
        self._leave_out = frozenset(leave_out)
        self._get_state = sampler_state
        self.sampler_state: Any = None

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Indices, position, batch number.

        Raises:
            StopIteration: The sampler is at its end.
        """
        while True:
            indices = next(self._samples)
            if self._auto_collation and not isinstance(indices, (list, tuple)) and isinstance(indices, Iterable):
                # A sampler may yield tensors, arrays or generators; torch only iterates over them.
                indices = list(indices)
            position, number = self._position, self._number
            self._position += self.num_samples(indices)
            self._number += 1
            if number not in self._leave_out:
                self.sampler_state = self._get_state()
                return indices, position, number

    def num_samples(self, indices: Any) -> int:
        """How many samples a batch has."""
        # What is no batch at all is an error where the batch is loaded.
        return len(indices) if self._auto_collation and isinstance(indices, (list, tuple)) else 1


def _pickle_part(value: Any) -> bytes:
    """A pickle without its first and last opcodes, PROTO and STOP, to be joined to others.

    Protocol 3 is the last one without frames, whose lengths would become wrong.
    """
    return pickle.dumps(value, protocol=3)[2:-1]


# Around the arguments of a call of remote.load. Pickling it each time takes longer than all the rest: the pickler
# imports a function to see whether it is the one of that name.
_LOAD, _, *_OPTIONS = Call(remote.load, (), {}, ordered=True, task=True).fields()
_BEFORE_ARGS = pickle.PROTO + b"\x03" + pickle.MARK + _pickle_part(_LOAD)
_AFTER_ARGS = b"".join(map(_pickle_part, _OPTIONS)) + pickle.TUPLE + pickle.STOP + NO_TENSORS


def load_request(indices: Any, position: int, number: int, *, last_try: bool = False) -> bytes:
    """The payload of a call of ``remote.load``.

    Raises:
        ValueError: The indices are large arrays or tensors.
        SerializationError: They cannot be pickled.
    """
    args = (indices, position, number, True) if last_try else (indices, position, number)
    try:
        pickled = _pickle_part(args)
        # Not of a class of the training script, which has to be sent along.
        if b"_main__" not in pickled:
            return _BEFORE_ARGS + pickled + _AFTER_ARGS
    except Exception:
        logger.debug("not for the plain pickler: %r", indices, exc_info=True)
    encoded = dumps(Call(remote.load, args, {}, ordered=True, task=True).fields(), name="indices")
    if encoded.buffers:
        raise ValueError("the sampler yields large tensors or arrays; yield lists of indices")
    return encoded.payload


def describe(task: Task) -> str:
    """A batch in an error message."""
    return f"batch {task.number} (indices {describe_indices(task.indices)})"
