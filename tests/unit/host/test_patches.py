"""What is found of a script's changes in other modules; in workers, see ``tests/behaviour/test_definitions.py``."""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import random
import string
import sys
import types

import pytest
import torch

from rpcdataloader.host import patching, sources
from rpcdataloader.host.patches import find_patches, is_compared, is_patch
from rpcdataloader.host.patching import patch
from rpcdataloader.host.snapshots import Deleted


@pytest.fixture(autouse=True)
def only_what_the_test_has(monkeypatch):
    """Not the modules of the tests."""
    look = sources.recorder.look
    known = lambda: {name: source for name, source in look().items() if name == "settings"}  # noqa: E731
    monkeypatch.setattr(sources.recorder, "look", known)


@pytest.fixture
def library(monkeypatch):
    """A module with a class."""
    module = types.ModuleType("library")
    module.Reader = type("Reader", (), {"__module__": "library", "limit": 1})
    monkeypatch.setitem(sys.modules, "library", module)
    return module


SOURCE = """
import library as lib
lib.size = 1
lib.size += 1
lib.Reader.limit = lib.other = 3
lib.named: int = 4

def main():
    lib.late = 5

class Own:
    pass

Own.number = 6
local = Own()
local.number = 7
lib.table["a"] = 8
missing.number = 9
import sys
sys.ps1 = ">"
"""


def test_assignments_to_attributes_of_libraries_are_found_with_their_present_values(library, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    namespace = {"__name__": "__main__", "__file__": str(path)}
    library.table = {}
    exec(SOURCE.replace("missing.number = 9", "").replace("sys.ps1", "sys.modules['library'].unused"), namespace)
    namespace["main"]()
    found = find_patches(namespace)
    names = {"size": 2, "Reader.limit": 3, "other": 3, "named": 4, "late": 5}
    assert found == {f"library:{name}": value for name, value in names.items()}
    assert all(map(is_patch, found))


REGISTRIES = """
import abc
import functools

class Shape(abc.ABC):
    pass

Shape.register(bytes)

class Reader:
    @functools.singledispatchmethod
    def show(self, value):
        return "other"

@functools.singledispatch
def describe(value):
    return "other"

def of_library(value):
    return "library"

class codecs:
    register = callable
"""

REGISTERING = """
import string
import library as lib

class Own:
    pass

@lib.Shape.register
class Square:
    pass

lib.Shape.register(Own)
lib.Shape.register(string.Template)

class Abstract(lib.Shape):
    pass

Abstract.register(int)

@lib.describe.register
def _(value: int):
    return "int"

@lib.Reader.show.register(str)
def _(self, value):
    return "str"

lib.describe.register(float, lib.of_library)
lib.codecs.register(Own)

def main():
    for kind in [dict]:
        lib.Shape.register(kind)
"""


def test_registrations_with_abstract_classes_and_dispatching_functions_of_libraries_are_found(library):
    exec(REGISTRIES, vars(library))
    namespace = {"__name__": "__main__", "_ih": ["", REGISTERING]}
    exec(REGISTERING, namespace)
    found = find_patches(namespace)
    assert {key: set(value) for key, value in found.items()} == {
        "library:Shape._abc_impl[...]": {namespace["Own"], namespace["Square"], string.Template},
        "library:describe.registry[...]": {int, float},
        "library:Reader.show.registry[...]": {str},
    }
    exec(REGISTRIES, vars(library))  # as in another process
    for key, value in found.items():
        patch(key, value)
    assert issubclass(namespace["Own"], library.Shape)
    assert issubclass(string.Template, library.Shape)
    assert [library.describe(1), library.describe(1.5), library.describe("a")] == ["int", "library", "other"]
    reader = library.Reader()
    assert [reader.show(1), reader.show("a")] == ["other", "str"]
    patching.keep(set())
    assert [library.describe(1), reader.show("a")] == ["other", "other"]


def test_cells_of_a_notebook_are_looked_at_in_place_of_a_file(library):
    library.size = 2
    cells = ["", "import library", "%matplotlib inline", "library.size = 2", "1 +"]
    assert find_patches({"_ih": cells, "library": library}) == {"library:size": 2}


def test_command_line_is_looked_at_in_place_of_a_file(library, monkeypatch):
    library.size = 2
    monkeypatch.setattr(sys, "argv", ["-c", "1"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-c", "import library; library.size = 2", "1"])
    assert find_patches({"library": library}) == {"library:size": 2}


def test_process_takes_over_what_it_can(library, monkeypatch):
    monkeypatch.setattr(string.Template, "delimiter", "$")
    for name, value in {
        "string:Template.delimiter": "%",
        "library:Reader.limit": 5,
        "library:Missing.limit": 5,
        "no_such_library:size": 5,
    }.items():
        patch(name, value)
    assert (string.Template.delimiter, library.Reader.limit) == ("%", 5)


def test_script_that_cannot_be_read_has_changed_nothing(tmp_path):
    assert find_patches({"__file__": str(tmp_path / "missing.py")}) == find_patches({}) == {}


OF_THE_SCRIPT = """
import collections
import random
import types

options = types.SimpleNamespace(size=1)
table, names, ordered, recent, drawn = {"a": 1}, ["a"], {"a": 1}, collections.deque([1]), random.Random(1)
level, same = 1, "same"

def read(limit=1):
    return limit
"""

ORIGINAL = "table", "names", "options", "ordered", "recent", "drawn", "tensor", "same"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A module of the script's own."""
    monkeypatch.setattr(patching, "_changes_here", {})
    (tmp_path / "settings.py").write_text(OF_THE_SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("settings")
    del sys.modules["settings"]


def test_own_modules_are_compared_and_what_the_script_assigns_there_is_told_from_the_rest(settings):
    namespace = {"settings": settings, "_ih": ["settings.level = 2", "settings.names = 3"]}
    settings.level, settings.table["b"], settings.ordered = 2, 2, {}
    found = {name: value for name, value in find_patches(namespace).items() if name.startswith("settings:")}
    assert found == {"settings:level": 2, "settings:table[...]": {"a": 1, "b": 2}, "settings:ordered[=]": {}}
    assert [is_compared(name) for name in found] == [True, True, False]


def test_what_an_own_module_assigns_in_a_library_is_found(settings, library, monkeypatch):
    library.size = 2
    source = sources.Source("settings.py", b"import library\nlibrary.size = 2")
    monkeypatch.setattr(sources.recorder, "look", lambda: {"settings": source})
    settings.library = library
    assert find_patches({})["library:size"] == 2


def test_what_has_changed_in_place_stays_the_same_object(settings):
    table, names, options = settings.table, settings.names, settings.options
    recent, drawn = settings.recent, settings.drawn
    settings.ordered = ordered = collections.OrderedDict(a=1)
    settings.kind = 1
    for name, value in {
        "table": {"b": 2},
        "names": ["b"],
        "options": type(options)(other=2),
        "ordered": collections.OrderedDict(b=2),
        "recent": collections.deque([2, 3]),
        "drawn": random.Random(2),
        "kind": "text",
    }.items():
        patch(f"settings:{name}[...]", value)
    assert (table, names, vars(options), list(ordered)) == ({"b": 2}, ["b"], {"other": 2}, ["b"])
    assert (list(recent), drawn.random()) == ([2, 3], random.Random(2).random())
    assert settings.kind == "text"


def test_changes_that_another_pass_has_made_are_undone_and_the_others_stay(settings, library):
    settings.tensor, settings.show = torch.nn.Parameter(torch.ones(2)), functools.singledispatch(str)
    settings.show.register(int, hex)
    objects, before = dict(vars(settings)), copy.deepcopy({name: vars(settings)[name] for name in ORIGINAL})
    patch("settings:level[=]", 2)
    for number in range(2):
        for name, value in {
            "table[...]": {"b": number},
            "table[=]": {},
            "names[...]": [],
            "options[...]": types.SimpleNamespace(other=number),
            "ordered[...]": collections.OrderedDict(b=2),
            "recent[...]": collections.deque([2, 3]),
            "drawn[...]": random.Random(2),
            "tensor[...]": torch.nn.Parameter(torch.zeros(2)),
            "show.registry[...]": {int: oct, float: hash},
            "kind[=]": number,
            "same[=]": Deleted,
            "read.__defaults__[=]": (2,),
        }.items():
            patch(f"settings:{name}", value)
    patch("library:Reader.limit", 5)
    patch("settings:names[=]", ["kept"])
    patch("not_imported:size", 2)
    undone = patching.keep({"settings:level[=]", "settings:names[=]"})
    assert {"settings:table[...]", "settings:table[=]", "not_imported:size", "library:Reader.limit"} <= {*undone}
    assert not {"settings:level[=]", "settings:names[=]"} & {*undone}
    assert (settings.level, settings.names, library.Reader.limit) == (2, ["kept"], 1)
    assert not hasattr(settings, "kind")
    assert (settings.show(10), settings.show(1.5), settings.read()) == ("0xa", "1.5", 1)
    for name in {*ORIGINAL} - {"names", "drawn", "tensor"}:
        assert getattr(settings, name) is objects[name]
        assert getattr(settings, name) == before[name]
    assert settings.tensor.tolist() == [1, 1]
    assert settings.drawn.random() == before["drawn"].random()
    assert patching.keep({"settings:level[=]", "settings:names[=]"}) == []


def test_what_was_deleted_is_deleted_and_set_again(settings):
    patch("settings:level[=]", Deleted)
    patch("settings:level[=]", Deleted)
    assert not hasattr(settings, "level")
    patch("settings:level[=]", 3)
    assert settings.level == 3


def test_what_is_the_same_object_already_keeps_its_content(settings):
    patch("settings:table[...]", settings.table)
    assert settings.table == {"a": 1}


def test_module_that_is_imported_later_is_changed_then(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_settings.py").write_text("table, level = {'a': 1}, 1\nsame = table")
    patch("late_settings:table[...]", {"b": 2})
    patch("late_settings:level", 2)
    assert "late_settings" not in sys.modules
    late = importlib.import_module("late_settings")
    assert (late.table, late.level, late.same is late.table) == ({"b": 2}, 2, True)
    assert late.__spec__.loader is late.__loader__
    assert late.__loader__.get_source("late_settings").startswith("table")
    del sys.modules["late_settings"]
    assert importlib.import_module("late_settings").level == 1
    del sys.modules["late_settings"]
