"""A connection from its first byte on: both sides in one process, over a Unix socket."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RemoteProtocolError,
)
from rpcdataloader.server.listening import accept, listen_unix
from rpcdataloader.wire import channel
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import accept_channel, local_identity, open_channel, recv_preamble
from rpcdataloader.wire.credentials import INSECURE, Credentials
from rpcdataloader.wire.frames import Flag, HeapBlock, Limits, MessageType, encode
from rpcdataloader.wire.handshake import Preamble
from rpcdataloader.wire.transport import Deadline, Stream
from tests.conftest import TIMEOUT_SCALE, wait_until

FOREVER = 30 * TIMEOUT_SCALE
CREDENTIALS = Credentials(b"a secret of the tests", "the tests")
SESSION_ID = bytes(range(16))


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def listener(tmp_path):
    with listen_unix(str(tmp_path / "socket")) as listener:
        yield listener


@pytest.fixture
def address(listener):
    return Address(path=listener.getsockname())


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def accept_stream(listener):
    sock, source, _name = accept(listener)
    return Stream(sock, source)


def serve(listener, credentials=CREDENTIALS, **identity):
    """Accept one connection as a node server does."""
    stream = accept_stream(listener)
    try:
        preamble = recv_preamble(stream)
        return accept_channel(stream, preamble, credentials, replace(local_identity("server"), **identity))
    except BaseException:
        stream.close()
        raise


def dial(address, credentials=CREDENTIALS, timeout=FOREVER, **identity):
    """Connect as a client does."""
    return open_channel(
        address, credentials, replace(local_identity("client", 3), **identity), SESSION_ID, Deadline(timeout)
    )


@pytest.fixture
def channels(listener, address, pool):
    accepting = pool.submit(serve, listener)
    client = dial(address)
    server = accepting.result(FOREVER)
    yield client, server
    client.stream.close()
    server.stream.close()


# --- messages


def test_messages_travel_in_both_directions(channels):
    client, server = channels
    client.send(MessageType.CALL, 7, b"payload", [b"block", bytearray(3)])
    message = server.recv()
    assert (message.type, message.request_id, bytes(message.payload)) == (MessageType.CALL, 7, b"payload")
    assert [bytes(block.view) for block in message.blocks] == [b"block", bytes(3)]
    server.send(MessageType.LOG, payload=b'{"level": 30}', flags=Flag.MEASURED)
    message = client.recv()
    assert (message.type, bytes(message.payload), message.flags) == (MessageType.LOG, b'{"level": 30}', Flag.MEASURED)


def test_sides_know_each_other(channels):
    client, server = channels
    host = socket.gethostname()
    assert server.name == f"client {host}:{os.getpid()} rank 3"
    assert (server.peer, client.peer) == (local_identity("client", 3), local_identity("server"))
    assert client.name.startswith("unix:/")
    assert client.differences == server.differences == []


def test_allocator_chooses_where_blocks_go(channels):
    client, server = channels
    blocks = []

    def allocate(request_id, sizes):
        blocks.extend(HeapBlock(size) for size in sizes)
        assert request_id == 9
        return blocks[-len(sizes) :]

    server.allocate_with(allocate)
    client.send(MessageType.CALL, 9, b"", [b"a" * 100_000, b"b"])
    assert server.recv().blocks == blocks
    assert bytes(blocks[0].view) == b"a" * 100_000


def test_descriptor_comes_with_its_message(channels):
    client, server = channels
    client.borrow_with(lambda *_args: None)
    server.send(MessageType.REPLY, 1, bytes(100_000))
    reader, writer = os.pipe()
    server.send_descriptor(MessageType.MAPPING, b"payload", writer)
    os.close(writer)
    server.send(MessageType.REPLY, 2, b"", [bytes(100_000)])
    assert len(client.recv().payload) == 100_000
    assert client.stream.take_descriptor() == -1
    assert bytes(client.recv().payload) == b"payload"
    descriptor = client.stream.take_descriptor()
    assert len(client.recv().blocks[0].view) == 100_000
    assert client.stream.take_descriptor() == -1
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"here")
    os.close(descriptor)
    assert os.read(reader, 5) == b"here"
    os.close(reader)


@pytest.mark.parametrize("takes_descriptors", [False, True])
def test_descriptors_without_an_owner_are_closed(channels, takes_descriptors):
    client, server = channels
    if takes_descriptors:
        client.borrow_with(lambda *_args: None)
    reader, writer = os.pipe()
    for _ in range(3):
        server.send_descriptor(MessageType.MAPPING, b"payload", writer)
    os.close(writer)
    for _ in range(3):
        assert bytes(client.recv().payload) == b"payload"
    client.stream.close()
    assert os.read(reader, 1) == b""  # no writer is left
    os.close(reader)


def test_many_threads_send_whole_messages(channels, pool):
    """Sealed in the order in which they are sent, or the other side would refuse them."""
    client, server = channels

    def send(thread):
        for number in range(100):
            client.send(MessageType.CALL, 1000 * thread + number, bytes([thread]) * (number * 50))

    sending = [pool.submit(send, thread) for thread in range(3)]
    received = [server.recv() for _ in range(300)]
    for future in sending:
        future.result(FOREVER)
    assert sorted(message.request_id for message in received) == [1000 * t + n for t in range(3) for n in range(100)]
    for message in received:
        thread, number = divmod(message.request_id, 1000)
        assert bytes(message.payload) == bytes([thread]) * (number * 50)


def test_clean_end_reads_as_none_and_a_cut_message_is_an_error(channels):
    client, server = channels
    client.stream.finish()
    assert server.recv() is None
    server.stream.send([b"RPDL"])
    server.stream.finish()
    with pytest.raises(ConnectionLostError, match="lost in the middle of a message"):
        client.recv()


@pytest.mark.parametrize("data", [b"x" * 80, bytes(200), b"RPDL" + bytes(76)])
def test_bytes_without_a_seal_are_refused(channels, data):
    client, server = channels
    client.stream.send([data])
    with pytest.raises(RemoteProtocolError):
        server.recv()


def test_it_is_known_whether_a_message_is_under_way(channels, pool):
    client, server = channels
    assert not client.is_sending
    sending = pool.submit(client.send, MessageType.CALL, 1, b"x" * 10_000_000)
    server.stream.recv_into([memoryview(bytearray(1))])
    assert client.is_sending
    client.stream.shutdown()
    with pytest.raises(ConnectionLostError):
        sending.result(FOREVER)
    assert not client.is_sending


# --- handshakes that fail


def test_secrets_that_differ(listener, address, pool):
    """Both sides are told, with a fingerprint to compare and without the secret."""
    other = Credentials(b"a secret of somebody else", "file /home/user/token")
    accepting = pool.submit(serve, listener)
    with pytest.raises(AuthenticationError, match="do not hold the same secret") as raised:
        dial(address, other)
    assert str(address) in str(raised.value)
    assert f"(this client's secret: file /home/user/token, fingerprint {other.fingerprint})" in str(raised.value)
    assert "somebody else" not in str(raised.value)
    with pytest.raises(AuthenticationError, match="do not hold the same secret"):
        accepting.result(FOREVER)


@pytest.mark.parametrize(("ours", "theirs"), [(CREDENTIALS, INSECURE), (INSECURE, CREDENTIALS)])
def test_one_side_without_a_secret_does_not_talk_the_other_into_it(listener, address, pool, ours, theirs):
    accepting = pool.submit(serve, listener, theirs)
    with pytest.raises(AuthenticationError):
        dial(address, ours)
    with pytest.raises(AuthenticationError):
        accepting.result(FOREVER)


def test_without_secrets_the_user_is_checked_on_both_sides(listener, address, pool, monkeypatch):
    accepting = pool.submit(serve, listener, INSECURE)
    dial(address, INSECURE).stream.close()
    accepting.result(FOREVER).stream.close()
    monkeypatch.setattr("rpcdataloader.wire.transport.peer_uid", lambda _sock: 12345)
    with pytest.raises(AuthenticationError, match="belongs to user id 12345"):
        dial(address, INSECURE)
    # Nothing was sent to that other user.
    stream = accept_stream(listener)
    with pytest.raises(AuthenticationError, match="belongs to user id 12345"):
        accept_channel(stream, Preamble(SESSION_ID), INSECURE, local_identity("server"))
    assert stream.recv_into([memoryview(bytearray(1))]) == 0
    stream.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"python_version": "3.9.1"}, "runs CPython 3.9"),
        ({"python_implementation": "PyPy"}, "runs PyPy 3"),
        ({"protocol": 77}, r"runs rpcdataloader \S+ \(version 77 of the protocol\)"),
        ({"numpy": "3.0.0"}, "runs numpy 3"),
    ],
)
@pytest.mark.parametrize("odd", ["client", "server"])
def test_versions_that_do_not_fit_are_named_on_both_sides(listener, address, pool, odd, changes, text):
    accepting = pool.submit(serve, listener, **(changes if odd == "server" else {}))
    with pytest.raises(RemoteProtocolError, match=text) as client_error:
        dial(address, **(changes if odd == "client" else {}))
    with pytest.raises(RemoteProtocolError, match=text) as server_error:
        accepting.result(FOREVER)
    for error in (client_error, server_error):
        assert "the client on " in str(error.value)
        assert "the node server on " in str(error.value)


def test_differences_that_are_no_obstacle_are_listed(listener, address, pool):
    accepting = pool.submit(serve, listener, torch="2.4.0+cpu")
    client = dial(address, torch="2.13.0+cu128")
    server = accepting.result(FOREVER)
    assert client.differences == [f"torch: 2.13.0 here, 2.4.0 on {socket.gethostname()}"]
    assert server.differences == [f"torch: 2.4.0 here, 2.13.0 on {socket.gethostname()}"]
    client.stream.close()
    server.stream.close()


# --- peers that are no node servers


def test_silent_peer_is_given_up_at_the_deadline(listener, address):
    with pytest.raises(ConnectError, match="accepted the connection, but did not finish the handshake in time"):
        dial(address, timeout=0.1)
    accept_stream(listener).close()


def test_peer_that_drips_is_given_up_at_the_deadline(listener, address, pool):
    """One byte before each receive would time out."""

    def drip():
        stream = accept_stream(listener)
        with contextlib.suppress(ConnectionLostError):
            for byte in b"RPDL" * 1000:
                stream.send([bytes([byte])])
                time.sleep(0.05)  # the point of this peer
        stream.close()

    dripping = pool.submit(drip)
    start = time.monotonic()
    with pytest.raises(ConnectError, match="did not finish the handshake in time"):
        dial(address, timeout=0.5)
    assert time.monotonic() - start >= 0.5
    dripping.result(FOREVER)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"", ConnectionLostError, "closed the connection during the handshake .is it a node server"),
        (b"RPDL" + bytes(30), ConnectionLostError, "lost in the middle of a message"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 10, RemoteProtocolError, "b'SSH-' is where one should begin"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, RemoteProtocolError, "b'HTTP' is where one should begin"),
        (b"\x80\x05" + bytes(100), RemoteProtocolError, "the peer sent no message"),
    ],
)
def test_peer_of_another_kind_is_named(listener, address, pool, data, error, text):
    def answer():
        stream = accept_stream(listener)
        stream.send([data] if data else [])
        stream.linger()
        stream.close()

    answering = pool.submit(answer)
    with pytest.raises(error, match=text) as raised:
        dial(address)
    assert str(address) in str(raised.value)
    answering.result(FOREVER)


def test_preamble(listener, address, pool):
    accepting = pool.submit(serve, listener)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address.path)
        sock.sendall(b"RPCDLDR\x01half")
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(RemoteProtocolError, match="closed after 12 bytes of a preamble"):
            accepting.result(FOREVER)


def test_connection_without_a_word_is_no_preamble(listener, address):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address.path)
    stream = accept_stream(listener)
    assert recv_preamble(stream) is None
    stream.close()


def test_message_over_the_limits_is_not_sent_and_harms_no_other(channels, monkeypatch):
    client, server = channels
    monkeypatch.setattr(channel, "encode", functools.partial(encode, limits=Limits(payload_size_bytes=10)))
    with pytest.raises(LocalProtocolError, match="a payload of 11 bytes is over the limit of 10"):
        client.send(MessageType.CALL, 1, bytes(11))
    client.send(MessageType.CALL, 2)
    assert server.recv().request_id == 2


def test_message_that_comes_in_parts_tells_when_it_began(channels):
    ours, theirs = channels
    for channel_ in ours, theirs:
        channel_.stream.read_ahead()
    ours.send(MessageType.CALL, 1, b"small")
    assert theirs.recv().arrival is None
    began, received = time.monotonic(), theirs.stream._traffic[0]
    data = b"".join(encode(ours._sealer, MessageType.CALL, 2, b"x" * 50_000))
    ours.stream.send([data[:20_000]])
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(theirs.recv)
        wait_until(lambda: theirs.stream._traffic[0] > received)
        ours.stream.send([data[20_000:]])
        message = receiving.result(FOREVER)
    assert began < message.arrival.at < time.monotonic()
    assert not message.arrival.was_here
    # All of it lies in the kernel, and is received in two calls.
    ours.send(MessageType.CALL, 3, b"x" * 50_000)
    assert theirs.recv().arrival.was_here
