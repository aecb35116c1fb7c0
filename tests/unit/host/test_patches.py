"""What is found of a script's changes in libraries; in workers, see ``tests/behaviour/test_idioms.py``."""

from __future__ import annotations

import string
import sys
import types

import pytest

from rpcdataloader.host.patches import find_patches, is_patch, patch


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


def test_cells_of_a_notebook_are_looked_at_in_place_of_a_file(library):
    library.size = 2
    cells = ["", "import library", "%matplotlib inline", "library.size = 2", "1 +"]
    assert find_patches({"_ih": cells, "library": library}) == {"library:size": 2}


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
