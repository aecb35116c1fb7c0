"""Folders of sessions: removed when their session has ended, or else with the next one."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

import pytest

from rpcdataloader.server.clients import Folders
from tests.conftest import wait_until


@pytest.mark.parametrize("wait", [False, True])
def test_folder_of_a_session_is_removed_with_all_that_is_in_it(tmp_path, monkeypatch, wait):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = Folders()
    path = folders.name()
    assert re.fullmatch(f"{tmp_path}/rpcdataloader-[0-9a-f]{{32}}", path)
    os.mkdir(path)
    # Deeper than what Python's own way to remove it can do.
    monkeypatch.chdir(path)
    for _ in range(1500):
        os.mkdir("deep")
        os.chdir("deep")
    monkeypatch.chdir(tmp_path)
    folders.remove(path, wait=wait)
    wait_until(lambda: os.listdir(tmp_path) == [], 0 if wait else 10)
    folders.remove(path)  # it was never made


def test_what_cannot_be_removed_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = Folders()
    first, second = folders.name(), folders.name()
    os.mkdir(first)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_args, **_options: None)  # as while a worker writes
        folders.remove(first)
    assert os.path.exists(first)
    folders.remove(second, wait=True)
    assert os.listdir(tmp_path) == []


def test_what_belongs_to_another_user_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    Folders().remove(str(tmp_path), wait=True)
    assert tmp_path.exists()


def test_without_a_place_for_temporary_files_there_is_no_name(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    folders = Folders()
    assert folders.name() == ""
    folders.remove("")
