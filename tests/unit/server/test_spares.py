"""Gates that are forked before anybody connects."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket

import pytest

from rpcdataloader.host.output import Output
from rpcdataloader.server import node
from rpcdataloader.server.node import MAX_SPARES, QUIET_SECONDS, NodeServer
from rpcdataloader.server.processes import EXHAUSTED_PAUSE
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def make_server(monkeypatch):
    """Make node servers on a clock that stands at 100, on which they wait until 100 and some quiet."""
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    with contextlib.ExitStack() as stack:

        def make(num_workers=1):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            context = ServerContext(ServerSettings(), INSECURE, num_workers)
            server = NodeServer(listener, context, log=Output(2))
            stack.callback(server.signals.close)
            stack.callback(server._close)
            return server

        yield make


def refill(server, now):
    """The gates that it then has, oldest first."""
    for _ in range(MAX_SPARES + 1):
        server._fork_spare(now)
    return server._spares()


def test_they_are_forked_once_it_has_been_quiet_for_a_while(make_server):
    server = make_server()
    assert refill(server, 100.0 + QUIET_SECONDS / 2) == []
    assert len(refill(server, 100.0 + QUIET_SECONDS)) == 2


def test_the_oldest_one_is_taken_and_without_one_it_is_forked_at_once(make_server):
    server = make_server()
    first = server._free_gate()
    refill(server, 101.0)
    assert server._free_gate() is first
    assert len(server._spares()) == 2


def test_one_that_was_killed_is_not_taken(make_server):
    server = make_server()
    first, second = refill(server, 101.0)
    os.kill(first.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
    assert server._free_gate() is second
    assert refill(server, 100.0 + EXHAUSTED_PAUSE / 2) == [second], "or it could die again and again"


def test_system_without_room_is_asked_again_later(make_server, monkeypatch):
    server, asked = make_server(), []

    def fail(_run):
        asked.append(True)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(node, "fork_linked", fail)
    for now, count in (101.0, 1), (101.0 + EXHAUSTED_PAUSE, 2):
        refill(server, now)
        assert len(asked) == count
    with pytest.raises(BlockingIOError):
        server._free_gate()


def test_there_are_not_as_many_as_workers_of_a_large_node_and_none_during_a_drain(make_server):
    server = make_server(128)
    gates = refill(server, 101.0)
    assert len(gates) == MAX_SPARES
    server._drain()
    assert all(gate.process.reap(wait=30.0) for gate in gates)
    assert refill(server, 1e9) == gates
