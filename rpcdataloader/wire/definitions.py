"""Functions and classes that travel by value, and their owners.

A worker cannot import the functions and classes of a client's ``__main__``, its lambdas and its local classes:
cloudpickle sends their code. Each gets a random token when it is first sent, and both sides remember, weakly, which
object goes by which token. So a definition that comes back is the client's own object, and never changes it: a
definition is applied only where it was received, not where it was made.
"""

from __future__ import annotations

import functools
import importlib
import secrets
import sys
import types
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

#: multiprocessing's name for ``__main__`` in a spawned child, where it is the same module under two names.
MAIN_NAMES = ("__main__", "__mp_main__")

LRU_CACHE = type(functools.lru_cache(id))


class Origin(NamedTuple):
    """The process that made a definition.

    Attributes:
        token: Name of the definition on both sides.
        is_ours: True if this process made it.
        name: Module and qualified name under which its maker finds it; None for a lambda or a local class.
    """

    token: bytes
    is_ours: bool
    name: tuple[str, str] | None


# No lock: each operation on these is atomic, and both threads of a race write the same.
_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
_definitions: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()


def is_definition(obj: object) -> bool:
    """Whether this is a function or a class, or a cached function, which pickle treats as one."""
    kind = type(obj)
    return kind is types.FunctionType or issubclass(kind, type) or kind is LRU_CACHE


def find_origin(definition: Any) -> Origin | None:
    """Return a definition's origin; None if it has neither been sent nor received."""
    return _origins.get(definition)


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
    if isinstance(definition, type) and vars(definition).get("__slots__"):
        args = tuple(_with_slots(arg, definition) for arg in args)
    origin = _origins.get(definition)
    if origin is None:
        ours = Origin(secrets.token_bytes(12), True, importable_name(definition))
        origin = _origins.setdefault(definition, ours)
        _definitions[origin.token] = definition
    return receive, (origin.token, origin.name, make, args), (set_state, state), None, None, complete


def _with_slots(argument: Any, cls: type) -> Any:
    """Add ``__slots__`` to the namespace in which cloudpickle makes a class; it adds them too late to have an effect.

    Instances would have a dictionary, and come back with a state that does not fit.
    """
    return argument | {"__slots__": vars(cls)["__slots__"]} if isinstance(argument, dict) else argument


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


def reduce_by_name(origin: Origin) -> tuple[Any, ...] | None:
    """Name a definition that its maker can find again; None if the maker may have lost it."""
    if origin.is_ours or origin.name is None:
        return None
    return find, (origin.token, *origin.name)


def find(token: bytes, module: str, name: str) -> Any:
    """Return this process's own definition: the one sent, or else the current one of that name."""
    definition = _definitions.get(token)
    return attrgetter(name)(importlib.import_module(module)) if definition is None else definition
