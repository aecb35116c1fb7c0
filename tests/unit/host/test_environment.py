"""Paths and modules that a session takes over of its client's process, and those that it does not."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
from dataclasses import replace

import pytest

from rpcdataloader.host import environment
from rpcdataloader.host.environment import Additions, Environment, Module, collect, hint_at, install, update


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, ["scripts", "library", "site-packages", "site-packages/mine", "."]),
        # `import random` on a worker must not find package/random.py after `python -m package.train`.
        ("of python -m", ["library", "site-packages", "site-packages/mine", "."]),
    ],
)
def test_folders_of_the_user_travel_in_their_order_and_the_installation_stays_at_home(
    monkeypatch, tmp_path, spec, expected
):
    paths = sysconfig.get_paths()
    entries = [
        str(tmp_path / "library"),
        str(tmp_path / "site-packages"),  # whose name says nothing
        str(tmp_path / "site-packages/mine"),
        paths["stdlib"],
        paths["purelib"],
        os.path.join(paths["stdlib"], "lib-dynload"),
        "/usr/lib/python3/dist-packages",
        "/opt/venv/lib/python3.12/site-packages/vendored",
        os.path.join(os.path.dirname(paths["stdlib"]), f"python3{sys.version_info[1]}.zip"),
    ]
    monkeypatch.setattr(sys, "path", entries)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "scripts" / "train.py"), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.chdir(tmp_path)
    found = collect({})
    assert [os.path.relpath(path) for path in found.import_path] == expected
    assert found.directory == str(tmp_path)


def test_folder_that_was_deleted_is_left_out(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", "lib", str(tmp_path)])
    environment = collect({})
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


def give(content):
    update(Additions.of({}, [Module("squares", {"squares.py": content})], forward_output=False), 0, 1, has_group=False)


@pytest.fixture
def no_modules(here, monkeypatch):
    """This is a session that has no modules yet."""
    monkeypatch.setattr(environment, "_installed", {})
    monkeypatch.setattr(environment, "_folder", str(here / "session"))
    monkeypatch.setattr(environment, "_note_folder", lambda: None, raising=False)


@pytest.mark.usefixtures("no_modules")
def test_other_files_of_a_module_that_is_there_are_too_late(here):
    for _ in range(2):
        give(b"side = 2")
    with pytest.raises(ImportError, match="squares comes too late"):
        give(b"side = 3")
    assert (here / "session" / "squares.py").read_bytes() == b"side = 2"


@pytest.mark.usefixtures("no_modules")
def test_folder_of_somebody_else_is_not_used_for_modules(here):
    (here / "session").mkdir()
    with pytest.raises(FileExistsError):
        give(b"side = 2")


def test_worker_has_the_environment_of_its_pass_and_keeps_what_user_code_has_set_in_its_session(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_taken", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    limit = sys.getrecursionlimit()
    found = []
    for number, folder in enumerate(folders[:2]):
        monkeypatch.chdir(folder)
        sys.setrecursionlimit(limit + number)
        found.append(collect({}))
    try:
        install(found[1])
        environment.have(found[0])
        assert (os.getcwd(), sys.getrecursionlimit()) == (str(folders[0]), limit)
        monkeypatch.chdir(folders[2])  # as a constructor may do
        environment.have(found[0])
        assert os.getcwd() == str(folders[2])
        install(replace(found[0], import_path=(*found[0].import_path, str(tmp_path))))
        assert str(tmp_path) in sys.path
        assert os.getcwd() == str(folders[2])
    finally:
        sys.setrecursionlimit(limit)
