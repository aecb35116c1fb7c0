"""What sources say that they change in other modules: names of attributes that are assigned, and of registrations."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rpcdataloader.host.sources import Source

# Sources that are read; a script's own modules have a few hundred kilobytes.
_MAX_SOURCE_BYTES = 1 << 20


class Changes(NamedTuple):
    """Dotted names in a source."""

    assigned: tuple[tuple[str, ...], ...] = ()  # attributes
    imported: tuple[tuple[str, str, str], ...] = ()  # names in functions, too: each with its module, and what of that
    # Whose method ``register`` is called, and with what: empty where that is no name.
    registered: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()


def changes_by_namespace(
    namespace: Mapping[str, Any], sources: Mapping[str, Source]
) -> Iterator[tuple[Mapping[str, Any], Changes]]:
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
def _changes_of_file(path: str, _changed: int) -> Changes:
    with open(path, encoding="utf-8", errors="replace") as file:
        return _parse(file.read())


@functools.lru_cache(maxsize=2048)
def _parse(source: str | bytes) -> Changes:
    """What a source changes."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a cell with a command of IPython
        return Changes()
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
    return Changes(*(tuple(dict.fromkeys(each)) for each in found))  # type: ignore[arg-type]


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
