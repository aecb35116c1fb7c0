"""Who sends what, in which order, and what is never sent."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import sys
import threading
from collections import deque
from unittest.mock import Mock

import pytest

from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.wire import outbox as outboxes
from rpcdataloader.wire.channel import Channel, Outgoing, Receiver
from rpcdataloader.wire.frames import Decoder, MessageType, heap_blocks
from rpcdataloader.wire.messages import pack_handles, unpack_handles
from rpcdataloader.wire.outbox import Outbox
from rpcdataloader.wire.transport import Deadline, Transport
from tests.conftest import wait_until

CALL, LOAD, CANCEL, RELEASE, LOG = (MessageType[name] for name in ("CALL", "LOAD", "CANCEL", "RELEASE", "LOG"))
LARGE = bytes(8 << 20)  # more than kernels hold


class Plain:
    """A channel without seals."""

    _sealer = None
    seal, begin = Channel.seal, Channel.begin

    def __init__(self, sock):
        self.transport = Transport(sock, "peer")


class Pair:
    """An outbox, and what its peer receives."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.channel, self.peer = Plain(ours), Transport(theirs, "outbox")
        self.failures = []
        self.outbox = Outbox("outbox of a test", self.failures.append, self.channel)
        self._receiver = Receiver(self.peer, Decoder(heap_blocks))

    def receive(self):
        message = self._receiver.receive()
        return message.type, message.request_id

    def close(self):
        self.channel.transport.shutdown()
        self.outbox.close()
        self.channel.transport.close()
        self.peer.close()
        assert not has_thread()


def has_thread():
    return any(thread.name == "outbox of a test" for thread in threading.enumerate())


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def request(number, payload=b"", type=CALL):
    return Outgoing(type, number, payload, size_bytes=len(payload))


def test_a_caller_sends_small_messages_itself(pair):
    for number in range(1, 4):
        pair.outbox.put(Outgoing(LOG), request(number), now=True)
    assert [pair.receive() for _ in range(6)] == [each for number in (1, 2, 3) for each in ((LOG, 0), (CALL, number))]
    assert not has_thread()
    pair.outbox.put(request(4))
    assert pair.receive() == (CALL, 4)
    assert has_thread()


def test_nothing_waits_for_a_peer_that_takes_nothing_and_the_order_stays(pair):
    pair.outbox.put(request(1, LARGE))
    for number in range(2, 6):
        pair.outbox.put(request(number), now=True)
    assert not pair.outbox.is_idle
    assert [pair.receive() for _ in range(5)] == [(CALL, number) for number in range(1, 6)]
    assert pair.outbox.join(10)


def test_what_the_kernel_leaves_of_a_message_is_sent_before_the_next_one(pair):
    content = bytes(range(256)) * 200
    for number in itertools.count(1):
        pair.outbox.put(request(number, content, LOAD), now=True)
        if not pair.outbox.is_idle:
            break
    pair.outbox.put(request(number + 1, content, LOAD), now=True)
    for expected in range(1, number + 2):
        message = pair._receiver.receive()
        assert (message.request_id, bytes(message.payload)) == (expected, content)
        pair.outbox.answered(len(content))


def test_messages_from_before_the_connection_come_first_and_need_no_thread(pair):
    outbox = Outbox("outbox of a test", pair.failures.append)
    for number in range(1, 4):
        outbox.put(request(number), now=True)
    assert outbox.withdraw(2)
    outbox.open(pair.channel)
    outbox.put(request(4), now=True)
    assert [pair.receive() for _ in range(3)] == [(CALL, 1), (CALL, 3), (CALL, 4)]
    assert not has_thread()
    outbox.close()


def test_rest_of_what_came_before_the_connection_is_sent_once_there_is_room_for_the_thread(pair, monkeypatch):
    pair.channel.transport._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    outbox = Outbox("outbox of a test", pair.failures.append)
    outbox.put(request(1, bytes(outboxes.LONG_BYTES)))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            outbox.open(pair.channel)
    outbox.open(pair.channel)
    assert pair.receive() == (CALL, 1)
    assert outbox.join(10)
    pair.channel.transport.shutdown()
    outbox.close()


def test_what_finalizers_send_needs_no_other_message(pair):
    outbox = Outbox("outbox of a test", pair.failures.append)
    outbox.put(request(1))
    outbox.open(pair.channel, start=True)
    outbox.post(Outgoing(RELEASE))
    assert [pair.receive(), pair.receive()] == [(CALL, 1), (RELEASE, 0)]
    pair.channel.transport.shutdown()
    outbox.close()


# Withdrawn and cancelled


def test_requests_that_are_not_begun_are_withdrawn(pair):
    for number in range(1, 5):
        pair.outbox.put(request(number, LARGE))
    wait_until(lambda: pair.peer.has_input())
    assert [pair.outbox.withdraw(number) for number in (1, 2, 4, 4)] == [False, True, True, False]
    assert [pair.receive() for _ in range(2)] == [(CALL, 1), (CALL, 3)]


def test_a_cancellation_comes_with_the_end_of_its_request_and_passes_all_others(pair, monkeypatch):
    sizes, send = [], pair.channel.transport.send

    def sized(pieces):
        sizes.append(sum(map(len, pieces)))
        send(pieces)

    monkeypatch.setattr(pair.channel.transport, "send", sized)
    for number in range(1, 4):
        pair.outbox.put(request(number, LARGE))
    wait_until(lambda: pair.peer.has_input())
    pair.outbox.cancel(1)
    assert pair.receive() == (CALL, 1)
    assert pair.receive() == (CANCEL, 1)
    # In one call: a peer that has the one has the other.
    assert outboxes._TAIL_BYTES < sizes[1] < 2 * outboxes._TAIL_BYTES
    assert pair.receive() == (CALL, 2)
    pair.outbox.cancel(2)
    assert sorted([pair.receive(), pair.receive()], key=lambda each: each[0] != CANCEL)[0] == (CANCEL, 2)


def test_a_cancellation_of_what_is_not_begun_comes_after_it(pair):
    pair.outbox.put(request(1, LARGE), request(2, type=LOAD), request(3))
    wait_until(lambda: pair.peer.has_input())
    pair.outbox.cancel(2)
    assert [pair.receive() for _ in range(4)] == [(CALL, 1), (LOAD, 2), (CALL, 3), (CANCEL, 2)]


def test_it_is_not_idle_while_a_message_is_taken_out(pair, monkeypatch):
    """Others look without the lock."""
    seen, taken = [], Outbox._with_following

    def with_following(outbox, message):
        seen.append(outbox.is_idle)
        return taken(outbox, message)

    class Watched(deque):
        def popleft(self):
            message = super().popleft()
            seen.append(pair.outbox.is_idle)
            return message

    monkeypatch.setattr(pair.outbox, "_waiting", Watched())
    monkeypatch.setattr(Outbox, "_with_following", with_following)
    pair.outbox.put(request(1))
    assert pair.receive() == (CALL, 1)
    assert seen == [False, False]


def test_rest_of_what_a_caller_sends_as_the_thread_looks_is_sent(pair, monkeypatch):
    pair.outbox.put(Outgoing(LOG))
    assert pair.outbox.join(10)
    lock, looks = pair.outbox._lock, iter([True])

    class Watched:
        """Lets a caller send something that the kernel has no room for, after the first look."""

        def __enter__(self):
            return lock.__enter__()

        def __exit__(self, *exc_info):
            lock.__exit__(*exc_info)
            if next(looks, False):
                pair.outbox.put(request(1, LARGE), now=True)

    monkeypatch.setattr(pair.outbox, "_lock", Watched())
    pair.outbox._bell.put(True)
    pair.peer.limit(Deadline(10))
    assert [pair.receive(), pair.receive()] == [(LOG, 0), (CALL, 1)]


# The window


def test_requests_beyond_the_window_wait_for_answers(pair, monkeypatch):
    monkeypatch.setattr(outboxes, "WINDOW_BYTES", 1000)
    for number in range(1, 5):
        pair.outbox.put(request(number, bytes(600)), now=number == 3)
    assert [pair.receive(), pair.receive()] == [(CALL, 1), (CALL, 2)]
    pair.outbox.cancel(1)
    assert pair.receive() == (CANCEL, 1)  # which is no request
    assert pair.outbox.withdraw(3)
    assert not pair.peer.has_input()
    pair.outbox.answered(600)
    assert pair.receive() == (CALL, 4)


def test_one_request_of_any_size_may_be_sent_beside_another(pair, monkeypatch):
    monkeypatch.setattr(outboxes, "WINDOW_BYTES", 1000)
    pair.outbox.put(*(request(number, bytes(5000)) for number in range(1, 4)))
    assert [pair.receive(), pair.receive()] == [(CALL, 1), (CALL, 2)]
    assert not pair.peer.has_input()
    pair.outbox.answered(5000)
    assert pair.receive() == (CALL, 3)


def test_any_mixture_keeps_its_order(pair, monkeypatch):
    rng = random.Random(7)
    monkeypatch.setattr(outboxes, "WINDOW_BYTES", 300_000)
    sizes, withdrawn, received, cancelled, last = {}, set(), [], set(), 0
    for _ in range(2000):
        step = rng.random()
        if step < 0.5:
            last += 1
            sizes[last] = rng.choice((10, 1000, 70_000, 200_000))
            pair.outbox.put(request(last, bytes(sizes[last])), now=rng.random() < 0.5 and sizes[last] < 65536)
        elif step < 0.6 and last:
            number = rng.randint(max(1, last - 10), last)
            if pair.outbox.withdraw(number):
                withdrawn.add(number)
        elif step < 0.7 and last:
            number = rng.randint(max(1, last - 10), last)
            if number not in withdrawn | cancelled:
                cancelled.add(number)
                pair.outbox.cancel(number, now=rng.random() < 0.5)
        elif pair.peer.has_input():
            received.append(pair.receive())
            if received[-1][0] == CALL:
                pair.outbox.answered(sizes[received[-1][1]])
    numbers = lambda kind: [number for type, number in received if type == kind]  # noqa: E731
    while set(numbers(CALL)) | withdrawn != set(sizes) or set(numbers(CANCEL)) != cancelled:
        received.append(pair.receive())
        if received[-1][0] == CALL:
            pair.outbox.answered(sizes[received[-1][1]])
    assert numbers(CALL) == sorted(numbers(CALL))
    assert not withdrawn & set(numbers(CALL))
    for number in cancelled - withdrawn:
        assert received.index((CALL, number)) < received.index((CANCEL, number))


# Finalizers, other threads, and the end


def test_finalizers_send_from_anywhere_and_their_messages_are_joined(pair):
    pair.outbox.put(request(1, LARGE))
    with pair.outbox._lock:
        for handle in range(3):
            pair.outbox.post(Outgoing(RELEASE, payload=pack_handles([handle])))
    pair.outbox.put(request(2))
    messages = [pair._receiver.receive() for _ in range(3)]
    assert [message.type for message in messages] == [CALL, RELEASE, CALL]
    assert unpack_handles(messages[1].payload) == [0, 1, 2]


def test_a_warning_in_the_middle_of_a_message_comes_after_it(pair, monkeypatch):
    def seal(message):
        if message.request_id:
            pair.outbox.put(Outgoing(LOG), now=True)
        return Channel.seal(pair.channel, message)

    monkeypatch.setattr(pair.channel, "seal", seal)
    pair.outbox.put(request(1), now=True)
    assert [pair.receive(), pair.receive()] == [(CALL, 1), (LOG, 0)]


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_it_closes_while_others_send():
    failures = []

    def send(outbox, begun):
        begun.set()
        try:
            for number in range(100):
                outbox.post(Outgoing(RELEASE))
                outbox.put(Outgoing(LOG), now=number % 2 == 0)
        except ConnectionLostError:
            pass
        except BaseException as error:
            failures.append(error)

    for _ in range(50):
        pair, begun = Pair(), threading.Event()
        thread = threading.Thread(target=send, args=(pair.outbox, begun))
        thread.start()
        begun.wait()
        pair.close()
        thread.join()
    assert not failures


def test_a_lost_connection_is_told_once(pair):
    pair.outbox.put(request(1, LARGE))
    pair.peer.shutdown()
    wait_until(lambda: pair.failures)
    pair.outbox.put(request(2))
    pair.outbox.close()
    assert [type(error) for error in pair.failures] == [ConnectionLostError]


def test_ctrl_c_as_the_thread_starts_does_not_make_two(pair, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.outbox.put(Outgoing(LOG))
    pair.outbox.put(request(1))
    assert pair.receive() == (CALL, 1)
    assert [thread.name for thread in threading.enumerate()].count("outbox of a test") == 1


def test_messages_are_sent_though_the_thread_could_not_be_started_for_the_first_one(pair, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            pair.outbox.put(Outgoing(LOG))
    pair.outbox.put(request(1))
    assert pair.outbox.join(10)
    assert pair.receive() == (CALL, 1)
