"""The picklers of both directions and the unpickler.

They differ from cloudpickle's in three kinds of objects: dense tensors and large numpy arrays go out of band, every
received array is writable, and definitions that travel by value keep their identity.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire import definitions
from rpcdataloader.wire.buffers import BlockBytes
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES, Packer, Stack, is_dense

#: Returns an object's stand-in on the wire; None for all that is pickled as usual.
PersistentId = Callable[[Any], Any]

# cloudpickle's own reducers, for properties, cells, code, modules, memoryviews and the like.
_CLOUDPICKLE_TABLE: Mapping[type, Any] = cloudpickle.Pickler.dispatch_table.maps[0]


def take_tensor(number: int) -> torch.Tensor:
    """Stands in a pickle for the ``__getitem__`` of the list of the message's tensors; see :class:`Unpickler`."""
    raise pickle.UnpicklingError(f"tensor {number} can only be loaded with the message that it belongs to")


def require_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Make a received tensor a leaf of autograd."""
    return tensor.requires_grad_()


def make_packed_sequence(*fields: torch.Tensor | None) -> PackedSequence:
    """Call a class that is otherwise made without a call, so that an unpickler sees its parts."""
    return PackedSequence(*fields)  # type: ignore[arg-type]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes dense tensors and other large buffers out of the pickle.

    Args:
        buffers: List for large numpy arrays. None pickles these in band, and tensors as torch does.

    Attributes:
        packer: Holds the dense tensors; None without any.
    """

    # The global table itself, so that reducers which users register keep working. cloudpickle's ChainMap over it would
    # cost a microsecond for every object, so reducer_override looks into cloudpickle's own table instead.
    dispatch_table = copyreg.dispatch_table

    def __init__(self, file: io.BytesIO, buffers: list[BlockBytes] | None) -> None:
        self.packer: Packer | None = None
        self._is_in_band = buffers is None
        # Not a method: the pickler would refer to itself, and keep every tensor until the next garbage collection.
        callback = None if buffers is None else functools.partial(_take_buffer, buffers)
        super().__init__(file, protocol=5, buffer_callback=callback)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects; the C pickler calls this for everything but the basic types."""
        kind = type(obj)
        if kind is torch.Tensor:
            if not self._is_in_band:
                if is_dense(obj):
                    if self.packer is None:
                        self.packer = Packer()
                    return take_tensor, (self.packer.add(obj),)
                if obj.requires_grad and not obj.__dict__ and is_dense(obj.detach()):
                    return require_grad, (obj.detach(),)
        elif kind is np.ndarray:
            if obj.dtype.hasobject:
                return NotImplemented
            if obj.nbytes >= MIN_BLOCK_BYTES:
                return _reduce_array(obj)
            if not obj.flags.writeable:
                return obj.copy(order="A").__reduce_ex__(5)
        elif kind is Stack:
            if not self._is_in_band:
                if self.packer is None:
                    self.packer = Packer()
                return take_tensor, (self.packer.add_stack(obj),)
        elif kind is PackedSequence:
            return make_packed_sequence, tuple(obj)
        elif kind in _CLOUDPICKLE_TABLE:
            return _CLOUDPICKLE_TABLE[kind](obj)
        elif definitions.is_definition(obj) and obj is not take_tensor:
            return self._reduce_definition(obj)
        return NotImplemented

    def _reduce_definition(self, obj: Any) -> Any:
        if type(obj) is definitions.LRU_CACHE:
            by_value = definitions.importable_name(obj) is None or obj.__module__ in definitions.MAIN_NAMES
            reduction = _reduce_lru_cache(obj) if by_value else NotImplemented
        else:
            reduction = super().reducer_override(obj)
        if isinstance(reduction, tuple) and len(reduction) == 6:  # code and state, as against a name
            return definitions.reduce_by_value(obj, reduction)
        return reduction


class RequestPickler(Pickler):
    """Pickles a client's messages.

    Args:
        persistent_id: Function called with every object; its result replaces the object on the wire, None keeps it.
    """

    def __init__(
        self, file: io.BytesIO, buffers: list[BlockBytes] | None, persistent_id: PersistentId | None = None
    ) -> None:
        super().__init__(file, buffers)
        if persistent_id is not None:
            self.persistent_id = persistent_id
        spawned_main = sys.modules.get("__mp_main__")
        if spawned_main is not None:  # cloudpickle takes this name for a module importable anywhere
            cloudpickle.register_pickle_by_value(spawned_main)


class ReplyPickler(Pickler):
    """Pickles a worker's messages: objects from the client go back by name."""

    def _reduce_definition(self, obj: Any) -> Any:
        origin = definitions.find_origin(obj)
        reduction = None if origin is None else definitions.reduce_by_name(origin)
        if reduction is not None:
            return reduction
        if definitions.importable_name(obj) is not None:  # of this process's __main__ too: never by value
            return NotImplemented
        return super()._reduce_definition(obj)


class UnresolvedError(BaseException):
    """Carries an exception of ``persistent_load`` past the handlers of malformed messages."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Unpickler(pickle.Unpickler):
    """Reads the output of both picklers; made with the pickle and the contents of ``buffers``.

    Attributes:
        adopt_main: Give definitions from the client's ``__main__`` their names in this process's.
        resolve: Function that returns the object that ``persistent_id`` replaced.
    """

    # Set before load, if different: a constructor in Python would be a good part of the cost of a small batch.
    tensors: Sequence[torch.Tensor] = ()
    adopt_main: bool = False
    resolve: Callable[[Any], Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names."""
        # In a message, a function of this package means something that knows the message.
        if module.startswith("rpcdataloader.wire."):
            if name == take_tensor.__name__:
                return self.tensors.__getitem__
            if name == definitions.complete.__name__:
                return definitions.complete_and_adopt if self.adopt_main else definitions.complete
        try:
            found = super().find_class(module, name)
        except AttributeError as error:
            raise SerializationError(f"module {module!r} has no {name!r} here: {error}") from error
        return _rebuild_nested_tensor if found is torch._utils._rebuild_nested_tensor else found

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that was replaced on the wire."""
        if self.resolve is None:
            raise pickle.UnpicklingError("the message refers to objects held elsewhere, which cannot be found here")
        try:
            return self.resolve(pid)
        except Exception as error:
            raise UnresolvedError(error) from error


def _take_buffer(buffers: list[BlockBytes], buffer: pickle.PickleBuffer) -> bool:
    """Keep a large buffer out of the pickle; returning True leaves it in."""
    view = buffer.raw()
    if view.nbytes < MIN_BLOCK_BYTES:
        return True
    buffers.append(view)
    return False


def _reduce_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Reduce an array of any dtype without Python objects to a call of numpy.ndarray over its bytes.

    numpy's own way names private functions that moved between versions, and copies datetimes and strided arrays into
    the pickle. The rebuilt array is writable.
    """
    # Over a read-only buffer, the array would be read-only there.
    if not array.flags.writeable or not _in_order_of_memory(array).flags.c_contiguous:
        array = array.copy(order="A")
    flat = _in_order_of_memory(array).reshape(-1).view(np.uint8)
    return np.ndarray, (array.shape, array.dtype, pickle.PickleBuffer(flat.data), 0, array.strides)


def _in_order_of_memory(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.transpose(sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True))


def _rebuild_nested_tensor(buffer: torch.Tensor, *layout: torch.Tensor) -> Any:
    """In place of torch's function, which takes the beginning of the storage for the buffer's."""
    whole: Any = buffer.clone() if buffer.storage_offset() else buffer
    return torch._utils._rebuild_nested_tensor(whole, *layout)  # type: ignore[no-untyped-call, unused-ignore]


def _reduce_lru_cache(cached: Any) -> tuple[Any, ...]:
    parameters = cached.cache_parameters()
    args = (cached.__wrapped__, parameters["maxsize"], parameters["typed"])
    return _make_lru_cache, args, None, None, None, _set_nothing


def _make_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _set_nothing(cached: Any, state: None) -> None:
    """A cached function is its arguments; its cached results stay where they are."""
