"""Tests of functions and classes by value."""

from __future__ import annotations

import sys
import types

import pytest

from rpcdataloader.wire.by_value import reduce_function


@pytest.fixture
def package(monkeypatch):
    """A package with parts, of which nothing is imported from files."""
    names = ("outer", "outer.inner", "outer.inner.deep", "outer.inner.other", "outer.unused", "outerworld")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    return modules["outer"]


def test_function_brings_the_parts_of_packages_that_it_reaches(package):
    namespace = {"outer": package}
    exec("def reach(): return outer.inner.deep.size + outer.missing", namespace)
    _make, _parts, content, *_ = reduce_function(namespace["reach"], "__main__")
    _state, _attributes, modules, _brought = content
    assert [module.__name__ for module in modules] == ["outer.inner", "outer.inner.deep"]


def test_parts_are_brought_for_a_package_that_only_a_closure_knows(package):
    def reach():
        return package.unused

    assert [module.__name__ for module in reduce_function(reach, "__main__")[2][2]] == ["outer.unused"]
