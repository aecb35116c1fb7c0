"""Which names of a module mean something else in each process that imports it, as its source says. Pure.

Hashes of texts are other ones in each interpreter, unless ``PYTHONHASHSEED`` says so: with ``CLASSES = list({"cat",
"dog"})``, a label has another number in each. So do random numbers vary whose generator the system seeds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# What keeps the order of its argument, and what makes a set of it.
_ORDERS = frozenset({"dict", "enumerate", "filter", "fromkeys", "list", "map", "reversed", "tuple", "zip"})
_SETS = frozenset({"difference", "frozenset", "intersection", "set", "symmetric_difference", "union"})

# What the system seeds, and what it seeds without an argument.
_BY_SYSTEM = frozenset({"SystemRandom", "token_bytes", "token_hex", "token_urlsafe", "urandom", "uuid1", "uuid4"})
_WITHOUT_SEED = frozenset({"Random", "RandomState", "SeedSequence", "default_rng"})

# Names that the order of a value may come from: empty for a set without a name.
_Sources = tuple[str, ...]


def varying_names(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, _Sources | None]]:
    """Yield names that may vary: with the names whose order they may have, or None if random numbers made them.

    Args:
        body: Statements of a module, of which those at its top level and in its classes count.
    """
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from varying_names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            sources, is_drawn = _sources(node.value), any(map(_is_drawn, ast.walk(node.value)))
            if sources is not None or is_drawn:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        yield prefix + target.id, None if is_drawn else sources


def _is_drawn(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = _name_of(node)
    return name in _BY_SYSTEM or (name in _WITHOUT_SEED and not node.args and not node.keywords)


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _sources(value: ast.expr) -> _Sources | None:
    """The names of sets, perhaps, whose order a container has; None for what has no such order."""
    if isinstance(value, (ast.Set, ast.SetComp)):
        return ()
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
        return _sources(value.generators[0].iter)
    if isinstance(value, (ast.List, ast.Tuple)):
        parts: list[ast.expr] = [each.value for each in value.elts if isinstance(each, ast.Starred)]
    elif isinstance(value, ast.BinOp):
        parts = [value.left, value.right]
    elif isinstance(value, ast.Call):
        if _name_of(value) in _SETS:
            return ()
        parts = value.args if _name_of(value) in _ORDERS else []
    else:
        return None
    found = [sources for sources in map(_sources, parts) if sources is not None]
    return next((sources for sources in found if not sources), found[0] if found else None)


def varies(value: Any, sources: _Sources | None, namespace: Mapping[str, Any]) -> bool:
    """Whether the value of a name may vary: with sets, numbers alone do not, as their hashes are their values.

    Args:
        sources: Those of :func:`varying_names`.
        namespace: The module's, which tells what is a set.
    """
    if sources is None:
        return True
    if sources and not any(isinstance(namespace.get(name), (set, frozenset)) for name in sources):
        return False
    if not isinstance(value, (list, tuple, dict)) or len(value) < 2:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return not all(isinstance(each, (int, float)) for each in items)
