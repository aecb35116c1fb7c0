"""Modules of a client in its session: written as they were, in a folder of their own, and once."""

from __future__ import annotations

import importlib
import sys

import numpy  # noqa: F401  # from elsewhere than a session has it from
import pytest

from rpcdataloader.host import environment
from rpcdataloader.host.environment import Additions, Module, prepare_session, update

FILES = {
    "shapes/__init__.py": b"from shapes.round import circle\n",
    "shapes/round.py": b"circle = 'a circle'\n",
    "shapes/data/names.txt": b"circle\r\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a session that has no modules yet."""
    monkeypatch.setattr(environment, "_installed", {})
    monkeypatch.setattr(environment, "_folder", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "earlier"), *sys.path])
    prepare_session(str(tmp_path / "session"), lambda: None)
    yield tmp_path / "session"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shapes", "squares")]:
        del sys.modules[name]


def install_modules(modules):
    update(Additions.of({}, modules, forward_output=False), 0, 1)


def test_files_are_written_as_they_were(folder):
    install_modules([Module("shapes", FILES)])
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == FILES
    assert "shapes/round" not in repr(Module("shapes", FILES))


def test_other_files_of_a_module_that_is_there_are_too_late(folder):
    install_modules([Module("shapes", FILES)])
    with pytest.raises(ImportError, match="shapes comes too late"):
        install_modules([Module("shapes", {**FILES, "shapes/round.py": b"circle = 2"})])
    assert (folder / "shapes" / "round.py").read_bytes() == FILES["shapes/round.py"]


def test_modules_come_before_others_of_their_name_and_are_private(folder, tmp_path):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "shapes.py").write_text("circle = 'another'")
    install_modules([Module("shapes", FILES)])
    shapes = importlib.import_module("shapes")
    assert shapes.circle == "a circle"
    assert shapes.__file__ == str(folder / "shapes" / "__init__.py")
    assert folder.stat().st_mode & 0o777 == 0o700
    install_modules([Module("shapes", FILES)])  # again: nothing to do
    install_modules([Module("squares", {"squares.py": b"side = 2"})])  # more of them, later
    assert importlib.import_module("squares").side == 2


def test_module_that_was_imported_from_elsewhere_is_too_late(folder):
    with pytest.raises(ImportError, match=r"comes too late on .* imported it from .*numpy/__init__\.py") as caught:
        install_modules([Module("squares", {"squares.py": b"side = 2"}), Module("numpy", {"numpy.py": b""})])
    assert "without --preload numpy" in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["squares.py"]


def test_folder_of_somebody_else_is_not_used(folder):
    folder.mkdir()
    with pytest.raises(FileExistsError):
        install_modules([Module("squares", {"squares.py": b"side = 2"})])
