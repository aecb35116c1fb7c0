from __future__ import annotations

import array
import contextlib

import numpy
import pytest

from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RemoteProtocolError
from rpcdataloader.wire.channel import Receiver
from rpcdataloader.wire.frames import (
    HEADER_SIZE,
    Decoder,
    HeapBlock,
    Limits,
    MessageType,
    Sealer,
    SharedBlock,
    encode,
    heap_blocks,
)
from rpcdataloader.wire.handshake import STATUS_TICKET, Preamble

KEY = bytes(range(32))
LIMITS = Limits(payload_size_bytes=100, num_blocks=3, block_size_bytes=50, message_size_bytes=160)


def refuse_to_allocate(_request_id, sizes):
    raise AssertionError(f"allocated {sizes}")


class Source:
    """A stream of bytes, received at most the given number at a time, and then at once; notes what it is asked for."""

    name = "the peer"
    unread = b""

    def __init__(self, data, step_sizes=None):
        self.rest = memoryview(data)
        self.steps = iter(step_sizes or ())
        self.asked = []

    def recv_into(self, views):
        limit = min(next(self.steps, len(self.rest)), len(self.rest))
        self.asked.append([len(view) for view in views])
        size = 0
        for view in views:
            assert len(view) > 0
            piece = self.rest[: min(len(view), limit - size)]
            view[: len(piece)] = piece
            self.rest = self.rest[len(piece) :]
            size += len(piece)
        return size

    def count_waiting(self):
        return len(self.rest)


def feed(decoder, data, step_sizes=None):
    """The messages that a channel reads from ``data``, but for a last one that is cut."""
    messages = []
    source = Source(data, step_sizes)
    with contextlib.suppress(ConnectionLostError):
        while (message := Receiver(source, decoder).receive()) is not None:
            messages.append(message)
    return messages


def content(message):
    return (
        message.type,
        message.flags,
        message.request_id,
        bytes(message.payload),
        [bytes(block.view) for block in message.blocks],
    )


def join(*args, **kwargs):
    return b"".join(encode(*args, **kwargs))


# ---------------------------------------------------------------------------------------------------- golden bytes


@pytest.mark.parametrize(
    ("preamble", "golden"),
    [
        # magic, version, flags, reserved, ticket
        (Preamble(bytes(range(16))), "525043444c445201 0500 0000 00000000 000102030405060708090a0b0c0d0e0f"),
        (Preamble(bytes(range(16)), tls=True), "525043444c445201 0500 0100 00000000 000102030405060708090a0b0c0d0e0f"),
        (Preamble(STATUS_TICKET), "525043444c445201 0500 0000 00000000 01000000000000000000000000000000"),
    ],
)
def test_golden_preamble(preamble, golden):
    assert preamble.encode() == bytes.fromhex(golden)
    assert Preamble.decode(bytes.fromhex(golden)) == preamble


def test_flags_of_a_later_preamble_are_ignored():
    assert Preamble.decode(Preamble().encode()[:10] + b"\xfe\xff\x01\x02\x03\x04" + bytes(16)) == Preamble()


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\nHost: node01:6543\r\n"[:32], bytes(32), bytes(31), bytes(33)]
)
def test_garbage_instead_of_a_preamble_is_a_protocol_error(data):
    with pytest.raises(RemoteProtocolError, match=r"preamble|does not speak this protocol"):
        Preamble.decode(data)


def test_golden_message_without_mac():
    golden = bytes.fromhex(
        "5250444c"  # magic
        "01"  # type
        "00"  # flags
        "5000"  # header size
        "0000000000000000"  # request id
        "0200000000000000"  # payload size
        "00000000"  # num blocks
        "00000000"  # reserved
        "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # SHA-256 of the body
        "00000000000000000000000000000000"  # MAC
        "7b7d"  # payload
    )
    assert join(None, MessageType.HELLO, payload=b"{}") == golden
    assert [content(message) for message in feed(Decoder(refuse_to_allocate), golden)] == [(1, 0, 0, b"{}", [])]


def fourth() -> Sealer:
    """That of the fourth message of its direction."""
    sealer = Sealer(KEY)
    sealer.num_sealed = 3
    return sealer


OF_TABLE_AND_PAYLOAD = "160e307225eec72e4bda4d9c9015853adc092b9c96d54a3fb2187c02851927d3"
WITH_DIGEST_OF_BLOCKS = "031396da88e93268ee5b0a4f0dc588df35af2b629c4fa71ea222d0162ec05316"
OF_BLOCKS = "d35c416a85b807e9b5384915d6ebb4a9f7352713efd89857b45a242f473728a9"


# The numbers of all types are on the page of the protocol, which is compared with them.
@pytest.mark.parametrize(
    ("type", "body_digest", "mac", "block_digest"),
    [
        (MessageType.CALL, WITH_DIGEST_OF_BLOCKS, "92af25f091f6ffbc39e99d39836cf6bb", OF_BLOCKS),
        (MessageType.BUILD, WITH_DIGEST_OF_BLOCKS, "d2831f3bdea07d141eda51e1302000bb", OF_BLOCKS),
        (MessageType.LOAD, OF_TABLE_AND_PAYLOAD, "6a0bc11117bcbb0760f656d5670470f0", ""),
        (MessageType.REPLY, OF_TABLE_AND_PAYLOAD, "0891c8780fe0fe8ce80a48e99259e2ac", ""),
    ],
)
def test_golden_sealed_message(type, body_digest, mac, block_digest):
    golden = bytes.fromhex(
        f"5250444c{int(type):02x}005000"  # magic, type, flags, header size
        "efcdab8967452301"  # request id
        "0300000000000000"  # payload size
        "0200000000000000"  # num blocks, reserved
        f"{body_digest}{mac}"
        f"05000000000000000000000000000000{block_digest}"  # table, and the SHA-256 of the blocks
        "010203"  # payload
        "6c61726765"  # first block; the second one is empty
    )
    blocks = [array.array("b", b"large"), numpy.empty((0, 3))]  # whatever their format
    assert join(fourth(), type, 0x0123456789ABCDEF, b"\1\2\3", blocks) == golden
    (message,) = feed(Decoder(heap_blocks, fourth()), golden)
    assert content(message) == (type, 0, 0x0123456789ABCDEF, b"\1\2\3", [b"large", b""])


def test_golden_reply_with_a_shared_block():
    golden = bytes.fromhex(
        "5250444c11025000"  # magic, type, flags, header size
        "0700000000000000"  # request id
        "0300000000000000"  # payload size
        "0200000000000000"  # num blocks, reserved
        "0b467110ef8982a6be9e756d3739db4772d4dbdb427c9649cef750669fdfb800"  # SHA-256 of the body
        "6647758bf66d955caa7a03e1b6c81291"  # MAC
        "05000000000000000000000000000000"
        "0000000000000000"  # table: size, no mapping
        "00000400000000000300000000000000"
        "0000010000000000"  # size, mapping, offset
        "010203"  # payload
        "6c61726765"  # the block that is sent
    )
    shared = SharedBlock(3, 0x10000, 0x40000)
    assert join(fourth(), MessageType.REPLY, 7, b"\1\2\3", [b"large", shared]) == golden
    decoder, borrowed = Decoder(heap_blocks, fourth()), HeapBlock(4)
    decoder.borrow = lambda request_id, block: borrowed if (request_id, block) == (7, shared) else None
    (message,) = feed(decoder, golden)
    assert (message.flags, [bytes(block.view) for block in message.blocks]) == (0, [b"large", bytes(4)])


@pytest.mark.parametrize(("type", "can_borrow"), [(MessageType.REPLY, False), (MessageType.CALL, True)])
def test_shared_block_where_there_is_no_shared_memory_is_an_error(type, can_borrow):
    decoder = Decoder(heap_blocks)
    decoder.borrow = (lambda *_args: HeapBlock(4)) if can_borrow else None
    with pytest.raises(RemoteProtocolError, match="a shared block where there is no shared memory"):
        feed(decoder, join(None, type, 7, b"", [SharedBlock(1, 0, 1 << 18)]))


def test_shared_blocks_count_for_the_limits():
    limits = Limits(message_size_bytes=1 << 19)
    decoder = Decoder(heap_blocks, limits=limits)
    decoder.borrow = lambda *_args: pytest.fail("borrowed")
    blocks = [SharedBlock(1, 0, 1 << 19), b"x"]
    with pytest.raises(RemoteProtocolError, match="the peer announced too much"):
        feed(decoder, join(None, MessageType.REPLY, 7, b"", blocks))
    with pytest.raises(LocalProtocolError, match="over the limit"):
        join(None, MessageType.REPLY, 7, b"", blocks, limits=limits)


# ---------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("split", range(1, 18))
def test_blocks_of_one_message_are_offered_together_and_refilled_from_where_they_stopped(split):
    data = join(None, MessageType.CALL, 7, b"p", [b"abcdef", b"", b"ghi", b"jklmnopqr"])
    source = Source(data, [HEADER_SIZE, len(data) - HEADER_SIZE - 18, split])
    message = Receiver(source, Decoder(heap_blocks)).receive()
    assert source.asked[2] == [6, 3, 9]
    assert sum(source.asked[3]) == 18 - split
    assert content(message) == (MessageType.CALL, 0, 7, b"p", [b"abcdef", b"", b"ghi", b"jklmnopqr"])


def test_buffer_that_is_not_contiguous_is_refused():
    with pytest.raises(TypeError, match="contiguous"):
        encode(None, MessageType.REPLY, 1, b"", [memoryview(b"abcdefgh")[::2]])


# ---------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("payload_size", "block_sizes", "excess"),
    [
        (101, [], "a payload of 101 bytes is over the limit of 100"),
        (0, [1, 1, 1, 1], "4 blocks are over the limit of 3"),
        (0, [1, 51], "a block of 51 bytes is over the limit of 50"),
        (61, [50, 50], "a message of 161 bytes is over the limit of 160"),
    ],
)
def test_message_over_a_limit_is_refused_on_both_sides(payload_size, block_sizes, excess):
    payload, blocks = bytes(payload_size), [bytes(size) for size in block_sizes]
    sealer = Sealer(KEY)
    with pytest.raises(LocalProtocolError, match=excess):
        encode(sealer, MessageType.CALL, 1, payload, blocks, limits=LIMITS)
    # The sealer was not touched: this is still the first message.
    data = join(sealer, MessageType.CALL, 1, payload, blocks)
    with pytest.raises(RemoteProtocolError, match=excess):
        feed(Decoder(refuse_to_allocate, Sealer(KEY), LIMITS), data)


def test_message_at_every_limit_is_accepted():
    data = join(None, MessageType.CALL, 1, bytes(100), [bytes(50), bytes(10), b""], limits=LIMITS)
    assert len(feed(Decoder(heap_blocks, limits=LIMITS), data)) == 1
    data = join(None, MessageType.CALL, 1, bytes(10), [bytes(50)] * 3, limits=LIMITS)
    assert len(feed(Decoder(heap_blocks, limits=LIMITS), data)) == 1


@pytest.mark.parametrize("size", [4, 6])
def test_memory_of_another_size_is_not_filled(size):
    data = join(None, MessageType.REPLY, 1, b"payload", [b"block"])
    with pytest.raises(LocalProtocolError, match=r"blocks of other sizes than \(5,\)"):
        feed(Decoder(lambda _request_id, _sizes: [HeapBlock(size)]), data)


def test_sealed_message_before_the_keys_exist_is_refused():
    with pytest.raises(RemoteProtocolError, match="before the handshake was over"):
        feed(Decoder(heap_blocks), join(Sealer(KEY), MessageType.CALL, 1, b"payload"))


# ---------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("offset", "value", "problem"),
    [
        (0, 0x51, "the peer sent no message: b'QPDL' is where one should begin"),
        (4, 99, "a message of the unknown type 99"),
        # A header of the future
        (5, 8, "cannot read: size 80, flags 8, reserved 0"),
        (5, 255, "cannot read: size 80, flags 255, reserved 0"),
        (6, 88, "cannot read: size 88, flags 0, reserved 0"),
        (28, 1, "cannot read: size 80, flags 0, reserved 1"),
        (-1, 0, "the body of message 1 was altered"),  # which is checked without a MAC, too
    ],
)
def test_message_that_cannot_be_read_is_an_error(offset, value, problem):
    data = bytearray(join(None, MessageType.CALL, 1, b"payload"))
    data[offset] = value
    with pytest.raises(RemoteProtocolError, match=problem):
        feed(Decoder(refuse_to_allocate), data)


@pytest.mark.parametrize("size", [20, 200])  # shorter and longer than a header
@pytest.mark.parametrize(
    ("answer", "name"),
    [("HTTP/1.1 400 Bad Request", "HTTP"), ("<!DOCTYPE HTML>", "HTTP"), ("SSH-2.0-OpenSSH_9.2", "SSH")],
)
def test_server_of_another_protocol_is_named(answer, name, size):
    with pytest.raises(RemoteProtocolError, match=f"an {name} server answers there"):
        feed(Decoder(refuse_to_allocate), answer.encode().ljust(size)[:size])


def test_end_of_stream_is_clean_only_between_messages():
    data = join(None, MessageType.CALL, 1, b"payload", [b"block"])
    assert Receiver(Source(b""), Decoder(heap_blocks)).receive() is None
    assert Receiver(Source(data), Decoder(heap_blocks)).receive() is not None
    for size in range(1, len(data)):
        with pytest.raises(ConnectionLostError, match="connection to the peer lost in the middle of a message"):
            Receiver(Source(data[:size]), Decoder(heap_blocks)).receive()
