"""A digest of what an object contains, to tell whether it has changed in place: bounded, and without code of the user.

Containers, attributes of instances, and what Python and numpy know to take apart count with all that is in them. All
else is what it is: a function, a lock, a table of a library that keeps its rows in memory of C.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import logging
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

# Larger ones have no digest, nor have arrays in them: of a table of gigabytes, a glance must be enough.
MAX_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 1 << 16
_MAX_ITEMS = 1 << 17  # of a container whose class is no plain one, which is copied

# Packages whose objects are taken apart as these say, which costs little and changes nothing; and those of Python whose
# objects belong to a process, and change as they are used.
_KNOWN = sys.stdlib_module_names | {"builtins", "numpy", "pandas"}
_OF_A_PROCESS = {
    *("asyncio", "concurrent", "contextvars", "itertools", "multiprocessing", "queue", "selectors", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "weakref"),
}

# Classes of a loader and its iterators, which change with each pass.
_LOADING = ("rpcdataloader.", "torch.utils.data.dataloader")

_NAMED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger, logging.Handler)
_MUTABLE: tuple[Any, ...] = (dict, list, set)


def is_loading(kind: type) -> bool:
    """Whether this is the class of a loader, of its dataset on nodes, or of an iterator."""
    return any(str(base.__module__).startswith(_LOADING) for base in kind.__mro__)


def level_of(logger: logging.Logger) -> int:
    """The level from which on records are made."""
    disabled = logger.manager.disable
    return max(logger.getEffectiveLevel(), disabled + 1 if disabled else 0)


class Content:
    """What an object contained.

    Attributes:
        digest: Equal for equal contents; None if it is too large, or cannot be told.
        size_bytes: What it took to tell.
    """

    __slots__ = ("_references", "digest", "size_bytes")

    def __init__(self, value: Any) -> None:
        self.digest, self.size_bytes, self._references = _digest(value)

    def has_changed(self, value: Any) -> bool:
        """Whether the same object now contains something else; False where that cannot be told."""
        if self.digest is None:
            return False
        return _digest(value)[0] != self.digest or any(refer() is None for refer in self._references)


def _digest(value: Any) -> tuple[int | None, int, tuple[weakref.ref[Any], ...]]:
    digester = _spare.pop() if _spare else _Digester(_Limited())
    digest, file = None, digester.file
    try:
        digester.dump(value)
        digest = hash(file.getvalue())
    except Exception:  # it is too large, or nested too deeply
        digester.references.clear()
    found = digest, file.tell(), tuple(digester.references)
    digester.references.clear()
    digester.clear_memo()
    file.seek(0)
    file.truncate()
    _spare.append(digester)
    return found


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_BYTES:
            raise OverflowError
        return super().write(data)


class _Digester(pickle.Pickler):
    """Makes a pickle that is only compared.

    Attributes:
        references: Weak references to objects whose ids are in it, as another object may get the same one later.
    """

    def __init__(self, file: _Limited) -> None:
        super().__init__(file, 5)
        self.file = file
        self.references: list[weakref.ref[Any]] = []

    def reducer_override(self, obj: Any) -> Any:
        """Reduce all but the basic types."""
        if obj is id:
            return NotImplemented
        kind = type(obj)
        if issubclass(kind, _NAMED):
            return self._refer(obj)
        if kind is types.MappingProxyType:
            return id, (dict(obj),)
        if issubclass(kind, (threading.local, contextvars.ContextVar)):
            return id, (id(obj), vars(obj) if issubclass(kind, threading.local) else obj.get(None))
        torch: Any = sys.modules.get("torch")
        if issubclass(kind, getattr(torch, "Tensor", ())):
            return id, (id(obj), *_version_of(obj))
        if issubclass(kind, getattr(torch, "Generator", ())) and obj.device.type == "cpu":
            return id, (obj.get_state().numpy().tobytes(),)
        package = str(kind.__module__).partition(".")[0]
        if package in _OF_A_PROCESS or is_loading(kind):
            return self._refer(obj)
        if package in _KNOWN:
            return self._reduce_known(obj)
        state = [*_state_of(obj)]
        return (id, (id(kind),), state) if state else self._refer(obj)

    def _reduce_known(self, obj: Any) -> Any:
        try:
            size_bytes = getattr(obj, "nbytes", None)
            if (8 * len(obj) if size_bytes is None and hasattr(obj, "__len__") else size_bytes or 0) > MAX_BYTES:
                return self._refer(obj)
            reduced = obj.__reduce_ex__(4)
        except Exception:  # a lock, an open file
            return self._refer(obj)
        return reduced if isinstance(reduced, tuple) else self._refer(obj)

    def _refer(self, obj: Any) -> Any:
        if not issubclass(type(obj), (type, types.BuiltinFunctionType)):
            with contextlib.suppress(TypeError):
                self.references.append(weakref.ref(obj))
        return id, (id(obj),)


def _version_of(tensor: Any) -> tuple[Any, ...]:
    """What tells the content of a tensor: of a small one its bytes, as ``.data`` changes them without a new version.

    Only as they lie in memory: to put them in order, torch would ask threads, which a fork of the script does not have.
    """
    with contextlib.suppress(Exception):  # it is elsewhere, or has no such memory
        if tensor.is_cpu and tensor.nbytes <= _MAX_TENSOR_BYTES and tensor.is_contiguous():
            return (tensor.detach().view(-1).view(sys.modules["torch"].uint8).numpy().tobytes(),)
    try:
        return tensor._version, tensor.data_ptr()
    except Exception:  # it has none
        return ()


def _state_of(obj: Any) -> Iterator[Any]:
    """Attributes and items of an instance."""
    kind = type(obj)
    with contextlib.suppress(AttributeError):
        yield object.__getattribute__(obj, "__dict__")
    for each in kind.__mro__:
        for name, member in vars(each).items():
            if type(member) is types.MemberDescriptorType and each is not object:
                with contextlib.suppress(AttributeError):  # it is empty
                    yield name, member.__get__(obj)
    for base in _MUTABLE:
        if issubclass(kind, base):
            yield base.copy(obj) if base.__len__(obj) <= _MAX_ITEMS else base.__len__(obj)
    if issubclass(kind, tuple):
        yield tuple.__getitem__(obj, slice(None))
    for simple in (str, bytes, int, float):
        if issubclass(kind, simple):
            yield simple.__hash__(obj)


# To make one takes as long as to digest a small object. Threads take one out.
_spare: list[_Digester] = []
