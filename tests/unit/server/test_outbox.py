"""How much may wait to be sent by a worker."""

from __future__ import annotations

import threading

from rpcdataloader.server.requests import Outbox
from rpcdataloader.wire.channel import Outgoing
from rpcdataloader.wire.frames import MessageType


def reply(size_bytes):
    return Outgoing(MessageType.REPLY, 1, b"x" * (size_bytes // 2), [memoryview(bytes(size_bytes - size_bytes // 2))])


def test_one_may_wait_whatever_its_size():
    outbox = Outbox(10)
    outbox.put(reply(1000))
    assert not outbox.is_full
    outbox.wait()
    outbox.put(reply(0))
    assert outbox.is_full


def test_many_small_ones_may_wait():
    outbox = Outbox(10)
    for _ in range(10):
        outbox.put(reply(1))
    assert not outbox.is_full
    outbox.put(reply(1))
    assert outbox.is_full
    outbox.done(outbox.get().size_bytes)
    assert not outbox.is_full


def test_message_waits_until_it_was_sent():
    outbox = Outbox(10)
    outbox.put(reply(1))
    message = outbox.get()
    assert outbox.num_waiting == 1
    outbox.done(message.size_bytes)
    assert outbox.num_waiting == 0
    outbox.close()
    assert outbox.get() is None


def test_who_waits_goes_on_when_there_is_room_again():
    outbox = Outbox(10)
    for _ in range(3):
        outbox.put(reply(8))
    went_on = threading.Event()
    thread = threading.Thread(target=lambda: (outbox.wait(), went_on.set()))
    thread.start()
    outbox.done(outbox.get().size_bytes)
    assert outbox.is_full
    assert not went_on.is_set()
    outbox.done(outbox.get().size_bytes)
    thread.join(10)
    assert went_on.is_set()
