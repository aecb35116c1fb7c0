"""A connection against a peer in the test's own thread, at the other end of a socketpair."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import weakref

import pytest
import torch

from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.client.sender import Sender
from rpcdataloader.errors import ConnectError, ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.wire.channel import Channel, local_identity
from rpcdataloader.wire.frames import Decoder, Message, MessageType, SharedBlock
from rpcdataloader.wire.handshake import PREAMBLE_SIZE, Handshake, Preamble
from rpcdataloader.wire.messages import pack_blocks, pack_handles, unpack_handles
from rpcdataloader.wire.shared import create_memory
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.transport import Stream
from tests.conftest import TIMEOUT_SCALE, wait_until

SECRET = b"a secret of the test"
POOL = PageablePool()


class FaultyStream(Stream):
    """Sends what the test wants to arrive, and not what it should send."""

    def __init__(self, sock, name):
        super().__init__(sock, name)
        self.fault = None

    def send(self, pieces):
        data = b"".join(pieces)
        if self.fault is None:
            super().send([data])
        else:
            self.fault(super().send, data)


def dribble(send, data):
    for position in range(len(data)):
        send([data[position : position + 1]])


def drop(send, data):
    pass


def truncate(size_bytes):
    return lambda send, data: send([data[:size_bytes]])


def flip(position):
    return lambda send, data: send([data[:position], bytes([data[position] ^ 1]), data[position + 1 :]])


def open_channels():
    """Both ends of an authenticated connection; the second is faulty on demand."""
    ours, theirs = socket.socketpair()
    client = Handshake(SECRET, local_identity("client"), Preamble(bytes(16)))
    data = client.data_to_send()
    server = Handshake(SECRET, local_identity("server"), Preamble.decode(data[:PREAMBLE_SIZE]))
    data = data[PREAMBLE_SIZE:]
    receiver, sender = server, client

    def fill(views, _is_first):
        nonlocal data
        [view] = views
        view[:], data = data[: len(view)], data[len(view) :]
        return len(view)

    while client.established is None or server.established is None:
        while data:
            message = Decoder(lambda _id, _sizes: []).read(fill)
            receiver.receive(message)
        data = receiver.data_to_send()
        receiver, sender = sender, receiver
    ends = (Stream(ours, "the peer"), client), (FaultyStream(theirs, "us"), server)
    return [Channel(stream, side.established, stream.name) for stream, side in ends]


class Listener:
    """Keeps what it is told."""

    def __init__(self):
        self.is_ready = threading.Event()
        self.messages = []
        self.loss = None
        self.explanation = None
        self.is_lost = threading.Event()

    def ready(self):
        self.is_ready.set()

    def received(self, message):
        self.messages.append(message)

    def explain(self, error):
        return self.explanation or error

    def lost(self, error):
        self.loss = error
        self.is_lost.set()


class Answer:
    """The completion of one request."""

    def __init__(self):
        self._reply = None
        self._event = threading.Event()

    def __call__(self, reply):
        assert self._reply is None, "completed twice"
        self._reply = reply
        self._event.set()

    @property
    def is_there(self):
        return self._event.is_set()

    def wait(self):
        assert self._event.wait(10 * TIMEOUT_SCALE), "not completed"
        return self._reply


class Pair:
    """A connection and its peer."""

    def __init__(self, sender):
        channel, self.peer = open_channels()
        self.listener = Listener()
        self.may_open = threading.Event()

        def open_channel():
            self.may_open.wait()
            return channel

        self.connection = Connection("node/1", open_channel, self.listener, POOL, sender)
        self.connection.start()

    def open(self):
        self.may_open.set()
        assert self.listener.is_ready.wait(10 * TIMEOUT_SCALE)
        return self

    def submit(self, payload=b"request", buffers=(), cancellable=False):
        answer = Answer()
        request = Request(answer, POOL, cancellable)
        answer.number = self.connection.submit(MessageType.CALL, payload, buffers, request)
        return answer

    def reply(self, number, payload=b"reply", buffers=()):
        self.peer.send(MessageType.REPLY, number, payload, buffers)

    def recv(self):
        message = self.peer.recv()
        return message.type, message.request_id, bytes(message.payload)

    def wait_for_loss(self):
        assert self.listener.is_lost.wait(10 * TIMEOUT_SCALE)
        return self.listener.loss

    def close(self):
        self.may_open.set()
        self.connection.close()
        self.peer.stream.close()
        self.connection.join()


@pytest.fixture
def sender():
    with contextlib.closing(Sender()) as made:
        yield made


@pytest.fixture
def make_pair(sender):
    pairs = []

    def make():
        pairs.append(Pair(sender))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    sender.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rpcdl")]
    assert not left


@pytest.fixture
def pair(make_pair):
    """An open connection."""
    return make_pair().open()


# --- requests and replies


def test_requests_are_numbered_and_arrive_in_order_without_waiting_for_replies(pair):
    for payload in (b"small", bytes(100_000), b"also small"):
        pair.submit(payload)
    assert [pair.recv() for _ in range(3)] == [
        (MessageType.CALL, 1, b"small"),
        (MessageType.CALL, 2, bytes(100_000)),
        (MessageType.CALL, 3, b"also small"),
    ]


def test_requests_of_many_threads_arrive_in_the_order_of_their_numbers(pair):
    threads = [threading.Thread(target=lambda: [pair.submit(bytes(9000)) for _ in range(20)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert [pair.recv()[1] for _ in range(100)] == list(range(1, 101))
    for thread in threads:
        thread.join()


def test_requests_wait_for_the_connection_to_open(make_pair):
    pair = make_pair()
    answers = [pair.submit(payload) for payload in (b"one", b"two")]
    assert not pair.connection.is_open
    pair.open()
    assert [pair.recv() for _ in range(2)] == [(MessageType.CALL, 1, b"one"), (MessageType.CALL, 2, b"two")]
    pair.reply(2)
    assert bytes(answers[1].wait().payload) == b"reply"
    assert pair.connection.is_open


def test_replies_in_any_order_complete_their_own_requests(pair):
    answers = [pair.submit() for _ in range(10)]
    assert pair.connection.num_pending == 10
    for number in (7, 1, 10, 2, 3, 9, 8, 4, 6, 5):
        pair.reply(number, b"reply %d" % number)
    assert [bytes(answer.wait().payload) for answer in answers] == [b"reply %d" % n for n in range(1, 11)]
    assert pair.connection.num_pending == 0


def test_errors_are_replies(pair):
    answer = pair.submit()
    pair.peer.send(MessageType.ERROR, 1, b"what went wrong")
    assert (answer.wait().type, bytes(answer.wait().payload)) == (MessageType.ERROR, b"what went wrong")


def test_reply_that_arrives_byte_by_byte_is_whole(pair):
    pair.peer.stream.fault = dribble
    answer = pair.submit()
    pair.reply(1, b"slowly", [b"block" * 100, b"another"])
    message = answer.wait()
    assert bytes(message.payload) == b"slowly"
    assert [bytes(block.view) for block in message.blocks] == [b"block" * 100, b"another"]


def test_blocks_of_a_reply_are_received_where_the_request_says(pair):
    sizes = []

    class Allocator:
        def allocate(self, size_bytes):
            sizes.append(size_bytes)
            return POOL.allocate(size_bytes)

    answer = Answer()
    pair.connection.submit(MessageType.CALL, b"", (), Request(answer, Allocator()))
    pair.reply(1, b"", [b"12345", b""])
    answer.wait()
    assert sizes == [5, 0]


def test_connection_keeps_nothing_of_a_reply_that_was_taken(pair):
    kept = []

    class Collected:
        def __call__(self, reply):
            kept.append(weakref.ref(reply.blocks[0].tensor))
            kept.append(weakref.ref(self))
            done.set()

    done = threading.Event()
    pair.connection.submit(MessageType.CALL, b"", (), Request(Collected(), POOL))
    pair.reply(1, b"", [bytes(1 << 20)])
    assert done.wait(10 * TIMEOUT_SCALE)
    gc.collect()
    wait_until(lambda: [reference() for reference in kept] == [None, None], what="the reply's memory")


def test_messages_that_answer_nothing_go_to_the_listener(pair):
    pair.peer.send(MessageType.GOAWAY, payload=b"{}")
    pair.peer.send(MessageType.LOG, payload=b"text")
    wait_until(lambda: len(pair.listener.messages) == 2)
    assert [message.type for message in pair.listener.messages] == [MessageType.GOAWAY, MessageType.LOG]


def test_requests_above_a_number_can_be_failed_alone(pair):
    answers = [pair.submit() for _ in range(3)]
    pair.connection.fail_above(1, ConnectionLostError("not begun"))
    assert [str(answer.wait()) for answer in answers[1:]] == ["not begun", "not begun"]
    pair.reply(1)
    assert answers[0].wait().type is MessageType.REPLY


def test_peer_that_reads_nothing_delays_no_caller(pair):
    tensor = torch.zeros(1 << 22, dtype=torch.uint8)
    for _ in range(10):
        pair.submit(b"", [memoryview(tensor.numpy())])
    for _ in range(160):
        pair.submit(bytes(4000))
    pair.connection.release(1)
    pair.connection.cancel(1)
    assert pair.connection.num_pending == 10 + 160


def test_peer_that_reads_nothing_holds_up_no_other_connection(make_pair):
    pairs = [make_pair().open() for _ in range(3)]
    for pair in pairs[:2]:
        for _ in range(3):
            pair.submit(b"large", [memoryview(bytes(50_000_000))])
    for number in range(1, 4):
        pairs[2].submit(b"small", [memoryview(bytes(1_000_000))])
        assert pairs[2].recv() == (MessageType.CALL, number, b"small")
    assert [pairs[0].recv() for _ in range(3)] == [(MessageType.CALL, number, b"large") for number in (1, 2, 3)]


def test_small_request_that_a_caller_sends_waits_for_those_before_it(pair):
    pair.submit(b"large", [memoryview(bytes(50_000_000))])
    for number in range(1000):
        pair.submit(b"%d" % number, cancellable=True)
    assert [pair.recv()[2] for _ in range(1001)] == [b"large", *(b"%d" % number for number in range(1000))]


def test_requests_that_the_kernel_has_no_room_for_arrive_later(pair):
    payloads = [b"%d" % number * 1000 for number in range(1000)]  # some are sent in part
    for payload in payloads:
        pair.submit(payload, cancellable=True)
    assert [pair.recv()[2] for _ in payloads] == payloads


# --- cancelling and releasing


def test_cancel_tells_the_server_of_requests_that_are_pending(pair):
    first, second = pair.submit(b"first"), pair.submit(b"second")
    assert [pair.recv(), pair.recv()] == [(MessageType.CALL, 1, b"first"), (MessageType.CALL, 2, b"second")]
    pair.reply(first.number)
    first.wait()
    pair.connection.cancel(first.number)  # has its reply
    pair.connection.cancel(second.number)
    assert pair.recv() == (MessageType.CANCEL, 2, b"")
    pair.peer.send(MessageType.ERROR, 2, b"given up")
    assert second.wait().type == MessageType.ERROR


def test_request_that_is_cancelled_before_the_connection_opens_is_never_sent(make_pair):
    pair = make_pair()
    answers = [pair.submit(payload) for payload in (b"one", b"two", b"three")]
    pair.connection.cancel(2)
    pair.open()
    assert [pair.recv() for _ in range(2)] == [(MessageType.CALL, 1, b"one"), (MessageType.CALL, 3, b"three")]
    pair.submit(b"four")
    assert pair.recv() == (MessageType.CALL, 4, b"four")
    pair.peer.stream.close()
    pair.wait_for_loss()
    assert [answer.is_there for answer in answers] == [True, False, True]


def test_releases_are_batched(make_pair):
    pair = make_pair()
    for handle in range(1000):
        pair.connection.release(handle)
    pair.open()
    type, _number, payload = pair.recv()
    assert type == MessageType.RELEASE
    assert unpack_handles(payload) == list(range(1000))


def test_releases_between_requests_are_not_lost(make_pair):
    pair = make_pair()
    for handle in range(100):
        pair.connection.release(2 * handle)
        pair.connection.release(2 * handle + 1)
        pair.submit(bytes([handle]))
    pair.open()
    released, called = [], []
    while len(called) < 100:
        type, _number, payload = pair.recv()
        if type == MessageType.RELEASE:
            released += unpack_handles(payload)
        else:
            # What was released before is not used after.
            assert len(released) > 2 * len(called)
            called += payload
    assert called == list(range(100))
    assert released == list(range(200))


def test_release_waits_for_nothing(pair):
    tensor = torch.zeros(1 << 24, dtype=torch.uint8)
    pair.submit(b"", [memoryview(tensor.numpy())])  # more than the peer's kernel takes: the sender is stuck
    with pair.connection._lock:  # as when the garbage collector runs in the middle of a submit
        for handle in range(1000):
            pair.connection.release(handle)
    pair.recv()
    assert len(unpack_handles(pair.recv()[2])) == 1000


# --- ends


def test_end_of_file_fails_everything_that_is_pending(pair):
    pair.listener.explanation = ConnectionLostError("worker 1 was killed by SIGKILL")
    answers = [pair.submit() for _ in range(3)]
    pair.peer.stream.close()
    errors = [answer.wait() for answer in answers]
    assert {(type(error), str(error)) for error in errors} == {(ConnectionLostError, "worker 1 was killed by SIGKILL")}
    assert len(set(map(id, errors))) == 3  # else, the traceback of one would grow with the others'
    assert str(pair.wait_for_loss()) == "worker 1 was killed by SIGKILL"
    with pytest.raises(ConnectionLostError, match="SIGKILL"):
        pair.submit()


def test_connection_refuses_requests_before_the_first_of_the_pending_ones_fails(pair):
    refused = Answer()

    def ask_again(_error):
        try:
            pair.submit()
        except ConnectionLostError as exc:
            refused(pair.connection.has_ended and exc)
        else:
            refused(None)

    pair.connection.submit(MessageType.CALL, b"", (), Request(ask_again, POOL))
    pair.peer.stream.close()
    assert isinstance(refused.wait(), ConnectionLostError)


# Header of 80 bytes, table of 8 bytes for each block, payload, blocks.
@pytest.mark.parametrize("size_bytes", [1, 79, 80, 85, 90, 95, 100, 1094])
def test_truncated_reply_fails_everything_that_is_pending(pair, size_bytes):
    answers = [pair.submit(), pair.submit()]
    pair.peer.stream.fault = truncate(size_bytes)
    pair.reply(1, b"payload", [bytes(1000)])
    pair.peer.stream.finish()
    for answer in answers:
        assert isinstance(answer.wait(), ConnectionLostError)
        assert "in the middle of a message" in str(answer.wait())


def test_dropped_reply_is_noticed_with_the_next_one(pair):
    answers = [pair.submit(), pair.submit()]
    pair.peer.stream.fault = drop
    pair.reply(1)
    pair.peer.stream.fault = None
    pair.reply(2)
    for answer in answers:
        assert isinstance(answer.wait(), RemoteProtocolError)
        assert "authentication" in str(answer.wait())


@pytest.mark.parametrize("position", [4, 8, 16, 40, 70, 82])
def test_altered_reply_is_not_delivered(pair, position):
    answer = pair.submit()
    pair.peer.stream.fault = flip(position)
    pair.reply(1)
    assert isinstance(answer.wait(), RPCError)
    assert pair.wait_for_loss()


def test_reset_fails_everything_that_is_pending(pair):
    # Sent by this thread, so that they are there when the peer closes.
    answers = [pair.submit(cancellable=True) for _ in range(3)]
    pair.peer.stream.close()  # with requests unread, which makes it a reset
    for answer in answers:
        assert isinstance(answer.wait(), ConnectionLostError)
        assert "reset by peer" in str(answer.wait())


def test_reset_while_sending_fails_everything_that_is_pending(pair):
    tensor = torch.zeros(1 << 24, dtype=torch.uint8)
    answers = [pair.submit(b"", [memoryview(tensor.numpy())]) for _ in range(3)]
    assert pair.peer.stream.recv_into([memoryview(bytearray(1000))])
    pair.peer.stream.close()
    for answer in answers:
        assert isinstance(answer.wait(), ConnectionLostError)


def test_half_closed_connection_is_closed(pair):
    answer = pair.submit(cancellable=True)
    pair.peer.stream.finish()
    assert isinstance(answer.wait(), ConnectionLostError)
    assert pair.recv()[0] == MessageType.CALL
    assert pair.peer.recv() is None


def test_reply_to_a_request_that_is_not_pending_is_an_error_of_the_server(pair):
    answer = pair.submit()
    pair.reply(5)
    assert isinstance(answer.wait(), RemoteProtocolError)
    assert "answered request 5, which is not pending" in str(answer.wait())


def test_second_reply_to_a_request_is_an_error_of_the_server(pair):
    answers = [pair.submit(), pair.submit()]
    pair.reply(1)
    pair.reply(1)
    assert bytes(answers[0].wait().payload) == b"reply"
    assert isinstance(answers[1].wait(), RemoteProtocolError)


def test_completion_that_raises_ends_the_connection_and_fails_the_others(pair, caplog):
    def complete(_reply):
        raise KeyError("a mistake of ours")

    pair.connection.submit(MessageType.CALL, b"", (), Request(complete, POOL))
    answer = pair.submit()
    pair.reply(1)
    assert isinstance(answer.wait(), ConnectionLostError)
    assert "KeyError" in str(answer.wait())
    assert isinstance(answer.wait().__cause__, KeyError)
    assert "the receiver of node/1 failed" in caplog.text
    pair.wait_for_loss()


@pytest.mark.parametrize("error", [ConnectError("nobody there"), RemoteProtocolError("another version")])
def test_requests_fail_with_the_reason_why_there_is_no_connection(error, sender):
    listener, answer = Listener(), Answer()

    def open_channel():
        assert may_open.wait(10 * TIMEOUT_SCALE)
        raise error

    may_open = threading.Event()
    connection = Connection("node", open_channel, listener, POOL, sender)
    connection.start()
    connection.submit(MessageType.CALL, b"", (), Request(answer, POOL))
    may_open.set()
    assert (type(answer.wait()), str(answer.wait())) == (type(error), str(error))
    connection.join()
    assert listener.loss is error


def test_mistake_while_connecting_fails_the_requests(caplog, sender):
    listener, answer = Listener(), Answer()

    def open_channel():
        assert may_open.wait(10 * TIMEOUT_SCALE)
        raise ZeroDivisionError("a mistake of ours")

    may_open = threading.Event()
    connection = Connection("node", open_channel, listener, POOL, sender)
    connection.start()
    connection.submit(MessageType.CALL, b"", (), Request(answer, POOL))
    may_open.set()
    assert isinstance(answer.wait(), ConnectionLostError)
    assert "ZeroDivisionError" in str(answer.wait())
    connection.join()
    assert "the receiver of node failed" in caplog.text


def test_close_fails_what_is_pending_and_ends_the_threads(pair):
    answers = [pair.submit() for _ in range(3)]
    pair.connection.close()
    pair.connection.close()
    pair.connection.join()
    for answer in answers:
        assert isinstance(answer.wait(), ConnectionLostError)
        assert str(answer.wait()) == "connection to node/1 was closed by this process"
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("node/1")]
    pair.connection.release(1)
    pair.connection.cancel(1)
    with pytest.raises(ConnectionLostError):
        pair.submit()


def test_close_gives_the_reason_that_its_caller_has(pair):
    answer = pair.submit()
    pair.connection.close(ConnectionLostError("the node is gone"))
    assert str(answer.wait()) == "the node is gone"
    assert str(pair.wait_for_loss()) == "the node is gone"


def test_close_ends_a_sender_that_is_stuck(pair):
    tensor = torch.zeros(1 << 24, dtype=torch.uint8)
    pair.submit(b"", [memoryview(tensor.numpy())])
    assert pair.peer.stream.recv_into([memoryview(bytearray(1000))])
    pair.connection.close()
    pair.connection.join(10 * TIMEOUT_SCALE)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("node/1")]
    assert pair.listener.is_lost.is_set()


def test_close_while_connecting_fails_what_is_pending_when_that_is_over(make_pair):
    pair = make_pair()
    answer = pair.submit()
    pair.connection.close()
    with pytest.raises(ConnectionLostError):
        pair.submit()
    pair.may_open.set()
    assert isinstance(answer.wait(), ConnectionLostError)
    assert not pair.listener.is_ready.is_set()
    assert pair.peer.recv() is None


@pytest.mark.usefixtures("pair")
def test_receiver_carries_the_name_of_the_connection_and_all_threads_block_signals():
    threads = {thread.name: thread for thread in threading.enumerate() if thread.name.startswith("rpcdl")}
    assert sorted(threads) == ["rpcdl-recv node/1", "rpcdl-send"]
    for thread in threads.values():

        def is_deaf(tid=thread.native_id):
            with open(f"/proc/self/task/{tid}/status") as file:
                masks = dict(line.split(":\t") for line in file if line.startswith("SigBlk"))
            return int(masks["SigBlk"], 16) & (1 << (2 - 1))  # SIGINT

        wait_until(is_deaf)


# --- messages without a reply


def test_message_that_has_no_reply_arrives_in_its_turn(pair):
    pair.submit(b"first")
    assert pair.recv()[2] == b"first"
    pair.connection.tell(MessageType.REPORT, b"report")
    assert pair.recv() == (MessageType.REPORT, 0, b"report")
    assert pair.connection.num_pending == 1
    pair.reply(1)


def test_message_that_has_no_reply_is_dropped_while_others_wait_or_nobody_is_there(make_pair):
    pair = make_pair()
    pair.connection.tell(MessageType.REPORT, b"too early")
    pair.open()
    answer = pair.submit(bytes(50_000_000))  # more than the kernel takes, which stops the sender
    wait_until(lambda: not pair.connection._outbox)
    for number in range(10):
        pair.connection.tell(MessageType.REPORT, b"%d" % number)
    assert len(pair.connection._outbox) == 1
    assert [pair.recv()[0] for _ in range(2)] == [MessageType.CALL, MessageType.REPORT]
    pair.reply(answer.number)
    assert isinstance(answer.wait(), Message)
    pair.connection.close()
    pair.connection.tell(MessageType.REPORT, b"too late")


# --- shared memory


def share(pair, descriptor=None):
    """Give memory to the connection, and wait until it is mapped."""
    descriptor = create_memory(1 << 20) if descriptor is None else descriptor
    pair.peer.send_descriptor(MessageType.MAPPING, pack_handles([1]), descriptor)
    return descriptor


def test_shared_blocks_are_returned_with_the_next_request(pair):
    descriptor = share(pair)
    assert pair.recv() == (MessageType.MAPPING, 0, pack_handles([1]))
    answer = pair.submit()
    assert pair.recv()[0] == MessageType.CALL
    os.pwrite(descriptor, b"here", 4096)
    os.close(descriptor)
    pair.reply(answer.number, buffers=[SharedBlock(1, 4096, 4)])
    blocks = answer.wait().blocks
    assert bytes(blocks[0].view) == b"here"
    other = pair.submit()
    assert pair.recv()[:2] == (MessageType.CALL, other.number)
    del answer, blocks[:]
    assert pair.submit().number
    assert pair.recv() == (MessageType.RETURN, 0, pack_blocks([(1, 4096)]))
    assert pair.recv()[0] == MessageType.CALL


def test_shared_blocks_for_pinned_memory_are_copied_there(pair):
    class Pinned:
        def allocate(self, size_bytes):
            allocated.append(size_bytes)
            return POOL.allocate(size_bytes)

    allocated = []
    os.close(share(pair))
    assert pair.recv()[0] == MessageType.MAPPING
    answer = Answer()
    number = pair.connection.submit(MessageType.CALL, b"", (), Request(answer, Pinned()))
    pair.recv()
    pair.reply(number, buffers=[SharedBlock(1, 0, 4)])
    assert bytes(answer.wait().blocks[0].view) == bytes(4)
    assert allocated == [4]
    pair.submit()
    assert pair.recv() == (MessageType.RETURN, 0, pack_blocks([(1, 0)]))


def test_memory_whose_descriptor_is_lost_on_the_way_is_not_used(pair):
    pair.peer.send(MessageType.MAPPING, payload=pack_handles([1]))
    answer = pair.submit()
    assert pair.recv()[0] == MessageType.CALL
    pair.reply(answer.number)
    assert bytes(answer.wait().payload) == b"reply"


def unsealed():
    return os.memfd_create("unsealed")


@pytest.mark.parametrize(
    ("make", "block", "error"),
    [
        (None, SharedBlock(2, 0, 64), "a block of shared memory 2, which it never gave"),
        (None, SharedBlock(1, 1 << 19, 1 << 20), "bytes 524288 to 1572864 of shared memory 1, which has 1048576"),
        (unsealed, None, "shared memory 1 that is not sealed against shrinking"),
    ],
)
def test_hostile_memory_ends_the_connection(pair, make, block, error):
    answer = pair.submit()
    os.close(share(pair, make and make()))
    if block is not None:
        pair.reply(answer.number, buffers=[block])
    assert error in str(pair.wait_for_loss())
    assert isinstance(answer.wait(), RemoteProtocolError)
