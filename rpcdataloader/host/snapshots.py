"""What has changed in the script's own modules since they were imported, by whatever means: found by comparing.

A worker of a node imports them anew, and must get what the script has changed there, and nothing else: what a module
computes as it is imported, such as a folder of its machine, stays the node's own.

Compared are the globals of a module, the attributes of its classes and functions, and the variables that these close
over. Names that have changed once count as changed for good, as a node may have got an earlier value. Of a module that
a node may import otherwise (``imports.py``), all data counts as changed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.host.contents import Content, is_loading, level_of
from rpcdataloader.host.imports import Imports
from rpcdataloader.host.literals import literals_of, set_later_in
from rpcdataloader.host.orders import Order, orders_in
from rpcdataloader.host.sources import Source, installed_prefixes, path_of_own, read_source, recorder

#: Ends the name of what has another content, and of what has another value.
CONTENT, VALUE = "[...]", "[=]"

# For the digests of all modules together: what comes then is compared without content.
_MAX_BYTES = 16 << 20

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_MAX_ATOM = 1 << 12  # bytes of a text that is kept to compare it; of others, the object counts

# Objects without a digest that are kept to be compared; of larger ones the id counts, which another may have later.
_MAX_KEPT_BYTES = 1 << 16

# What a module has but does not change.
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger)

# What has attributes that are compared, apart from modules.
_DEFINITIONS = (type, types.FunctionType)

# Attributes of functions that have no dictionary.
_DEFAULTS = ("__defaults__", "__kwdefaults__")

# Functions and classes that functions make belong to what has them, up to this depth: they may refer to each other.
_MAX_DEPTH = 3


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
            if issubclass(kind, logging.Logger):
                self.content = _Level(value)
            elif has_digest and (kind is types.MethodType or not issubclass(kind, _NO_DATA)):
                self.content = Content(value)
            is_told = self.content is not None and self.content.digest is not None
            if type(self.before) is _Id and not is_told and sys.getsizeof(value) <= _MAX_KEPT_BYTES:
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


class _Level(Content):
    """In place of a content, what decides in which records of a logger are made where only its module has set it."""

    def __init__(self, logger: logging.Logger) -> None:
        self.digest = hash((logger.level or logging.WARNING, logger.disabled))
        self.size_bytes = 0
        self._references = ()

    def has_changed(self, value: Any) -> bool:
        """Whether other records are made now."""
        return hash((level_of(value), value.disabled)) != self.digest


class _Id(int):
    """That of an object, which may be another one's later: what that contains tells."""


class _Kept:
    """A reference to an object that has no weak ones, nor a digest."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


class _Known:
    """A module right after its import.

    Attributes:
        refer: The module, while it is there.
        facts: What its names meant.
    """

    __slots__ = ("_stamp", "facts", "refer")

    def __init__(self, module: types.ModuleType, facts: dict[str, _Fact]) -> None:
        self.refer = weakref.ref(module)
        self.facts = facts
        self._stamp = _stamp(vars(module), facts)

    def may_have_changed(self) -> bool:
        """Whether there may be a change; several times as fast as to find it, and blind to parts of functions."""
        namespace = vars(self.refer())
        return _stamp(namespace, self.facts) != self._stamp or _has_other_content(namespace, self.facts)


def _stamp(namespace: Mapping[str, Any], facts: Mapping[str, _Fact]) -> int:
    """What tells the objects that a module and its classes have; one number, as there are thousands of names."""
    owned = [(namespace.get(name), fact.parts) for name, fact in facts.items() if fact.parts]
    stamps = [_stamp(vars(value), parts) for value, parts in owned if isinstance(value, type)]
    return hash((*map(id, list(namespace.values())), *stamps))


def _has_other_content(namespace: Mapping[str, Any], facts: Mapping[str, _Fact]) -> bool:
    return any(
        (fact.content is not None and fact.content.has_changed(namespace.get(name)))
        or (
            bool(fact.parts)
            and isinstance(value := namespace.get(name), type)
            and _has_other_content(vars(value), fact.parts)
        )
        for name, fact in facts.items()
    )


@dataclass
class Snapshots:
    """The script's own modules, as they were right after their imports.

    Thread-safe without a lock, which a fork might inherit: what it sets, it sets at once.
    """

    _modules: dict[str, _Known] = field(default_factory=dict)
    _left_bytes: int = _MAX_BYTES
    _changed: dict[tuple[str, str], str] = field(default_factory=dict)  # how, by module and dotted name
    _early: set[str] = field(default_factory=set)
    _imports: Imports = field(default_factory=Imports)
    _sent_whole: set[str] = field(default_factory=set)
    _whole: set[tuple[str, str]] = field(default_factory=set)  # what has changed only for these

    def begin(self, name: str, code: types.CodeType) -> None:
        """Note what has changed in a module that is about to run again, and in those that it uses; does not fail."""
        self.look(name)
        with contextlib.suppress(Exception):
            for used in self._imports.begin(name, code):
                if used in self._early and (source := read_source(sys.modules[used].__file__ or "")) is not None:
                    self._compare_with_source(used, source)
                if self._modules[used].may_have_changed():
                    self._look_after_script(used)

    def end(self, name: str) -> None:
        """Note that a module has run, or failed, and what it has changed elsewhere; does not fail."""
        with contextlib.suppress(Exception):
            for used in self._imports.end(name):
                if self._modules[used].may_have_changed():
                    self.look(used)

    def take(self, names: Iterable[str], *, are_early: bool = False) -> None:
        """Note modules that have been imported; does not fail.

        Args:
            are_early: They may have been changed since their import.
        """
        prefixes = installed_prefixes()
        for name in names:
            module = sys.modules.get(name)
            self._modules.pop(name, None)
            self._sent_whole.discard(name)
            with contextlib.suppress(Exception):  # an import must not fail for that
                if isinstance(module, types.ModuleType) and path_of_own(name, module.__spec__, prefixes) is not None:
                    self._modules[name] = _Known(module, self._facts_of(name, vars(module), ""))
                    (self._early.add if are_early else self._early.discard)(name)
                    loader: Any = module.__loader__
                    if are_early:
                        self._imports.take_early(name, loader.get_code(name))

    def has_all_of(self, module: str) -> bool:
        """Whether all changes of a module are found."""
        return module in self._modules and module not in self._early

    def look(self, name: str) -> None:
        """Note what has changed in a module, which may be about to be imported again."""
        module, known = sys.modules.get(name), self._modules.get(name)
        if module is not None and known is not None and known.refer() is module:
            with contextlib.suppress(Exception):
                for changed, kind in _compare(name, vars(module), known.facts, ""):
                    if self._changed.get((name, changed)) != VALUE:  # or a node would set the former object back
                        self._changed[name, changed] = kind
                    self._whole.discard((name, changed))

    def _look_after_script(self, name: str) -> None:
        """Note what has changed in a module, which the script has done if it is new."""
        before = len(self._changed)
        self.look(name)
        new = [place for _module, place in [*self._changed][before:]]
        # Levels are those of a process, which logging.basicConfig sets for all modules.
        if any(not isinstance(_present(sys.modules[name], place), logging.Logger) for place in new):
            self._imports.moved.add(name)

    def forget(self, name: str) -> None:
        """Begin anew with a module, for tests."""
        self._modules.pop(name, None)
        self._imports.forget(name)
        self._sent_whole.discard(name)
        for changed in [each for each in self._changed if each[0] == name]:
            del self._changed[changed]

    def find(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        """Present values of what has changed: by module, dotted name, and :data:`CONTENT` or :data:`VALUE`.

        Args:
            sources: Those of the modules. What one says is compared, too, if the module was imported early.
        """
        for name in [*self._modules]:
            self._look_after_script(name)
            if name in self._early and name in sources:
                self._compare_with_source(name, sources[name])
        if not self._early.isdisjoint(self._imports.moved):
            self._imports.judge_early(self._early)
        self._imports.judge_unsure()
        for name in self._imports.differing - self._sent_whole:
            self._sent_whole.add(name)
            self._take_all_of(name, sources.get(name))
        found = {}
        for (name, place), kind in [*self._changed.items()]:
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # what it was an attribute of is gone
                found[name, place, kind] = _present(sys.modules[name], place)
        # What a module has taken from one where it is another object now is that object there, too.
        bound = {id(value) for (*_, kind), value in found.items() if kind == VALUE and type(value) not in _ATOMS}
        for name, place, _kind in [
            key for key, value in found.items() if key[:2] in self._whole and id(value) in bound
        ]:
            self._changed[name, place] = VALUE
        return {f"{name}:{place}{self._changed[name, place]}": value for (name, place, _kind), value in found.items()}

    def _compare_with_source(self, name: str, source: Source) -> None:
        for place, literal in literals_of(source.content).items():
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                value = _present(sys.modules[name], place)
                if not _equal(value, literal):
                    self._changed.setdefault((name, place), VALUE if type(literal) in _ATOMS else CONTENT)
                    self._imports.moved.add(name)

    def _take_all_of(self, name: str, source: Source | None) -> None:
        """Let all data of a module count as changed, but for what is as its source says."""
        literals = {} if source is None else literals_of(source.content)
        for place in _data_in(self._modules[name].facts, vars(sys.modules[name])):
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                is_told = place in literals and _equal(_present(sys.modules[name], place), literals[place])
                if not is_told and (name, place) not in self._changed:
                    self._changed[name, place] = CONTENT
                    self._whole.add((name, place))

    def may_stay(self, name: str, value: Any) -> bool:
        """Whether nothing is missing on a node that does not get what this key of :meth:`find` means.

        It was an empty container that has been filled, as memos are, or the module itself sets it when it is needed,
        such as a connection: a worker makes its own. Or it is an object of a library that has only been used, such as a
        progress bar.
        """
        place, _bracket, _kind = name.partition("[")
        module, _colon, path = place.partition(":")
        if (module, path) in self._whole:
            return True
        fact = self._fact(module, path)
        if fact is not None and fact.is_lazy:
            source = recorder.look().get(module)
            return name.endswith(CONTENT) or (
                source is not None and path.rpartition(".")[2] in set_later_in(source.content)
            )
        owner = type(value).__module__
        return name.endswith(CONTENT) and owner not in self._modules and owner.partition(".")[0] not in _PLAIN

    def orders(self, names: Iterable[str], key: bytes) -> dict[str, dict[str, Order]]:
        """How the lists of modules are ordered that they have as they have computed them, by module and name.

        Args:
            key: See :func:`orders_in`.
        """
        found = {}
        for name in names:
            # Of a module that differs, all data is sent.
            module = None if name in self._imports.differing else sys.modules.get(name)
            orders = {} if module is None else orders_in(name, vars(module), key)
            found[name] = {place: each for place, each in orders.items() if self._is_unchanged(name, place)}
        return found

    def _is_unchanged(self, module: str, place: str) -> bool:
        place = place.partition("[")[0]
        fact = self._fact(module, place)
        if fact is None or fact.content is None or fact.content.digest is None:
            return False
        return fact.difference(_present(sys.modules[module], place)) is None

    def _fact(self, module: str, place: str) -> _Fact | None:
        known, fact = self._modules.get(module), None
        facts = {} if known is None else known.facts
        for each in place.split("."):
            fact = facts.get(each)
            facts = {} if fact is None else fact.parts
        return fact

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
        return name in _DEFAULTS or type(value) is types.FunctionType
    kind = type(value)
    return kind in _ATOMS or not (issubclass(kind, types.ModuleType) or is_loading(kind))


def _data_in(facts: Mapping[str, _Fact], namespace: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield dotted names of data that a module may have computed: no definitions, and nothing that a class does."""
    for name, fact in facts.items():
        value = namespace.get(name, Deleted)
        if fact.parts:
            if not isinstance(value, enum.EnumMeta):  # whose members nobody can set
                yield from _data_in(fact.parts, parts_of(value), f"{prefix}{name}.")
        elif value is not Deleted and not (
            isinstance(value, (*_DEFINITIONS, types.BuiltinFunctionType))
            or (hasattr(type(value), "__get__") and not isinstance(value, functools.partial))
        ):
            yield prefix + name


def _parts_of(value: Any, module: str, place: str) -> Mapping[str, Any] | None:
    """Parts of a class or function that belongs to a module, in this place; None of all else."""
    if not issubclass(type(value), _DEFINITIONS) or value.__module__ != module:
        return None
    if value.__qualname__ != place and ("<locals>" not in value.__qualname__ or place.count(".") >= _MAX_DEPTH):
        return None
    return parts_of(value)


def parts_of(value: Any) -> Mapping[str, Any]:
    """Attributes by name; of a function, also its defaults, and in brackets the variables that it closes over."""
    if not isinstance(value, types.FunctionType):
        return types.MappingProxyType(vars(value))
    found = {name: each for name in _DEFAULTS if (each := getattr(value, name))}
    if value.__dict__:
        found |= {name: each for name, each in vars(value).items() if is_data(name, each)}
    if value.__closure__:
        for name, cell in cells_of(value).items():
            with contextlib.suppress(ValueError):  # it is empty
                found[name] = cell.cell_contents
    return found


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """Variables that a function closes over, by their names in brackets."""
    names = [f"<{name}>" for name in function.__code__.co_freevars]
    return dict(zip(names, function.__closure__ or (), strict=True))


def _present(owner: Any, place: str) -> Any:
    *owners, last = place.split(".")
    for name in owners:
        owner = parts_of(owner)[name] if name.startswith("<") else vars(owner)[name]
    if isinstance(owner, types.FunctionType) and (last in _DEFAULTS or last.startswith("<")):
        return parts_of(owner).get(last)
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
