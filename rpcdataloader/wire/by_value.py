"""Functions and classes by value: what :mod:`copyreg` would need to take them apart, and the way back.

Both sides have the module ``__main__``, and those that can be imported: a function is bound to the receiver's module,
and refers to its globals by name. A class that the receiver has stays the same object. Of it, only those attributes are
set that have changed at the sender, so what a process has changed itself stays.

For enumerations, and classes of other metaclasses of libraries, cloudpickle knows the way.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import ctypes
import dis
import enum
import functools
import hashlib
import importlib
import itertools
import logging
import operator
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from cloudpickle import cloudpickle  # type: ignore[import-untyped]

from rpcdataloader.host.contents import level_of
from rpcdataloader.host.patches import is_patch
from rpcdataloader.host.signals import is_interrupt
from rpcdataloader.host.snapshots import is_data

#: multiprocessing's name for ``__main__`` in a spawned child, where it is the same module under two names.
MAIN_NAMES = ("__main__", "__mp_main__")

#: The type of a function with ``functools.lru_cache`` or ``functools.cache``.
CachedFunction = type(functools.lru_cache(abs))

# That of all functions which ``functools.singledispatch`` has made.
_DISPATCHING = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]  # it is a function

# Of classes, the tokens of the attributes that were received; None for a class that was made in this process.
_received: weakref.WeakKeyDictionary[type, Mapping[str, Any] | None] = weakref.WeakKeyDictionary()

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))

_SUBCLASSES = "__subclasses__"

# Of modules, the tokens of the globals that were received with functions.
_received_globals: dict[str, dict[str, Any]] = {}


def main_globals() -> dict[str, Any]:
    """The globals of the script, or those that this process has of it."""
    main = sys.modules["__main__"]
    return vars(main) if main.__name__ == "__main__" else _spawned_globals(main)


@functools.lru_cache(maxsize=1)
def _spawned_globals(main: types.ModuleType) -> dict[str, Any]:
    """The globals that functions of the script use in a child that multiprocessing has spawned: no module has them.

    The child runs the script as ``__mp_main__``, and gives its module a copy of what it has defined.
    """
    for value in list(vars(main).values()):
        for function in list(vars(value).values()) if issubclass(type(value), type) else (value,):
            if type(function) is types.FunctionType and function.__globals__.get("__name__") == main.__name__:
                return function.__globals__
    return vars(main)


def root_of(name: str) -> str:
    """The definition that a dotted name belongs to; a key of ``patches.py`` is one itself."""
    return name if is_patch(name) else name.partition(".")[0]


def named(name: str) -> Any:
    """The object of the script with this dotted name."""
    root, _dot, rest = name.partition(".")
    namespace = main_globals()
    found = namespace[root] if root in namespace else getattr(sys.modules["__main__"], root)
    return attrgetter(rest)(found) if rest else found


def is_of_main(obj: Any) -> bool:
    """Whether a function or class belongs to the script."""
    return getattr(obj, "__module__", None) in MAIN_NAMES or getattr(obj, "__globals__", None) is main_globals()


# Functions


def module_of(function: types.FunctionType) -> str | None:
    """The module whose globals a function uses, if another process finds it by name; the script is ``__main__``."""
    namespace = function.__globals__
    if namespace is main_globals():
        return "__main__"
    name = namespace.get("__name__")  # a decorator may have replaced that of the function
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not namespace or not cloudpickle._should_pickle_by_reference(module):
        return None
    spec = getattr(module, "__spec__", None)
    return name if spec is not None and spec.origin and _origin_of(module.__name__) == spec.origin else None


@functools.lru_cache(maxsize=4096)
def _origin_of(name: str) -> str | None:
    """Where an import of this module would find it; not where the module is that has this name now."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    for finder in [*sys.meta_path]:
        with contextlib.suppress(Exception):  # of a finder of others
            if (spec := finder.find_spec(name, path)) is not None:
                return spec.origin
    return None


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may look up among its globals, in the functions and classes that it defines included.

    With ``__subclasses__``, if it asks for these.
    """
    found = {
        str(instruction.argval): None
        for instruction in dis.get_instructions(code)
        # Class bodies have the last three.
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(names_in(constant))
        elif isinstance(constant, str) and "globals" in code.co_names:  # globals().get("NAME")
            found[constant] = None
    if _SUBCLASSES in code.co_names:
        found[_SUBCLASSES] = None
    return tuple(found)


def globals_of_script(code: types.CodeType) -> set[str]:
    """The same, for code of the script: with its classes, if the code asks for subclasses, which nothing may name."""
    names = set(names_in(code))
    if _SUBCLASSES in names:
        present = list(main_globals().items())
        names |= {name for name, value in present if issubclass(type(value), type) and is_of_main(value)}
    return names


def data_of(function: types.FunctionType) -> dict[str, Any]:
    """The data among the globals that a function uses."""
    namespace = function.__globals__
    names = [name for name in names_in(function.__code__) if name in namespace]
    return {name: namespace[name] for name in names if is_data(name, namespace[name])}


def reduce_function(
    function: types.FunctionType, module: str, digest: Callable[[Any], bytes] | None = None
) -> tuple[Any, ...]:
    """Take apart a function.

    Args:
        module: That of :func:`module_of`.
        digest: Function that tells whether a value has changed; with it, the data that the function uses of another
            module than the script comes along, as the script may have changed it.
    """
    brought: dict[str, tuple[Any, Any]] = {}
    if digest is not None and module != "__main__":
        for name, value in data_of(function).items():
            try:
                brought[name] = token_of(value, digest), value
            except Exception as error:  # it cannot be sent: the receiver's module has its own
                if is_interrupt(error):
                    raise
    namespace, cells = function.__globals__, function.__closure__ or ()
    used = [namespace[name] for name in names_in(function.__code__) if name in namespace]
    for cell in cells:
        with contextlib.suppress(ValueError):  # it is empty
            used.append(cell.cell_contents)
    modules = _parts_of_packages(function.__code__, used)
    state = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": function.__annotations__,
    }
    content = state, dict(function.__dict__), modules, brought
    parts = function.__code__, function.__name__, tuple(cells), module
    return make_function, parts, content, None, None, fill_function


def _parts_of_packages(code: types.CodeType, used: Iterable[Any]) -> list[types.ModuleType]:
    """The modules that code reaches through packages: ``import package.part`` binds the package alone.

    cloudpickle compares the names of all modules that are loaded: a third of a millisecond for each function beside
    a few thousand of them.
    """
    found = dict[str, types.ModuleType]()
    packages = [
        value.__name__ for value in used if issubclass(type(value), types.ModuleType) and hasattr(value, "__path__")
    ]
    while packages:
        package = packages.pop()
        for name in code.co_names:
            part = sys.modules.get(full := f"{package}.{name}")
            if part is not None and full not in found:
                found[full] = part
                packages.append(full)
    return list(found.values())


def make_function(
    code: types.CodeType, name: str, cells: tuple[types.CellType, ...], module: str
) -> types.FunctionType:
    """A function whose globals are those of a module of this process."""
    namespace = main_globals() if module == "__main__" else vars(importlib.import_module(module))
    return types.FunctionType(code, namespace, name, None, cells)


def fill_function(
    function: types.FunctionType,
    content: tuple[dict[str, Any], dict[str, Any], Any, Mapping[str, tuple[Any, Any]]],
) -> None:
    """Give a function what may refer to itself, and its module those globals that are others than it has received."""
    state, attributes, _modules, brought = content
    for name, value in state.items():
        setattr(function, name, value)
    function.__dict__.update(attributes)
    for name, (token, value) in brought.items():
        received = _received_globals.setdefault(function.__globals__["__name__"], {})
        if received.get(name) != token:
            function.__globals__[name], received[name] = value, token


def content_of(function: types.FunctionType) -> tuple[Any, ...]:
    """What may change in a function: its code and defaults, its attributes, and the variables of its closure.

    Globals that are sent with it count, too.
    """
    module, namespace = module_of(function), function.__globals__
    if module is not None:
        used = {} if module == "__main__" else data_of(function)
    else:
        used = {name: namespace[name] for name in names_in(function.__code__) if name in namespace}
    variables = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            variables.append(cell.cell_contents)
    defaults = function.__defaults__, function.__kwdefaults__
    return hash(function.__code__), defaults, dict(function.__dict__), variables, used


def reduce_cell(cell: types.CellType) -> tuple[Any, ...]:
    """Take apart a variable of a closure, which functions share."""
    try:
        content = cell.cell_contents
    except ValueError:
        return types.CellType, ()
    return types.CellType, (), (content,), None, None, fill_cell


def fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    """Give the variable its value, which may be a function that uses it."""
    (cell.cell_contents,) = content


def reduce_cached(function: Any) -> tuple[Any, ...]:
    """Take apart a function with a cache: the cache begins empty."""
    parameters = function.cache_parameters()
    attributes = {name: value for name, value in vars(function).items() if name != "cache_parameters"}
    wrapped = attributes.pop("__wrapped__")
    return make_cached, (wrapped, parameters["maxsize"], parameters["typed"]), attributes, None, None, fill_cached


def make_cached(wrapped: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """A function with a cache."""
    return functools.lru_cache(maxsize, typed)(wrapped)


def fill_cached(function: Any, attributes: dict[str, Any]) -> None:
    """Give a function with a cache its further attributes."""
    vars(function).update(attributes)


def is_dispatcher(function: types.FunctionType) -> bool:
    """Whether ``functools.singledispatch`` has made a function."""
    return function.__code__ is _DISPATCHING


def reduce_dispatcher(function: Any) -> tuple[Any, ...]:
    """Take apart such a function."""
    own = vars(function).keys() - vars(functools.singledispatch(abs)).keys()
    content = dict(function.registry), {name: vars(function)[name] for name in own}
    return functools.singledispatch, (function.__wrapped__,), content, None, None, fill_dispatcher


def fill_dispatcher(function: Any, content: tuple[dict[type, Any], dict[str, Any]]) -> None:
    """Give such a function what was registered, and its further attributes."""
    registered, attributes = content
    for kind, each in registered.items():
        function.register(kind, each)
    vars(function).update(attributes)


# Classes


def reduce_class(cls: type, digest: Callable[[Any], bytes]) -> tuple[Any, ...]:
    """Take apart a class.

    Args:
        digest: Function that tells whether a value has changed.
    """
    if (of_ctypes := _reduce_of_ctypes(cls)) is not None:
        return of_ctypes
    reduction = cloudpickle._dynamic_class_reduce(cls)
    make, args, (attributes, _slots) = reduction[:3]
    attributes = {name: value for name, value in attributes.items() if not _is_slot(value, cls)}
    if "_fields_" in attributes:  # which settings of ctypes, such as _pack_, must precede
        attributes["_fields_"] = attributes.pop("_fields_")
    members: dict[str, dict[str, Any]] = {}
    if issubclass(cls, enum.Enum):
        # cloudpickle leaves out aliases, and what the constructor has given to members.
        args = (*args[:3], {name: member.value for name, member in cls.__members__.items()}, *args[4:])
        attributes = {name: value for name, value in attributes.items() if name not in cls.__members__}
        members = {name: _own_state(member) for name, member in cls.__members__.items()}
    attributes["__qualname__"] = cls.__qualname__
    attributes.pop("__slotnames__", None)  # which copyreg remembers
    if make is cloudpickle._make_skeleton_class and _maker_of(type(cls)) is not None:
        own = {name: value for name, value in args[3].items() if name != "__slots__"}
        if "__slots__" in attributes:
            slots = attributes.pop("__slots__")
            own["__slots__"] = slots if isinstance(slots, str) else tuple(slots)
        if "__orig_bases__" in attributes:  # which typing.Generic looks for
            own["__orig_bases__"] = attributes.pop("__orig_bases__")
        make, args = make_class, (type(cls), cls.__name__, cls.__bases__, own, args[4])
    tokens = _received.setdefault(cls, None)
    if tokens is None:
        tokens = {name: token_of(value, digest) for name, value in attributes.items()}
    return make, args, (attributes, tokens, members), None, None, fill_class


def _reduce_of_ctypes(cls: Any) -> tuple[Any, ...] | None:
    """Take apart what ctypes makes once: types of arrays, types of the other byte order, and metaclasses."""
    if issubclass(cls, ctypes.Array) and cls is cls._type_ * cls._length_:
        return operator.mul, (cls._type_, cls._length_)
    for other, own in ("__ctype_be__", "__ctype_le__"), ("__ctype_le__", "__ctype_be__"):
        number = getattr(cls, own, cls)
        if number is not cls and getattr(number, other) is cls:
            return getattr, (number, other)
    plain = ctypes.Structure, ctypes.Union, ctypes.c_int
    return next(((type, (made,)) for made in plain if cls is type(made)), None)


def _own_state(member: enum.Enum) -> dict[str, Any]:
    """What an enumeration has given to a member, besides name and value."""
    return {name: value for name, value in vars(member).items() if not (name.startswith("_") and name.endswith("_"))}


def _is_slot(value: Any, cls: type) -> bool:
    """Whether ``__slots__`` has made an attribute of a class, or ``_fields_`` of ctypes."""
    is_member = isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls
    return is_member or type(value).__name__ == "CField"


def _maker_of(metaclass: type) -> Callable[..., type] | None:
    """What makes a class without calling the script's metaclass; None if a library's metaclass must be called."""
    first = next(base for base in metaclass.__mro__ if not is_of_main(base))
    if first.__name__ == "_TypedDictMeta":  # of typing or typing_extensions: it refuses dict, the base of what it makes
        return type.__new__
    return first.__new__ if first in (type, abc.ABCMeta) else None


def make_class(metaclass: type, name: str, bases: tuple[type, ...], own: dict[str, Any], identity: str) -> type:
    """The class of this identity; made now, and still empty, if this process lacks it.

    The script's metaclass is not called, nor its ``__init_subclass__``: what they did when the script made the class is
    part of what is sent, and done again it might count double, or fail.
    """
    if (known := cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)) is not None:
        return known  # type: ignore[no-any-return]
    with _without_hooks(bases):
        made: type = (_maker_of(metaclass) or type.__new__)(metaclass, name, bases, dict(own))
    return cloudpickle._lookup_class_or_track(identity, made)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_hooks(bases: tuple[type, ...]) -> Iterator[None]:
    ancestors = dict.fromkeys(itertools.chain.from_iterable(base.__mro__ for base in bases))
    hooked = {base: vars(base)["__init_subclass__"] for base in ancestors if base in _received and _has_hook(base)}
    for base in hooked:
        type.__setattr__(base, "__init_subclass__", classmethod(lambda _cls, **_options: None))
    try:
        yield
    finally:
        for base, hook in hooked.items():
            type.__setattr__(base, "__init_subclass__", hook)


def _has_hook(cls: type) -> bool:
    return "__init_subclass__" in vars(cls)


def fill_class(cls: Any, content: tuple[dict[str, Any], Mapping[str, Any], dict[str, dict[str, Any]]]) -> None:
    """Give a class those of its attributes that are others than it has received before."""
    attributes, tokens, members = content
    before = _received.setdefault(cls, {})
    if before is None:
        return
    changed = {name: value for name, value in attributes.items() if before.get(name) != tokens.get(name, ())}
    for name in before.keys() - tokens.keys():
        with contextlib.suppress(AttributeError):
            delattr(cls, name)
    for name, state in members.items():
        vars(cls[name]).update(state)
    cloudpickle._class_setstate(cls, (changed, {}))
    _received[cls] = tokens


def token_of(value: Any, digest: Callable[[Any], bytes]) -> Any:
    """What tells a value of an attribute from another one that follows: the object, and its content."""
    if isinstance(value, _ATOMS):
        return type(value).__name__, repr(value)
    if isinstance(value, types.FunctionType):
        try:
            return id(value), digest(value)
        except Exception as error:  # it refers to what the receiver gets in another way
            if is_interrupt(error):
                raise
            return id(value), hash(value.__code__)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType)):
        return id(value)
    return id(value), digest(value)


# What has no content that another process could use


def reduce_thread_local(local: threading.local) -> tuple[Any, ...]:
    """Take apart what each thread has of its own: the receiver gets that of this thread."""
    return make_thread_local, (dict(vars(local)),)


def make_thread_local(content: dict[str, Any]) -> threading.local:
    """The same for the present thread."""
    made = threading.local()
    vars(made).update(content)
    return made


def reduce_context_variable(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    """Take apart a variable of this thread's context."""
    with contextlib.suppress(LookupError):
        return make_context_variable, (variable.name, variable.get())
    return contextvars.ContextVar, (variable.name,)


def make_context_variable(name: str, value: Any) -> contextvars.ContextVar[Any]:
    """A variable with a value in every context."""
    return contextvars.ContextVar(name, default=value)


def reduce_logger(logger: logging.Logger) -> tuple[Any, ...]:
    """Take apart a logger: its handlers stay here."""
    state = {"level": level_of(logger), "disabled": logger.disabled}
    return logging.getLogger, (logger.name,), state, None, None, fill_logger


def fill_logger(logger: logging.Logger, state: dict[str, Any]) -> None:
    """Give a logger the level that it has in the script, whichever logger that was set for."""
    logger.setLevel(state["level"])
    logger.disabled = state["disabled"]


def reduce_cached_property(attribute: functools.cached_property[Any]) -> tuple[Any, ...]:
    """Take apart a property, which had a lock before Python 3.12."""
    return make_cached_property, (attribute.func, attribute.attrname)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """The property again."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def make_alias(name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """What a ``type`` statement makes, from Python 3.12 on."""
    return vars(typing)["TypeAliasType"](name, value, type_params=parameters)


def digest_of(pickled: bytes) -> bytes:
    """A digest of a pickle, for comparisons within one client."""
    return hashlib.blake2b(pickled, digest_size=16).digest()


#: Reducers for the globals, class attributes and closures of a script, which a fork would copy: locks arrive open.
OF_DEFINITIONS: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    type(threading.Lock()): lambda _lock: (threading.Lock, ()),
    type(threading.RLock()): lambda _lock: (threading.RLock, ()),
    contextvars.ContextVar: reduce_context_variable,
    logging.Logger: reduce_logger,
    threading.local: reduce_thread_local,
    weakref.WeakKeyDictionary: lambda mapping: (weakref.WeakKeyDictionary, (dict(mapping),)),
    weakref.WeakValueDictionary: lambda mapping: (weakref.WeakValueDictionary, (dict(mapping),)),
    typing.NewType: lambda made: (typing.NewType, (made.__name__, made.__supertype__), vars(made)),
    typing.ParamSpec: lambda made: (typing.ParamSpec, (made.__name__,)),
}
if sys.version_info >= (3, 12):
    OF_DEFINITIONS = {
        **OF_DEFINITIONS,
        typing.TypeAliasType: lambda made: (make_alias, (made.__name__, made.__value__, made.__type_params__)),
    }
