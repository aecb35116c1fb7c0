"""What a script has changed in other modules, such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``: read from its source.

A process cannot tell by itself which attribute of a module was set by whom. The script's source, and that of its own
modules, name them, wherever in it:

- assignments to attributes of modules, and of classes and functions of modules;
- changes in place of what belongs to one of its own modules: ``config.options["size"] = 3``, ``options.size = 3``,
  ``options.update(...)``, ``update(options)``, and ``setup()``, which changes what it names in its module;
- what is registered with a function of ``functools.singledispatch``;
- whatever is in one of these, after ``setattr(config, name, value)``, ``vars(config)``, or ``globals()`` there.

Their values are those of the moment.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import dis
import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from rpcdataloader.host.sources import Source, recorder

# Modules by which a worker lives.
_OWN = (
    *("builtins", "copyreg", "gc", "logging", "multiprocessing", "os", "pickle", "select", "signal", "socket", "ssl"),
    *("subprocess", "sys", "threading", "time", "rpcdataloader"),
)

# Ends the name of what is changed in place; others are set.
_CONTENT = "[...]"

# What a module has but does not change.
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger)
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)

# What has attributes of its own, apart from modules.
_OWNERS = (type, types.FunctionType)

# Sources that are read; a script's own modules have a few hundred kilobytes.
_MAX_SOURCE_BYTES = 1 << 20


class _Changes(NamedTuple):
    """Dotted names in a source."""

    assigned: tuple[tuple[str, ...], ...] = ()  # attributes
    touched: tuple[tuple[str, ...], ...] = ()  # what may have changed in place
    called: tuple[tuple[str, ...], ...] = ()
    opened: tuple[tuple[str, ...], ...] = ()  # modules of which anything may have changed
    imported: tuple[tuple[str, str, str], ...] = ()  # names in functions, too: each with its module, and what of that


def find_patches(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the script of ``namespace`` has set elsewhere, by module and dotted name: ``PIL.Image:NAME``.

    Of what it has changed in place, the name ends with ``[...]``.
    """
    found: dict[str, Any] = {}
    sources = recorder.look()
    modules = {name: sys.modules[name] for name in sources if name in sys.modules}
    contents = _Contents(modules)
    for own, changes in _changes_by_namespace(namespace, modules, sources):
        names = {**_imported(changes.imported, own), **own}
        for chain in changes.assigned:
            if chain[0] not in names:  # it is a local one
                continue
            with contextlib.suppress(Exception):  # a name that means nothing now, or a property that fails
                owner = _follow(names, chain[:-1])
                if (place := _place_of(owner)) is not None:
                    value = vars(owner)[chain[-1]] if isinstance(owner, type) else getattr(owner, chain[-1])
                    # A module that decorates its own functions does so on the node, too.
                    if own is namespace or place.partition(":")[0] not in modules or is_data(chain[-1], value):
                        # What functions keep that they have computed may be large: contents have a limit.
                        kind = _CONTENT * isinstance(owner, types.FunctionType)
                        found[f"{place}{chain[-1]}{kind}"] = value
        noted = (contents.touch, changes.touched), (contents.call, changes.called), (contents.open, changes.opened)
        for note, chains in noted:
            for chain in chains:
                with contextlib.suppress(Exception):
                    note(names, chain)
    return {**contents.found, **found}


class _Contents:
    """What belongs to the script's own modules, and has changed there.

    Attributes:
        found: Values by name.
    """

    def __init__(self, modules: Mapping[str, types.ModuleType]) -> None:
        self._modules = modules
        self._called: set[int] = set()
        self.found: dict[str, Any] = {}

    @functools.cached_property
    def _places(self) -> dict[int, tuple[str, str]]:
        """Module and name of the globals, by their ids."""
        return {
            id(value): (module, name)
            for module, each in self._modules.items()
            for name, value in list(vars(each).items())
            if is_data(name, value) and not isinstance(value, _CONSTANT)
        }

    def touch(self, names: Mapping[str, Any], chain: tuple[str, ...]) -> None:
        """Note the first object of a dotted name that a module, or a class or function of it, has."""
        if chain[0] not in names:
            return
        value, owner, last = names[chain[0]], None, chain[0]
        for name in chain[1:]:
            if not isinstance(value, (*_OWNERS, types.ModuleType)):
                break
            value, owner, last = getattr(value, name), value, name
        if isinstance(value, types.FunctionType) and "registry" in vars(value):  # of functools.singledispatch
            value, owner, last = vars(value)["registry"], value, "registry"
        if not is_data(last, value) or isinstance(value, _CONSTANT):
            return
        if isinstance(owner, _OWNERS) and owner.__module__ in self._modules and (place := _place_of(owner)):
            self.found[f"{place}{last}{_CONTENT}"] = value
        elif (place_of_global := self._places.get(id(value))) is not None:
            module, last = place_of_global
            self.found[f"{module}:{last}{_CONTENT}"] = value

    def open(self, names: Mapping[str, Any], chain: tuple[str, ...]) -> None:
        """Note all that an own module has."""
        self._open(_follow(names, chain))

    def _open(self, module: Any) -> None:
        if isinstance(module, types.ModuleType) and self._modules.get(module.__name__) is module:
            for name, value in list(vars(module).items()):
                if isinstance(value, _CONSTANT) and is_data(name, value):
                    self.found[f"{module.__name__}:{name}"] = value
                elif (place := self._places.get(id(value))) is not None:
                    self.found[f"{place[0]}:{place[1]}{_CONTENT}"] = value

    def call(self, names: Mapping[str, Any], chain: tuple[str, ...]) -> None:
        """Note what a function does that belongs to an own module."""
        self._call(_follow(names, chain))

    def _call(self, function: Any) -> None:
        """Note what a function of an own module sets or names there, and the functions of it that it calls."""
        code, namespace = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        module = str(namespace.get("__name__"))
        known = self._modules.get(module)
        if code is None or known is None or id(function) in self._called or vars(known) is not namespace:
            return
        self._called.add(id(function))
        for name in code.co_names:
            value = namespace.get(name)
            if isinstance(value, types.FunctionType):
                self._call(value)
            elif name in namespace and is_data(name, value) and not isinstance(value, _CONSTANT):
                self.found[f"{module}:{name}{_CONTENT}"] = value
        if "globals" in code.co_names:
            self._open(known)
        for name in _stored(code) & namespace.keys():
            self.found[f"{module}:{name}"] = namespace[name]


@functools.lru_cache(maxsize=1024)
def _stored(code: types.CodeType) -> frozenset[str]:
    """The globals that code sets."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")


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


def is_data(name: str, value: Any) -> bool:
    """Whether a global of a module is data, which a script may change: no function, class, module, or logger."""
    return not ((name.startswith("__") and name.endswith("__")) or isinstance(value, _NO_DATA))


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
    is_own = module in ("__main__", "__mp_main__") or module.partition(".")[0] in _OWN
    return None if is_own else place


def _changes_by_namespace(
    namespace: Mapping[str, Any], modules: Mapping[str, types.ModuleType], sources: Mapping[str, Source]
) -> Iterator[tuple[Mapping[str, Any], _Changes]]:
    """What the script and its own modules change, with the names that each of them has."""
    cells = namespace.get("_ih")  # of a notebook, all that has run
    if isinstance(cells, list):
        for cell in cells:
            yield namespace, _changes(str(cell), bool(modules))
    elif isinstance(path := namespace.get("__file__"), str):
        with contextlib.suppress(OSError):
            yield namespace, _changes_of_file(path, os.stat(path).st_mtime_ns, bool(modules))
    elif sys.argv[:1] == ["-c"] and "-c" in sys.orig_argv:
        yield namespace, _changes(sys.orig_argv[sys.orig_argv.index("-c") + 1], bool(modules))
    left = _MAX_SOURCE_BYTES
    for name, source in sources.items():
        if name in modules and (left := left - len(source.content)) >= 0:
            yield vars(modules[name]), _changes_of_module(source.path, source.content)


@functools.lru_cache(maxsize=2)
def _changes_of_file(path: str, _changed: int, has_modules: bool) -> _Changes:
    with open(path, encoding="utf-8", errors="replace") as file:
        return _changes(file.read(), has_modules)


@functools.lru_cache(maxsize=1024)
def _changes_of_module(_path: str, content: bytes) -> _Changes:
    return _parse(content)


@functools.lru_cache(maxsize=1024)
def _changes(source: str, has_modules: bool) -> _Changes:
    return _parse(source, has_modules)


def _parse(source: str | bytes, has_modules: bool = True) -> _Changes:
    """What a source changes; without modules of the script's own, nothing of theirs."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a cell with a command of IPython
        return _Changes()
    found = _Found([], [], [], [], [])
    for node in _statements(tree.body):
        if isinstance(node, (ast.Assign, ast.Delete)):
            for target in node.targets:
                found.target(target)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            found.target(node.target)
            found.touched.append(_chain(node.target))
        elif isinstance(node, ast.With) and has_modules:
            for item in node.items:
                found.target(item.optional_vars)
                found.calls(item.context_expr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for decorator in node.decorator_list:
                found.call(decorator.func if isinstance(decorator, ast.Call) else decorator)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and node.col_offset:  # others are in the module
            found.imports(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found.setattr(node.value)
        for part in ("value", "test", "iter", "exc") if has_modules else ():
            found.calls(getattr(node, part, None))
    return _Changes(*(tuple(dict.fromkeys(filter(None, each))) for each in found))  # type: ignore[arg-type]


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements at any depth. Expressions, of which a source has ten times as many nodes, contain none."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, part, ()))


class _Found(NamedTuple):
    """The changes of a source while it is read."""

    assigned: list[tuple[str, ...]]
    touched: list[tuple[str, ...]]
    called: list[tuple[str, ...]]
    opened: list[tuple[str, ...]]
    imported: list[tuple[str, str, str]]

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
        """Note what is assigned to, or deleted."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.target(each)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self.calls(target)
            owner = _chain(target.value)
            self.touched.append(owner)
            if isinstance(target, ast.Attribute) and owner and _is_dotted(target):
                self.assigned.append((*owner, target.attr))

    def calls(self, value: ast.expr | None) -> None:
        """Note what is called in an expression, and with what: not in its operators and comprehensions."""
        while isinstance(value, (ast.Attribute, ast.Subscript, ast.Starred, ast.Await, ast.Lambda)):
            if isinstance(value, ast.Attribute) and value.attr == "__dict__":
                self.opened.append(_chain(value.value))
            value = value.body if isinstance(value, ast.Lambda) else value.value
        if not isinstance(value, ast.Call):
            return
        self.call(value.func)
        self.setattr(value)
        self.calls(value.func)
        only_reads = isinstance(value.func, ast.Name) and hasattr(builtins, value.func.id)
        for each in (*value.args, *(keyword.value for keyword in value.keywords)):
            if isinstance(each, (ast.Name, ast.Attribute)) and not only_reads:
                self.touched.append(_chain(each))
            self.calls(each)

    def call(self, function: ast.expr) -> None:
        """Note what is called for what it does."""
        if _is_dotted(function):
            self.called.append(_chain(function))
        if isinstance(function, ast.Attribute):
            self.touched.append(_chain(function.value))

    def setattr(self, call: ast.Call) -> None:
        """Note the attribute that ``setattr(module, "name", value)`` sets; or all, for ``vars(module)`` and others."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if not call.args or not _is_dotted(owner := call.args[0]):
            return
        if name == "setattr" and len(call.args) == 3:
            attribute = call.args[1]
            if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                self.assigned.append((*_chain(owner), attribute.value))
            else:
                self.opened.append(_chain(owner))
        elif name == "vars":
            self.opened.append(_chain(owner))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The names before the first index: ``config.table`` in ``config.table["a"].size``; none after a call."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        else:
            names.clear()
        node = node.value
    return (node.id, *names) if isinstance(node, ast.Name) else ()


def _is_dotted(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def is_patch(name: str) -> bool:
    """Whether this is a key of :func:`find_patches`, and not a name of the script."""
    return ":" in name


def is_content(name: str) -> bool:
    """Whether this is such a key, of something that has changed in place."""
    return name.endswith(_CONTENT)


def patch(name: str, value: Any) -> None:
    """Change a module as the script has done, once it is imported here; without effect where it is missing."""
    _later.values[name] = value
    if not _later.is_importing:
        _later.change_imported()
    if _later.values and _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)


def _apply(name: str, value: Any) -> None:
    module, _colon, attribute = name.removesuffix(_CONTENT).partition(":")
    owner, _dot, last = attribute.rpartition(".")
    with contextlib.suppress(AttributeError, TypeError):
        place = attrgetter(owner)(sys.modules[module]) if owner else sys.modules[module]
        if isinstance(registry := vars(place).get(last), types.MappingProxyType) and is_content(name):
            for kind in [kind for kind in value if registry.get(kind) is not value[kind]]:
                place.register(kind, value[kind])
        elif not is_content(name) or not _become(vars(place).get(last), value):
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
        if self.is_importing or not self.values:
            return None
        for finder in [*sys.meta_path]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None or finder is self else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

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
        try:
            self._loader.exec_module(module)
        finally:
            _later.is_importing = was_importing
        if not was_importing:
            _later.change_imported()


_later = _Later()


def _become(obj: Any, other: Any) -> bool:
    """Give an object the content of another one, as more than its module may refer to it; False if it has none."""
    if obj is other:
        return True
    if type(obj) is not type(other):
        return False
    kinds: tuple[Any, ...] = (collections.OrderedDict, dict, list, set)
    kind = next((kind for kind in kinds if isinstance(obj, kind)), None)
    if kind is not None:
        kind.clear(obj)
        (list.extend if kind is list else kind.update)(obj, other)
    own = getattr(obj, "__dict__", None)
    if own is not None:
        content = dict(vars(other))
        own.clear()
        own.update(content)
    return kind is not None or own is not None
