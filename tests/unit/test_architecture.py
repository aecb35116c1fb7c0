"""The layout of the package: which module may import which, and what the package root exports."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rpcdataloader

PACKAGE = Path(rpcdataloader.__file__).parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
    for path in PACKAGE.rglob("*.py")
}

# What each part of the package may import besides itself. Nothing imports launch, ssh, check, status, integrations.
BELOW = {
    "errors": set(),
    "host": {"errors"},
    "wire": {"host", "errors"},
    "fetch": {"wire", "host", "errors"},
    "server": {"fetch", "wire", "host", "errors"},
    "pools": {"launch", "client", "wire", "errors"},
    "client": {"launch", "server", "wire", "host", "errors"},
    "ssh": {"launch", "wire", "host", "errors"},
    "plan": {"errors"},
    "diagnosis": {"wire", "errors"},
    "loader": {"diagnosis", "plan", "fetch", "client", "wire", "host", "errors"},
    "launch": {"server", "wire", "host", "errors"},
    "__main__": {"launch", "ssh", "check", "status"},
    "integrations": {"loader"},
    "check": {"loader", "fetch", "client", "server", "wire", "errors"},
    "status": {"client", "diagnosis", "wire", "errors"},
}
PURE = {f"rpcdataloader.wire.{name}" for name in ("address", "frames", "handshake", "messages", "status")}
PURE |= {"rpcdataloader.status.report", "rpcdataloader.loader.order"}
PURE |= {name for name in SOURCES if name.startswith(("rpcdataloader.plan.", "rpcdataloader.diagnosis."))}
IMPURE = {"asyncio", "multiprocessing", "select", "selectors", "signal", "socket", "ssl", "subprocess"}
IMPURE |= {"threading", "time"}


# A module named in a string is imported later, or by another process.
HIDDEN = re.compile(r"(?:\A|(?:from|import) )(rpcdataloader(?:\.\w+)+)(?:\Z| import|;)")


class Import(NamedTuple):
    target: str
    line: int
    for_types_only: bool  # under ``if TYPE_CHECKING:``
    is_hidden: bool = False  # in a string


def find_imports(module: str, sources: dict[str, str]) -> Iterator[Import]:
    """Yield the full name of each imported module, wherever in the module the statement or its name stands."""
    is_package = any(name.startswith(f"{module}.") for name in sources)

    def visit(node: ast.AST, for_types_only: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno, for_types_only)
            case ast.ImportFrom():
                parts = module.split(".")
                base = parts[: len(parts) + is_package - node.level] if node.level else []
                origin = ".".join([*base, *filter(None, [node.module])])
                for alias in node.names:
                    if (origin, alias.name) == ("rpcdataloader", "__version__"):
                        continue  # a text, which the root has in any case
                    name = f"{origin}.{alias.name}"
                    yield Import(name if name in sources else origin, node.lineno, for_types_only)
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                for statement in node.body:
                    yield from visit(statement, True)
                for statement in node.orelse:
                    yield from visit(statement, for_types_only)
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.Constant(value=str(text)):
                for name in HIDDEN.findall(text):
                    # Packages are names of loggers.
                    if name in sources and not any(other.startswith(f"{name}.") for other in sources):
                        yield Import(name, node.lineno, False, is_hidden=True)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from visit(child, for_types_only)

    yield from visit(ast.parse(sources[module]), False)


def get_part(module: str) -> str:
    """``rpcdataloader.wire.frames`` is in the part ``wire``; the package root is in the part of the empty name."""
    return module.removeprefix("rpcdataloader").lstrip(".").partition(".")[0]


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "rpcdataloader"


def find_faults(sources: dict[str, str]) -> list[str]:
    """Return one line for each import that breaks a rule."""
    faults = []
    graph: dict[str, set[str]] = {}
    for module in sources:
        part = get_part(module)
        graph[module] = set()
        for target, line, for_types_only, is_hidden in find_imports(module, sources):
            if is_ours(target) and part and not for_types_only:
                graph[module].add(target)
            # The root names its exports, for type checkers and in strings, and imports them when they are asked for.
            if not part:
                allowed = for_types_only or is_hidden or target.split(".")[0] in sys.stdlib_module_names
            elif is_ours(target):
                allowed = get_part(target) in {part, *BELOW[part]}
            else:
                allowed = True
            if module in PURE:
                is_standard = target.split(".")[0] in sys.stdlib_module_names - IMPURE
                allowed = allowed and (is_standard or target in PURE | {"rpcdataloader.errors"})
            if not allowed:
                faults.append(f"{module}:{line} imports {target}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append("cycle: " + " <- ".join(error.args[1]))
    return faults


def test_imports_point_downwards_and_pure_modules_stay_pure():
    assert SOURCES.keys() >= PURE
    assert find_faults(SOURCES) == []


def test_public_names_can_be_imported_and_no_others():
    assert set(rpcdataloader.__all__) <= set(dir(rpcdataloader))
    for name in rpcdataloader.__all__:
        assert getattr(rpcdataloader, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rpcdataloader.no_such_name
