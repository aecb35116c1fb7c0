"""What a script has changed in other modules, and how a worker changes its own likewise.

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
import ast
import builtins
import contextlib
import copy
import functools
import importlib.abc
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from rpcdataloader.host.refill import refill, refilling
from rpcdataloader.host.snapshots import CONTENT, VALUE, Deleted, cells_of, compares, parts_of, snapshots
from rpcdataloader.host.sources import Source, has_imported, recorder

_MAIN = "__main__", "__mp_main__"

# Modules by which a worker lives.
_OWN = (
    *("builtins", "copyreg", "gc", "logging", "multiprocessing", "os", "pickle", "select", "signal", "socket", "ssl"),
    *("subprocess", "sys", "threading", "time", "rpcdataloader"),
)

# What has attributes of its own, apart from modules.
_OWNERS = (type, types.FunctionType)

# The attribute of abstract base classes that has what is registered with them.
_ABSTRACT = "_abc_impl"

# Sources that are read; a script's own modules have a few hundred kilobytes.
_MAX_SOURCE_BYTES = 1 << 20


class _Changes(NamedTuple):
    """Dotted names in a source."""

    assigned: tuple[tuple[str, ...], ...] = ()  # attributes
    imported: tuple[tuple[str, str, str], ...] = ()  # names in functions, too: each with its module, and what of that
    # Whose method ``register`` is called, and with what: empty where that is no name.
    registered: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()


def find_patches(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the script of ``namespace`` has set elsewhere, or changed there, by key."""
    sources = recorder.look()
    compared, found = snapshots.find(sources) if sources else {}, dict[str, Any]()
    for own, changes in _changes_by_namespace(namespace, sources):
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
        attribute, kinds = _ABSTRACT, [ref() for ref in abc._get_dump(owner)[0]]  # type: ignore[attr-defined]
        registered = dict.fromkeys(kind for kind in kinds if kind is not None)
    else:
        owner = _dispatcher(owner)
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


def _dispatcher(function: Any) -> Any:
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


def _changes_by_namespace(
    namespace: Mapping[str, Any], sources: Mapping[str, Source]
) -> Iterator[tuple[Mapping[str, Any], _Changes]]:
    """What the script and its own modules change, with the names that each of them has."""
    cells = namespace.get("_ih")  # of a notebook, all that has run
    if isinstance(cells, list):
        for cell in cells:
            yield namespace, _parse(str(cell))
    elif isinstance(path := namespace.get("__file__"), str):
        with contextlib.suppress(OSError):
            yield namespace, _changes_of_file(path, os.stat(path).st_mtime_ns)
    elif sys.argv[:1] == ["-c"] and "-c" in sys.orig_argv:
        yield namespace, _parse(sys.orig_argv[sys.orig_argv.index("-c") + 1])
    left = _MAX_SOURCE_BYTES
    for name, source in sources.items():
        if name in sys.modules and (left := left - len(source.content)) >= 0:
            yield vars(sys.modules[name]), _parse(source.content)


@functools.lru_cache(maxsize=2)
def _changes_of_file(path: str, _changed: int) -> _Changes:
    with open(path, encoding="utf-8", errors="replace") as file:
        return _parse(file.read())


@functools.lru_cache(maxsize=2048)
def _parse(source: str | bytes) -> _Changes:
    """What a source changes."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a cell with a command of IPython
        return _Changes()
    found = _Found([], [], [])
    for node in _statements(tree.body):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.target(target)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            found.target(node.target)
        elif isinstance(node, ast.With):
            for item in node.items:
                found.target(item.optional_vars)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and node.col_offset:  # others are in the module
            found.imports(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.setattr(node.value)
    if ("register" if isinstance(source, str) else b"register") in source:  # type: ignore[operator]
        found.registrations(tree.body)
    return _Changes(*(tuple(dict.fromkeys(each)) for each in found))  # type: ignore[arg-type]


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements at any depth. Expressions, of which a source has ten times as many nodes, contain none."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, part, ()))


class _Found(NamedTuple):
    """The changes of a source while it is read."""

    assigned: list[tuple[str, ...]]
    imported: list[tuple[str, str, str]]
    registered: list[tuple[tuple[str, ...], tuple[str, ...]]]

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
        """Note the names that an import statement binds."""
        for each in node.names:
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imported.append((each.asname or each.name, module, each.name))
            else:
                root = each.name.partition(".")[0]
                self.imported.append((each.asname or root, each.name if each.asname else root, ""))

    def target(self, target: ast.expr | None) -> None:
        """Note what is assigned to."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.target(each)
        elif isinstance(target, ast.Attribute) and (owner := _chain(target.value)):
            self.assigned.append((*owner, target.attr))

    def setattr(self, call: ast.Call) -> None:
        """Note the attribute that ``setattr(module, "name", value)`` sets."""
        if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
            owner, name = _chain(call.args[0]), call.args[1]
            if owner and isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.assigned.append((*owner, name.value))

    def registrations(self, body: Iterable[ast.AST]) -> None:
        """Note calls of ``owner.register``, and decorators."""
        for node in _statements(body):
            calls: list[tuple[ast.expr, Sequence[ast.expr]]] = []
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                calls.append((node.value.func, node.value.args))
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                named = [ast.Name(node.name)]
                calls += [(each.func if isinstance(each, ast.Call) else each, named) for each in node.decorator_list]
            for function, args in calls:
                if (chain := _chain(function))[1:] and chain[-1] == "register":
                    self.registered.append((chain[:-1], _chain(args[0]) if args else ()))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The names in ``library.Reader.limit``; none of what is no dotted name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node.id, *names) if isinstance(node, ast.Name) else ()


def is_patch(name: str) -> bool:
    """Whether this is a key of :func:`find_patches`, and not a name of the script."""
    return ":" in name


def is_content(name: str) -> bool:
    """Whether this is such a key, of something that has changed in place."""
    return name.endswith(CONTENT)


def is_compared(name: str) -> bool:
    """Whether this is such a key, of what was found by comparing: perhaps a memo, or a connection."""
    return name.endswith((CONTENT, VALUE))


def patched(name: str, received: Mapping[str, Any]) -> Any:
    """The object that a key means in this process.

    Args:
        received: Values of keys that are not given to :func:`patch` yet.
    """
    place = name.partition("[")[0]
    values = {**_later.values, **received}
    with contextlib.suppress(Exception):  # it is not imported, which must wait for what computes from it
        module, _colon, path = place.partition(":")
        own: Any = sys.modules[module]
        for each in path.split("."):
            own = parts_of(own)[each] if each.startswith("<") else getattr(own, each)
        if name not in values or (is_content(name) and refilling(own, values[name])):
            return own
    return values[name]


def patch(name: str, value: Any) -> None:
    """Change a module as the script has done, once it is imported here; without effect where it is missing."""
    _later.values[name] = value
    if not _later.is_importing:
        _later.change_imported()
    if _later.values and _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)


def keep(names: Set[str]) -> list[str]:
    """Undo what :func:`patch` has changed here, and in the processes of which this one is a fork, but for ``names``.

    Returns:
        The names of what was undone.
    """
    undone = [name for name in _later.values if name not in names]
    for name in undone:
        del _later.values[name]
    for place, changes in list(_changes_here.items()):
        if next(reversed(changes.values)) not in names:
            del _changes_here[place]
            for undo in reversed(changes.undo.values()):
                with contextlib.suppress(AttributeError, TypeError):
                    undo()
            for name, value in changes.values.items():
                if name in names:
                    _apply(name, value)
                else:
                    undone.append(name)
    return undone


class _ChangesHere(NamedTuple):
    """What was changed in one place."""

    owner: Any
    name: str
    before: Any  # Deleted if there was nothing
    undo: dict[str, Callable[[], object]]  # by name; the first one first
    values: dict[str, Any]  # the last one last


_changes_here: dict[str, _ChangesHere] = {}


def _note(name: str, value: Any, place: Any, last: str) -> None:
    """Note a change before it is made."""
    key = name.partition("[")[0]
    changes = _changes_here.get(key) or _ChangesHere(place, last, _attribute(place, last), {}, {})
    _changes_here[key] = changes
    if name not in changes.undo:
        changes.undo[name] = _undo_of(name, place, last, value)
    changes.values.pop(name, None)
    changes.values[name] = value


def _undo_of(name: str, place: Any, last: str, value: Any) -> Callable[[], object]:
    """What makes an attribute have its present value again, with its present content if that is about to change."""
    before = _attribute(place, last)
    if before is Deleted:
        return lambda: delattr(place, last)
    if isinstance(before, types.MappingProxyType) and is_content(name):  # a function of functools.singledispatch
        former = {kind: place.dispatch(kind) for kind in value}
        return lambda: [place.register(*each) for each in former.items()]
    is_cell, content = last.startswith("<"), None
    if (is_content(name) or is_cell) and type(before) is type(value):
        with contextlib.suppress(Exception):  # it cannot be copied
            content = (copy.deepcopy if isinstance(before, torch.Tensor) else copy.copy)(before)

    def undo() -> None:
        if content is not None:
            refill(before, content)
        if is_cell:
            cells_of(place)[last].cell_contents = before
        else:
            setattr(place, last, before)

    return undo


def _attribute(owner: Any, name: str) -> Any:
    """What an owner has itself; Deleted without such an attribute."""
    if not isinstance(owner, types.FunctionType):
        return vars(owner).get(name, Deleted)
    return cells_of(owner)[name].cell_contents if name.startswith("<") else getattr(owner, name, Deleted)


def _apply(name: str, value: Any) -> None:
    module, _colon, attribute = name.partition("[")[0].partition(":")
    owner, _dot, last = attribute.rpartition(".")
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        place: Any = sys.modules[module]
        for each in owner.split(".") if owner else ():
            place = parts_of(place)[each] if each.startswith("<") else getattr(place, each)
        if last == "registry" and is_content(name) and hasattr(place, "register"):
            place = _dispatcher(place)
        _note(name, value, place, last)
        if last.startswith("<"):
            cell = cells_of(place)[last]
            if not refill(cell.cell_contents, value):
                cell.cell_contents = value
        elif value is Deleted:
            delattr(place, last)
        elif last == _ABSTRACT:
            for kind in value:
                place.register(kind)
        elif isinstance(registry := vars(place).get(last), types.MappingProxyType) and is_content(name):
            for kind in [kind for kind in value if registry.get(kind) is not value[kind]]:
                place.register(kind, value[kind])
        elif not is_content(name) or not refill(vars(place).get(last), value):
            setattr(place, last, value)


class _Later(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported: those that no worker needs are not imported for that.

    A module that imports others gets them unchanged, as the script has first imported all of them: what it computes
    from them is what the script has.

    Attributes:
        values: What :func:`patch` has got, by name, until its module is imported.
        is_importing: True within an import.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.is_importing = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The spec that others find, with a loader that makes the changes."""
        if self.is_importing or not (self.values or (_changes_here and has_imported(name))):
            return None
        for finder in [*sys.meta_path]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let values be those before the changes: the script has imported the module that is about to run by then.

        What was imported after a change gets the script's data anyway (``imports.py``).
        """
        changed = [
            (owner, name, before, _attribute(owner, name))
            for owner, name, before, *_rest in _changes_here.values()
            if before is not Deleted and not name.startswith("<")
        ]
        for owner, name, before, _now in changed:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(owner, name, before)
        try:
            yield
        finally:
            for owner, name, before, now in changed:
                if _attribute(owner, name) is not before or now is before:
                    continue  # the module has set it, or it was none that can be set
                if now is Deleted:
                    delattr(owner, name)
                else:
                    setattr(owner, name, now)

    def change_imported(self) -> None:
        """Change the modules that are imported."""
        for name in [name for name in self.values if name.partition(":")[0] in sys.modules]:
            _apply(name, self.values.pop(name))


class _Loader(importlib.abc.Loader):
    """Makes the changes once another loader has run the module, which then is that loader's."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        was_importing, _later.is_importing = _later.is_importing, True
        is_late = not was_importing and has_imported(module.__name__) and not _has_other_threads()
        try:
            with _later.as_before() if is_late else contextlib.nullcontext():
                self._loader.exec_module(module)
        finally:
            _later.is_importing = was_importing
        if not was_importing:
            _later.change_imported()


_later = _Later()


def _has_other_threads() -> bool:
    """Whether user code may run in another thread, which must not meet values from before a change."""
    return any(
        not each.name.startswith("rpcdl-") for each in threading.enumerate() if each is not threading.main_thread()
    )
