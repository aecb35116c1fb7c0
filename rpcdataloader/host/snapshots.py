"""What has changed in the script's own modules since they were imported, by whatever means: found by comparing.

A worker of a node imports them anew, and must get what the script has changed there, and nothing else: what a module
computes as it is imported, such as a folder of its machine, stays the node's own.

Compared are the globals of a module, and the attributes of its classes and functions. Names that have changed once
count as changed for good, as a node may have got an earlier value.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.host.contents import Content, is_loading
from rpcdataloader.host.literals import literals_of
from rpcdataloader.host.sources import Source, installed_prefixes, path_of_own

#: Ends the name of what has another content, and of what has another value.
CONTENT, VALUE = "[...]", "[=]"

# For the digests of all modules together: what comes then is compared without content.
_MAX_BYTES = 16 << 20

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_MAX_ATOM = 1 << 12  # bytes of a text that is kept to compare it; of others, the object counts

# What a module has but does not change.
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger)

# What has attributes that are compared, apart from modules.
_DEFINITIONS = (type, types.FunctionType)

# Attributes of functions that have no dictionary.
_DEFAULTS = ("__defaults__", "__kwdefaults__")


# Modules whose objects hold what a script sets.
_PLAIN = ("__main__", "argparse", "builtins", "collections", "types")


class Deleted:
    """In place of a value: the script has deleted the name."""


def is_data(name: str, value: Any) -> bool:
    """Whether a global of a module is data, which a script may change: no function, class, module, or logger."""
    # By the type alone: proxies of libraries do what they are lazy about when asked for their class.
    return not ((name.startswith("__") and name.endswith("__")) or issubclass(type(value), _NO_DATA))


class _Fact:
    """What a name meant after the import.

    Attributes:
        parts: For a class or function of the module, its attributes.
        before: The value itself, if it is a constant, or a reference to it, or its id.
        content: What its object contained; None for what has no content.
        is_lazy: Whether it seems to wait for a value: None, or an empty container.
    """

    __slots__ = ("before", "content", "is_lazy", "parts")

    def __init__(self, value: Any, parts: dict[str, _Fact], has_digest: bool) -> None:
        self.parts = parts
        self.content: Content | None = None
        self.is_lazy = value is None or (type(value) in (dict, list, set) and not value)
        kind = type(value)
        if kind in _ATOMS and not (kind in (str, bytes) and len(value) > _MAX_ATOM):
            self.before: Any = value
        elif issubclass(kind, _DEFINITIONS):
            self.before = weakref.ref(value)
        else:
            try:
                self.before = weakref.ref(value)
            except TypeError:
                self.before = _Id(id(value))
            if has_digest and not issubclass(kind, _NO_DATA):
                self.content = Content(value)
            if type(self.before) is _Id and (self.content is None or self.content.digest is None):
                self.before = _Kept(value)

    def difference(self, value: Any) -> str | None:
        """Whether there is another value, or another content."""
        before, kind = self.before, type(value)
        if type(before) is _Id:
            is_same = before == id(value)
        elif type(before) in (weakref.ref, _Kept):
            is_same = value is not None and before() is value
        else:
            is_same = value is before or (kind is type(before) and value == before)
        if not is_same:
            return VALUE
        return CONTENT if self.content is not None and self.content.has_changed(value) else None


class _Id(int):
    """That of an object, which may be another one's later: what that contains tells."""


class _Kept:
    """A reference to an object that has no weak ones, nor a digest."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


@dataclass
class Snapshots:
    """The script's own modules, as they were right after their imports.

    Thread-safe without a lock, which a fork might inherit: what it sets, it sets at once.
    """

    _modules: dict[str, tuple[weakref.ref[types.ModuleType], dict[str, _Fact]]] = field(default_factory=dict)
    _left_bytes: int = _MAX_BYTES
    _changed: dict[tuple[str, str], str] = field(default_factory=dict)  # how, by module and dotted name
    _early: set[str] = field(default_factory=set)

    def take(self, names: Iterable[str], *, are_early: bool = False) -> None:
        """Note modules that have been imported; does not fail.

        Args:
            are_early: They may have been changed since their import.
        """
        prefixes = installed_prefixes()
        for name in names:
            module = sys.modules.get(name)
            self._modules.pop(name, None)
            with contextlib.suppress(Exception):  # an import must not fail for that
                if isinstance(module, types.ModuleType) and path_of_own(name, module.__spec__, prefixes) is not None:
                    self._modules[name] = weakref.ref(module), self._facts_of(name, vars(module), "")
                    (self._early.add if are_early else self._early.discard)(name)

    def has_all_of(self, module: str) -> bool:
        """Whether all changes of a module are found."""
        return module in self._modules and module not in self._early

    def look(self, name: str) -> None:
        """Note what has changed in a module, which may be about to be imported again."""
        module, known = sys.modules.get(name), self._modules.get(name)
        if module is not None and known is not None and known[0]() is module:
            with contextlib.suppress(Exception):
                for changed, kind in _compare(name, vars(module), known[1], ""):
                    self._changed[name, changed] = kind

    def forget(self, name: str) -> None:
        """Begin anew with a module, for tests."""
        self._modules.pop(name, None)
        for changed in [each for each in self._changed if each[0] == name]:
            del self._changed[changed]

    def find(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        """Present values of what has changed: by module, dotted name, and :data:`CONTENT` or :data:`VALUE`.

        Args:
            sources: Those of the modules. What one says is compared, too, if the module was imported early.
        """
        for name in [*self._modules]:
            self.look(name)
            if name in self._early and name in sources:
                self._compare_with_source(name, sources[name])
        found = {}
        for (name, place), kind in [*self._changed.items()]:
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # what it was an attribute of is gone
                found[f"{name}:{place}{kind}"] = _present(sys.modules[name], place)
        return found

    def _compare_with_source(self, name: str, source: Source) -> None:
        for place, literal in literals_of(source.content).items():
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                value = _present(sys.modules[name], place)
                if not _equal(value, literal):
                    self._changed.setdefault((name, place), VALUE if type(literal) in _ATOMS else CONTENT)

    def may_stay(self, name: str, value: Any) -> bool:
        """Whether nothing is missing on a node that does not get what this key of :meth:`find` means.

        It was None, or an empty container, as memos and connections are: a worker makes its own. Or it is an object of
        a library that has only been used, such as a progress bar.
        """
        place, _bracket, _kind = name.partition("[")
        module, _colon, path = place.partition(":")
        _refer, facts = self._modules.get(module, (None, {}))
        fact = None
        for each in path.split("."):
            fact = facts.get(each)
            facts = {} if fact is None else fact.parts
        if fact is not None and fact.is_lazy:
            return True
        owner = type(value).__module__
        return name.endswith(CONTENT) and owner not in self._modules and owner.partition(".")[0] not in _PLAIN

    def _facts_of(self, module: str, namespace: Mapping[str, Any], prefix: str) -> dict[str, _Fact]:
        facts = {}
        for name, value in list(namespace.items()):
            if not compares(name, value):
                continue
            parts = _parts_of(value, module, prefix + name)
            inner = {} if parts is None else self._facts_of(module, parts, f"{prefix}{name}.")
            facts[name] = fact = _Fact(value, inner, self._left_bytes > 0)
            if fact.content is not None:
                self._left_bytes -= fact.content.size_bytes
        return facts


def _compare(
    module: str, namespace: Mapping[str, Any], facts: Mapping[str, _Fact], prefix: str, is_function: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield dotted names that mean something else, each with how."""
    for name in facts:
        if name not in namespace:
            yield prefix + name, VALUE
    for name, value in list(namespace.items()):
        fact = facts.get(name)
        if fact is not None and value is fact.before:
            continue
        kind = VALUE if fact is None else fact.difference(value)
        if kind is not None:
            if compares(name, value):
                # What functions keep that they have computed may be large: contents have a lower limit.
                yield prefix + name, CONTENT if is_function else kind
        elif fact is not None and (parts := _parts_of(value, module, prefix + name)) is not None:
            yield from _compare(module, parts, fact.parts, f"{prefix}{name}.", isinstance(value, types.FunctionType))


def compares(name: str, value: Any) -> bool:
    """Whether a name of a module, class or function is compared."""
    if name.startswith("__") and name.endswith("__"):
        return name in _DEFAULTS
    kind = type(value)
    return kind in _ATOMS or not (issubclass(kind, (types.ModuleType, logging.Logger)) or is_loading(kind))


def _parts_of(value: Any, module: str, place: str) -> Mapping[str, Any] | None:
    """Attributes of a class or function that belongs to a module, in this place; None of all else."""
    if not issubclass(type(value), _DEFINITIONS) or value.__module__ != module or value.__qualname__ != place:
        return None
    if not isinstance(value, types.FunctionType):
        return types.MappingProxyType(vars(value))
    defaults = {name: each for name in _DEFAULTS if (each := getattr(value, name))}
    if not value.__dict__:
        return defaults
    return {**{name: each for name, each in vars(value).items() if is_data(name, each)}, **defaults}


def _present(owner: Any, place: str) -> Any:
    *owners, last = place.split(".")
    for name in owners:
        owner = vars(owner)[name]
    if isinstance(owner, types.FunctionType) and last in _DEFAULTS:
        return getattr(owner, last)
    return vars(owner).get(last, Deleted)


def _equal(value: Any, literal: Any) -> bool:
    if type(value) is not type(literal):
        return False
    try:
        return bool(value == literal)
    except Exception:  # an array is in it now
        return False


#: Of this process; it hears of imports.
snapshots = listener = Snapshots()
