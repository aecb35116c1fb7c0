from __future__ import annotations

import array
import contextlib
import gc
import hashlib
import struct
import weakref

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import ConnectionLostError, LocalProtocolError, RemoteProtocolError
from rpcdataloader.wire.channel import Receiver
from rpcdataloader.wire.frames import (
    HEADER_SIZE,
    Decoder,
    Limits,
    MessageType,
    Sealer,
    SharedBlock,
    encode,
)
from rpcdataloader.wire.handshake import PREAMBLE_SIZE, STATUS_ID, Preamble

KEY = bytes(range(32))


class FakeBlock:
    def __init__(self, size):
        self.view = memoryview(bytearray(size))


def allocate(_request_id, sizes):
    return [FakeBlock(size) for size in sizes]


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


def sealed_stream(num_messages, key=KEY):
    """Messages of one direction, each as bytes."""
    sealer = Sealer(key)
    return [
        join(sealer, MessageType.CALL, number, b"payload %d" % number, [b"block %d" % number])
        for number in range(num_messages)
    ]


def patch_header(data, **changes):
    """Change fields of an encoded message without a MAC, and make its digest fit again."""
    names = ["magic", "type", "flags", "header_size", "request_id", "payload_size", "num_blocks", "reserved"]
    header = dict(zip(names, struct.unpack_from("<4sBBHQQII", data), strict=True)) | changes
    body_size = 8 * header["num_blocks"] + header["payload_size"]
    digest = hashlib.sha256(data[HEADER_SIZE : HEADER_SIZE + body_size]).digest()
    return struct.pack("<4sBBHQQII32s16x", *header.values(), digest) + data[HEADER_SIZE:]


# ---------------------------------------------------------------------------------------------------- golden bytes


def test_golden_preamble():
    session_id = bytes(range(16))
    golden = bytes.fromhex(
        "525043444c445201"  # magic
        "0300"  # version
        "0000"  # flags
        "00000000"  # reserved
        "000102030405060708090a0b0c0d0e0f"  # session id
    )
    assert len(golden) == PREAMBLE_SIZE == 32
    assert Preamble(session_id).encode() == golden
    assert Preamble.decode(golden) == Preamble(session_id, version=3)
    golden = golden[:10] + b"\x01" + golden[11:]
    assert Preamble(session_id, tls=True).encode() == golden
    assert Preamble.decode(golden) == Preamble(session_id, version=3, tls=True)


def test_golden_preamble_of_a_status_connection():
    golden = bytes.fromhex("525043444c445201030000000000000001000000000000000000000000000000")
    assert Preamble(STATUS_ID).encode() == golden
    assert Preamble.decode(golden).session_id == STATUS_ID


def test_flags_of_a_later_preamble_are_ignored():
    assert Preamble.decode(Preamble().encode()[:10] + b"\xfe\xff\x01\x02\x03\x04" + bytes(16)) == Preamble()


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


GOLDEN_MACS = {
    MessageType.HELLO: "b661d4c872452f40b949d2699f62cfa0",
    MessageType.AUTH: "31ec0cef51a2c9c515f53080c97f92d8",
    MessageType.REFUSED: "0e98115abf0839b7aef4b6befa6ba6e8",
    MessageType.WELCOME: "55869f79a4aa2c6b45b502b571f96e41",
    MessageType.BUSY: "e451e6a39dcd4d14f787c05316c54025",
    MessageType.CALL: "92af25f091f6ffbc39e99d39836cf6bb",
    MessageType.REPLY: "0891c8780fe0fe8ce80a48e99259e2ac",
    MessageType.ERROR: "beba8d2ac2c36db2ae79d796a9fa07ab",
    MessageType.RELEASE: "9d17c8e2c8eb462aac3e585c82cdcd8a",
    MessageType.CANCEL: "af97ece45f638dec90c8efa213ad1bae",
    MessageType.LOG: "d938975f410c455b92192a92fbbb0bb4",
    MessageType.GOAWAY: "ad813d46856e0965976bc3996324072f",
    MessageType.EXITED: "377727408018af945c0c3bfdd821572f",
    MessageType.BUILD: "d2831f3bdea07d141eda51e1302000bb",
    MessageType.STACK: "fd8d816b100df06820070b738392bcdf",
    MessageType.STATS: "9abfc04f512d5d5a34fa38295c0ab009",
    MessageType.REPORT: "2bca2dcdb0345fc08459ff073180b4af",
    MessageType.MAPPING: "b719d871bb03e76a0abcee54f2bbdbf4",
    MessageType.RETURN: "38ca11299f69572202fc9b0b741cd564",
    MessageType.LOAD: "6a0bc11117bcbb0760f656d5670470f0",
}


@pytest.mark.parametrize("type", MessageType)
def test_golden_sealed_message_of_each_type(type):
    # The fourth message of its direction.
    sealer, checker = Sealer(KEY), Sealer(KEY)
    for _ in range(3):
        assert checker.seal(b"") == sealer.seal(b"")
    with_digest = type in (MessageType.CALL, MessageType.BUILD)
    body_digest = "160e307225eec72e4bda4d9c9015853adc092b9c96d54a3fb2187c02851927d3"
    if with_digest:
        body_digest = "031396da88e93268ee5b0a4f0dc588df35af2b629c4fa71ea222d0162ec05316"
    golden = bytes.fromhex(
        f"5250444c{int(type):02x}005000"  # magic, type, flags, header size
        "efcdab8967452301"  # request id
        "0300000000000000"  # payload size
        "0200000000000000"  # num blocks, reserved
        + body_digest  # SHA-256 of the body
        + GOLDEN_MACS[type]
        + "05000000000000000000000000000000"  # table
        + (
            "d35c416a85b807e9b5384915d6ebb4a9f7352713efd89857b45a242f473728a9" if with_digest else ""
        )  # SHA-256 of the blocks
        + "010203"  # payload
        "6c61726765"  # first block; the second one is empty
    )
    assert join(sealer, type, 0x0123456789ABCDEF, b"\1\2\3", [b"large", b""]) == golden
    decoder = Decoder(allocate, checker)
    assert [content(message) for message in feed(decoder, golden)] == [
        (type, 0, 0x0123456789ABCDEF, b"\1\2\3", [b"large", b""])
    ]


def test_golden_reply_with_a_shared_block():
    sealer, checker = Sealer(KEY), Sealer(KEY)
    for _ in range(3):
        assert checker.seal(b"") == sealer.seal(b"")
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
    assert join(sealer, MessageType.REPLY, 7, b"\1\2\3", [b"large", shared]) == golden
    decoder, borrowed = Decoder(allocate, checker), FakeBlock(4)
    decoder.borrow = lambda request_id, block: borrowed if (request_id, block) == (7, shared) else None
    (message,) = feed(decoder, golden)
    assert (message.flags, [bytes(block.view) for block in message.blocks]) == (0, [b"large", bytes(4)])


@pytest.mark.parametrize(("type", "can_borrow"), [(MessageType.REPLY, False), (MessageType.CALL, True)])
def test_shared_block_where_there_is_no_shared_memory_is_an_error(type, can_borrow):
    decoder = Decoder(allocate)
    decoder.borrow = (lambda *_args: FakeBlock(4)) if can_borrow else None
    with pytest.raises(RemoteProtocolError, match="a shared block where there is no shared memory"):
        feed(decoder, join(None, type, 7, b"", [SharedBlock(1, 0, 1 << 18)]))


def test_shared_blocks_count_for_the_limits():
    limits = Limits(message_size_bytes=1 << 19)
    decoder = Decoder(allocate, limits=limits)
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
    message = Receiver(source, Decoder(allocate)).receive()
    assert source.asked[2] == [6, 3, 9]
    assert sum(source.asked[3]) == 18 - split
    assert content(message) == (MessageType.CALL, 0, 7, b"p", [b"abcdef", b"", b"ghi", b"jklmnopqr"])


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 100_000])
def test_payload_of_any_size_arrives(size):
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces = encode(Sealer(KEY), MessageType.REPLY, 1, payload, [b"block"])
    assert all(pieces)
    [message] = feed(Decoder(allocate, Sealer(KEY)), b"".join(pieces))
    assert content(message) == (MessageType.REPLY, 0, 1, payload, [b"block"])


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"abcdefgh"),
        array.array("d", [1.5, 2.5]),
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        numpy.float64(3.5).reshape(()),
        numpy.empty((0, 3)),
        memoryview(b"abcdefgh")[2:5],
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_buffers_of_any_format_are_sent_as_their_bytes(buffer):
    view = memoryview(buffer)
    data = join(None, MessageType.REPLY, 1, view, [view])
    [message] = feed(Decoder(allocate), data)
    assert content(message) == (MessageType.REPLY, 0, 1, view.tobytes(), [view.tobytes()])


def test_buffer_that_is_not_contiguous_is_refused():
    with pytest.raises(TypeError, match="contiguous"):
        encode(None, MessageType.REPLY, 1, b"", [memoryview(b"abcdefgh")[::2]])


def test_blocks_of_a_message_that_was_cut_are_freed_without_the_garbage_collector():
    allocated = []

    def record(request_id, sizes):
        blocks = allocate(request_id, sizes)
        allocated.extend(map(weakref.ref, blocks))
        return blocks

    gc.disable()
    try:
        decoder = Decoder(record)
        assert feed(decoder, join(None, MessageType.CALL, 1, b"payload", [b"block"])[:-1]) == []
        assert [block() for block in allocated] == [None]
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------- garbage


def decode_garbage(data, step_sizes=(), sealer=None):
    small = Limits(payload_size_bytes=1000, num_blocks=10, block_size_bytes=1000, message_size_bytes=3000)
    decoder = Decoder(allocate, sealer, small)
    try:
        return feed(decoder, data, step_sizes)
    except RemoteProtocolError:
        return None


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.integers(0, 255),
            "flags": st.integers(0, 255),
            "header_size": st.integers(0, 2**16 - 1),
            "request_id": st.integers(0, 2**64 - 1),
            "payload_size": st.integers(0, 40) | st.integers(0, 2**64 - 1),
            "num_blocks": st.integers(0, 4) | st.integers(0, 2**32 - 1),
            "reserved": st.integers(0, 2**32 - 1),
        },
    ),
    st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=4),
    st.binary(max_size=60),
    st.lists(st.integers(1, 100), max_size=10),
)
def test_wrong_fields_are_protocol_errors_or_too_short(changes, table, rest, step_sizes):
    message = join(None, MessageType.CALL, 1, struct.pack(f"<{len(table)}Q", *table) + rest)
    for received in decode_garbage(patch_header(message, **changes), step_sizes) or ():
        assert isinstance(received.type, MessageType)


# ---------------------------------------------------------------------------------------------------- limits


LIMITS = Limits(payload_size_bytes=100, num_blocks=3, block_size_bytes=50, message_size_bytes=160)


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
    assert len(feed(Decoder(allocate, limits=LIMITS), data)) == 1
    data = join(None, MessageType.CALL, 1, bytes(10), [bytes(50)] * 3, limits=LIMITS)
    assert len(feed(Decoder(allocate, limits=LIMITS), data)) == 1


@pytest.mark.parametrize("type", [MessageType.CALL, MessageType.BUILD])
def test_blocks_of_requests_are_checked(type):
    data = join(Sealer(KEY), type, 1, b"payload", [b"block 0"])
    with pytest.raises(RemoteProtocolError, match="the blocks of message 1 were altered"):
        feed(Decoder(allocate, Sealer(KEY)), data[:-1] + b"!")


def test_blocks_of_replies_are_not_covered_by_the_mac():
    # They are batches, too many to hash; TLS is there for them. If this changes, the documentation has to.
    data = join(Sealer(KEY), MessageType.REPLY, 1, b"payload", [b"block 0"])
    [message] = feed(Decoder(allocate, Sealer(KEY)), data[:-1] + b"!")
    assert bytes(message.blocks[0].view) == b"block !"


def test_body_without_mac_is_checked_too():
    data = bytearray(join(None, MessageType.HELLO, payload=b"payload"))
    data[-1] ^= 1
    with pytest.raises(RemoteProtocolError, match="the body of message 0 was altered"):
        feed(Decoder(refuse_to_allocate), bytes(data))


def test_sealed_message_before_the_keys_exist_is_refused():
    with pytest.raises(RemoteProtocolError, match="before the handshake was over"):
        feed(Decoder(allocate), sealed_stream(1)[0])


# ---------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("changes", [{"header_size": 88}, {"flags": 8}, {"flags": 255}, {"reserved": 1}], ids=str)
def test_header_of_the_future_is_an_error(changes):
    data = patch_header(join(None, MessageType.CALL, 1, b"payload"), **changes)
    with pytest.raises(RemoteProtocolError, match="cannot read"):
        feed(Decoder(refuse_to_allocate), data)


def test_end_of_stream_is_clean_only_between_messages():
    data = join(None, MessageType.CALL, 1, b"payload", [b"block"])
    assert Receiver(Source(b""), Decoder(allocate)).receive() is None
    assert Receiver(Source(data), Decoder(allocate)).receive() is not None
    for size in range(1, len(data)):
        with pytest.raises(ConnectionLostError, match="connection to the peer lost in the middle of a message"):
            Receiver(Source(data[:size]), Decoder(allocate)).receive()


# ---------------------------------------------------------------------------------------------------- preamble


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\nHost: node01:6543\r\n"[:32], bytes(32), bytes(31), bytes(33)]
)
def test_garbage_instead_of_a_preamble_is_a_protocol_error(data):
    with pytest.raises(RemoteProtocolError, match=r"preamble|does not speak this protocol"):
        Preamble.decode(data)
