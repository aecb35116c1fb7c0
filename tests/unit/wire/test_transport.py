"""Sockets: what arrives, what happens when it does not, and which errors callers see.

Everything here is one process, over socket pairs, loopback ports of the kernel's choice and Unix sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rpcdataloader.errors import AuthenticationError, ConnectError, ConnectionLostError
from rpcdataloader.wire import transport
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import accept, connect, listen_tcp, listen_unix
from rpcdataloader.wire.transport import Deadline, Transport
from tests.conftest import TIMEOUT_SCALE, wait_until

FOREVER = 30 * TIMEOUT_SCALE

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pair():
    """Two transports joined to each other."""
    ours, theirs = (
        Transport(sock, name) for sock, name in zip(socket.socketpair(), ("node07:6543", "client"), strict=True)
    )
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def tcp_pair():
    with listen_tcp("127.0.0.1", [0]) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    transports = Transport(ours, "node07:6543"), Transport(theirs, "client")
    yield transports
    for each in transports:
        each.close()


def read(transport, size):
    """Exactly ``size`` bytes, or what comes before the end of file."""
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size and (count := transport.recv_into([view[filled:]])):
        filled += count
    return bytes(data[:filled])


def in_thread(function, *args):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def test_pieces_arrive_in_order_whatever_their_number_and_kind(pair):
    """More than the kernel takes at once, and more than the socket holds."""
    ours, theirs = pair
    pieces = [struct.pack("<I", number) for number in range(3 * transport.MAX_PIECES)]
    pieces += [bytearray(b"x" * 5_000_000), memoryview(b"y" * 7), b"", b"z"]
    expected = b"".join(pieces)
    sending = in_thread(ours.send, pieces)
    assert read(theirs, len(expected)) == expected
    sending.result(FOREVER)


MIB = 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [[4 * MIB], [9 * MIB + 1], [5 * MIB, MIB // 2, 0, MIB // 2], [5 * MIB, MIB // 2, MIB], [100_000] * 100],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_large_blocks_over_tcp_arrive_whole_with_nothing_after_them(tcp_pair, sizes):
    ours, theirs = tcp_pair
    size = sum(sizes)
    data = os.urandom(size)
    sending = in_thread(ours.send, [data])
    memory = memoryview(bytearray(size))
    filled = 0
    while filled < size:
        views, end = [], 0
        for length in sizes:  # what is left of each
            end += length
            views.append(memory[max(filled, end - length) : max(filled, end)])
        filled += theirs.recv_into(list(filter(None, views)))
    assert memory == data
    sending.result(FOREVER)
    ours.send([b"x"])
    assert read(theirs, 1) == b"x"


def low_water(transport):
    return transport._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_receiver_of_a_large_block_sleeps_until_much_has_come(tcp_pair):
    ours, theirs = tcp_pair
    memory = memoryview(bytearray(9 * MIB))
    receiving = in_thread(theirs.recv_into, [memory])
    wait_until(lambda: low_water(theirs) == transport.LOW_WATER_BYTES)
    ours.send([bytes(9 * MIB - 1)])
    assert receiving.result(FOREVER) == 8 * MIB
    assert low_water(theirs) == 1
    receiving = in_thread(theirs.recv_into, [memory])
    wait_until(lambda: low_water(theirs) > 1)
    ours.shutdown()
    assert receiving.result(FOREVER) == MIB - 1


def test_reset_is_a_lost_connection_with_its_cause(tcp_pair):
    ours, theirs = tcp_pair
    theirs._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(ConnectionLostError, match="connection to node07:6543 lost: Connection reset by peer") as raised:
        ours.recv_into([memoryview(bytearray(10))])
    assert isinstance(raised.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize(
    ("uid", "euid", "allowed"), [(1000, 1000, True), (0, 1000, True), (1001, 1000, False), (1000, 0, False)]
)
def test_only_the_same_user_may_connect_without_a_secret(pair, monkeypatch, uid, euid, allowed):
    monkeypatch.setattr(transport, "peer_uid", lambda _sock: uid)
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    if allowed:
        pair[0].require_same_user()
    else:
        with pytest.raises(AuthenticationError, match=f"belongs to user id {uid} and this process to {euid}"):
            pair[0].require_same_user()


# --- connecting


def test_connecting_to_nobody_says_what_to_do():
    with listen_tcp("127.0.0.1", [0]) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(ConnectError, match=rf"cannot connect to {address}: connection refused \(is `python -m rpc"):
        connect(address, Deadline(FOREVER))
    with pytest.raises(ConnectError, match="cannot connect to unix:/nowhere/pool: No such file or directory"):
        connect(Address(path="/nowhere/pool"), Deadline(FOREVER))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64 + ".org"])
def test_host_that_does_not_resolve(host, monkeypatch):
    if host.endswith(".invalid"):  # so that nobody is asked
        error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    with pytest.raises(ConnectError, match=rf"cannot connect to {host}:6543: the host name does not resolve \("):
        connect(Address(host, 6543), Deadline(FOREVER))


class Impatient(Deadline):
    """Makes pauses a hundred times shorter."""

    def pause(self, seconds):
        return super().pause(seconds / 100)


def test_waiting_for_a_server_that_is_not_there_yet(tmp_path, caplog):
    """Trainers and node servers of a job start at the same time."""
    address = Address(path=str(tmp_path / "socket"))
    waiting = in_thread(lambda: connect(address, Impatient(FOREVER), retry=True, label=lambda: "[rank 1 of 2] "))
    wait_until(lambda: "[rank 1 of 2] still waiting for unix:" in caplog.text, 20)
    with listen_unix(address.path):
        waiting.result(FOREVER).close()
    assert caplog.text.count("still waiting") == 1


def test_waiting_ends_at_the_deadline_and_when_it_is_cancelled(tmp_path):
    address = Address(path=str(tmp_path / "socket"))
    with pytest.raises(ConnectError, match="No such file or directory"):
        connect(address, Deadline(0.1), retry=True)
    deadline = Deadline(None)
    waiting = in_thread(lambda: connect(address, deadline, retry=True))
    deadline.cancel()
    with pytest.raises(ConnectError):
        waiting.result(FOREVER)


@contextlib.contextmanager
def silent_host():
    """An address that answers nothing: a listener whose queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.1)
            try:
                filler.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()


def test_every_address_of_a_name_is_tried_within_the_one_deadline(monkeypatch):
    """An address that drops packets, such as an IPv6 one without a route, leaves time for the next."""
    with silent_host() as silent, listen_tcp("127.0.0.1", [0]) as listener:
        known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (silent, listener.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: known)
        for _ in range(2):
            connect(Address("node07", 6543), Deadline(3.0)).close()
            known.reverse()
        known[1] = known[0]
        start = time.monotonic()
        with pytest.raises(ConnectError, match="cannot connect to node07:6543: no answer in time"):
            connect(Address("node07", 6543), Deadline(0.3))
        assert time.monotonic() - start < 0.3 + FOREVER


def test_connection_of_a_port_to_itself_is_nobody(monkeypatch):
    """TCP allows that, and a client that waits for a server on a port of the ephemeral range will meet it."""

    class FromTheSamePort(socket.socket):
        def connect(self, address):
            self.bind(address)
            super().connect(address)

    with listen_tcp("127.0.0.1", [0]) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(socket, "socket", FromTheSamePort)
    with pytest.raises(ConnectError, match="connection refused"):
        connect(Address("127.0.0.1", port), Deadline(FOREVER))


def test_tcp_options():
    with listen_tcp("127.0.0.1", [0]) as listener:
        ours = connect(Address("127.0.0.1", listener.getsockname()[1]), Deadline(FOREVER))
        sock, source, _name = accept(listener)
    assert source == "127.0.0.1"
    for end in (ours._sock, sock):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        # It would cut off a peer that merely stands still.
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        if sys.platform == "linux":
            # The kernel doubles it, up to its limit, which is at least 208 KiB.
            assert 1 << 18 <= end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20
    ours.close()
    sock.close()


# Repeated segments, probes, seconds since data came, seconds since an acknowledgement came.
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((3, 0, 25, 25), True),
        ((0, 3, 25, 25), True),  # the peer takes nothing more, and does not answer the question when it will
        ((1, 2, 25, 25), True),
        ((2, 0, 600, 600), False),  # too few to be sure
        ((9, 0, 24, 600), False),  # an outage that may pass, as keep-alive waits for it, too
        ((9, 9, 600, 1), False),  # a process that is stopped: its host answers
        ((9, 9, 1, 600), False),
    ],
)
def test_host_is_gone_if_it_leaves_all_unanswered_for_as_long_as_keep_alive_waits(fields, expected):
    *counts, data, acknowledgement = fields
    info = struct.pack("=2xBB48xII", *counts, data * 1000, acknowledgement * 1000)
    sock = Mock(family=socket.AF_INET, getsockopt=Mock(return_value=info))
    assert transport.is_cut_off(sock) is expected
    sock.getsockopt.assert_called_once_with(socket.IPPROTO_TCP, socket.TCP_INFO, len(info))
