"""Sockets: what arrives, what happens when it does not, and which errors callers see.

Everything here is one process, over socket pairs, loopback ports of the kernel's choice and Unix sockets.
"""

from __future__ import annotations

import math
import os
import resource
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rpcdataloader.errors import AuthenticationError, LocalProtocolError
from rpcdataloader.wire import transport
from rpcdataloader.wire.channel import Channel, Receiver
from rpcdataloader.wire.connecting import listen_tcp
from rpcdataloader.wire.frames import Decoder, MessageType, Sealer, encode, heap_blocks
from rpcdataloader.wire.handshake import Established
from rpcdataloader.wire.transport import Transport
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


@pytest.fixture
def descriptors():
    """Those of two files."""
    opened = [os.memfd_create(f"file {number}") for number in range(2)]
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def receive_mapping(transport):
    """The inode of the file that comes with a message, if any."""
    assert read(transport, 7) == b"mapping"
    if (descriptor := transport.take_descriptor()) < 0:
        return None
    with open(descriptor, "rb") as file:
        return os.fstat(file.fileno()).st_ino


def test_descriptors_come_with_their_messages_however_many_wait(pair, descriptors):
    ours, theirs = pair
    ours.take_descriptors()
    ours.read_ahead()
    theirs.send([b"before"])
    for descriptor in descriptors:
        theirs.send_descriptor(b"mapping", descriptor)
    theirs.send([b"after"])
    assert read(ours, 6) == b"before"
    assert [receive_mapping(ours) for _ in descriptors] == [os.fstat(each).st_ino for each in descriptors]
    assert read(ours, 5) == b"after"


def test_no_descriptor_comes_with_another_message_when_there_was_no_room_for_one(pair, descriptors):
    ours, theirs = pair
    ours.take_descriptors()
    ours.read_ahead()
    theirs.send([b"before"])
    theirs.send_descriptor(b"mapping", descriptors[0])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        assert read(ours, 6) == b"before"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    theirs.send_descriptor(b"mapping", descriptors[1])
    assert [receive_mapping(ours) for _ in descriptors] == [None, None]


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


# Repeated segments, probes, seconds of the timeout by now, and since data was sent, data came, an acknowledgement came.
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((3, 0, 1.6, 0, 25, 25), True),
        ((0, 3, 0.2, 0, 25, 25), True),  # the peer takes nothing more, and does not answer the question when it will
        ((1, 2, 0.4, 0, 25, 25), True),
        ((2, 0, 0.8, 0, 600, 600), False),  # too few to be sure
        ((6, 0, 12.8, 0, 24, 600), False),  # an outage that may pass, as keep-alive waits for it, too
        ((3, 9, 102.4, 0, 600, 1), False),  # a process that is stopped: its host answers, with a closed window
        ((3, 9, 1.6, 0, 1, 600), False),
        ((6, 0, 12.8, 12.4, 1, 1), True),  # other data comes and is acknowledged, but not what is repeated
        ((6, 0, 12.8, 12.3, 1, 1), False),
        ((7, 0, 25.6, 0, 1, 1), True),
    ],
)
def test_host_is_gone_if_it_leaves_all_unanswered_for_as_long_as_keep_alive_waits(fields, expected):
    num_repeated, num_probes, timeout, *times = fields
    # From 0.2 s on, it doubles with each repetition, and with each probe of a closed window.
    backoff = round(math.log2(timeout / 0.2))
    milliseconds = (round(1000 * each) for each in times)
    info = struct.pack("=2xBBB3xI32xI4xII", num_repeated, num_probes, backoff, round(timeout * 1e6), *milliseconds)
    sock = Mock(family=socket.AF_INET, getsockopt=Mock(return_value=info))
    assert transport.is_cut_off(sock) is expected
    sock.getsockopt.assert_called_once_with(socket.IPPROTO_TCP, socket.TCP_INFO, len(info))


def test_message_that_is_interrupted_once_it_is_sealed_is_the_last(pair):
    """The peer would take the next one for an altered one."""
    sealer = Sealer(b"key")
    channel = Channel(pair[0], Established(sealer, sealer, Mock(), []), bytes(16), "client")
    with pytest.raises(LocalProtocolError, match="send it in parts"):
        channel.send(MessageType.REPLY, 1, b"", [memoryview(b"")] * (2**20 + 1))
    channel.send(MessageType.REPLY, 1)
    pair[0].send = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        channel.send(MessageType.REPLY, 2)
    assert len(read(pair[1], 1000)) < 200  # one message, and the end


def test_message_that_was_here_before_it_was_asked_for_is_told_from_one_that_comes(pair):
    (message,) = encode(None, MessageType.REPLY, 1, bytes(1000))
    receiver = Receiver(pair[1], Decoder(heap_blocks))
    pair[0].send([message])
    assert receiver.receive().arrival.was_here
    pair[0].send([message[:500]])
    received = in_thread(receiver.receive)
    wait_until(lambda: not pair[1].count_waiting())
    pair[0].send([message[500:]])
    assert not received.result(FOREVER).arrival.was_here
