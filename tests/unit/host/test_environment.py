"""Paths and modules that a session takes over of its client's process, and those that it does not."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy  # noqa: F401  # from elsewhere than a session has it from
import pytest

from rpcdataloader.host import environment
from rpcdataloader.host.environment import (
    Additions,
    Environment,
    Module,
    collect,
    hint_at,
    install,
    prepare_session,
    update,
)

ROOT = str(Path(__file__).parents[3])

PRINT = f"""
import json, sys
sys.path.append({ROOT!r})
from rpcdataloader.host.environment import collect
environment = collect()
print(json.dumps([environment.import_path, environment.directory]))
"""


@pytest.fixture
def run(tmp_path):
    """Run an interpreter in a folder of its own; gives the environment that it collects there."""
    (tmp_path / "project" / "package").mkdir(parents=True)
    (tmp_path / "project" / "package" / "__init__.py").touch()
    (tmp_path / "project" / "package" / "train.py").write_text(PRINT)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(PRINT)
    (tmp_path / "library").mkdir()

    def run(*args, **env):
        result = subprocess.run(
            [sys.executable, *args],
            cwd=tmp_path / "project",
            env={**os.environ, "PYTHONPATH": "", **env},
            capture_output=True,
            check=True,
            text=True,
        )
        paths, directory = json.loads(result.stdout)
        assert directory == str(tmp_path / "project")
        assert ROOT in paths
        return [os.path.relpath(path, tmp_path) for path in paths if path != ROOT]

    return run


def test_script_brings_its_folder_and_the_current_one(run, tmp_path):
    assert run(tmp_path / "scripts" / "train.py") == ["scripts", "project"]


def test_module_brings_the_current_folder_and_not_its_own(run):
    """`import random` on a worker must not find project/package/random.py, as it does not here."""
    assert run("-m", "package.train") == ["project"]


def test_paths_of_the_user_travel_in_their_order(run, tmp_path):
    paths = os.pathsep.join([str(tmp_path / "library"), "../scripts", str(tmp_path / "missing")])
    assert run("-c", PRINT, PYTHONPATH=paths) == ["project", "library", "scripts", "missing"]


def test_installation_stays_at_home(monkeypatch, tmp_path):
    paths = sysconfig.get_paths()
    entries = [
        str(tmp_path),
        paths["stdlib"],
        paths["purelib"],
        os.path.join(paths["stdlib"], "lib-dynload"),
        "/usr/lib/python3/dist-packages",
        "/opt/venv/lib/python3.12/site-packages/vendored",
        os.path.join(os.path.dirname(paths["stdlib"]), f"python3{sys.version_info[1]}.zip"),
    ]
    monkeypatch.setattr(sys, "path", entries)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.chdir(tmp_path)
    environment = collect()
    assert (environment.import_path, environment.directory) == ((str(tmp_path),), str(tmp_path))


def test_folder_that_was_deleted_is_left_out(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "lib", str(tmp_path)])
    environment = collect()
    assert environment.directory == ""
    assert str(tmp_path) in environment.import_path
    assert "" not in environment.import_path


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["/opt/server", "/usr/lib/python3"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # which install sets
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_lack", "")
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_paths_that_exist_come_first(here):
    install(Environment((str(here / "b"), str(here / "missing"), str(here / "a")), str(here / "c")))
    assert sys.path == [str(here / "b"), str(here / "a"), "/opt/server", "/usr/lib/python3"]
    assert os.getcwd() == str(here / "c")


@pytest.mark.parametrize("directory", ["", "/no/such/folder"])
def test_folder_that_does_not_exist_here_changes_nothing(here, directory):
    install(Environment((), directory))
    assert os.getcwd() == str(here)


def chained():
    error = ValueError("x")
    error.__cause__ = ModuleNotFoundError("x")
    return error


def test_hint_at_missing_folders_is_given_as_long_as_they_are_missing(here):
    install(Environment(("/no/script", str(here / "missing")), "/no/directory"))
    hint = hint_at(chained())
    for text in ("no /no/script and no /no/directory", f"directory is {here}", f"on {socket.gethostname()}"):
        assert text in hint
    install(Environment((str(here), "/no/other"), str(here)))
    assert hint_at(chained()) is None


def test_missing_folders_are_told_where_that_of_the_server_was_deleted(here):
    os.chdir(here / "c")
    (here / "c").rmdir()
    install(Environment(("/no/script",), "/no/directory"))
    assert "the working directory is deleted, there is no /no/script" in hint_at(ModuleNotFoundError("x"))


def test_folders_that_others_can_write_to_are_neither_searched_nor_entered(here, caplog):
    (here / "a").chmod(0o777)
    install(Environment((str(here / "a"), str(here / "b")), str(here / "a")))
    assert sys.path[0] == str(here / "b")
    assert os.getcwd() == str(here)
    (record,) = caplog.records
    for text in (f"{here}/a is not used, as it is writable", "py_modules="):
        assert text in record.getMessage()
    assert hint_at(ModuleNotFoundError("x")) == record.getMessage()
    assert not hint_at(ValueError("x"))


def test_variables_of_the_user_have_the_last_word(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    update(Additions({"WORLD_SIZE": "4"}), 1, 3)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "4")


# Modules: written as they were, in a folder of their own, and once


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


def test_other_files_of_a_module_that_is_there_are_too_late(folder):
    install_modules([Module("shapes", FILES)])
    with pytest.raises(ImportError, match="shapes comes too late"):
        install_modules([Module("shapes", {**FILES, "shapes/round.py": b"circle = 2"})])
    assert (folder / "shapes" / "round.py").read_bytes() == FILES["shapes/round.py"]


def test_modules_are_written_as_they_were_come_before_others_and_are_private(folder, tmp_path):
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "shapes.py").write_text("circle = 'another'")
    install_modules([Module("shapes", FILES)])
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES
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
