"""Folders of sessions: removed when their session has ended, or else with the next one."""

from __future__ import annotations

import os
import shutil
import tempfile

from rpcdataloader.server.folders import Folders


def test_folder_of_a_session_is_removed_with_all_that_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = Folders()
    path = folders.name("abc")
    assert path == f"{tmp_path}/rpcdataloader-abc"
    os.makedirs(f"{path}/shapes/__pycache__")
    folders.remove(path)
    assert os.listdir(tmp_path) == []
    folders.remove(path)  # it was never made


def test_what_cannot_be_removed_goes_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = Folders()
    first, second = folders.name("1"), folders.name("2")
    os.mkdir(first)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_args, **_options: None)  # as while a worker writes
        folders.remove(first)
    assert os.path.exists(first)
    folders.remove(second)
    assert os.listdir(tmp_path) == []


def test_without_a_place_for_temporary_files_there_is_no_name(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    folders = Folders()
    assert folders.name("1") == ""
    folders.remove("")
