"""Node servers that register in a directory, and clients that find them there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async, wire
from rpcdataloader.__main__ import main
from rpcdataloader.client import discovery
from rpcdataloader.errors import ConnectError
from rpcdataloader.wire import credentials
from tests.conftest import AT_ONCE, close_client, descendants, wait_until
from tests.support import datasets
from tests.support.clocks import in_server

pytestmark = pytest.mark.usefixtures("clean_client")


class Servers(IterableDataset):
    """Which node server it is iterated over on: an epoch ends when every worker has said so."""

    def __iter__(self):
        yield datasets.node_server()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pool"


@pytest.fixture
def where(folder):
    return f"@{folder}"


@pytest.fixture
def register(serve, folder):
    """Start a server with two workers that registers; gives it and its file."""

    def register(*options, **others):
        before = set(files(folder))
        server = serve("--num-workers", "2", "--register", str(folder), *options, **others)
        (path,) = set(files(folder)) - before
        return server, path

    return register


def files(folder):
    return sorted(folder.iterdir()) if folder.exists() else []


def servers_of(loader):
    return {int(server) for server in loader}


# --- the server


def test_file_is_there_with_the_ready_line_and_is_renewed_where_there_is_nothing_to_do(register):
    server, path = register(before=in_server("renewal"))
    said = json.loads(path.read_text())
    assert (said["address"], said["num_workers"], said["pid"]) == (server.address, server.num_workers, server.pid)
    assert said["host"] == socket.gethostname()
    for _ in range(3):
        os.utime(path, (1000.0, 1000.0))
        wait_until(lambda: path.stat().st_mtime > 1000.0)


def test_file_that_is_removed_is_written_again_unless_its_folder_has_gone(register, folder):
    server, path = register(before=in_server("renewal"))
    path.unlink()
    server.logged(f"{path} was removed by another process: registered again")
    assert path.exists()
    folder.rename(f"{folder}-gone")
    server.logged(f"cannot renew {path}: No such file or directory")
    assert server.log.count("registered again") == 1


@pytest.mark.parametrize("function", ["utime", "unlink"])
def test_server_whose_file_server_hangs_serves_and_drains(register, function):
    hangs = f"import os, time; os.{function} = lambda *_: time.sleep(600); "
    server, _path = register(before=hangs + in_server("renewal"))
    wait_until(lambda: function == "unlink" or len(descendants(server.pid)) == 1)
    assert rpc_async(server.address, os.getpid).wait() > 0
    begin = time.monotonic()
    assert server.end(signal.SIGTERM) == 0
    assert time.monotonic() - begin < AT_ONCE


FOLDER_HANGS = """
import tempfile
folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(dir={folder!r})  # the package may lie beside it
def hangs(real):
    def call(path, *args, **options):
        if str(path).startswith(folder) and os.path.exists({hangs!r}):
            time.sleep(600)
        return real(path, *args, **options)
    return call
for name in "stat", "lstat":
    setattr(os, name, hangs(getattr(os, name)))
"""


def test_server_whose_folder_for_temporary_files_hangs_serves_on_after_the_end_of_a_session(serve, tmp_path):
    folder, hangs, module = (tmp_path / name for name in ("folder", "hangs", "sent_module.py"))
    folder.mkdir()
    module.touch()
    before = f"import os, time{FOLDER_HANGS.format(folder=str(folder), hangs=str(hangs))}"
    server = serve("--num-workers", "1", before=before)
    # So that the session has a folder.
    assert len(RPCDataset(server.address, datasets.Numbers, 3, py_modules=[module])) == 3
    hangs.touch()
    close_client()
    server.logged("session of .* ended: the client has gone")
    for _ in range(2):
        assert rpc_async(server.address, os.getpid).wait() > 0
        close_client()
        server.logged("session of .* ended: the client has gone")


# --- clients


@pytest.fixture
def hang(monkeypatch):
    """Let functions of a module hang until the end of the test, as while a file server or a resolver does."""
    ended = threading.Event()

    def hang(module, name):
        def wait(*_args, **_options):
            ended.wait()
            raise OSError("the test is over")

        monkeypatch.setattr(module, name, wait)

    yield hang
    ended.set()


def test_epoch_begins_while_the_register_and_the_folder_of_the_secret_hang(register, where, hang, caplog):
    register()
    dataset = RPCDataset(where, Servers)
    loader = RPCDataloader(dataset)
    servers = servers_of(loader)
    hang(wire.register.os, "scandir")
    hang(credentials, "read_safely")
    for _ in range(3):
        begin = time.monotonic()
        assert servers_of(loader) == servers
        assert time.monotonic() - begin < AT_ONCE
    assert not caplog.text


def test_name_that_no_resolver_answers_is_told_within_the_connect_timeout(hang, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "2")
    hang(discovery.socket, "getaddrinfo")
    with pytest.raises(ConnectError, match=r"pool.example: no answer for \d+ s"):
        RPCDataset("dns://pool.example:6543", Servers)


def test_node_that_restarts_while_the_resolver_hangs_joins_at_its_last_address(serve, hang, monkeypatch):
    server = serve("--num-workers", "1", "--host", "localhost")
    loader = RPCDataloader(RPCDataset(server.address, Servers))
    assert servers_of(loader) == {server.pid}
    server.stop()
    resolve = socket.getaddrinfo
    hang(socket, "getaddrinfo")
    answers = {"localhost": socket.getaddrinfo}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **how: answers.get(host, resolve)(host, *args, **how)
    )
    again = serve("--num-workers", "1", "--host", "localhost", "--port", server.address.split(":")[1])
    begin = time.monotonic()
    assert servers_of(loader) == {again.pid}
    assert time.monotonic() - begin < AT_ONCE


def test_node_that_moves_is_found_where_its_name_leads_now(serve, monkeypatch):
    resolve, host = socket.getaddrinfo, "127.0.0.1"

    def look_up(name, *args, **how):
        return resolve(host if name == "localhost" else name, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    server = serve("--num-workers", "1", "--host", host, "--advertise", "localhost")
    loader = RPCDataloader(RPCDataset(server.address, Servers))
    assert servers_of(loader) == {server.pid}
    server.stop()
    host = "127.0.0.2"
    options = "--num-workers", "1", "--port", server.address.split(":")[1]
    again = serve(*options, "--host", host)
    other = serve(*options, "--host", "127.0.0.1")  # of the same secret, where the node was
    assert servers_of(loader) == {again.pid} != {other.pid}


def test_secret_that_was_changed_is_read_again(serve, tmp_path, monkeypatch):
    """The one that the server had accepted is tried first: a home directory may be away for a moment."""
    path = tmp_path / "token"
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(path))
    path.touch(0o600)
    path.write_text("the first secret of this test")
    server = serve("--host", f"unix:{tmp_path}/socket", "--token-file", str(path))
    assert rpc_async(server.address, os.getpid).wait() > 0
    server.stop()
    path.write_text("the second secret of this test")
    server = serve("--host", f"unix:{tmp_path}/socket", "--token-file", str(path))
    assert rpc_async(server.address, os.getpid).wait() > 0


def test_dataset_over_a_directory_uses_all_servers_in_it(register, where, monkeypatch):
    pids = {register()[0].pid, register()[0].pid}
    dataset = RPCDataset(where, Servers)
    assert f"workers='{where}'" in repr(dataset)
    assert servers_of(RPCDataloader(dataset)) == pids
    assert servers_of(RPCDataloader(Servers(), workers=where)) == pids
    monkeypatch.setenv("RPCDATALOADER_WORKERS", where)
    assert servers_of(RPCDataloader(RPCDataset(None, Servers))) == pids


def test_trainer_waits_for_the_first_server(register, where, folder, caplog):
    results = []
    trainer = threading.Thread(target=lambda: results.append(servers_of(RPCDataloader(RPCDataset(where, Servers)))))
    trainer.start()
    wait_until(lambda: f"waiting for a node server to be registered in {folder}" in caplog.text)
    server, _path = register()
    trainer.join()
    assert results == [{server.pid}]


def test_directory_without_servers_is_an_error_that_names_it(where, folder, monkeypatch, capsys):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "0.1")
    close_client()
    with pytest.raises(ConnectError, match=f"no node server is registered in {folder}, and none came within 0.1 s"):
        RPCDataset(where, Servers)
    assert main(["check", "tests.behaviour.test_register:Servers", "--workers", where]) == 1
    assert f"no node server is registered in {folder}" in capsys.readouterr().out


def test_file_of_a_server_that_was_killed_holds_nobody_up(register, where, caplog, monkeypatch):
    dead, path = register()
    alive, _path = register()
    loader = RPCDataloader(RPCDataset(where, Servers))
    assert servers_of(loader) == {dead.pid, alive.pid}
    dead.end(signal.SIGKILL)
    assert path.exists()
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    assert servers_of(loader) == {alive.pid}
    close_client()
    assert servers_of(RPCDataloader(RPCDataset(where, Servers))) == {alive.pid}
    warning = f"going on without {dead.address} until it comes: cannot connect to {dead.address}"
    assert warning in caplog.text


def test_file_of_a_server_that_was_killed_is_no_reason_not_to_wait_for_the_next(register, where, caplog):
    dead, path = register()
    dead.end(signal.SIGKILL)
    assert path.exists()
    with ThreadPoolExecutor(1) as pool:
        servers = pool.submit(lambda: servers_of(RPCDataloader(RPCDataset(where, Servers))))
        wait_until(lambda: f"no answer from {dead.address}: waiting for node servers" in caplog.text)
        alive, _path = register()
        assert servers.result() == {alive.pid}


def test_server_that_was_killed_counts_for_min_workers_when_it_is_there_again(register, where):
    register()
    dead, _path = register()
    dead.end(signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        dataset = pool.submit(RPCDataset, where, Servers, min_workers=4)
        register("--port", dead.address.rpartition(":")[2])
        dataset.result()


def test_dataset_whose_servers_were_replaced_by_others_can_be_asked_and_changed(register, where):
    before, _path = register()
    dataset = RPCDataset(where, datasets.State)
    before.end(signal.SIGTERM)
    register()
    dataset.epoch = 5
    assert {int(epoch) for _index, epoch, _changes, _pid in RPCDataloader(dataset)} == {5}


def test_server_with_another_secret_is_left_out(register, where, other_secret, caplog):
    other, _path = register("--token-file", str(other_secret))
    server, _path = register()
    assert servers_of(RPCDataloader(RPCDataset(where, Servers))) == {server.pid}
    assert f"going on without {other.address} until it comes: the node server refused this connection: " in caplog.text


def test_server_that_cannot_say_that_it_is_ready_leaves_no_file(folder):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rpcdataloader.launch", "--port", "0", "--register", folder]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert "registered as" in ended.stderr
    assert "error: [Errno 32] Broken pipe" in ended.stderr
    assert files(folder) == []


@pytest.mark.parametrize("seconds", [-120, 120])
def test_status_waits_for_a_renewal_where_the_clock_of_this_machine_may_be_wrong(
    register, where, monkeypatch, capsys, seconds
):
    server, _path = register(before=in_server("renewal"))
    clock = SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
    monkeypatch.setattr("rpcdataloader.wire.register.time", clock)
    assert main(["status", where]) == 0
    assert server.address in capsys.readouterr().out
    server.end(signal.SIGKILL)
    monkeypatch.setattr("rpcdataloader.wire.register._RENEWED_AFTER", 0.5)
    assert main(["status", where]) == 1
