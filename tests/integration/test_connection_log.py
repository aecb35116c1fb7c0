"""What a node server logs of connections: who, from where, how long, how much, and why no longer."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from rpcdataloader import RPCDataset, rpc_async
from rpcdataloader.client import client as pool
from rpcdataloader.errors import ConnectError
from tests.conftest import wait_until
from tests.unit.server.test_connections import parse

CLIENT = f"{socket.gethostname()}:{os.getpid()}"
LINE = re.compile(r"rpcdataloader\.connections\[\d+\] (.*)")
MEGABYTE = 2**20


def lines(server, **wanted):
    """What the log says of connections, where it says this."""
    found = [parse(match[1]) for match in LINE.finditer(server.log)]
    return [line for line in found if all(line[key] == value for key, value in wanted.items())]


@pytest.fixture
def serve(serve):
    """Start node servers that log each connection."""
    return lambda *options, **more: serve("--log-level", "debug", *options, **more)


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.mark.parametrize(("level", "expected"), [("info", ["control"]), ("warning", [])])
def test_log_has_one_line_per_client_unless_each_connection_is_asked_for(serve, level, expected):
    server = serve("--log-level", level)
    assert rpc_async(server.address, os.getpid).wait() != os.getpid()
    pool.close_client()
    wait_until(lambda: not server.processes())
    assert [line["kind"] for line in lines(server)] == expected
    assert ("listening on" in server.log) == bool(expected)


def test_connections_of_a_client_have_a_line_at_each_end(serve):
    server = serve()
    assert len(rpc_async(server.address, bytes, (bytes(MEGABYTE),)).wait()) == MEGABYTE
    pool.close_client()
    wait_until(lambda: len(lines(server, event="closed")) == 2)
    assert len(lines(server)) == 4
    for line in lines(server):
        assert re.fullmatch(r"127\.0\.0\.1:\d+", line["peer"])
        assert (line["client"], line["rank"], line["job"]) == (CLIENT, "3", "4711")
    (control,), (worker,) = (lines(server, event="closed", kind=kind) for kind in ("control", "worker"))
    assert control["reason"] == "the client has gone"
    assert (control["worker"], worker["worker"]) == ("-", "1")
    assert control["peer"] != worker["peer"]
    for direction in ("received", "sent"):
        assert 100 < int(control[direction]) < 100_000
        assert MEGABYTE < int(worker[direction]) < MEGABYTE + 10_000
    assert 0 < float(worker["seconds"]) <= float(control["seconds"]) + 0.001


def test_connection_waits_while_the_table_of_processes_has_no_room(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "1")
    before = """
from rpcdataloader.server.counters import CounterTable
CounterTable.__init__.__defaults__ = (2, *CounterTable.__init__.__defaults__[1:])
"""
    server = serve(before=before)
    with pytest.raises(ConnectError):  # it has a session, and no worker
        rpc_async(server.address, os.getpid).wait()
    assert "cannot accept a connection now: at most 1 processes can serve connections" in server.log
    assert [line["kind"] for line in lines(server, event="accepted")] == ["control"]


def test_bytes_of_a_worker_that_was_killed_are_known(serve):
    server = serve()
    pid = rpc_async(server.address, os.getpid).wait()
    assert rpc_async(server.address, len, (bytes(MEGABYTE),)).wait() == MEGABYTE
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: lines(server, event="closed"))
    (line,) = lines(server, event="closed")
    assert (line["kind"], line["reason"]) == ("worker", "was killed by SIGKILL (perhaps out of memory)")
    assert int(line["received"]) > MEGABYTE


def test_connections_of_a_session_that_was_killed_are_closed_too(serve):
    server = serve()
    session = rpc_async(server.address, os.getppid).wait()
    os.kill(session, signal.SIGKILL)
    wait_until(lambda: len(lines(server, event="closed")) == 2)
    (line,) = lines(server, event="closed", kind="worker")
    assert line["reason"] == "its session has ended: was killed by SIGKILL (perhaps out of memory)"
    assert int(line["sent"]) > 100


def test_client_that_gets_no_worker_is_refused_by_name(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "2")
    server = serve("--max-connections-per-client", "1")
    dataset = RPCDataset([server.address], range, 3)
    assert dataset[1] == 1  # by a worker that is kept
    with pytest.raises(ConnectError, match="is busy: this client has its 1 connections"):
        rpc_async(server.address, os.getpid).wait()
    line = lines(server, event="refused")[0]
    assert (line["kind"], line["client"], line["job"]) == ("worker", CLIENT, "4711")
    assert line["reason"] == "busy: this client has its 1 connections (--max-connections-per-client)"


def test_peers_on_a_unix_socket_are_users(serve, tmp_path):
    server = serve("--host", f"unix:{tmp_path}/socket")
    rpc_async(server.address, os.getpid).wait()
    assert {line["peer"] for line in lines(server)} == {f"uid:{os.geteuid()}"}
