"""Batches on their way to a device: one asynchronous copy for each block, beside what the device computes.

The copies run on a stream of their own, whose memory they are made in. Who takes a batch lets the stream that he uses
wait for their end, and the allocator wait for that stream before the memory is used again. Pinned memory that is read
meanwhile is known to torch's allocator, see :class:`~rpcdataloader.wire.slabs.Block`, and may be let go at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rpcdataloader.wire.buffers import pieces_of
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.rebuild import Movable
from rpcdataloader.wire.slabs import Allocator, Block, pinned_allocator_for


class Copies(Protocol):
    """Memory on a device that is being copied to."""

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """One ``uint8`` tensor for each that is copied."""

    def wait(self) -> None:
        """Let what the calling thread does next on the device wait for the copies, and the memory for that."""

    def times(self) -> tuple[float, float] | None:
        """Seconds that the copies took, and that the stream of the one who waited stood still for them.

        None if that is not known, or not yet.
        """


class Copier(Protocol):
    """What copies to one device. Thread-safe.

    Attributes:
        device: With its index.
    """

    device: torch.device

    def copy(self, blocks: Sequence[torch.Tensor], is_timed: bool = False) -> Copies:
        """Begin to copy ``uint8`` tensors; they may be dropped at once."""

    def is_busy(self) -> bool:
        """Whether the stream of the calling thread has work left, so that a wait of the loop has cost nothing."""


class StreamCopier:
    """Copies on a stream of its own.

    Args:
        module: ``torch.cuda``, or what has its functions for another type of device.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self._module = module
        self._stream = module.Stream(device=device)

    def copy(self, blocks: Sequence[torch.Tensor], is_timed: bool = False) -> Copies:
        """Begin to copy, from any thread."""
        module = self._module
        # The device first: a stream of another one than the current would make a context on both.
        with module.device(self.device), module.stream(self._stream):
            memory = [torch.empty(block.numel(), dtype=torch.uint8, device=self.device) for block in blocks]
            start = _recorded(module, self._stream) if is_timed else None
            for copy, block in zip(memory, blocks, strict=True):
                copy.copy_(block, non_blocking=True)
            event = _recorded(module, self._stream, is_timed)
        return _StreamCopies(self.device, module, memory, event, start)

    def is_busy(self) -> bool:
        """See :class:`Copier`; to ask takes some microseconds."""
        return not self._module.current_stream(self.device).query()


def _recorded(module: Any, stream: Any, is_timed: bool = True) -> Any:
    event = module.Event(enable_timing=is_timed)
    event.record(stream)
    return event


class _StreamCopies:
    def __init__(self, device: torch.device, module: Any, memory: list[torch.Tensor], event: Any, start: Any) -> None:
        self.memory = memory
        self._device = device
        self._module = module
        self._event = event
        self._start = start  # of copies that are timed
        self._waits: list[Any] = []  # events around the wait of the stream

    def wait(self) -> None:
        stream = self._module.current_stream(self._device)
        if self._start is None:
            stream.wait_event(self._event)
        else:
            before = _recorded(self._module, stream)
            stream.wait_event(self._event)
            self._waits = [before, _recorded(self._module, stream)]
        for copy in self.memory:
            copy.record_stream(stream)

    def times(self) -> tuple[float, float] | None:
        if not self._waits or not self._waits[1].query():
            return None
        before, after = self._waits
        return self._start.elapsed_time(self._event) / 1e3, before.elapsed_time(after) / 1e3


class PlainCopier:
    """Copies to a device that has one stream, in the order of all else."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy(self, blocks: Sequence[torch.Tensor], is_timed: bool = False) -> Copies:  # noqa: ARG002
        """Copy, from any thread."""
        began = time.monotonic()
        memory = [block.to(self.device) for block in blocks]
        return _Done(memory, time.monotonic() - began)

    def is_busy(self) -> bool:
        """It does not tell."""
        return False


class _Done:
    def __init__(self, memory: list[torch.Tensor], seconds: float) -> None:
        self.memory = memory
        self._seconds = seconds

    def wait(self) -> None:
        """There is nothing to wait for."""

    def times(self) -> tuple[float, float]:
        return self._seconds, 0.0


class Carrier:
    """Brings batches to a device."""

    def __init__(self, copier: Copier, allocator: Allocator) -> None:
        self.allocator = allocator
        self.is_device_busy = copier.is_busy
        self._copier = copier

    def carry(self, movable: Movable, is_timed: bool = False) -> Copies:
        """Begin to copy the tensors of a message.

        Raises:
            RuntimeError: The device has no memory left, or is in a state of error.
        """
        # In the trainer's thread, too, in which what is made for a validation would be of no use for training.
        with torch.inference_mode(False), torch.no_grad():
            copies = self._copier.copy(movable.blocks, is_timed)
            movable.move(copies.memory, self._copier.device)
        return copies

    def send(self, batch: Any) -> Any:
        """The batch that would arrive if a worker had made this one.

        Raises:
            SerializationError: Some part of it cannot be pickled.
            RuntimeError: As for :meth:`carry`.
        """
        encoded = dumps_reply(batch, name="batch")
        blocks = [self._fill(pieces_of(buffer)) for buffer in encoded.buffers]
        movable = Movable()
        arrived = loads(encoded.payload, blocks, allocator=self.allocator, movable=movable)
        self.carry(movable).wait()
        return arrived

    def _fill(self, pieces: Sequence[memoryview]) -> Block:
        block = self.allocator.allocate(sum(map(len, pieces)))
        start = 0
        for piece in pieces:
            block.view[start : start + len(piece)] = piece
            start += len(piece)
        return block


def find_busy_gpu() -> Callable[[], bool] | None:
    """What :meth:`Copier.is_busy` is where the loop uses a GPU, and copies batches there itself; None without one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return lambda: not torch.cuda.current_stream().query()


def make_carrier(device: torch.device, pageable: Allocator) -> Carrier:
    """A carrier to what :func:`find_device` has found.

    Args:
        device: Without an index, the one of its type that is the current one of this thread.
        pageable: For what cannot be pinned for this device.
    """
    module = _module_of(device)
    if device == torch.device(device.type) and hasattr(module, "current_device"):  # without an index
        device = torch.device(device.type, module.current_device())
    copier: Copier = StreamCopier(device, module) if hasattr(module, "Stream") else PlainCopier(device)
    return Carrier(copier, pinned_allocator_for(device) or pageable)


def find_device(device: Any) -> torch.device | None:
    """The device that is meant; None for the memory of this process.

    Args:
        device: A :class:`torch.device`, what makes one, or None.

    Raises:
        TypeError: It is no device.
        ValueError: There is no such device here.
    """
    if device is None:
        return None
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a text such as 'cuda:0', or an index, but is {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not available: {str(error).splitlines()[0]}") from None
    if found.type == "cpu":
        return None
    module = _module_of(found)
    if module is None or not module.is_available():
        raise ValueError(f"device={device!r} is not available: torch {torch.__version__} sees no {found.type} device")
    num_devices = module.device_count()
    if found.index is not None and found.index >= num_devices:
        raise ValueError(f"device={device!r} is not available: there are {num_devices}, counted from 0")
    return found


def _module_of(device: torch.device) -> Any:
    """``torch.cuda`` and its like; None for what is no accelerator."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "is_available") and hasattr(module, "device_count") else None
