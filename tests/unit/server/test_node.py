"""The loop of a node server, with clients that do as the test says."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from unittest.mock import Mock

import pytest

from rpcdataloader.server import clients
from rpcdataloader.server.clients import ClientRecord
from rpcdataloader.server.node import MAX_UNPROVED, NodeServer
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE
from rpcdataloader.wire.handshake import Preamble, Tickets
from tests.conftest import TIMEOUT_SCALE, wait_until

KEY = b"a key of the test"
SESSION = 4711


@pytest.fixture
def server():
    """A node server with a client, whose session does not take connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        life, held = multiprocessing.Pipe(duplex=False)
        server = NodeServer(listener, ServerContext(ServerSettings(), INSECURE, 1, life), held)
        process = Mock(pid=SESSION)
        link = Mock(**{"recv.side_effect": BlockingIOError, "offer.return_value": False})
        client = ClientRecord(
            process=process,
            link=link,
            sock=Mock(),
            tickets=Tickets(KEY, SESSION),
            name="client",
            identity=Mock(),
            folder="",
            row=server._context.counters.open(),
        )
        server._clients._by_pid[SESSION] = client
        server._children[SESSION] = Mock(link=link, client=client)
        server._fork_gate = Mock(side_effect=AssertionError("a fork"))
        yield server
        for connection in list(server._unproved):
            server._drop(connection, "the test ends")
        server.signals.close()


@contextlib.contextmanager
def comes(server, ticket=b"", start=b""):
    """A peer with a ticket, or with other first bytes, has connected."""
    peer, sock = socket.socketpair()
    with peer:
        peer.settimeout(10 * TIMEOUT_SCALE)
        peer.sendall(start or Preamble(ticket).encode())
        server._look_at(server._add_stranger(sock, "host", "host:1"))
        yield peer


def test_connections_that_come_and_go_before_a_busy_session_are_looked_at_by_one_timer(server, monkeypatch):
    monkeypatch.setattr(clients, "RETRY_PAUSE", 600.0)
    client, tickets = server._clients.find(SESSION), Tickets(KEY, SESSION)
    num_before = len(server._loop._timers.queue)
    for _ in range(3):
        with comes(server, tickets.make()):
            assert len(client.coming) == 1
        server._loop.wait(0)
        assert not client.coming
    assert len(server._loop._timers.queue) == num_before + 1
    assert not server._unproved


def test_connections_beyond_all_limits_of_strangers_wait_for_a_busy_session(server):
    client, tickets = server._clients.find(SESSION), Tickets(KEY, SESSION)
    with contextlib.ExitStack() as peers:
        for number in range(300):
            peers.enter_context(comes(server, tickets.make()))
            assert (len(client.coming), len(server._unproved)) == (number + 1, 0)
        assert server._strangers.num_refused == 0
        client.link.offer.return_value = True
        server._clients._hand_over_later(client)
        assert not client.coming


@pytest.mark.parametrize("kind", ["forged", "of another key", "used", "of a session that has ended"])
def test_ticket_that_is_not_good_is_refused_without_a_process(server, kind):
    client, tickets = server._clients.find(SESSION), Tickets(KEY, SESSION)
    ticket = tickets.make()
    if kind == "forged":
        ticket = ticket[:-1] + bytes([ticket[-1] ^ 1])
    elif kind == "of another key":
        ticket = Tickets(b"that of another session", SESSION).make()
    elif kind == "used":
        client.tickets.take(ticket)
    else:
        ticket = Tickets(KEY, SESSION + 1).make()
    with comes(server, ticket) as peer:
        assert b"there is no such session on this node server" in peer.recv(4096)
        assert peer.recv(1) == b""
        assert not client.coming
        assert len(server._unproved) == 1  # until it closes
    server._loop.wait(0)
    assert not server._unproved
    assert server._strangers.num_refused == (kind != "of a session that has ended")
    client.link.offer.assert_not_called()


def test_connection_with_other_bytes_than_a_preamble_is_closed_without_a_process(server):
    with comes(server, start=b"GET / HTTP/1.1\r\nHost: node01:6543\r\n\r\n") as peer:
        assert server._strangers.num_refused == 1
        assert not server._unproved
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


def test_preamble_may_come_in_parts_and_costs_no_process_if_it_is_cut_short(server):
    client, whole = server._clients.find(SESSION), Preamble(Tickets(KEY, SESSION).make()).encode()
    with comes(server, start=whole[:20]) as peer:
        server._loop.wait(0)
        assert len(server._unproved) == 1
        peer.sendall(whole[20:])
        wait_until(lambda: server._loop.wait(0) or client.coming)
    with comes(server, start=whole[:20]):
        pass
    server._loop.wait(0)
    assert not server._unproved
    assert server._strangers.num_refused == 1


def test_refused_strangers_make_room_at_once(server):
    with contextlib.ExitStack() as peers:
        for _ in range(MAX_UNPROVED + 5):
            assert server._has_room()
            peers.enter_context(comes(server, Tickets(b"another key", SESSION).make()))
        assert len(server._unproved) == MAX_UNPROVED
