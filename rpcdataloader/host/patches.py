"""What a script has changed in other modules: how it is found. ``patching`` lets a worker change its own likewise.

In the script's own modules, it is found by comparing (``snapshots.py``). In libraries, such as
``ImageFile.LOAD_TRUNCATED_IMAGES = True``, a comparison would find all that they do themselves. So the source of the
script, and that of its modules, is read for assignments to attributes of modules, and of their classes and functions.
Their values are those of the moment. So are what the script registers with abstract base classes of others, and with
functions of ``functools.singledispatch``.

A key is ``PIL.ImageFile:NAME`` for what the source says, ``module:name[=]`` for another value that was found by
comparing, and ``module:name[...]`` for what has changed in place.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rpcdataloader.host.assignments import changes_by_namespace
from rpcdataloader.host.snapshots import CONTENT, VALUE, compares, snapshots
from rpcdataloader.host.sources import recorder

_MAIN = "__main__", "__mp_main__"

# Modules by which a worker lives.
_OWN = (
    *("builtins", "copyreg", "gc", "logging", "multiprocessing", "os", "pickle", "select", "signal", "socket", "ssl"),
    *("subprocess", "sys", "threading", "time", "rpcdataloader"),
)

# What has attributes of its own, apart from modules.
_OWNERS = (type, types.FunctionType)

# The attribute of abstract base classes that has what is registered with them.
ABSTRACT = "_abc_impl"


def is_patch(name: str) -> bool:
    """Whether this is a key of :func:`find_patches`, and not a name of the script."""
    return ":" in name


def is_content(name: str) -> bool:
    """Whether this is such a key, of something that has changed in place."""
    return name.endswith(CONTENT)


def is_compared(name: str) -> bool:
    """Whether this is such a key, of what was found by comparing: perhaps a memo, or a connection."""
    return name.endswith((CONTENT, VALUE))


def find_patches(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the script of ``namespace`` has set elsewhere, or changed there, by key."""
    sources = recorder.look()
    compared, found = snapshots.find(sources) if sources else {}, dict[str, Any]()
    for own, changes in changes_by_namespace(namespace, sources):
        names = {**_imported(changes.imported, own), **own}
        for chain in changes.assigned:
            if chain[0] not in names:  # it is a local one
                continue
            with contextlib.suppress(Exception):  # a name that means nothing now, or a property that fails
                owner = _follow(names, chain[:-1])
                if (place := _place_of(owner)) is None:
                    continue
                value = vars(owner)[chain[-1]] if isinstance(owner, type) else getattr(owner, chain[-1])
                # What functions keep that they have computed may be large: contents have a limit.
                key = f"{place}{chain[-1]}{CONTENT * isinstance(owner, types.FunctionType)}"
                if (module := place.partition(":")[0]) not in sources:
                    found[key] = value
                elif own is namespace and (
                    f"{key}{VALUE}" in compared or not snapshots.has_all_of(module) or not compares(chain[-1], value)
                ):
                    compared.pop(f"{key}{VALUE}", None)
                    found[key] = value
        for chain, kind in changes.registered if own is namespace else ():
            with contextlib.suppress(Exception):  # the same, or it is another kind of register
                named = functools.partial(_follow, {**vars(builtins), **names}, kind)
                key, registered = _registered_with(_follow(names, chain), named)
                if registered and key not in compared:
                    found[key] = {**found.get(key, {}), **registered}
    return {**compared, **found}


def _registered_with(owner: Any, get_kind: Callable[[], Any]) -> tuple[str, dict[type, Any]]:
    """What the script has registered with something: its key, and by each class the function for it, if there is one.

    Args:
        get_kind: Function that returns a class, which may be a library's, or fails.

    Raises:
        Exception: It is no such thing, or the script's own, which travels with that.
    """
    if isinstance(owner, abc.ABCMeta):
        attribute, kinds = ABSTRACT, [ref() for ref in abc._get_dump(owner)[0]]  # type: ignore[attr-defined]
        registered = dict.fromkeys(kind for kind in kinds if kind is not None)
    else:
        owner = dispatcher_of(owner)
        attribute, registered = "registry", dict(owner.registry)
    named = None
    with contextlib.suppress(Exception):
        named = get_kind()
    own = {
        kind: function
        for kind, function in registered.items()
        if kind is named or any(getattr(each, "__module__", None) in _MAIN for each in (kind, function))
    }
    return f"{_named_place(owner)}{attribute}{CONTENT}", own


def _named_place(owner: Any) -> str:
    if (place := _place_of(owner)) is None:
        raise ValueError(owner)
    return place


def dispatcher_of(function: Any) -> Any:
    """What ``functools.singledispatch`` has made of a function, or within ``singledispatchmethod``."""
    return function if hasattr(function, "registry") else function.register.__self__.dispatcher


def _imported(imports: Iterable[tuple[str, str, str]], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """What import statements have named, as far as it is there."""
    found = {}
    for name, module, attribute in imports:
        with contextlib.suppress(Exception):
            if module.startswith("."):
                module = importlib.util.resolve_name(module, namespace["__package__"])
            owner = sys.modules[module]
            found[name] = (
                getattr(owner, attribute, None) or sys.modules[f"{module}.{attribute}"] if attribute else owner
            )
    return found


def _follow(names: Mapping[str, Any], chain: tuple[str, ...]) -> Any:
    found = names[chain[0]]
    for name in chain[1:]:
        found = getattr(found, name)
    return found


def _place_of(owner: Any) -> str | None:
    if isinstance(owner, types.ModuleType):
        module, place = owner.__name__, f"{owner.__name__}:"
    elif isinstance(owner, _OWNERS) and "<locals>" not in owner.__qualname__:
        module, place = owner.__module__, f"{owner.__module__}:{owner.__qualname__}."
    else:
        return None
    is_own = module in _MAIN or module.partition(".")[0] in _OWN
    return None if is_own else place
