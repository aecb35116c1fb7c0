"""Which paths a session takes over of its client's process, and which it does not; and its rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rpcdataloader.host.environment
from rpcdataloader.host.environment import Additions, Environment, collect, hint_at, install, update

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
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
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
    monkeypatch.setattr(rpcdataloader.host.environment, "_lack", "")
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


def test_missing_folders_are_a_warning_and_a_hint_at_errors_that_may_come_of_them(here, caplog):
    install(Environment(("/no/script", str(here / "missing")), "/no/directory"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for text in ("no /no/script and no /no/directory", f"directory is {here}", f"on {socket.gethostname()}"):
        assert text in record.getMessage()
    for error in FileNotFoundError(2, "x", "y"), ModuleNotFoundError("x"), chained():
        assert hint_at(error) == record.getMessage()
    assert hint_at(ValueError("x")) is None
    install(Environment((str(here), "/no/other"), str(here)))
    assert hint_at(FileNotFoundError(2, "x", "y")) is None
    assert len(caplog.records) == 1


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


def test_rank_is_the_client_s_and_not_that_of_the_server(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "5")
    update(Additions({"WORLD_SIZE": "4"}), 1, 3)  # env= has the last word
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["1", "4", "5"]
