"""Objects to a payload and blocks, and back.

The payload is a pickle, then the bytes of the message's tensors if they are very few, then the index of the tensors,
then the lengths of these bytes and of the index as 32-bit numbers. The blocks are numpy arrays and other large buffers
in the order of the pickle, then tensors of 64 KiB or more, then the slabs of small ones.

Apart from exceptions, received bytes are unpickled here only, and after their message was authenticated.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rpcdataloader.errors import RPCError, SerializationError
from rpcdataloader.wire.buffers import BlockBytes
from rpcdataloader.wire.diagnose import USER_ERRORS, find_culprit
from rpcdataloader.wire.exceptions import dumps_exception, loads_exception
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.picklers import PersistentId, Pickler, ReplyPickler, RequestPickler, Unpickler, UnresolvedError
from rpcdataloader.wire.rebuild import Movable, MovableUnpickler, inline_memory, rebuild, rebuild_inline
from rpcdataloader.wire.slabs import Allocator, Block
from rpcdataloader.wire.tensors import Index

__all__ = ["Encoded", "dumps", "dumps_exception", "dumps_reply", "loads", "loads_exception", "result_of"]

_LENGTHS = struct.Struct("<II")

#: Turns a pickle without tensors and blocks into a payload.
NO_TENSORS = _LENGTHS.pack(0, 0)

# A slab up to this size travels inside the payload: a block would cost more than its bytes.
_MAX_INLINE_BYTES = 1 << 11

_REQUEST_ADVICE = (
    "build it where it is used: pass a callable and its arguments, RPCDataset(workers, MyDataset, *args), so that "
    "each node calls it; or open it on first use instead of in the constructor"
)
_REPLY_ADVICE = "what a worker sends back must consist of tensors, arrays and objects that pickle accepts"


@dataclass(slots=True)
class Encoded:
    """The content of a message.

    Attributes:
        payload: The pickle with its index.
        buffers: The blocks, in order. They keep and show the memory of the tensors themselves: changing a large tensor
            before it is sent changes the message.
    """

    payload: bytes
    buffers: list[BlockBytes]

    @property
    def size_bytes(self) -> int:
        """The size of payload and blocks together."""
        return len(self.payload) + sum(buffer.nbytes for buffer in self.buffers)


def dumps(obj: Any, *, persistent_id: PersistentId | None = None, name: str = "object") -> Encoded:
    """Encode a client's object.

    Args:
        obj: Any object. Functions and classes that the worker cannot import travel by value.
        persistent_id: Function called with every object; its result replaces the object, until ``persistent_load``
            restores it. None keeps the object.
        name: The caller's name for the object; errors give attribute paths from here.

    Raises:
        SerializationError: A part of the object cannot be pickled.
        RPCError: ``persistent_id`` raised it.
    """

    def make_pickler(file: io.BytesIO, buffers: list[BlockBytes]) -> Pickler:
        return RequestPickler(file, buffers, persistent_id)

    return _dumps(obj, make_pickler, name, _REQUEST_ADVICE)


def dumps_reply(obj: Any, *, name: str = "result") -> Encoded:
    """Encode a worker's object.

    Args:
        obj: Any object. Functions and classes that came from the client go back by name.
        name: Name of the object in errors.

    Raises:
        SerializationError: A part of the object cannot be pickled.
    """
    return _dumps(obj, ReplyPickler, name, _REPLY_ADVICE)


_MakePickler = Callable[[io.BytesIO, "list[BlockBytes]"], Pickler]


def _dumps(obj: Any, make_pickler: _MakePickler, name: str, advice: str) -> Encoded:
    file = io.BytesIO()
    buffers: list[BlockBytes] = []
    try:
        pickler = make_pickler(file, buffers)
        pickler.dump(obj)
        if pickler.packer is None:
            file.write(NO_TENSORS)
            return Encoded(file.getvalue(), buffers)
        index, blocks = pickler.packer.pack()
    except RPCError:  # already clear, such as for a reference to an object of another worker
        raise
    except USER_ERRORS as error:
        raise _explain(obj, make_pickler, name, advice, error) from error
    inline: bytes | memoryview = b""
    if len(blocks) == 1 and isinstance(blocks[0], memoryview) and blocks[0].nbytes <= _MAX_INLINE_BYTES:
        inline = blocks[0]
        blocks = []
    encoded_index = pickle.dumps(tuple(index), protocol=5)
    file.write(inline)
    file.write(encoded_index)
    file.write(_LENGTHS.pack(len(inline), len(encoded_index)))
    return Encoded(file.getvalue(), buffers + blocks)


def _explain(obj: Any, make_pickler: _MakePickler, name: str, advice: str, error: BaseException) -> SerializationError:
    def attempt(part: Any) -> BaseException | None:
        try:
            make_pickler(io.BytesIO(), []).dump(part)
        except USER_ERRORS as error:
            return error
        return None

    path, part, reason = find_culprit(obj, name, error, attempt)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return SerializationError(f"{path} is a {kind}, which cannot be pickled ({_describe(reason)}): {advice}")


def loads(
    payload: bytes | bytearray | memoryview,
    blocks: Sequence[Block],
    *,
    allocator: Allocator | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
    adopt_main: bool = False,
    movable: Movable | None = None,
) -> Any:
    """Decode the output of :func:`dumps` or :func:`dumps_reply`. Runs code that the sender chose.

    Args:
        payload: Payload of an authenticated message.
        blocks: Its blocks. Tensors and arrays are made over their memory and keep it.
        allocator: Allocator of the blocks, and of copies of small tensors. None for plain memory.
        persistent_load: Function that returns the object for a result of ``persistent_id``.
        adopt_main: Give functions and classes of the sender's ``__main__`` their names in this process's. For workers,
            which have no ``__main__`` of their own to protect.
        movable: An empty one, to move the tensors afterwards; None if they stay.

    Raises:
        SerializationError: A module or name is missing here, or an object fails to rebuild.
        Exception: ``persistent_load`` failed.
    """
    try:
        content = memoryview(payload)
        index_end = len(content) - _LENGTHS.size
        inline_bytes, index_bytes = _LENGTHS.unpack_from(content, index_end)
        tensors: list[torch.Tensor] = []
        num_buffers = len(blocks)
        if index_bytes:
            index_start = index_end - index_bytes
            index = Index(*pickle.loads(content[index_start:index_end]))
            if inline_bytes:
                inline = content[index_start - inline_bytes : index_start]
                if movable is None:
                    tensors = rebuild_inline(index, inline, allocator)
                else:
                    tensors = movable.rebuild(index, [inline_memory(inline, allocator)])
            else:
                num_buffers -= len(index.blocks) + len(index.slabs)
                memory = [block.tensor for block in blocks[num_buffers:]]
                tensors = rebuild(index, memory, allocator) if movable is None else movable.rebuild(index, memory)
        buffers = [block.view for block in blocks[:num_buffers]] if blocks else None
        unpickler: Unpickler
        if movable is None:
            unpickler = Unpickler(io.BytesIO(payload), buffers=buffers)
        else:
            unpickler = MovableUnpickler(io.BytesIO(payload), buffers=buffers)
            unpickler.movable = movable
        unpickler.tensors, unpickler.adopt_main, unpickler.resolve = tensors, adopt_main, persistent_load
        return unpickler.load()
    except RPCError:
        raise
    except UnresolvedError as unresolved:
        raise unresolved.error from unresolved.error.__cause__
    except ImportError as error:
        raise SerializationError(
            f"{error} on {os.uname().nodename}; it must be importable there too: send it with py_modules=, put it "
            "on a file system that both sides see and into PYTHONPATH, or preload it with launch --preload"
        ) from error
    except USER_ERRORS as error:
        raise SerializationError(f"a message cannot be rebuilt: {_describe(error)}") from error


def result_of(reply: Message | RPCError, allocator: Allocator, movable: Movable | None = None) -> Any:
    """The result in a reply; ``movable`` as for :func:`loads`.

    Raises:
        Exception: The request failed, or has no reply.
    """
    if not isinstance(reply, Message):
        raise reply
    if reply.type == MessageType.ERROR:
        raise loads_exception(reply.payload)
    return loads(reply.payload, reply.blocks, allocator=allocator, movable=movable)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
