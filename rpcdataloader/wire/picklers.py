"""The picklers of both directions and the unpickler.

They differ from cloudpickle's in three kinds of objects: dense tensors and large numpy arrays go out of band, every
received array is writable, and *definitions* that travel by value, functions and classes, keep their identity.

A worker cannot import the functions and classes of a client's ``__main__``, its lambdas and its local classes:
cloudpickle sends their code. Each gets a random token when it is first sent, and both sides remember, weakly, which
object goes by which token. So a definition that comes back is the client's own object, and never changes it: a
definition is applied only where it was received, not where it was made.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import pickle
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES, is_dense

#: Exceptions of user code while its objects are pickled or rebuilt. KeyboardInterrupt comes from the user instead.
USER_ERRORS = (Exception, SystemExit, GeneratorExit)

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


def load_whole(pickled: bytes) -> Any:
    """Load a tensor that is more than bytes and layout; see :class:`Unpickler`."""
    return Unpickler(io.BytesIO(pickled)).load()


def make_packed_sequence(data: torch.Tensor, batch_sizes: list[int], *order: torch.Tensor | None) -> PackedSequence:
    """The CPU reads the sizes: unlike the other parts, they are no tensor of the message, which may go to a device."""
    return PackedSequence(data, torch.tensor(batch_sizes, device="cpu"), *order)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes dense tensors and other large buffers out of the pickle.

    Args:
        buffers: List for large numpy arrays. None pickles these in band, and tensors as torch does.

    Attributes:
        tensors: The dense tensors.
        modules: Names of the modules in which an unpickler looks for functions and classes.
    """

    # The global table itself, so that reducers which users register keep working. cloudpickle's ChainMap over it would
    # cost a microsecond for every object, so reducer_override looks into cloudpickle's own table instead.
    dispatch_table = copyreg.dispatch_table

    def __init__(self, file: io.BytesIO, buffers: list[memoryview] | None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.modules: set[str] = set()
        self._is_in_band = buffers is None
        # Not a method: the pickler would refer to itself, and keep every tensor until the next garbage collection.
        callback = None if buffers is None else functools.partial(_take_buffer, buffers)
        super().__init__(file, protocol=5, buffer_callback=callback)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects; the C pickler calls this for everything but the basic types."""
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            if self._is_in_band:
                return NotImplemented
            if kind is torch.Tensor and is_dense(obj):
                self.tensors.append(obj)
                return take_tensor, (len(self.tensors) - 1,)
            if kind is torch.Tensor and obj.requires_grad and not obj.__dict__ and is_dense(obj.detach()):
                return require_grad, (obj.detach(),)
            return load_whole, (self._dump_whole(obj),)
        if kind is np.ndarray:
            if obj.dtype.hasobject:
                return NotImplemented
            # numpy before 2.3 loses the strides of permuted arrays.
            if obj.nbytes >= MIN_BLOCK_BYTES or not obj.flags.forc:
                return _reduce_array(obj)
            if not obj.flags.writeable:
                return obj.copy(order="A").__reduce_ex__(5)
        elif kind is PackedSequence:
            return make_packed_sequence, (obj.data, obj.batch_sizes.tolist(), obj.sorted_indices, obj.unsorted_indices)
        elif kind in _CLOUDPICKLE_TABLE:
            if kind is types.ModuleType:
                self.modules.add(obj.__name__)
            return _CLOUDPICKLE_TABLE[kind](obj)
        elif is_definition(obj) and obj is not take_tensor:
            return self._reduce_definition(obj)
        return NotImplemented

    def _dump_whole(self, tensor: torch.Tensor) -> bytes:
        """Pickle a tensor as torch does, with its parts: torch needs them in memory of their own, on the CPU."""
        file = io.BytesIO()
        pickler = type(self)(file, None)
        pickler.dump(tensor)
        self.modules |= pickler.modules
        return file.getvalue()

    def _reduce_definition(self, obj: Any) -> Any:
        if type(obj) is LRU_CACHE:
            by_value = importable_name(obj) is None or obj.__module__ in MAIN_NAMES
            reduction = _reduce_lru_cache(obj) if by_value else NotImplemented
        else:
            reduction = super().reducer_override(obj)
        if isinstance(reduction, tuple) and len(reduction) == 6:  # code and state, as against a name
            return reduce_by_value(obj, reduction)
        self.modules.add(str(obj.__module__))
        return reduction


class RequestPickler(Pickler):
    """Pickles a client's messages.

    Args:
        persistent_id: Function called with every object; its result replaces the object on the wire, None keeps it.
    """

    def __init__(
        self, file: io.BytesIO, buffers: list[memoryview] | None, persistent_id: PersistentId | None = None
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
        origin = _origins.get(obj)
        if origin is not None and not origin.is_ours and origin.name is not None:  # its maker can find it again
            return find, (origin.token, *origin.name)
        if importable_name(obj) is not None:  # of this process's __main__ too: never by value
            return NotImplemented
        return super()._reduce_definition(obj)


class UnresolvedError(BaseException):
    """Carries an exception of ``persistent_load`` past the handlers of malformed messages."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Unpickler(pickle.Unpickler):
    """Reads the output of both picklers; made with the pickle and the contents of ``buffers``."""

    # Set before load, if different: a constructor in Python would be a good part of the cost of a small batch.
    tensors: Sequence[torch.Tensor] = ()  # of the message
    adopt_main: bool = False  # give definitions from the client's ``__main__`` their names in this process's
    resolve: Callable[[Any], Any] | None = None  # returns the object that ``persistent_id`` replaced

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names."""
        # In a message, a function of this package means something that knows the message.
        if module.startswith("rpcdataloader.wire."):
            if name == take_tensor.__name__:
                return self.tensors.__getitem__
            if name == complete.__name__:
                return complete_and_adopt if self.adopt_main else complete
        try:
            found = super().find_class(module, name)
        except AttributeError as error:
            raise SerializationError(f"module {module!r} has no {name!r} here: {error}") from error
        return _load_storage if found is torch.storage._load_from_bytes else found

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that was replaced on the wire."""
        if self.resolve is None:
            raise pickle.UnpicklingError("the message refers to objects held elsewhere, which cannot be found here")
        try:
            return self.resolve(pid)
        except Exception as error:
            raise UnresolvedError(error) from error


def _take_buffer(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
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


def _load_storage(content: bytes) -> Any:
    """In place of torch's function, in which torch 2.4 and 2.5 warn that their own default will change."""
    return torch.load(io.BytesIO(content), weights_only=False)


def _reduce_lru_cache(cached: Any) -> tuple[Any, ...]:
    parameters = cached.cache_parameters()
    args = (cached.__wrapped__, parameters["maxsize"], parameters["typed"])
    return _make_lru_cache, args, None, None, None, _set_nothing


def _make_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _set_nothing(cached: Any, state: None) -> None:
    """A cached function is its arguments; its cached results stay where they are."""


#: multiprocessing's name for ``__main__`` in a spawned child, where it is the same module under two names.
MAIN_NAMES = ("__main__", "__mp_main__")

LRU_CACHE = type(functools.lru_cache(id))


class Origin(NamedTuple):
    """The process that made a definition."""

    token: bytes  # name of the definition on both sides
    is_ours: bool  # made by this process
    name: tuple[str, str] | None  # module and qualified name under which its maker finds it; None if it cannot


# No lock: each operation on these is atomic, and both threads of a race write the same.
_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
_definitions: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()


def is_definition(obj: object) -> bool:
    """Whether this is a function or a class, or a cached function, which pickle treats as one."""
    kind = type(obj)
    return kind is types.FunctionType or issubclass(kind, type) or kind is LRU_CACHE


def importable_name(definition: Any) -> tuple[str, str] | None:
    """Return the module and qualified name under which this process finds exactly this object."""
    module, name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    try:
        found = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):  # missing, or "<locals>"
        return None
    return (module, name) if found is definition else None


def reduce_by_value(definition: Any, reduction: tuple[Any, ...]) -> tuple[Any, ...]:
    """Extend cloudpickle's recipe for a definition by its origin.

    Args:
        reduction: Result of ``reducer_override``: make, args, state, None, None, set_state.
    """
    make, args, state, _, _, set_state = reduction
    slots = vars(definition).get("__slots__") if isinstance(definition, type) else None
    if slots:
        # cloudpickle adds them too late to have an effect: instances would have a dictionary, and come back with a
        # state that does not fit. They belong into the namespace in which it makes the class.
        args = tuple(arg | {"__slots__": slots} if isinstance(arg, dict) else arg for arg in args)
    origin = _origins.get(definition)
    if origin is None:
        ours = Origin(secrets.token_bytes(12), True, importable_name(definition))
        origin = _origins.setdefault(definition, ours)
        _definitions[origin.token] = definition
    return receive, (origin.token, origin.name, make, args), (set_state, state), None, None, complete


def receive(token: bytes, name: tuple[str, str] | None, make: Callable[..., Any], args: Any) -> Any:
    """Return the definition of this token: this process's own, or else one begun by ``make(*args)``."""
    definition = _definitions.get(token)
    if definition is None or not _origins[definition].is_ours:
        definition = make(*args)
        _origins[definition] = Origin(token, False, name)
        _definitions[token] = definition
    return definition


def complete(definition: Any, recipe: tuple[Callable[[Any, Any], None], Any]) -> None:
    """Fill a received function or class, unless this process made it."""
    if not _origins[definition].is_ours:
        set_state, state = recipe
        set_state(definition, state)


def complete_and_adopt(definition: Any, recipe: tuple[Callable[[Any, Any], None], Any]) -> None:
    """On a worker, also give a definition from the client's ``__main__`` its name in the worker's.

    So code there that pickles it by name, as deep copies and child processes do, works too.
    """
    complete(definition, recipe)
    origin = _origins[definition]
    if origin.name and not origin.is_ours:
        module, name = origin.name
        if module in MAIN_NAMES and "." not in name:
            main = sys.modules["__main__"]
            sys.modules.setdefault(module, main)
            setattr(main, name, definition)


def find(token: bytes, module: str, name: str) -> Any:
    """Return this process's own definition: the one sent, or else the current one of that name."""
    definition = _definitions.get(token)
    return attrgetter(name)(importlib.import_module(module)) if definition is None else definition
