"""The layout of the package: which module may import which, and what the package root exports."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rpcdataloader

PACKAGE = Path(rpcdataloader.__file__).parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text("utf-8")
    for path in PACKAGE.rglob("*.py")
}

PACKAGES = {name.rpartition(".")[0] for name in SOURCES}

# What each part of the package may import besides itself. Nothing imports launch, ssh, check, status, integrations.
BELOW = {
    "errors": set(),
    "host": {"errors"},
    "wire": {"host", "errors"},
    "fetch": {"wire", "host", "errors"},
    "server": {"fetch", "wire", "host", "errors"},
    "starter": {"launch"},
    "pools": {"starter", "client", "wire", "host", "errors"},
    "client": {"launch", "server", "wire", "host", "errors"},
    "ssh": {"starter", "launch", "wire", "host", "errors"},
    "plan": {"errors"},
    "diagnosis": {"wire", "errors"},
    "loader": {"diagnosis", "plan", "fetch", "client", "server", "wire", "host", "errors"},
    "launch": {"server", "wire", "host", "errors"},
    "__main__": {"launch", "ssh", "check", "status", "host"},
    "integrations": {"loader"},
    "check": {"loader", "fetch", "client", "server", "wire", "errors"},
    "status": {"client", "diagnosis", "wire", "errors"},
}
PURE = {f"rpcdataloader.wire.{name}" for name in ("address", "frames", "handshake", "messages", "shelf", "status")}
PURE |= {"rpcdataloader.status.report", "rpcdataloader.loader.order"}
PURE |= {name for name in SOURCES if name.startswith(("rpcdataloader.plan.", "rpcdataloader.diagnosis."))}
# What a plain pass does without until it is asked: the rooms that it runs through import these where they are used. No
# room imports a leaf that is a room (pools, check, status), or a module of the root.
LEAVES = {f"rpcdataloader.diagnosis.{name}" for name in ("figures", "trace", "verdict", "words")}
LEAVES |= {"rpcdataloader.loader.costs"}
SPINE = {"client", "diagnosis", "fetch", "host", "loader", "plan", "server", "wire"}
IMPURE = {"asyncio", "multiprocessing", "select", "selectors", "signal", "socket", "ssl", "subprocess"}
IMPURE |= {"threading", "time"}


# A module named in a string is imported later, or by another process.
HIDDEN = re.compile(r"(?:\A|(?:from|import) )(rpcdataloader(?:\.\w+)+)(?:\Z| import|;)")


def find_imports(module: str) -> Iterator[tuple[str, ast.AST, bool]]:
    """Yield each module that one imports, where its name stands, and whether that is for types only."""
    nodes = list(ast.walk(ast.parse(SOURCES[module])))
    checks = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {part for check in checks for statement in check.body for part in ast.walk(statement)}
    for node in nodes:
        assert not getattr(node, "level", 0), f"{module} has an import that is not absolute"
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(origin)):
                full = [f"{origin}.{alias.name}" for alias in node.names]
                # The version is a text, which the root has in any case.
                names = [name if name in SOURCES else origin for name in full if name != "rpcdataloader.__version__"]
            case ast.Constant(value=str(text)):
                # Packages are names of loggers.
                names = [name for name in HIDDEN.findall(text) if name in SOURCES.keys() - PACKAGES]
        yield from ((name, node, node in for_types) for name in names)


def get_part(module: str) -> str:
    """``rpcdataloader.wire.frames`` is in the part ``wire``; the package root is in the part of the empty name."""
    return module.removeprefix("rpcdataloader").lstrip(".").partition(".")[0]


def is_allowed(module: str, target: str, node: ast.AST, for_types_only: bool) -> bool:
    part, top = get_part(module), target.split(".")[0]
    # The root names its exports, for type checkers and in strings, and imports them when they are asked for.
    if not part:
        return for_types_only or isinstance(node, ast.Constant) or top in sys.stdlib_module_names
    if top == "rpcdataloader" and get_part(target) not in {part, *BELOW[part]}:
        return False
    return module not in PURE or target in PURE | {"rpcdataloader.errors"} or top in sys.stdlib_module_names - IMPURE


def test_imports_point_downwards_and_pure_modules_stay_pure():
    assert SOURCES.keys() >= PURE
    faults, graph = [], {}
    for module in SOURCES:
        found = list(find_imports(module))
        wrong = [each for each in found if not is_allowed(module, *each)]
        faults += [f"{module}:{node.lineno} imports {target}" for target, node, _for_types_only in wrong]
        graph[module] = {name for name, _node, for_types_only in found if get_part(module) and not for_types_only}
    assert faults == []
    graphlib.TopologicalSorter(graph).prepare()  # raises an error for a cycle


def test_rooms_that_every_pass_runs_through_import_no_leaf_before_it_is_used():
    rooms = {name for part in SPINE for name in BELOW[part]}
    assert rooms <= SPINE | {"errors", "launch"}
    modules = [name for name in SOURCES if get_part(name) in SPINE and name not in LEAVES]
    assert SOURCES.keys() >= LEAVES
    assert [
        f"{module}:{node.lineno} imports {target}"
        for module in modules
        for target, node, for_types_only in find_imports(module)
        # Statements of functions are indented.
        if target in LEAVES and not (for_types_only or node.col_offset)
    ] == []


def test_no_lock_that_ctrl_c_may_leave_locked():
    """Where the training process uses it: the others are of servers, of commands, or named as a type."""
    elsewhere = ("rpcdataloader.host.locks", "rpcdataloader.server.", "rpcdataloader.status.")
    elsewhere += ("rpcdataloader.wire.channel", "rpcdataloader.wire.by_value")
    plain = re.compile(r"\bthreading\.(?:R?Lock|Condition)\b")
    assert not [name for name, source in SOURCES.items() if plain.search(source) and not name.startswith(elsewhere)]


def test_one_list_says_what_happens_at_forks():
    assert [name for name, source in SOURCES.items() if "register_at_fork" in source] == ["rpcdataloader.host.forks"]


def test_public_names_can_be_imported_and_no_others():
    assert set(rpcdataloader.__all__) <= set(dir(rpcdataloader))
    for name in rpcdataloader.__all__:
        assert getattr(rpcdataloader, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = rpcdataloader.no_such_name


@pytest.mark.parametrize(("name", "meant"), [("RPCDataLoader", "RPCDataloader"), ("rpcdataset", "RPCDataset")])
def test_other_capitals_name_the_right_ones_also_where_they_are_imported(name, meant):
    with pytest.raises(ImportError, match=f"^module 'rpcdataloader' has no attribute '{name}': write {meant}$"):
        exec(f"from rpcdataloader import {name}")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from rpcdataloader import no_such_name")
