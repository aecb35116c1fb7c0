"""Connecting, listening and accepting: who may listen where, what is said of a host that does not answer.

Everything here is one process, over loopback ports of the kernel's choice and Unix sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import accept, connect, listen_tcp, listen_unix
from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE
from tests.unit.wire.test_transport import in_thread

FOREVER = 30 * TIMEOUT_SCALE

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_full_queue_of_a_unix_socket_is_waited_for(tmp_path):
    """TCP does that by itself. Many workers may come at once, and Linux before 5.4 lets 128 of them wait."""
    address = Address(path=str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.path)
        listener.listen(0)
        connected = [connect(address, Deadline(FOREVER))]
        start = time.monotonic()
        with pytest.raises(ConnectError, match="temporarily"):
            connect(address, Deadline(0.2))
        assert time.monotonic() > start + 0.1
        with listener.accept()[0]:
            connected.append(connect(address, Deadline(FOREVER)))
        for transport in connected:
            transport.close()


class Hasty(Deadline):
    """Allows this many pauses, and makes none."""

    def __init__(self, num_pauses):
        super().__init__(FOREVER)
        self.num_pauses = num_pauses

    def pause(self, _seconds):
        self.num_pauses -= 1
        return self.num_pauses >= 0


def test_reason_of_each_attempt_is_told(tmp_path):
    told = []
    with pytest.raises(ConnectError, match="No such file"):
        connect(Address(path=str(tmp_path / "socket")), Hasty(2), retry=True, tell=told.append)
    assert len(told) == 2
    assert all(text.startswith("No such file") for text in told)


@contextlib.contextmanager
def stuck(family, address):
    """The address of a listener that answers nothing: its queue is full."""
    with socket.socket(family) as listener, contextlib.ExitStack() as stack:
        listener.bind(address)
        listener.listen(0)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                filler = stack.enter_context(socket.socket(family))
                filler.settimeout(0.1)
                filler.connect(listener.getsockname())
        yield listener.getsockname()


def test_every_address_of_a_name_is_tried_within_the_one_deadline(monkeypatch):
    """An address that drops packets, such as an IPv6 one without a route, leaves time for the next."""
    with stuck(socket.AF_INET, ("127.0.0.1", 0)) as silent, listen_tcp("127.0.0.1", [0]) as listener:
        known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (silent, listener.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: known)
        for _ in range(2):
            connect(Address("node07", 6543), Deadline(2.0)).close()
            known.reverse()
        known[1] = known[0]
        start = time.monotonic()
        with pytest.raises(ConnectError, match="cannot connect to node07:6543: no answer"):
            connect(Address("node07", 6543), Deadline(0.3))
        assert time.monotonic() - start < 0.3 + FOREVER


@pytest.mark.parametrize("order", [1, -1])
def test_server_is_waited_for_whose_name_has_an_address_that_cannot_be_reached(monkeypatch, order):
    """As localhost has in containers without IPv6."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # and does not listen yet
        port = server.getsockname()[1]
        known = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", port)), (socket.AF_INET6, 1, 6, "", ("fe80::1", port, 0, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: known[::order])
        with pytest.raises(ConnectError, match=f"cannot connect to localhost:{port}: connection refused"):
            connect(Address("localhost", port), Deadline(FOREVER))
        waiting = in_thread(lambda: connect(Address("localhost", port), Deadline(FOREVER), retry=True))
        server.listen()
        waiting.result(FOREVER).close()


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
    # TCP_USER_TIMEOUT would cut off a peer that merely stands still.
    expected = {"NODELAY": 1, "KEEPIDLE": 10, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 0}
    for end in (ours._sock, sock):
        found = {name: end.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in expected}
        assert found == expected
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        # The kernel doubles it, up to its limit, which is at least 208 KiB.
        assert 1 << 18 <= end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20
    ours.close()
    sock.close()


# Listening


def test_only_one_of_two_servers_that_start_at_once_replaces_the_file_of_a_dead_one(tmp_path):
    path = str(tmp_path / "socket")
    both = threading.Barrier(2)

    def start():
        both.wait()
        with contextlib.suppress(ConnectError):
            return listen_unix(path)

    for _ in range(100):
        listen_unix(path).close()
        starting = [in_thread(start) for _ in range(2)]
        (listener,) = filter(None, [each.result(FOREVER) for each in starting])
        connect(Address(path=path), Deadline(FOREVER)).close()
        listener.close()
    assert os.listdir(tmp_path) == ["socket"]


def test_socket_of_a_server_that_is_stuck_is_not_taken(tmp_path):
    path = str(tmp_path / "socket")
    with stuck(socket.AF_UNIX, path), pytest.raises(ConnectError, match="in use by another server"):
        listen_unix(path)


def test_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("precious")
    with pytest.raises(ConnectError, match=f"cannot listen on unix:{path}: something else has that name"):
        listen_unix(str(path))
    assert path.read_text() == "precious"
