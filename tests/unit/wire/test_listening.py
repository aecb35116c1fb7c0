"""Who may listen where, and what a server accepts.

Everything here is one process, over loopback ports of the kernel's choice and Unix sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

import pytest

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import accept, connect, listen_tcp, listen_unix
from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE

FOREVER = 30 * TIMEOUT_SCALE

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_first_free_port_of_a_range():
    with listen_tcp("127.0.0.1", [0]) as first:
        port = first.getsockname()[1]
        with listen_tcp("127.0.0.1", [port, 0]) as second:
            assert second.getsockname()[1] not in (0, port)


def test_port_in_use_is_told_with_the_way_out():
    with listen_tcp("127.0.0.1", [0]) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectError, match=f"cannot listen on 127.0.0.1: port {port} in use; choose another"):
            listen_tcp("127.0.0.1", [port])
        with pytest.raises(ConnectError, match=f"port {port}-{port} in use"):
            listen_tcp("127.0.0.1", [port, port])


@pytest.fixture
def unix_path(tmp_path):
    """One that is too long for a socket address."""
    folder = tmp_path / ("d" * 120) / ("e" * 90)
    folder.mkdir(parents=True)
    return str(folder / "socket")


def test_socket_file_of_a_dead_server_is_replaced(unix_path):
    listen_unix(unix_path).close()
    with pytest.raises(ConnectError, match="connection refused"):
        connect(Address(path=unix_path), Deadline(FOREVER))
    with listen_unix(unix_path):
        connect(Address(path=unix_path), Deadline(FOREVER)).close()


def test_socket_of_a_live_server_is_not_taken(unix_path):
    with listen_unix(unix_path), pytest.raises(ConnectError, match=f"cannot listen on unix:{unix_path}: in use by"):
        listen_unix(unix_path)


def test_socket_of_a_server_that_is_stuck_is_not_taken(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as stuck, contextlib.ExitStack() as stack:
        stuck.bind(path)
        stuck.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(path)
        with pytest.raises(ConnectError, match="in use by another server"):
            listen_unix(path)


def test_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("precious")
    with pytest.raises(ConnectError, match=f"cannot listen on unix:{path}: something else has that name"):
        listen_unix(str(path))
    assert path.read_text() == "precious"


def test_accept_without_a_descriptor_left_is_an_error_and_the_connection_waits():
    with listen_tcp("127.0.0.1", [0]) as listener:
        listener.setblocking(False)
        stream = connect(Address("127.0.0.1", listener.getsockname()[1]), Deadline(FOREVER))
        lowest = os.dup(0)
        os.close(lowest)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            with pytest.raises(ConnectError, match=os.strerror(errno.EMFILE)):
                accept(listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock, _source, _name = accept(listener)
        sock.close()
        stream.close()
