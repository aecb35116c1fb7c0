"""What a worker has answered to a task, decoded, in the thread that has received it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.pin_memory

from rpcdataloader.fetch.stopping import stopped
from rpcdataloader.fetch.stream_state import StreamState
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.movable import Movable
from rpcdataloader.wire.pickling import result_of
from rpcdataloader.wire.slabs import Allocator


class Failure:
    """An exception that stands in for a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass(slots=True)
class Answer:
    """What a worker has answered to a task.

    Attributes:
        result: The batch, or what stands for it: a :class:`Failure`, or a ``Reduced``.
        size_bytes: What it occupies here.
        seconds: How long the worker took; None of an exception.
        stream: How far the worker's stream has come; None if there is none, or it has ended.
        movable: What goes to a device.
    """

    result: Any
    size_bytes: int
    seconds: float | None
    stream: StreamState | None
    movable: Movable | None


def decode(reply: Message, allocator: Allocator, *, iterable: bool, pins: bool, moves: bool) -> Answer:
    """Make the batch of a reply.

    Args:
        allocator: Where its blocks were received.
        iterable: It comes with the state of its stream.
        pins: ``allocator`` is that of pinned memory.
        moves: It goes to a device.
    """
    size_bytes = len(reply.payload) + sum(block.view.nbytes for block in reply.blocks)
    seconds: float | None = None
    stream: StreamState | None = None
    movable = Movable() if moves else None
    try:
        timings, result = result_of(reply, allocator, movable)
        seconds = sum(timings)
        if iterable:
            result, stream = result
        if pins:
            # What came in band, and batch types with a pin_memory method of their own. What is pinned stays.
            result = pin(result)
    except StopIteration as exc:
        error = stopped("receiving a batch")
        error.__cause__ = exc
        return Answer(Failure(error), size_bytes, seconds, stream, None)
    except BaseException as exc:
        return Answer(Failure(exc), size_bytes, seconds, stream, None)
    return Answer(result, size_bytes, seconds, stream, movable)


def pin(batch: Any) -> Any:
    """Pin what is not pinned yet, the way torch's loader does."""
    return torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
