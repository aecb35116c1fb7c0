"""The picklers of both directions and the unpickler.

They differ from cloudpickle's in three kinds of objects: dense tensors and large numpy arrays go out of band, every
received array is writable, and what the script defines is named, in both directions. A request says which names its
receiver must have; ``definitions.py`` makes what is sent of them.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import enum
import functools
import importlib
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence, Set
from multiprocessing.reduction import ForkingPickler
from multiprocessing.spawn import get_preparation_data
from operator import attrgetter
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2
from torch.nn.utils.rnn import PackedSequence

from rpcdataloader.errors import SerializationError
from rpcdataloader.host.sources import recorder
from rpcdataloader.wire.by_value import (
    MAIN_NAMES,
    OF_DEFINITIONS,
    CachedFunction,
    content_of,
    digest_of,
    globals_of_script,
    is_dispatcher,
    is_of_main,
    main_globals,
    module_of,
    named,
    reduce_cached,
    reduce_cached_property,
    reduce_cell,
    reduce_class,
    reduce_dispatcher,
    reduce_function,
    root_of,
)
from rpcdataloader.wire.maps import MIN_SOUGHT_BYTES, reduce_array, reduce_tensor
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.tensors import MIN_BLOCK_BYTES, Layout, find_views, is_dense, place, place_of, span_of
from rpcdataloader.wire.told import note_copy, number_of

#: Returns an object's stand-in on the wire; None for all that is pickled as usual.
PersistentId = Callable[[Any], Any]

# cloudpickle's own reducers, for properties, cells, code, modules, memoryviews and the like.
_CLOUDPICKLE_TABLE: Mapping[type, Any] = cloudpickle.Pickler.dispatch_table.maps[0]


# Objects that each process has one of: functions such as ``random.choice`` are methods of some, and others are compared
# by ``is``. A copy would draw the same numbers in each worker, or show the environment of a client.
_OF_EACH_PROCESS = {
    id(obj): (obj, (module, name))
    for module, names in {
        "dataclasses": ("KW_ONLY", "MISSING", "_HAS_DEFAULT_FACTORY"),
        "numpy.random.mtrand": ("_rand",),
        "os": ("environ", "environb"),
        "random": ("_inst",),
        "torch": ("default_generator",),
    }.items()
    for name in names
    if (obj := getattr(importlib.import_module(module), name, None)) is not None
}


def name_among_own(obj: Any) -> tuple[str, str] | None:
    """Module and name of such an object; None for all others."""
    known = _OF_EACH_PROCESS.get(id(obj))
    return known[1] if known is not None and known[0] is obj else None


def own_of(module: str, name: str) -> Any:
    """What this process has of such an object."""
    return getattr(importlib.import_module(module), name)


def _place_in_modules(obj: object) -> tuple[str, str] | None:
    """Module and name of a global of the script's own modules."""
    for name in recorder.look():
        for each, value in list(vars(sys.modules[name]).items()):
            if value is obj:
                return name, each
    return None


def sentinel_of(module: str, name: str) -> Any:
    """A plain object of a module, with which its functions compare; a new one where that module is missing."""
    with contextlib.suppress(ImportError, AttributeError):
        return own_of(module, name)
    return object()


def take_tensor(number: int) -> torch.Tensor:
    """Stands in a pickle for the ``__getitem__`` of the list of the message's tensors; see :class:`Unpickler`."""
    raise pickle.UnpicklingError(f"tensor {number} can only be loaded with the message that it belongs to")


def require_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Make a received tensor a leaf of autograd."""
    return tensor.requires_grad_()


def place_tensor(
    content: memoryview, layout: Layout, requires_grad: bool, *, blocks: Sequence[Block] = ()
) -> torch.Tensor:
    """Make the tensor of a subclass on the storage of its block; see :class:`Unpickler`."""
    (memory,) = (block.tensor for block in blocks if block.view is content)
    return place(memory, layout).requires_grad_(requires_grad)


def variable_of(name: str, number: int, find: Callable[[str], Any] = named) -> types.CellType:
    """A variable of the closure of the script's function ``name``."""
    cell: types.CellType = find(name).__closure__[number]
    return cell


def load_whole(
    pickled: bytes | memoryview, resolve: Callable[[Any], Any] | None = None, find: Callable[[str], Any] = named
) -> Any:
    """Load what has a pickle of its own: a tensor that is more than bytes and layout, or a :class:`Frozen` object."""
    unpickler = Unpickler(io.BytesIO(pickled))
    unpickler.resolve, unpickler.find = resolve, find
    return unpickler.load()


def adopt(pickled: bytes) -> None:  # noqa: ARG001
    """Stands in a message for taking over definitions of the script; see :class:`Unpickler`."""
    raise pickle.UnpicklingError("definitions of a client's script are for its workers alone")


class Frozen:
    """In messages, an object as it was when it was pickled, whatever has become of it."""

    def __init__(self, pickled: bytes, modules: Set[str], definitions: Mapping[str, Any]) -> None:
        self.pickled = pickled
        self.modules = modules  # in which an unpickler looks for functions and classes
        self.definitions = definitions  # of the script, which it needs, as they were then

    def __reduce__(self) -> tuple[Any, ...]:
        # In band, whatever its size: no code authenticates the blocks of a reply, and these bytes are unpickled.
        return load_whole, (self.pickled,)


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
    dispatch_table: MutableMapping[type, Any] = copyreg.dispatch_table

    tensors: list[torch.Tensor]
    modules: set[str]

    _opens_maps = False  # True if arrays and tensors in memory maps are opened by the receiver
    _brings_globals = False  # True if local functions of modules bring the data that they use

    def __init__(self, file: io.BytesIO, buffers: list[memoryview] | None) -> None:
        self.tensors = []
        self.modules = set()
        self._is_in_band = buffers is None
        # Not a method: the pickler would refer to itself, and keep every tensor until the next garbage collection.
        callback = None if buffers is None else functools.partial(_take_buffer, buffers)
        super().__init__(file, protocol=5, buffer_callback=callback)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects; the C pickler calls this for everything but the basic types."""
        kind = type(obj)
        if issubclass(kind, torch.Tensor):
            is_sought = self._opens_maps and kind is torch.Tensor and _size_of(obj) >= MIN_SOUGHT_BYTES
            if is_sought and is_dense(obj) and obj.is_cpu and (reduced := reduce_tensor(obj)) is not None:
                return reduced
            if self._is_in_band:
                own = _in_own_memory(obj)
                return NotImplemented if own is obj else own.__reduce_ex__(5)  # type: ignore[no-untyped-call]
            if kind is torch.Tensor and is_dense(obj):
                self.tensors.append(obj)
                return take_tensor, (len(self.tensors) - 1,)
            if kind is torch.Tensor and obj.requires_grad and not obj.__dict__ and is_dense(obj.detach()):
                return require_grad, (obj.detach(),)
            if (reduction := self._reduce_large(obj)) is not None:
                return reduction
            return load_whole, (self._dump_whole(obj),)
        if kind is np.ndarray:
            if obj.dtype.hasobject:
                return NotImplemented
            # numpy before 2.3 loses the strides of permuted arrays.
            if obj.nbytes >= MIN_BLOCK_BYTES or not obj.flags.forc:
                return (self._opens_maps and reduce_array(obj)) or _reduce_array(obj)
            if not obj.flags.writeable:
                return obj.copy(order="A").__reduce_ex__(5)
        elif kind is np.memmap:
            is_large = obj.nbytes >= MIN_BLOCK_BYTES
            return (self._opens_maps and is_large and reduce_array(obj)) or NotImplemented
        elif kind is PackedSequence:
            return make_packed_sequence, (obj.data, obj.batch_sizes.tolist(), obj.sorted_indices, obj.unsorted_indices)
        elif kind in _CLOUDPICKLE_TABLE:
            if kind is types.ModuleType:
                self.modules.add(obj.__name__)
            elif kind is types.CellType:
                return self._reduce_cell(obj)
            reduction = _CLOUDPICKLE_TABLE[kind](obj)
            return reduction if kind is not types.CodeType else _with_file(reduction, obj)
        elif issubclass(kind, types.ModuleType) and sys.modules.get(name := obj.__name__) is obj:  # of torch.backends
            self.modules.add(name)
            return importlib.import_module, (name,)
        elif kind is Frozen:
            self._take_frozen(obj)
        elif is_definition(obj) and obj is not take_tensor:
            return self._reduce_definition(obj)
        elif kind is CachedFunction or kind is object:
            return self._reduce_global(obj)
        elif kind is functools.cached_property:
            return reduce_cached_property(obj)
        elif issubclass(kind, BaseException) and _is_reduced_as_built_in(kind):
            return reduce_parts(*parts_of(obj))
        elif (name := name_among_own(obj)) is not None and self._leaves_own(name):
            return own_of, name
        return NotImplemented

    def _leaves_own(self, name: tuple[str, str]) -> bool:  # noqa: ARG002
        return True

    def _take_frozen(self, frozen: Frozen) -> None:
        self.modules |= frozen.modules

    def _reduce_cell(self, cell: types.CellType) -> Any:
        return reduce_cell(cell)

    def _reduce_large(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Reduce a large tensor of a subclass, or with attributes, as torch does: over a block that stays on the CPU.

        None if it is pickled in another way, or is more than bytes and layout without these.
        """
        if tensor.numel() * tensor.element_size() < MIN_BLOCK_BYTES:
            return None
        reduction: Any = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        if len(reduction) != 2 or reduction[0] is not _rebuild_from_type_v2:
            return None
        make, kind, parts, state = reduction[1]
        if make is not torch._utils._rebuild_tensor_v2 or parts[5]:  # with hooks
            return None
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(torch.Tensor).detach()
        if type(plain) is not torch.Tensor or not is_dense(plain):
            return None
        layout, content = span_of(plain)
        if state:
            state = Frozen(self._dump_whole(state), self.modules, {})
        args = pickle.PickleBuffer(content), layout, tensor.requires_grad
        return _rebuild_from_type_v2, (place_tensor, kind, args, state)

    def _dump_whole(self, value: Any) -> bytes:
        """Pickle a tensor as torch does, with its parts: torch needs them in memory of their own, on the CPU."""
        file = io.BytesIO()
        pickler = self._like(file)
        pickler.dump(value)
        self.modules |= pickler.modules
        return file.getvalue()

    def _like(self, file: io.BytesIO) -> Pickler:
        """A pickler of the same kind, all in band."""
        return type(self)(file, None)

    def _reduce_definition(self, obj: Any) -> Any:
        if is_of_main(obj):
            return self._reduce_global(obj)
        if type(obj) is types.FunctionType and not cloudpickle.cloudpickle._should_pickle_by_reference(obj):
            return self._reduce_by_value(obj)
        reduction = super().reducer_override(obj)
        if reduction is NotImplemented:  # by name
            self.modules.add(str(obj.__module__))
        elif len(reduction) == 6:
            return self._reduce_by_value(obj)
        return reduction

    def _reduce_global(self, obj: Any) -> Any:
        """Reduce what the script may define: by name, or else by value."""
        if (name := name_of(obj)) is not None and self._may_name(name):
            return named, (name,)
        return self._reduce_by_value(obj)

    def _may_name(self, name: str) -> bool:  # noqa: ARG002
        return True

    def _reduce_by_value(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType:
            if is_dispatcher(obj):
                return reduce_dispatcher(obj)
            if (module := module_of(obj)) is None:  # made by ``exec``, with globals of its own
                return super().reducer_override(obj)
            if module != "__main__":
                self.modules.add(module)
            return reduce_function(obj, module, self._digest if self._brings_globals else None)
        if isinstance(obj, type):
            return reduce_class(obj, self._digest)
        if type(obj) is CachedFunction and (obj.__module__ in MAIN_NAMES or _has_no_name(obj)):
            return reduce_cached(obj)
        return NotImplemented

    def _digest(self, value: Any) -> bytes:
        """A digest of a value of a class, for comparisons within one process."""
        return _digest(value, io.BytesIO())


class Limited(io.BytesIO):
    """A file that holds few bytes.

    Raises:
        OverflowError: They are too many.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def write(self, data: Any) -> int:
        """Write bytes."""
        if self.tell() + memoryview(data).nbytes > self.max_bytes:  # of a large array, a PickleBuffer
            raise OverflowError(f"more than {self.max_bytes} bytes")
        return super().write(data)

    def check(self, obj: Any) -> None:
        """Refuse a tensor or an array before it is copied."""
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            is_elsewhere = isinstance(obj, torch.Tensor) and not obj.is_cpu
            if is_elsewhere or _size_of(obj) > self.max_bytes:
                raise OverflowError(f"more than {self.max_bytes} bytes")


class Digester(Pickler):
    """Pickles a value to compare it with a later one: classes are what they are, and functions that have names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, None)
        self._file = file

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects."""
        if isinstance(self._file, Limited):
            self._file.check(obj)
        if is_definition(obj):
            # A state, since a function may be in its own closure.
            return id, (id(obj),), content_of(obj) if self._travels_within(obj) else None
        if (reduce := OF_DEFINITIONS.get(type(obj))) is not None:
            return reduce(obj)
        return super().reducer_override(obj)

    def _travels_within(self, obj: Any) -> bool:
        """Whether this is a function that is sent as a part of what refers to it: all that it refers to counts, too."""
        if type(obj) is not types.FunctionType or cloudpickle.cloudpickle._should_pickle_by_reference(obj):
            return False
        return main_globals().get(obj.__name__) is not obj


def _digest(value: Any, file: io.BytesIO) -> bytes:
    Digester(file).dump(value)
    return digest_of(file.getvalue())


def _size_of(whole: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Bytes of a tensor or an array; 0 of a sparse tensor, whose parts have them."""
    is_sparse = isinstance(whole, torch.Tensor) and whole.layout is torch.sparse_coo
    return 0 if is_sparse else whole.nbytes


def _in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a view, as torch pickles all the memory that it is a view of; other tensors as they are."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not tensor.is_leaf:
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        copy = tensor.as_subclass(torch.Tensor).detach().clone().as_subclass(type(tensor))
        copy.requires_grad_(tensor.requires_grad)
    state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    return torch._utils._set_obj_state(copy, state)  # type: ignore[no-any-return,no-untyped-call]


def _with_file(reduction: Any, code: types.CodeType) -> Any:
    """With the name of the file, which tracebacks show, and cloudpickle 3.1.3 leaves out."""
    make, parts = reduction
    return make, tuple(code.co_filename if type(part) is str and part == "<dynamic-code>" else part for part in parts)


class RequestPickler(Pickler):
    """Pickles a client's messages.

    Args:
        persistent_id: Function called with every object; its result replaces the object on the wire, None keeps it.
        reducers: Further reducers, which come before all others.
        numbers_told: Number small shared tensors.

    Attributes:
        used: Names of the script's globals that the receiver needs, each with what uses it.
        frozen: Frozen objects.
        dense: Tensors that may be views of the same memory.
    """

    used: dict[str, str]
    frozen: list[Frozen]
    dense: list[torch.Tensor]

    _opens_maps = _brings_globals = True
    _views: Mapping[tuple[Any, ...], tuple[Any, ...]] = {}  # of tensors in the same memory, by their places

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[memoryview] | None,
        persistent_id: PersistentId | None = None,
        reducers: Mapping[type, Callable[[Any], Any]] | None = None,
        *,
        numbers_told: bool = False,
    ) -> None:
        super().__init__(file, buffers)
        self._start = file.tell()
        self._output = file
        self._buffers = buffers
        self.used = {}
        self.frozen = []
        self.dense = []
        self._reducers = reducers
        self._numbers_told = numbers_told
        self._within: dict[int, Any] = {}  # what numbered tensors are reduced to, by id
        if persistent_id is not None:
            self.persistent_id = persistent_id

    def dump(self, obj: Any) -> None:
        """Pickle an object; twice if it has tensors that are views of the same memory, which is known only then.

        torch's workers have them as such, with each start method: what is written through one is seen in the others.
        """
        super().dump(obj)
        if len(self.dense) > 1 and (views := find_views(self.dense)):
            self._views = views
            self._output.seek(self._start)
            self._output.truncate()
            for each in (self.tensors, self.frozen, self._buffers or []):
                each.clear()
            self.clear_memo()
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects."""
        if self._reducers is not None and (reduce := self._reducers.get(type(obj))) is not None:
            return reduce(obj)
        if type(obj) is torch.Tensor and (reduced := self._reduce_view(obj)) is not None:
            reduction: Any = reduced
        else:
            reduction = super().reducer_override(obj)
        if self._numbers_told and isinstance(obj, torch.Tensor) and id(obj) not in self._within:
            return self._with_number(obj, reduction)
        return reduction

    def _reduce_view(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """The reduction of a tensor that is a view of the same memory as another one; None of all else."""
        if not is_dense(tensor) or (tensor.nbytes >= MIN_SOUGHT_BYTES and reduce_tensor(tensor) is not None):
            return None
        if self._views:
            view = self._views.get(place_of(tensor))
            return None if view is None or view[0] is tensor else (place, view)
        self.dense.append(tensor)
        return None

    def _with_number(self, tensor: torch.Tensor, reduction: Any) -> Any:
        """The reduction of a tensor, whose copy is noted if it is a small shared one."""
        if (number := number_of(tensor)) is None:
            return reduction
        if reduction is NotImplemented:
            reduction = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        make, args = reduction
        self._within |= {id(part): part for part in args if isinstance(part, torch.Tensor)}
        return make, args, number, None, None, note_copy

    def _take_frozen(self, frozen: Frozen) -> None:
        super()._take_frozen(frozen)
        self.frozen.append(frozen)

    def _like(self, file: io.BytesIO) -> Pickler:
        pickler = RequestPickler(file, None, reducers=self._reducers)
        pickler.used = self.used
        return pickler

    def _may_name(self, name: str) -> bool:
        self.used.setdefault(root_of(name), "")
        return True

    def _reduce_by_value(self, obj: Any) -> Any:
        if type(obj) is types.FunctionType and obj.__globals__ is main_globals():
            self.used |= dict.fromkeys(globals_of_script(obj.__code__), obj.__qualname__)
        elif type(obj) is object and (place := _place_in_modules(obj)) is not None:
            self.modules.add(place[0])
            return sentinel_of, place
        return super()._reduce_by_value(obj)


_ATOMS = frozenset((types.NoneType, bool, int, float, complex, str, bytes))

# Found by a name, or by their content alone. The variables of a function are objects of their own.
_SAME_EVERYWHERE: tuple[type, ...] = (
    *(types.NoneType, types.EllipsisType, types.NotImplementedType, enum.Enum, np.ufunc),
    *(type, types.ModuleType, types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, torch.dtype, torch.layout, torch.memory_format),
)


@functools.lru_cache(maxsize=4096)
def _may_change(kind: Any) -> bool:
    """Whether objects of a class may change, so that it matters which of them is meant."""
    has_name = issubclass(kind, _SAME_EVERYWHERE) or (kind in _CLOUDPICKLE_TABLE and kind is not types.CellType)
    # What has a hash of its content is a value; but in a class of the user, that may be the hash of a name.
    is_of_user = bool(kind.__dictoffset__) and str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names
    return not has_name and (is_of_user or kind.__hash__ in (None, object.__hash__))


class DefinitionPickler(RequestPickler):
    """Pickles globals of the script by value, and names all others.

    Args:
        names: Names of these globals.
        owners: Names by the ids of what belongs to one global, see ``definitions.py``.
        reference_of: Function called with every object; its result replaces the object on the wire, None keeps it.

    Attributes:
        contained: Names of other globals that are part of these.
        objects: Parts without a name that may change, by id; kept, so that no other object gets that.
    """

    def __init__(
        self,
        file: io.BytesIO,
        names: Collection[str],
        owners: Mapping[int, str],
        reference_of: PersistentId | None = None,
    ) -> None:
        super().__init__(file, None, None, OF_DEFINITIONS, numbers_told=True)
        self.contained = set[str]()
        self.objects = dict[int, Any]()
        self._file = file
        self._names = names
        self._owners = owners
        self._reference_of = reference_of
        # An attribute, which a search for what cannot be pickled may replace; without a reference to itself.
        self.persistent_id = functools.partial(DefinitionPickler._refer, weakref.proxy(self))  # type: ignore[arg-type]

    def reducer_override(self, obj: Any) -> Any:
        """Reduce special objects."""
        if isinstance(self._file, Limited):
            self._file.check(obj)
        return super().reducer_override(obj)

    def _digest(self, value: Any) -> bytes:
        file = Limited(self._file.max_bytes) if isinstance(self._file, Limited) else io.BytesIO()
        return _digest(value, file) + (self._mark(value) if len(self._names) > 1 else b"")

    def _mark(self, value: Any) -> bytes:
        """What tells a value that contains one of these globals from one that contains the object before."""
        trial = DefinitionPickler(io.BytesIO(), (), self._owners, self._reference_of)
        trial.dump(value)
        return b"" if trial.contained.isdisjoint(self._names) else repr(sorted(self._names)).encode()

    def _refer(self, obj: Any) -> Any:
        """What stands for an object that belongs to another global, or is held elsewhere."""
        if (kind := type(obj)) in _ATOMS:  # of which there may be millions, and none is owned or held elsewhere
            return None
        name = self._owners.get(id(obj))
        if name is not None and kind is not types.CellType and self._may_name(name):
            return name
        if name is not None and kind in (types.CellType, types.FunctionType):
            return None  # what is held elsewhere has these from here
        reference = None if self._reference_of is None else self._reference_of(obj)
        if name is None and reference is None and _may_change(kind):  # type: ignore[arg-type]
            self.objects[id(obj)] = obj
        return reference

    def _may_name(self, name: str) -> bool:
        root = root_of(name)
        if root in self._names:
            return False
        self.contained.add(root)
        return super()._may_name(name)

    def _reduce_cell(self, cell: types.CellType) -> Any:
        name, _dot, number = self._owners.get(id(cell), "").partition(".")
        if name and self._may_name(name):
            return variable_of, (name, int(number))
        return super()._reduce_cell(cell)

    def _like(self, file: io.BytesIO) -> Pickler:
        pickler = DefinitionPickler(file, self._names, self._owners, self._reference_of)
        pickler.contained, pickler.used, pickler.objects = self.contained, self.used, self.objects
        return pickler


def runs_script_again() -> bool:
    """Whether a process that multiprocessing spawns runs this script as ``__mp_main__``: a notebook is none."""
    return any(name.startswith("init_main") for name in get_preparation_data("worker"))


class ReplyPickler(Pickler):
    """Pickles a worker's messages: what has a name in ``__main__`` here has it at the client."""

    def _leaves_own(self, name: tuple[str, str]) -> bool:
        return name[0] == "dataclasses"  # others have a state, which is that of the worker


def reply_as_multiprocessing() -> None:
    """Let replies of this process use the reducers that the script has registered with multiprocessing, as torch's do.

    Not those of torch and Python, which share memory: replies have their own way.
    """
    registered: Mapping[type, Callable[[Any], Any]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    own = {
        kind: reduce
        for kind, reduce in registered.items()
        if str(getattr(reduce, "__module__", "")).partition(".")[0] not in ("multiprocessing", "torch")
    }
    if own:  # a chain of tables costs a microsecond for each object
        ReplyPickler.dispatch_table = collections.ChainMap(own, copyreg.dispatch_table)


class UnresolvedError(BaseException):
    """Carries an exception of ``persistent_load`` past the handlers of malformed messages."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Unpickler(pickle.Unpickler):
    """Reads the output of both picklers; made with the pickle and the contents of ``buffers``."""

    # Set before load, if different: a constructor in Python would be a good part of the cost of a small batch.
    tensors: Sequence[torch.Tensor] = ()  # of the message
    blocks: Sequence[Block] = ()  # of the message
    resolve: Callable[[Any], Any] | None = None  # returns the object that ``persistent_id`` replaced
    adopt: Callable[[bytes], None] | None = None  # takes over definitions
    find: Callable[[str], Any] = staticmethod(named)  # returns an object of the script

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names."""
        # In a message, a function of this package means something that knows the message.
        if module.startswith("rpcdataloader.wire."):
            if name == take_tensor.__name__:
                return self.tensors.__getitem__
            if name == place_tensor.__name__:
                return functools.partial(place_tensor, blocks=self.blocks)
            if name == load_whole.__name__:
                return functools.partial(load_whole, resolve=self.resolve, find=self.find)
            if name == named.__name__:
                return self.find
            if name == variable_of.__name__:
                return functools.partial(variable_of, find=self.find)
            if name == adopt.__name__ and self.adopt is not None:
                return self.adopt
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            advice = "; put it into a module of its own, and send that with py_modules=" * (module in MAIN_NAMES)
            raise SerializationError(f"module {module!r} has no {name!r} here: {error}{advice}") from error

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
    # Of the array, not of a memoryview: Python 3.11 crashes when it collects a memoryview of another one in a cycle.
    return np.ndarray, (array.shape, array.dtype, pickle.PickleBuffer(flat), 0, array.strides)  # type: ignore[arg-type]


def _in_order_of_memory(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.transpose(sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True))


def _load_storage(content: bytes) -> Any:
    """In place of torch's function, in which torch 2.4 and 2.5 warn that their own default will change."""
    return torch.load(io.BytesIO(content), weights_only=False)


def _is_reduced_as_built_in(kind: type[BaseException]) -> bool:
    """Whether a class of exceptions leaves its pickles to Python: a call of its constructor with ``args``.

    Many constructors take other arguments, or make another text of these.
    """
    owner = getattr(kind.__reduce__, "__objclass__", None)
    ours = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__setstate__ is BaseException.__setstate__
    return ours and kind not in copyreg.dispatch_table and getattr(owner, "__module__", "") == "builtins"


# Attributes of an exception that do not travel, and its arguments.
_NOT_SENT = {"__dict__", "__weakref__", "__traceback__", "__context__", "__cause__", "__suppress_context__", "args"}


def parts_of(exc: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """Class, arguments and attributes of an exception; also those in slots, such as the number of an ``OSError``."""
    found = {}
    for kind in type(exc).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)) and name not in _NOT_SENT:
                with contextlib.suppress(AttributeError):  # an empty slot
                    found[name] = member.__get__(exc)
    return type(exc), exc.args, {**found, **vars(exc)}


def reduce_parts(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any, ...]:
    """The reduction of an exception with these parts; attributes may lead back to it."""
    return make_exception, (kind, args), attributes, None, None, set_attributes


def make_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an exception without its constructor."""
    built_in: Any = kind
    while built_in.__module__ != "builtins":
        built_in = built_in.__base__  # whose memory it has, of several
    exc: BaseException = built_in.__new__(kind, *args)
    exc.args = args  # OSError leaves it to the constructor of a class that has one
    return exc


def set_attributes(exc: BaseException, attributes: dict[str, Any]) -> None:
    """Set the attributes of an exception that was made without its constructor."""
    for name, value in attributes.items():
        if value is not getattr(exc, name, exc):  # a second file name that is set to None would be shown
            with contextlib.suppress(AttributeError, TypeError):  # read only, and set with the arguments
                object.__setattr__(exc, name, value)


def _has_no_name(obj: Any) -> bool:
    """Whether its module does not have an object of a module, as it was made within a function."""
    return cloudpickle.cloudpickle._lookup_module_and_qualname(obj) is None


def is_definition(obj: object) -> bool:
    """Whether this is a function or a class."""
    kind = type(obj)
    return kind is types.FunctionType or issubclass(kind, type)


def name_of(obj: Any) -> str | None:
    """The dotted name of an object of the script; None without one."""
    namespace = main_globals()
    qualified = getattr(obj, "__qualname__", None)
    if isinstance(qualified, str):
        found: Any = namespace
        try:
            root, _dot, rest = qualified.partition(".")
            found = namespace[root]
            if (attrgetter(rest)(found) if rest else found) is obj:
                return qualified
        except (KeyError, AttributeError):  # missing, or "<locals>"
            pass
    return next((name for name, value in list(namespace.items()) if value is obj), None)
