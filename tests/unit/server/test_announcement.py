"""The file by which a node server is found."""

from __future__ import annotations

import os
import stat
from contextlib import closing

import pytest

from rpcdataloader.errors import ConnectError
from rpcdataloader.server.announcement import Announcement
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.status import Registration

NODE = Registration(Address("node01", 6543), 32, "node01", 4711, "the machine", started=0.0)
LONG_AGO = 1000.0


def announced(folder):
    (path,) = folder.iterdir()
    return path


def test_file_is_there_during_the_block_and_for_its_owner_alone(tmp_path):
    folder = tmp_path / "pool"
    with closing(Announcement(str(folder), NODE)):
        path = announced(folder)
        assert path.name.startswith("node01-6543-4711-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        said = Registration.decode(path.read_bytes())
        assert (said.address, said.num_workers, said.pid) == (NODE.address, 32, 4711)
    assert list(folder.iterdir()) == []


def test_time_is_that_of_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: LONG_AGO)
    with closing(Announcement(str(tmp_path), NODE)):
        path = announced(tmp_path)
        assert abs(Registration.decode(path.read_bytes()).started - path.stat().st_mtime) < 10


def test_folder_that_is_there_is_left_as_it_is(tmp_path):
    folder = tmp_path / "pool"
    folder.mkdir(mode=0o755)
    with closing(Announcement(str(folder), NODE)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_file_is_whole_from_the_first_moment_on(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("os.fsync", lambda _descriptor: seen.extend(tmp_path.iterdir()))
    with closing(Announcement(str(tmp_path), NODE)):
        (temporary,) = seen
        assert temporary.name.startswith(".")
        assert not temporary.exists()
        assert Registration.decode(announced(tmp_path).read_bytes()).address == NODE.address


def test_nothing_is_left_when_the_disk_is_full(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConnectError, match=f"cannot register in {tmp_path}: No space left on device"):
        Announcement(str(tmp_path), NODE)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_an_error(tmp_path):
    missing = tmp_path / "missing" / "pool"
    with pytest.raises(ConnectError, match=f"cannot register in {missing}: No such file or directory"):
        Announcement(str(missing), NODE)


def test_server_after_a_server_has_a_file_of_its_own(tmp_path):
    """In containers, process ids and ports are always the same."""
    first, second = Announcement(str(tmp_path), NODE), Announcement(str(tmp_path), NODE)
    names = {path.name for path in tmp_path.iterdir()}
    first.close()
    assert announced(tmp_path).name in names
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_renewal_sets_the_time(tmp_path):
    with closing(Announcement(str(tmp_path), NODE)) as announcement:
        path = announced(tmp_path)
        os.utime(path, (LONG_AGO, LONG_AGO))
        announcement.renew()
        assert path.stat().st_mtime > LONG_AGO


def test_file_that_somebody_removed_comes_back_as_it_was(tmp_path, caplog):
    with closing(Announcement(str(tmp_path), NODE)) as announcement:
        path = announced(tmp_path)
        content = path.read_bytes()
        path.unlink()
        announcement.renew()
        assert announced(tmp_path) == path
        assert path.read_bytes() == content
        assert "removed by another process: registered again" in caplog.text


def test_renewal_that_fails_is_a_warning_for_each_time_that_it_begins_to(tmp_path, caplog, monkeypatch):
    def fail(_path):
        raise OSError(116, "Stale file handle")

    with closing(Announcement(str(tmp_path), NODE)) as announcement:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr("os.utime", fail)
                announcement.renew()
                announcement.renew()
            announcement.renew()
    assert caplog.text.count("Stale file handle") == 2


def test_nothing_comes_back_after_the_end(tmp_path):
    announcement = Announcement(str(tmp_path), NODE)
    for _ in range(2):
        announcement.close()
        assert list(tmp_path.iterdir()) == []
