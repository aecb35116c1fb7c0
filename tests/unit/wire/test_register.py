"""What a node server writes about itself, which node servers are in a directory, and what is none."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import threading
import time
import types
from pathlib import Path

import pytest

from rpcdataloader.host.resources import machine_id
from rpcdataloader.wire import register as module
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.register import (
    MAX_SILENCE,
    MAX_TOLD,
    MAX_UNUSABLE,
    PATIENCE,
    Lookup,
    Register,
    Registration,
    ServerEntry,
)
from tests.conftest import wait_until


def server(name, started=1.0, **fields):
    address = fields.pop("address", Address(name, 6543))
    return dataclasses.replace(ServerEntry(address, 2, name, 4711, "the machine", started), **fields)


def write(folder, registration, unique="0"):
    path = folder / registration.file_name(unique)
    path.touch(mode=0o600)
    path.write_bytes(registration.encode())
    return path


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def register(tmp_path):
    return Register(str(tmp_path))


def found(register):
    """The registrations of the servers that are found, in their order."""
    return tuple(ServerEntry.decode(Path(register.directory, name).read_bytes()) for name in register.look().values())


def test_servers_are_in_the_order_in_which_they_came(tmp_path, register):
    late, early, middle = server("a", 3.0), server("b", 1.0), server("c", 2.0)
    for one in (late, early, middle):
        write(tmp_path, one)
    assert found(register) == (early, middle, late)


def test_file_that_is_not_whole_is_found_when_it_is_and_warned_of_once_if_it_stays_so(tmp_path, register, caplog):
    """As NFS may show it."""
    whole = server("a")
    path = write(tmp_path, whole)
    for content in (b"", whole.encode()[:20]):
        path.write_bytes(content)
        assert register.look() == {}
    path.write_bytes(whole.encode())
    assert found(register) == (whole,)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    path = write(tmp_path, server("b"))
    path.write_bytes(b"{}")
    for _ in range(3 * PATIENCE):
        assert found(register) == (whole,)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"{path} is not used: address is of another type"
    assert register.problems == {path.name: "address is of another type"}


def test_what_others_may_have_put_there_is_no_server_and_its_name_writes_no_line_of_its_own(tmp_path, register, caplog):
    real = tmp_path / "elsewhere"
    real.write_bytes(server("a").encode())
    real.chmod(0o600)
    (tmp_path / "link.server.json").symlink_to(real)
    os.mkfifo(tmp_path / "pipe.server.json", 0o600)
    (tmp_path / "a\n\x1b[31mready.server.json").mkdir()
    write(tmp_path, server("open")).chmod(0o646)
    write(tmp_path, server("shared")).chmod(0o644)
    for _ in range(PATIENCE):
        assert found(register) == (server("shared"),)
    names = ["a\n\x1b[31mready.server.json", "link.server.json", "pipe.server.json"]
    assert register.problems == {
        **dict.fromkeys(names, "it is not a regular file"),
        server("open").file_name("0"): "it is open to other users (mode 0646): run chmod 600",
    }
    warnings = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert f"{tmp_path}/a\\n\\x1b[31mready.server.json is not used: it is not a regular file" in warnings


def test_folder_with_thousands_of_other_files_costs_a_few_lines_and_reads_at_each_look(
    tmp_path, register, monkeypatch, caplog
):
    for number in range(500):
        (tmp_path / f"{number}.server.json").touch(mode=0o600)
    age(write(tmp_path, server("a")), -1)  # which is renewed, and so is newer
    read, num_read = module.read_safely, 0

    def count(*args, **options):
        nonlocal num_read
        num_read += 1
        return read(*args, **options)

    monkeypatch.setattr(module, "read_safely", count)
    for _ in range(2 * PATIENCE):
        assert found(register) == (server("a"),)
    assert num_read <= 2 * PATIENCE * MAX_UNUSABLE + 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == MAX_TOLD + 1
    assert warnings[-1] == f"{tmp_path} has more files that are not used; give the node servers their own"
    assert len(register.problems) == MAX_TOLD + 1
    assert register.problems[str(tmp_path)] == f"{500 - MAX_TOLD} more files there are not used"


def test_files_that_others_have_put_there_hide_no_server(tmp_path, register):
    write(tmp_path, known := server("a"))
    assert found(register) == (known,)
    for number in range(2 * MAX_UNUSABLE):
        path = tmp_path / f"{number}.server.json"
        path.touch()
        path.chmod(0o666)
    path.unlink()
    (tmp_path / "link.server.json").symlink_to("/etc/passwd")
    age(write(tmp_path, new := server("b", 2.0)), 1)
    assert found(register) == (known, new)


def test_servers_that_only_other_machines_reach_hide_no_server(tmp_path, register):
    for number in range(2 * MAX_UNUSABLE):
        address = Address("127.0.0.1", 1024 + number)
        write(tmp_path, server("elsewhere", address=address, machine="~"), str(number))
    register.look()  # they are known from now on
    age(write(tmp_path, new := server("b")), 1)
    assert found(register) == (new,)


LOCAL = [Address(host, 6543) for host in ("127.0.0.1", "127.0.1.1", "::1", "fe80::1", "localhost", "name.of.this.host")]


@pytest.mark.parametrize("address", [*LOCAL, Address(path="/run/pool")], ids=str)
@pytest.mark.parametrize("machine", ["!", "~"])
def test_loopback_address_of_another_machine_is_not_used(tmp_path, register, address, machine, monkeypatch):
    names = {"name.of.this.host": "127.0.1.1", "localhost": "::1", "10.0.0.7": "10.0.0.7"}
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (names[host], 0))])
    path = write(tmp_path, server("node01", address=address, machine=machine))
    assert register.look() == {}
    assert f"{address} cannot be reached from outside node01" in register.problems[path.name]
    path.unlink()
    path = write(tmp_path, server("node02", address=Address("10.0.0.7", 6543), machine=machine, is_local=True))
    assert register.look() == {}
    assert "10.0.0.7:6543 cannot be reached from outside node02" in register.problems[path.name]
    path.unlink()
    here = server("node01", address=address, machine=machine_id())
    write(tmp_path, here, "1")
    assert found(register) == (here,)


def test_file_that_was_removed_comes_again_as_it_was(tmp_path):
    registration = Registration(str(tmp_path), server("node01"))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.unlink()
    registration.renew()
    assert path.read_bytes() == content
    registration.close()
    assert list(tmp_path.iterdir()) == []


def test_of_two_servers_at_an_address_the_newer_one_is_there(tmp_path, register):
    old, new = server("a", 1.0), server("a", 2.0, pid=5000)
    write(tmp_path, new)
    path = write(tmp_path, old)
    assert found(register) == (new,)
    assert register.problems == {path.name: f"{new.file_name('0')} is newer and has the same address"}


def test_server_that_falls_silent_is_gone_until_it_is_heard_again(tmp_path, register, monkeypatch):
    path = write(tmp_path, server("a"))
    assert found(register) == (server("a"),)
    later = time.monotonic() + MAX_SILENCE + 1
    monkeypatch.setattr(module.time, "monotonic", lambda: later)
    others = tuple(server(name) for name in "bcdefg")
    for each in others:
        write(tmp_path, each)
    assert set(found(register)) == set(others)
    age(path, 5)
    assert set(found(register)) == {server("a"), *others}


def test_directory_that_cannot_be_read_leaves_what_was_known(tmp_path, register, monkeypatch):
    write(tmp_path, server("a"))
    assert found(register) == (server("a"),)

    def fail(_path):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        assert found(register) == (server("a"),)
        assert register.problems == {str(tmp_path): "Input/output error"}
    assert found(register) == (server("a"),)
    assert register.problems == {}
    away = tmp_path.rename(tmp_path.with_name("away"))
    assert len(register.look()) == 1
    away.rename(tmp_path)
    assert Register(str(tmp_path / "missing")).look() == {}


# What a node server writes about itself


NODE = ServerEntry(Address("node01", 6543), 32, "node01", 4711, "the machine", 1795264940.5)

CONTENT = b"""{
 "address": "node01:6543",
 "num_workers": 32,
 "host": "node01",
 "pid": 4711,
 "machine": "the machine",
 "started": 1795264940.5,
 "is_local": false
}
"""


def test_content_of_a_file():
    assert NODE.encode() == CONTENT
    assert ServerEntry.decode(CONTENT) == NODE
    assert ServerEntry.decode(changed(more=[1, 2])) == NODE  # of a later version


def changed(**fields):
    return json.dumps({**json.loads(CONTENT), **fields}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[]", "is not a JSON object"),
        (b"[" * 4096, "is n"),  # "is nested too deeply", or from Python 3.12 on "is not JSON"
        (changed(address=None), "address is of another type"),
        (changed(address="node01"), "cannot read the address 'node01': write host:port"),
        (changed(address="node01:6543\x1b[2J"), "cannot read the address"),
        (changed(address="\ud800:1"), "cannot read the address"),
        (changed(num_workers=True), "num_workers is of another type"),
        (changed(started="now"), "started is of another type"),
    ],
)
def test_anything_else_is_refused(content, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        ServerEntry.decode(content)


@pytest.mark.parametrize(
    ("alone", "addresses"),
    [
        (True, ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "[fe80::1]:1", "localhost:1", "unix:/run/pool"]),
        (False, ["10.0.0.1:1", "node01:1"]),
    ],
)
def test_addresses_that_are_for_their_machine_alone(alone, addresses):
    for address in addresses:
        assert dataclasses.replace(NODE, address=Address.parse(address)).is_for_its_machine_alone is alone


def skew(monkeypatch, seconds):
    """Set the clock of this machine forward."""
    clock = types.SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
    monkeypatch.setattr(module, "time", clock)


@pytest.mark.parametrize("seconds", [-120, 120])
def test_first_look_is_unsure_where_all_servers_seem_silent(tmp_path, register, monkeypatch, seconds):
    assert (found(register), register.is_unsure) == ((), False)
    path = write(tmp_path, server("a"))
    skew(monkeypatch, seconds)
    register = Register(str(tmp_path))
    assert (found(register), register.is_unsure) == ((), True)
    age(path, -1)  # it is renewed
    assert found(register) == (server("a"),)
    # One that is alive by this clock shows that it is right.
    skew(monkeypatch, 0)
    write(tmp_path, server("b"), "1")
    age(path, 120)
    register = Register(str(tmp_path))
    assert (found(register), register.is_unsure) == ((server("b"),), False)


def test_first_look_is_sure_after_the_time_of_a_renewal(tmp_path, register, monkeypatch):
    monkeypatch.setattr(module, "_RENEWED_AFTER", 0.2)
    age(write(tmp_path, server("a")), 120)
    assert (found(register), register.is_unsure) == ((), True)
    wait_until(lambda: not register.is_unsure)
    assert found(register) == ()


class Counting(Lookup):
    condition, advice, pause = "here", "", 60.0

    def __init__(self):
        super().__init__("here")
        self.count = 0

    def _look(self):
        self.count += 1
        return {Address("node", self.count): ""}, {}


def test_passes_share_looks_until_it_is_time_for_another_one():
    lookup = Counting()
    for _ in range(3):
        servers, seconds = lookup.follow()
        assert list(servers) == [Address("node", 1)]
        assert 0 < seconds <= 60
    # Never older than what a pass has begun with.
    assert list(lookup.look()) == [Address("node", 2)]
    assert list(lookup.follow()[0]) == [Address("node", 2)]
    lookup.pause = 0.0
    assert lookup.follow() == ({Address("node", 3): ""}, 0.0)


def test_look_ends_after_ctrl_c_as_one_begins(monkeypatch):
    class Interrupted(threading.Thread):
        def start(self):
            signal.raise_signal(signal.SIGINT)
            super().start()

    lookup = Counting()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lookup.look()
    assert lookup.look(10)
    assert not lookup.problems


def test_pass_that_comes_as_another_one_has_looked_does_not_look_again():
    lookup = Counting()
    changed = lookup._changed

    @contextlib.contextmanager
    def after_another():
        lookup._changed = changed
        lookup.follow()
        with changed:
            yield

    lookup._changed = after_another()
    lookup.follow()
    assert lookup.count == 1
