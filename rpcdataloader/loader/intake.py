"""Replies of workers as batches, in the memory that the user has chosen."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpcdataloader.diagnosis.records import Probe
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.samples import Skipped, stopped
from rpcdataloader.loader.copying import Carrier, Copies, find_busy_gpu, make_carrier, pin
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.wire.exceptions import take_state
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.pickling import result_of
from rpcdataloader.wire.slabs import Allocator, pinned_allocator
from rpcdataloader.wire.tensors import Movable


@dataclass(slots=True)
class Answer:
    """A worker's answer to a task."""

    result: Any = None  # batch
    lacks: Skipped | None = None  # what the batch lacks because of exceptions of the dataset
    where: str = "this process"  # process that loaded such a batch, in words
    size_bytes: int = 0
    error: BaseException | None = None  # exception in place of a batch
    timings: tuple[float, float] | None = None  # seconds to fetch and to collate; None for an exception
    arrived: float = 0.0  # time of the first bytes of the reply, and
    received: float = 0.0  # of the last, if they were waited for; otherwise 0
    stream: StreamState | None = None  # progress of the worker's stream; None without one, or at its end
    movable: Movable | None = None
    copies: Copies | None = None
    worker: int = -1
    probe: Probe | None = None


def decode(reply: Message, allocator: Allocator, *, pins: bool, moves: bool) -> Answer:
    """Turn a reply into a batch.

    Args:
        pins: True if ``allocator`` has pinned memory.
    """
    answer = Answer(size_bytes=len(reply.payload))
    for block in reply.blocks:
        answer.size_bytes += block.view.nbytes
    if reply.arrival is not None and not reply.arrival.was_here:
        answer.arrived, answer.received = reply.arrival.at, time.monotonic()
    movable = Movable() if moves else None
    try:
        answer.timings, result, answer.lacks, answer.stream = result_of(reply, allocator, movable)
        if pins:
            # In-band data, and batch types with a pin_memory method of their own. Pinned data stays.
            result = pin(result)
        answer.result, answer.movable = result, movable
    except StopIteration as exc:
        error = stopped("receiving a batch")
        error.__cause__ = exc
        return Answer(size_bytes=answer.size_bytes, error=error)
    except BaseException as exc:
        # A new exception: the traceback refers to this frame, and would keep the referents of the exception.
        return Answer(size_bytes=answer.size_bytes, error=exc, stream=answer.stream or take_state(exc))
    return answer


class Intake:
    """The way of replies into this process.

    Args:
        allocator: Memory for blocks, where the user has chosen none.

    Attributes:
        allocator: Memory for the blocks of batches.
        decode: Function that turns a reply into an answer.
        carrier: The way to a device; None without one.
        is_device_busy: Function that tells whether the device has work that hides a wait; None without a device.
    """

    def __init__(self, settings: PassSettings, allocator: Allocator) -> None:
        pinned = pinned_allocator() if settings.pin_memory else None
        self.allocator: Allocator = pinned or allocator
        self.carrier: Carrier | None = None
        self.is_device_busy: Callable[[], bool] | None = find_busy_gpu()
        if settings.device is not None:
            self.carrier = make_carrier(settings.device, self.allocator)
            self.allocator, self.is_device_busy = self.carrier.allocator, self.carrier.is_device_busy
        self.decode: Callable[[Message], Answer] = functools.partial(
            decode,
            allocator=self.allocator,
            pins=pinned is not None,
            moves=self.carrier is not None,
        )

    def check(self, reply: Message) -> Any:
        """Return the result of a reply that has no batch, or raise its exception."""
        return result_of(reply, self.allocator)
