"""How much may wait to be sent by a worker."""

from __future__ import annotations

import sys
import threading

import pytest

from rpcdataloader.server.requests import Outbox
from rpcdataloader.wire.channel import Outgoing
from rpcdataloader.wire.frames import MessageType


def reply(size_bytes):
    return Outgoing(MessageType.REPLY, 1, b"x" * (size_bytes // 2), [memoryview(bytes(size_bytes - size_bytes // 2))])


@pytest.fixture
def outbox(monkeypatch):
    """One whose sender is stuck in its first message until it is told to go on."""

    def send(message):
        goes_on.wait()
        if is_over.is_set():
            sys.exit()  # the thread has no other end: a worker's goes with its process
        sent.append(message.size_bytes)

    sent, goes_on, is_over = [], threading.Event(), threading.Event()
    outbox = Outbox(send, 10)
    before = set(threading.enumerate())
    # pytest's takes the end by sys.exit() for a failure.
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    yield outbox, sent, goes_on
    goes_on.set()
    outbox.join()
    is_over.set()
    outbox.put(reply(0))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_one_may_wait_whatever_its_size(outbox):
    outbox, _sent, _goes_on = outbox
    outbox.put(reply(1000))
    assert not outbox.is_full
    outbox.wait()
    outbox.put(reply(0))
    assert outbox.is_full


def test_many_small_ones_may_wait(outbox):
    outbox, _sent, _goes_on = outbox
    for _ in range(10):
        outbox.put(reply(1))
    assert not outbox.is_full
    outbox.put(reply(1))
    assert outbox.is_full


def test_message_waits_until_it_was_sent(outbox):
    outbox, sent, goes_on = outbox
    outbox.put(reply(1))
    assert (outbox.num_waiting, sent) == (1, [])
    goes_on.set()
    outbox.join()
    assert (outbox.num_waiting, sent) == (0, [1])


def test_who_waits_goes_on_when_there_is_room_again(outbox):
    outbox, sent, goes_on = outbox
    for _ in range(3):
        outbox.put(reply(8))
    thread = threading.Thread(target=outbox.wait)
    thread.start()
    assert outbox.is_full
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()
    outbox.join()
    assert sent == [8, 8, 8]
