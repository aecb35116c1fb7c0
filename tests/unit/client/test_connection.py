"""Requests of a client's connection: those from before it was open, and those that cannot be sent."""

from __future__ import annotations

import socket
import threading
from unittest.mock import Mock

import pytest

from rpcdataloader.client import connection as connections
from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.wire.channel import Channel, Receiver
from rpcdataloader.wire.frames import Decoder, MessageType, heap_blocks
from rpcdataloader.wire.handshake import Established
from rpcdataloader.wire.outbox import LONG_BYTES
from rpcdataloader.wire.pickling import Encoded
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.transport import Transport
from tests.conftest import TIMEOUT_SCALE, wait_until

SHORT, LONG = bytes(10), bytes(LONG_BYTES + 1)


class Owner:
    """Opens the channel once it may; notes what it hears."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.peer = Transport(theirs, "owner")
        self._receiver = Receiver(self.peer, Decoder(heap_blocks))
        self._channel = Channel(Transport(ours, "peer"), Established(None, None, Mock(), []), bytes(16), "peer")
        self.may_open = threading.Event()
        self.is_ready = threading.Event()
        self.is_lost = threading.Event()
        self.lacking = []

    def open(self):
        assert self.may_open.wait(20 * TIMEOUT_SCALE)
        return self._channel

    def lacks_thread(self, reason):
        self.lacking.append(reason)

    def ready(self):
        self.is_ready.set()

    def explain(self, error):
        return error

    def lost(self, _error):
        self.is_lost.set()

    def receive(self):
        message = self._receiver.receive()
        return message.request_id, len(message.payload)


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture(params=[True, False], ids=["sends", "by its thread"])
def connection(owner, request):
    connection = Connection("test", owner, sends_now=request.param)
    connection.start()
    yield connection
    owner.may_open.set()
    connection.close()
    connection.join()
    owner.peer.close()
    assert not threads_that_send()


def threads_that_send():
    return [thread for thread in threading.enumerate() if thread.name == "rpcdl-send test"]


def submit(connection, payload, completed):
    return connection.submit(MessageType.CALL, Encoded(payload, []), Request(completed.append, PageablePool()))


def test_requests_from_before_the_connection_come_first_and_short_ones_need_no_thread(owner, connection):
    numbers = [submit(connection, SHORT, []) for _ in range(3)]
    connection.cancel(numbers[1])
    owner.may_open.set()
    assert owner.is_ready.wait(20 * TIMEOUT_SCALE)
    numbers.append(submit(connection, SHORT, []))
    assert [owner.receive() for _ in range(3)] == [(numbers[place], len(SHORT)) for place in (0, 2, 3)]
    assert len(threads_that_send()) == (not connection._sends_now)


@pytest.mark.parametrize("payload", [SHORT, LONG], ids=["short", "long"])
def test_early_requests_of_a_connection_without_a_thread_that_sends_fail(owner, connection, payload, monkeypatch):
    monkeypatch.setattr(connections, "_NO_THREAD_TIMEOUT", 0.1)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "rpcdl-send test":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    completed = []
    submit(connection, payload, completed)
    owner.may_open.set()
    if payload is SHORT and connection._sends_now:
        assert owner.receive() == (1, len(SHORT))
        return
    wait_until(lambda: completed)
    (error,) = completed
    assert isinstance(error, ConnectionLostError)
    assert "can't start new thread" in str(error)
    assert owner.lacking
    assert owner.is_lost.wait(20 * TIMEOUT_SCALE)
