"""What a node server logs of connections: who, from where, how long, how much, why no longer; and who is refused."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket

import pytest

from rpcdataloader import RPCDataset, rpc_async
from rpcdataloader.client.discovery import ask_status
from rpcdataloader.errors import AuthenticationError, ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import load_credentials
from rpcdataloader.wire.handshake import UnavailableError
from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE, close_client, wait_until
from tests.support.peers import NO_TICKET, open_as_client, open_worker_of, preamble, ticket_of
from tests.support.tampering import dial, read_to_the_end

CLIENT = f"client {socket.gethostname()}:{os.getpid()} rank 3"
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_log_has_the_lines_of_clients_and_on_request_those_of_workers(serve, level):
    server = serve("--log-level", level)
    assert len(rpc_async(server.address, bytes, (bytes(MEGABYTE),)).wait()) == MEGABYTE
    close_client()
    wait_until(lambda: not server.processes())
    if level != "warning":
        server.logged(rf" INFO rpcdataloader.server\[\d+\] {CLIENT} of job 4711 has come from 127\.0\.0\.1:\d+\n")
        line = (
            rf"INFO .* session of {CLIENT} ended: the client has gone after \d+\.\d s; its workers received (\d+) .* "
        )
        received, sent = server.logged(line + r"sent (\d+)\n").groups()
        assert MEGABYTE < int(received) < MEGABYTE + 10_000
        assert MEGABYTE < int(sent) < MEGABYTE + 10_000
    assert ("listening on" in server.log, CLIENT in server.log) == (level != "warning",) * 2
    assert bool(re.search(rf"DEBUG .* worker 1 of {CLIENT} has come from", server.log)) == (level == "debug")


def test_clients_that_leave_early_or_find_no_worker_are_not_refused(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "2")
    server = serve("--max-connections", "1", "--log-level", "debug")
    assert rpc_async(server.address, os.getpid).wait() > 0
    worker = ticket_of(server.address)
    for ticket in NO_TICKET, worker, b"\1" * 16:  # a new session, a worker, and one of a session that has ended
        with dial(server.address, preamble(ticket)) as sock:
            sock.shutdown(socket.SHUT_WR)
            read_to_the_end(sock)
    dataset = RPCDataset(server.address, range, 3)
    with pytest.raises(ConnectError):
        assert dataset[1]
    server.logged(rf"INFO .* {CLIENT} gets no further worker: all 1 connections are in use \(--max-connections\)\n")
    assert "refused" not in server.log


def test_client_that_is_refused_repeatedly_is_told_of_once(serve, other_secret, monkeypatch):
    server = serve()
    where, told = Address.parse(server.address), set()
    with monkeypatch.context() as patch:
        patch.setenv("RPCDATALOADER_TOKEN_FILE", str(other_secret))
        for _ in range(3):
            with pytest.raises(AuthenticationError) as caught:
                ask_status(where, load_credentials(), None, Deadline(20 * TIMEOUT_SCALE))
            told.add(str(caught.value))
    assert len(told) == 1  # so that a client tells of it once, too

    def num_refused():
        return ask_status(where, load_credentials(), None, Deadline(20 * TIMEOUT_SCALE))[0].refused_connections

    wait_until(lambda: num_refused() == 3)
    assert server.log.count("] refused 127.0.0.1:") == 1


def test_client_without_room_is_told_of_once_though_it_begins_other_sessions(serve):
    server = serve("--max-connections", "1")
    assert rpc_async(server.address, os.getpid).wait() > 0
    for _ in range(3):
        control, welcome = open_as_client(server.address)
        with (
            contextlib.closing(control.transport),
            pytest.raises(UnavailableError, match="all 1 connections are in use"),
        ):
            open_worker_of(server.address, control, welcome.pid)
    assert server.log.count("gets no further worker: all 1 connections are in use") == 1


def test_log_that_is_not_read_stops_nothing_and_counts_what_is_lost(serve, fifo):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb", buffering=0) as log, open(fifo, "wb", buffering=0) as filler:
        os.set_blocking(filler.fileno(), False)
        while filler.write(b"x" * 4095 + b"\n"):
            pass
        server = serve("--log-level", "debug", before=f"os.dup2(os.open({fifo!r}, os.O_WRONLY), 2)")
        lines = [f"{number:04d} {'y' * 1000}" for number in range(2000)]
        rpc_async(server.address, print, ("\n".join(lines),)).wait()
        close_client()
        assert rpc_async(server.address, os.getpid).wait() > 0  # another client
        text = b""

        def left_out():
            nonlocal text
            text += log.read(65536) or b""
            return re.search(rb"\nrpcdataloader: left (\d+) lines out here, as they were not read in time\n", text)

        wait_until(left_out)
        written = re.findall(rb"worker 1\] (\d{4}) y{1000}\n", text)
        assert [int(number) for number in written] == list(range(len(written)))
        assert len(written) + int(left_out()[1]) >= len(lines)
        with contextlib.suppress(BlockingIOError):
            while filler.write(b"x" * 4096):
                pass
        server.signal(signal.SIGTERM)
        close_client()
        assert server.wait() == 0
