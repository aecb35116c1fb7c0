"""Functions and classes that travel by value, and who owns them.

The functions and classes of a client's ``__main__``, its lambdas and its local classes cannot be imported by a worker:
cloudpickle sends their code. Each gets a random token when it is first sent, and both sides remember, weakly, which
object goes by which token. So what comes back is the client's own object, and the client's object is never changed by
what comes back: a definition is applied only where it was received, not where it was made.
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

#: What multiprocessing calls ``__main__`` in a spawned child, where it is the same module under two names.
MAIN_NAMES = ("__main__", "__mp_main__")

LRU_CACHE = type(functools.lru_cache(id))


class Origin(NamedTuple):
    """Where a definition was made.

    Attributes:
        token: Names it on both sides.
        is_ours: This process made it.
        name: Module and qualified name under which its maker finds it, None for a lambda or a local class.
    """

    token: bytes
    is_ours: bool
    name: tuple[str, str] | None


# No lock: each operation on these is atomic, and whoever comes second in a race writes the same.
_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
_definitions: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()


def is_definition(obj: object) -> bool:
    """Tell whether this is a function or a class, or a cached function, which pickle treats as one."""
    kind = type(obj)
    return kind is types.FunctionType or issubclass(kind, type) or kind is LRU_CACHE


def find_origin(definition: Any) -> Origin | None:
    """Return where a definition came from, None if it has neither been sent nor received."""
    return _origins.get(definition)


def importable_name(definition: Any) -> tuple[str, str] | None:
    """Return the module and qualified name under which this process finds exactly this object."""
    module, name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    try:
        found = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):  # not there, or "<locals>"
        return None
    return (module, name) if found is definition else None


def reduce_by_value(definition: Any, reduction: tuple[Any, ...]) -> tuple[Any, ...]:
    """Extend cloudpickle's recipe for a definition by its origin.

    Args:
        reduction: As ``reducer_override`` returns it: make, args, state, None, None, set_state.
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
    """Add ``__slots__`` to the namespace in which cloudpickle makes a class; it adds them only afterwards.

    Too late to have an effect: instances would have a dictionary, and come back with a state that does not fit.
    """
    return argument | {"__slots__": vars(cls)["__slots__"]} if isinstance(argument, dict) else argument


def receive(token: bytes, name: tuple[str, str] | None, make: Callable[..., Any], args: Any) -> Any:
    """Return the definition of this token: our own if we made it, else one begun by ``make(*args)``."""
    definition = _definitions.get(token)
    if definition is None or not _origins[definition].is_ours:
        definition = make(*args)
        _origins[definition] = Origin(token, False, name)
        _definitions[token] = definition
    return definition


def complete(definition: Any, recipe: tuple[Callable[[Any, Any], None], Any]) -> None:
    """Fill a received function or class, unless it is our own."""
    if not _origins[definition].is_ours:
        set_state, state = recipe
        set_state(definition, state)


def complete_and_adopt(definition: Any, recipe: tuple[Callable[[Any, Any], None], Any]) -> None:
    """On a worker, also give what comes from the client's ``__main__`` its name in ours.

    So code there which pickles it by name, as deep copies and child processes do, works too.
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
    """Return our own definition: the one that was sent, or else what has its name now."""
    definition = _definitions.get(token)
    return attrgetter(name)(importlib.import_module(module)) if definition is None else definition
