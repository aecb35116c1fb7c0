"""Copies of batches to a device or to pinned memory: one asynchronous copy per block, beside the device's computation.

The copies run, and are allocated, on a stream of their own. The consumer's stream waits for their end, and the
allocator waits for that stream before it reuses the memory. Torch's allocator knows of its own pinned memory that is
being read, see :class:`~rpcdataloader.wire.slabs.Block`; memory of workers on this machine is kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.data._utils.pin_memory

from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import Allocator, Block, pinned_allocator_for
from rpcdataloader.wire.tensors import Movable


def _recorded(module: Any, stream: Any, is_timed: bool = True) -> Any:
    event = module.Event(enable_timing=is_timed)
    event.record(stream)
    return event


class DeviceCopies:
    """Copies to a device, that are under way.

    Attributes:
        memory: The target, until :meth:`wait`: one ``uint8`` tensor for each copied block.
    """

    def __init__(self, carrier: Carrier, memory: list[torch.Tensor], event: Any, start: Any) -> None:
        self.memory = memory
        self._device = carrier.device
        self._module = carrier.module
        self._event = event  # at their end
        self._start = start  # at their beginning, if they are timed
        self._waits: list[Any] = []  # around the stream's wait

    def wait(self) -> None:
        """Let the calling thread's next work on the device wait for the copies, and reuse of their memory for that."""
        stream = self._module.current_stream(self._device)
        if self._start is None:
            stream.wait_event(self._event)
        else:
            before = _recorded(self._module, stream)
            stream.wait_event(self._event)
            self._waits = [before, _recorded(self._module, stream)]
        # The batch keeps it from now on, and no longer than the loop does: a probe is kept for its times.
        memory, self.memory = self.memory, []
        for copy in memory:
            copy.record_stream(stream)

    def times(self) -> tuple[float, float] | None:
        """Seconds that the copies took, and that the waiting stream stalled for them; None while they are unknown."""
        if not self._waits or not self._waits[1].query():
            return None
        before, after = self._waits
        return self._start.elapsed_time(self._event) / 1e3, before.elapsed_time(after) / 1e3


class Carrier:
    """Moves batches to one device, in the order of all other work there, on a stream of its own. Thread-safe.

    Args:
        device: Device with its index.
        allocator: Memory for the blocks of batches.
        module: Module ``torch.cuda``, or its equal for another type of device.
    """

    def __init__(self, device: torch.device, allocator: Allocator, module: Any) -> None:
        self.device = device
        self.allocator = allocator
        self.module = module
        self._lock = Lock()
        self._read: list[tuple[Any, Sequence[torch.Tensor]]] = []  # blocks, with the end of their copies
        self._stream = module.Stream(device=device)

    def copy(self, blocks: Sequence[torch.Tensor], is_timed: bool = False) -> DeviceCopies:
        """Begin to copy ``uint8`` tensors, which the caller may drop at once."""
        module = self.module
        # The device first: a stream of another device than the current one would create a context on both.
        with module.device(self.device), module.stream(self._stream):
            memory = [torch.empty(block.numel(), dtype=torch.uint8, device=self.device) for block in blocks]
            start = _recorded(module, self._stream) if is_timed else None
            for copy, block in zip(memory, blocks, strict=True):
                copy.copy_(block, non_blocking=True)
            event = _recorded(module, self._stream, is_timed)
        with self._lock:
            self._read = [(end, each) for end, each in self._read if not end.query()] + [(event, blocks)]
        return DeviceCopies(self, memory, event, start)

    def __del__(self) -> None:
        try:  # without a global: at the end of the interpreter, there are none
            for end, _blocks in self._read:
                end.synchronize()
        except RuntimeError:  # in a forked child
            pass

    def is_device_busy(self) -> bool:
        """Whether the stream of the calling thread has work left, so that a wait of the loop costs nothing."""
        return not self.module.current_stream(self.device).query()  # takes some microseconds

    def carry(self, movable: Movable, is_timed: bool = False) -> DeviceCopies:
        """Begin to copy the tensors of a message.

        Raises:
            RuntimeError: The device is out of memory, or in a state of error.
        """
        # Also in the trainer's thread, where tensors created in a validation would be useless for training.
        with torch.inference_mode(False), torch.no_grad():
            copies = self.copy(movable.blocks, is_timed)
            movable.move(copies.memory, self.device)
        return copies

    def send(self, batch: Any) -> Any:
        """Return the batch as it would arrive from a worker.

        Raises:
            SerializationError: A part of it cannot be pickled.
            RuntimeError: As for :meth:`carry`.
        """
        encoded = dumps_reply(batch, name="batch")
        blocks = [self._fill(buffer) for buffer in encoded.buffers]
        movable = Movable()
        arrived = loads(encoded.payload, blocks, allocator=self.allocator, movable=movable)
        self.carry(movable).wait()
        return arrived

    def _fill(self, content: memoryview) -> Block:
        block = self.allocator.allocate(content.nbytes)
        block.view[:] = content
        return block


def pin(batch: Any) -> Any:
    """Pin unpinned tensors, the way torch's loader does."""
    return torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


def find_busy_gpu() -> Callable[[], bool] | None:
    """:meth:`Carrier.is_device_busy` for a loop that uses a GPU, and copies batches there itself; None without one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return lambda: not torch.cuda.current_stream().query()


def make_carrier(device: torch.device, pageable: Allocator) -> Carrier:
    """Return a carrier to a device from :func:`find_device`.

    Args:
        device: Device; without an index, the current one of its type in this thread.
        pageable: Memory for blocks that cannot be pinned for this device.
    """
    module = _module_of(device)
    if device == torch.device(device.type):  # without an index
        device = torch.device(device.type, module.current_device())
    return Carrier(device, pinned_allocator_for(device) or pageable, module)


def find_device(device: Any) -> torch.device | None:
    """Return the device; None for the memory of this process.

    Args:
        device: A :class:`torch.device`, an argument of one, or None.

    Raises:
        TypeError: ``device`` has another type.
        ValueError: The device does not exist here.
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
    """Return ``torch.cuda`` or its equal; None for a device without one."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "is_available") and hasattr(module, "device_count") else None
