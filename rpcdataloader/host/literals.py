"""What the source of a module says that its names are once it is imported, as far as that takes no execution. Pure."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Bodies of these run later, or not at all.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@functools.lru_cache(maxsize=1024)
def literals_of(source: bytes) -> dict[str, Any]:
    """Values by name, and by class and name, of what is written as a literal, and not changed as the module runs."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    set_elsewhere = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _binds(node)]
    try:
        found = dict(_literals_in(tree.body, ""))
    except RecursionError:  # an expression of a thousand terms
        return {}
    return {
        name: value for name, value in found.items() if "." not in name or name.rpartition(".")[2] not in set_elsewhere
    }


@functools.lru_cache(maxsize=64)
def set_later_in(source: bytes) -> frozenset[str]:
    """Globals and attributes that functions of a module set, such as a connection that is made when it is needed."""
    found: set[str] = set()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Global):
                found.update(node.names)
            elif isinstance(node, ast.Attribute) and _binds(node):
                found.add(node.attr)
    return frozenset(found)


def _literals_in(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Any]]:
    mentions = list(_mentions(body))
    bound = Counter(name for name, is_bound in mentions if is_bound)
    named = Counter(name for name, _is_bound in mentions)
    for node in body:
        if isinstance(node, ast.ClassDef) and bound[node.name] == 1:
            yield from _literals_in(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and isinstance(target := targets[0], ast.Name) and bound[target.id] == 1:
                with contextlib.suppress(ValueError, TypeError, MemoryError, RecursionError):  # it is no literal
                    value = ast.literal_eval(node.value)
                    # A container may be filled where it is mentioned.
                    if not isinstance(value, (dict, list, set)) or named[target.id] == 1:
                        yield prefix + target.id, value


def _mentions(body: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield names that code mentions as it runs, attributes of others included, and whether it binds them."""
    for node in body:
        if isinstance(node, ast.Name):
            yield node.id, _binds(node)
        elif isinstance(node, ast.Attribute):
            yield node.attr, _binds(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, True
        elif isinstance(node, ast.alias):
            yield node.asname or node.name, True
        inner = ast.iter_child_nodes(node)
        if isinstance(node, _LATER):
            inner = iter([*getattr(node, "decorator_list", ()), node.args])
        yield from _mentions(inner)


def _binds(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)
