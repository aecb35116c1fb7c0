"""What a script has changed in libraries, such as ``ImageFile.LOAD_TRUNCATED_IMAGES = True``: read from its source.

A process cannot tell by itself which attribute of a module was set by whom. The script's source names them: assignments
to attributes of modules, and of classes of modules, anywhere in it. Their values are those of the moment.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import types
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

# Modules by which a worker lives.
_OWN = (
    *("builtins", "copyreg", "gc", "logging", "multiprocessing", "os", "pickle", "select", "signal", "socket", "ssl"),
    *("subprocess", "sys", "threading", "time", "rpcdataloader"),
)


def find_patches(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the script of ``namespace`` has set in libraries, by module and dotted name: ``PIL.Image:NAME``."""
    found = {}
    for chain in _assigned(namespace):
        with contextlib.suppress(Exception):  # a name that means nothing now, or a property that fails
            owner = namespace[chain[0]]
            for name in chain[1:-1]:
                owner = getattr(owner, name)
            if (place := _place_of(owner)) is not None:
                value = vars(owner)[chain[-1]] if isinstance(owner, type) else getattr(owner, chain[-1])
                found[f"{place}{chain[-1]}"] = value
    return found


def _place_of(owner: Any) -> str | None:
    if isinstance(owner, types.ModuleType):
        module, place = owner.__name__, f"{owner.__name__}:"
    elif isinstance(owner, type) and "<locals>" not in owner.__qualname__:
        module, place = owner.__module__, f"{owner.__module__}:{owner.__qualname__}."
    else:
        return None
    is_own = module in ("__main__", "__mp_main__") or module.partition(".")[0] in _OWN
    return None if is_own else place


def _assigned(namespace: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Names of the attributes that the script assigns to."""
    cells = namespace.get("_ih")  # of a notebook, all that has run
    if isinstance(cells, list):
        for cell in cells:
            yield from _targets(str(cell))
    elif isinstance(path := namespace.get("__file__"), str):
        with contextlib.suppress(OSError):
            yield from _targets_of_file(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _targets_of_file(path: str, _changed: int) -> tuple[tuple[str, ...], ...]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return _targets(file.read())


@functools.lru_cache(maxsize=1024)
def _targets(source: str) -> tuple[tuple[str, ...], ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a cell with a command of IPython
        return ()
    chains = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
            names: list[str] = []
            while isinstance(target, ast.Attribute):
                names.insert(0, target.attr)
                target = target.value
            if names and isinstance(target, ast.Name):
                chains.append((target.id, *names))
    return tuple(dict.fromkeys(chains))


def is_patch(name: str) -> bool:
    """Whether this is a key of :func:`find_patches`, and not a name of the script."""
    return ":" in name


def patch(name: str, value: Any) -> None:
    """Set a value in a library as the script has done; without effect where the library is missing."""
    module, _colon, attribute = name.partition(":")
    owner, _dot, last = attribute.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        found = importlib.import_module(module)
        setattr(attrgetter(owner)(found) if owner else found, last, value)
