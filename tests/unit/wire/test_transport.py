"""Sockets: what arrives, what happens when it does not, and which errors callers see.

Everything here is one process, over socket pairs, loopback ports of the kernel's choice and Unix sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rpcdataloader.errors import AuthenticationError, ConnectError, ConnectionLostError, RPCTimeoutError
from rpcdataloader.server.listening import accept, listen_tcp, listen_unix
from rpcdataloader.wire import connecting, transport
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import connect
from rpcdataloader.wire.transport import Deadline, Stream
from tests.conftest import TIMEOUT_SCALE, wait_until

FOREVER = 30 * TIMEOUT_SCALE

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pair():
    """Two streams joined to each other."""
    ours, theirs = (
        Stream(sock, name) for sock, name in zip(socket.socketpair(), ("node07:6543", "client"), strict=True)
    )
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def tcp_pair():
    with listen_tcp("127.0.0.1", [0]) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    streams = Stream(ours, "node07:6543"), Stream(theirs, "client")
    yield streams
    for stream in streams:
        stream.close()


def read(stream, size):
    """Exactly ``size`` bytes, or what comes before the end of file."""
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size and (count := stream.recv_into([view[filled:]])):
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


def test_partial_sends_go_on_where_the_kernel_stopped(pair):
    ours, theirs = pair
    traffic = ours._traffic
    ours._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    pieces = [bytes([number % 251]) * (number * 37 % 3000 + 1) for number in range(500)]
    sending = in_thread(ours.send, pieces)
    expected = b"".join(pieces)
    received = b""
    while len(received) < len(expected):
        received += read(theirs, min(1000, len(expected) - len(received)))
    assert received == expected
    sending.result(FOREVER)
    assert traffic == [0, len(expected)]


def test_send_that_must_not_wait_keeps_the_rest(pair):
    ours, theirs = pair
    traffic = ours._traffic
    pieces = [bytes([number % 251]) * 1000 for number in range(3 * transport.MAX_PIECES)]
    assert not ours.send_now(pieces)
    assert not ours.send_now([b"more"])
    received = traffic[1]
    assert read(theirs, received) == b"".join(pieces)[:received]
    expected = (b"".join(pieces) + b"more")[received:]
    rest = in_thread(read, theirs, len(expected))
    while not ours.send_now():
        select.select([], [ours], [])
    assert rest.result(FOREVER) == expected
    assert traffic[1] == received + len(expected)
    assert ours.send_now([b"again"])
    assert read(theirs, 5) == b"again"
    theirs.close()
    with pytest.raises(ConnectionLostError, match="lost while sending"):
        ours.send_now([b"too late"])


def test_what_the_peer_may_have_is_counted_and_what_was_not_sent_is_not(pair):
    class Watched:
        def sendmsg(self, pieces, *_flags):
            seen.append(list(ours._traffic))
            if len(seen) > 1:
                raise ConnectionResetError(errno.ECONNRESET, "reset")
            return sum(map(len, pieces))

    (ours, _theirs), seen = pair, []
    sock, ours._sock = ours._sock, Watched()
    ours.send([b"abc", b"de"])
    with pytest.raises(ConnectionLostError):
        ours.send([b"more"])
    ours._sock = sock
    assert seen == [[0, 5], [0, 9]]
    assert ours._traffic == [0, 5]


def test_pieces_are_not_copied(pair):
    class Recorder:
        def __init__(self, sock):
            self.sock, self.seen = sock, []

        def sendmsg(self, pieces, *flags):
            self.seen += pieces
            return self.sock.sendmsg(pieces, *flags)

    ours, theirs = pair
    sock, ours._sock = ours._sock, Recorder(ours._sock)
    pieces = [b"header", memoryview(bytearray(100_000))]
    ours.send(pieces)
    assert all(seen is piece for seen, piece in zip(ours._sock.seen, pieces, strict=True))
    ours._sock = sock
    read(theirs, 100_006)


def test_receive_fills_several_views_and_waits_for_all_of_them(pair):
    ours, theirs = pair
    views = [memoryview(bytearray(size)) for size in (3, 5, 100_000)]
    receiving = in_thread(theirs.recv_into, views)
    for _ in range(10):
        ours.send([b"abc" * 3_334])
    ours.send([b"x" * 10_000])
    assert receiving.result(FOREVER) == 100_008
    assert b"".join(views)[:9] == b"abcabcabc"


def test_end_of_file_reads_as_0_and_cuts_a_receive_short(pair):
    ours, theirs = pair
    ours.send([b"abc"])
    ours.finish()
    assert theirs.recv_into([memoryview(bytearray(10))]) == 3
    assert theirs.recv_into([memoryview(bytearray(10))]) == 0


def test_read_ahead_gives_the_same_bytes(pair):
    ours, theirs = pair
    theirs.read_ahead()
    data = os.urandom(300_000)
    sending = in_thread(lambda: [ours.send([data]), ours.finish()])
    received = [read(theirs, size) for size in (1, 80, 7, 70_000, 3, 200_000, 100, 50_000)]
    assert b"".join(received) == data
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


def low_water(stream):
    return stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


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


def test_shutdown_wakes_a_receiver_and_a_sender(pair):
    ours, _theirs = pair
    receiving = in_thread(ours.recv_into, [memoryview(bytearray(10))])
    sending = in_thread(ours.send, [bytes(50_000_000)])
    ours.shutdown()
    assert receiving.result(FOREVER) == 0
    with pytest.raises(ConnectionLostError, match="connection to node07:6543 lost while sending"):
        sending.result(FOREVER)


def test_reset_is_a_lost_connection_with_its_cause(tcp_pair):
    ours, theirs = tcp_pair
    theirs._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    with pytest.raises(ConnectionLostError, match="connection to node07:6543 lost: Connection reset by peer") as raised:
        ours.recv_into([memoryview(bytearray(10))])
    assert isinstance(raised.value.__cause__, ConnectionResetError)


def test_writing_to_a_closed_peer_is_a_lost_connection(pair):
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionLostError, match="connection to node07:6543 lost while sending: Broken pipe"):
        ours.send([b"x"])


def test_limit_bounds_receives_and_sends(pair):
    ours, _theirs = pair
    ours.limit(Deadline(0.01))
    with pytest.raises(RPCTimeoutError, match="timed out receiving from node07:6543"):
        ours.recv_into([memoryview(bytearray(10))])
    with pytest.raises(RPCTimeoutError, match="timed out sending to node07:6543"):
        ours.send([bytes(50_000_000)])


@pytest.mark.parametrize("name", ["recv_into", "sendmsg"])
def test_host_that_keep_alive_finds_gone_is_a_lost_connection(pair, name):
    """And not one that has taken too long, though Python calls both a TimeoutError."""
    ours, _theirs = pair
    ours._sock.close()
    ours._sock = Mock(**{f"{name}.side_effect": OSError(errno.ETIMEDOUT, "Connection timed out")})
    with pytest.raises(ConnectionLostError, match=r"connection to node07:6543 lost.*: Connection timed out"):
        ours.recv_into([memoryview(bytearray(10))]) if name == "recv_into" else ours.send([b"x"])


@pytest.mark.parametrize(
    ("num_repeated", "num_probes", "since_data", "since_answer", "expected"),
    [
        (3, 0, 25_000, 25_000, True),
        (0, 3, 25_000, 25_000, True),
        (2, 1, 99_000, 25_000, True),  # data that came while probes were under way
        (3, 0, 24_999, 99_000, False),
        (3, 0, 99_000, 24_999, False),
        (1, 1, 99_000, 99_000, False),  # a machine that has slept may have to repeat something
        (0, 0, 99_000, 99_000, False),  # probes of a closed window are answered, but come in longer and longer pauses
    ],
)
def test_cut_off_is_who_leaves_unanswered_what_was_repeated(
    num_repeated, num_probes, since_data, since_answer, expected
):
    info = struct.pack("=2xBB48xII", num_repeated, num_probes, since_data, since_answer)
    assert transport.is_cut_off(Mock(**{"getsockopt.return_value": info})) is expected


def test_connection_that_is_local_or_closed_is_not_cut_off(pair, tcp_pair):
    assert not pair[0].is_cut_off()
    assert not tcp_pair[0].is_cut_off()
    tcp_pair[0].close()
    assert not tcp_pair[0].is_cut_off()


def test_wait_for_a_connection_is_ended_by_cancelling_its_deadline():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # The queue is full with one: the kernel answers nobody else.
        with socket.create_connection(listener.getsockname()):
            deadline = Deadline(None)
            waiting = in_thread(lambda: connect(Address("127.0.0.1", listener.getsockname()[1]), deadline))
            wait_until(lambda: is_connecting(listener.getsockname()[1]), what="a connection under way")
            deadline.cancel()
            with pytest.raises(ConnectError):
                waiting.result(FOREVER)


def is_connecting(port):
    with open("/proc/net/tcp") as file:
        return any(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "02" for line in file)


def test_limit_that_has_passed_is_an_error_at_once(pair):
    deadline = Deadline(None)
    deadline.cancel()
    with pytest.raises(RPCTimeoutError, match="no answer from node07:6543 in time"):
        pair[0].limit(deadline)


def test_limit_can_be_taken_away(pair):
    ours, _theirs = pair
    ours.limit(Deadline(0.01))
    ours.limit(Deadline(None))
    assert ours._sock.gettimeout() is None


def test_lingering_saves_the_last_words_from_unread_input(tcp_pair):
    """Without, the kernel resets the connection of a socket that is closed with input, and the peer reads an error."""
    ours, theirs = tcp_pair
    theirs.send([b"nobody reads this" * 1000])
    ours.send([b"refused"])
    lingering = in_thread(ours.linger)
    assert read(theirs, 100) == b"refused"
    theirs.send([b"nor this"])
    theirs.close()
    lingering.result(FOREVER)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_does_not_keep_a_connection_open(pair):
    """multiprocessing in a trainer or in a worker: the peer must see the end although the fork lives on."""
    ours, theirs = pair
    done_read, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done_write)
        os.read(done_read, 1)
        os._exit(0)
    os.close(done_read)
    try:
        ours.close()
        theirs.limit(Deadline(FOREVER))
        assert theirs.recv_into([memoryview(bytearray(1))]) == 0
    finally:
        os.close(done_write)
        os.waitpid(pid, 0)


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


def test_kernel_knows_the_peer_of_a_unix_socket(pair, tcp_pair):
    assert transport.peer_uid(pair[0]._sock) == os.getuid()
    tcp_pair[0].require_same_user()  # nothing is known there


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


def test_nothing_is_said_of_a_wait_that_the_user_knows_of(tmp_path, caplog):
    asked = threading.Event()
    address, deadline = Address(path=str(tmp_path / "socket")), Impatient(FOREVER)
    waiting = in_thread(lambda: connect(address, deadline, retry=True, label=asked.set))
    assert asked.wait(FOREVER)
    deadline.cancel()
    with pytest.raises(ConnectError, match="No such file"):
        waiting.result(FOREVER)
    assert "still waiting" not in caplog.text


def test_connection_that_is_reset_at_once_is_tried_again(tmp_path, monkeypatch):
    """By the backlog of a server that ends, for example."""
    tune = Mock(side_effect=[OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)), None])
    monkeypatch.setattr(connecting, "tune", tune)
    with listen_unix(str(tmp_path / "socket")):
        connect(Address(path=str(tmp_path / "socket")), Impatient(FOREVER), retry=True).close()
    assert tune.call_count == 2


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


def test_host_that_does_not_answer():
    with silent_host() as (host, port), pytest.raises(ConnectError, match="no answer in time"):
        connect(Address(host, port), Deadline(0.2))


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
        stream = connect(Address("127.0.0.1", listener.getsockname()[1]), Deadline(FOREVER))
        sock, source, _name = accept(listener)
    assert source == "127.0.0.1"
    for end in (stream._sock, sock):
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        # It would cut off a peer that merely stands still.
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        if sys.platform == "linux":
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * transport.SAME_HOST_SEND_BYTES
    stream.close()
    sock.close()


def test_bytes_that_wait_in_the_kernel_are_counted(pair):
    ours, theirs = pair
    assert theirs.count_waiting() == 0
    ours.send([b"12345"])
    assert theirs.count_waiting() == 5
    read(theirs, 3)
    assert theirs.count_waiting() == 2


def test_time_with_a_full_window_of_the_peer_is_part_of_the_time_with_unacknowledged_data(tcp_pair):
    ours, theirs = tcp_pair
    assert ours.sending_times() == (0.0, 0.0)
    size = 20_000_000  # more than the buffers of both sides
    sending = in_thread(ours.send, [bytes(size)])
    wait_until(lambda: ours.sending_times()[1] > 0.05, what="a window that stays full")
    busy, full = ours.sending_times()
    assert full <= busy < 30
    read(theirs, size)
    sending.result(FOREVER)


def test_times_are_where_the_kernel_writes_them(tcp_pair, monkeypatch):
    """tcpi_busy_time and tcpi_rwnd_limited, as include/uapi/linux/tcp.h has them."""
    kernel = types.SimpleNamespace(getsockopt=lambda *_arguments: bytes(168) + struct.pack("=QQ", 3_000_000, 1_500_000))
    with monkeypatch.context() as patch:
        patch.setattr(tcp_pair[0], "_sock", kernel)
        assert tcp_pair[0].sending_times() == (3.0, 1.5)


def test_unix_socket_has_no_times(pair):
    assert pair[0].sending_times() == (0.0, 0.0)
