"""Payloads: what one side encodes is what the other side decodes, and everything else is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire import messages

MESSAGES = [
    messages.Welcome("node07", 4711, 32),
    messages.Welcome("node07", 4711, 32, worker=3),
    messages.Busy("all 8 connections are in use"),
    messages.Exited(3, 4711, "was killed by SIGKILL (perhaps out of memory)"),
    messages.StackRequest(3),
    messages.StackRequest(3, "took longer than 5 s"),
    messages.Goaway(17),
    messages.Goaway(17, retired=True),
    messages.Log(30, "py.warnings", "UserWarning: déjà vu\n日本"),
    messages.Log(0, "", "loading 17", "worker 3"),
]
KINDS = list(dict.fromkeys(map(type, MESSAGES)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_round_trip(message, kind):
    assert type(message).decode(kind(message.encode())) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "payload",
    [b"", b"\x80\x05.", b"[]", b"7", b"null", b"{}", b'{"other": 1}', b"{", b"\xff", b'{"reason": 1}', b"[" * 100_000],
    ids=lambda payload: repr(payload[:9]),
)
def test_malformed_payload_is_refused(kind, payload):
    with pytest.raises(RemoteProtocolError, match=f"malformed {kind.__name__} message"):
        kind.decode(payload)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_handles_round_trip(handles):
    assert messages.unpack_handles(memoryview(messages.pack_handles(handles))) == handles
    assert messages.pack_handles(iter(handles)) == b"".join(handle.to_bytes(8, "little") for handle in handles)


@pytest.mark.parametrize("size", [1, 7, 9, 15])
def test_handles_of_a_wrong_size_are_refused(size):
    with pytest.raises(RemoteProtocolError, match=f"a RELEASE message of {size} bytes"):
        messages.unpack_handles(bytes(size))


# Durations that a worker sends beside a reply


def test_stages_keep_their_values_in_28_bytes():
    stages = messages.Stages(*(number / 4 for number in range(9)))
    assert len(stages.pack()) == messages.STAGES_BYTES == 28
    assert messages.Stages.unpack(memoryview(stages.pack())).with_timings((stages.fetch, stages.collate)) == stages
    assert stages.task == stages.fetch + stages.collate + stages.encode
    golden = "0000803f00000040" + "00000000" + "0000003f" + "00000000" + "00000040" + "00000000"
    assert messages.Stages(idle=1.0, encode=2.0, runqueue=0.5, cpus=2.0).pack().hex() == golden


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e30])
def test_impossible_durations_count_as_nothing(value):
    assert messages.Stages.unpack(messages.Stages(encode=value, cpu=1.0).pack()) == messages.Stages(cpu=1.0)
    assert messages.Stages().with_timings((value, 1.0)) == messages.Stages(collate=1.0)


@pytest.mark.parametrize("size", [0, 27, 29])
def test_another_length_is_refused(size):
    with pytest.raises(RemoteProtocolError, match=f"stages of {size} bytes instead of 28"):
        messages.Stages.unpack(bytes(size))


# Text that others have chosen


def test_only_what_can_do_something_to_a_terminal_is_escaped():
    assert messages.printable("é日 ok") == "é日 ok"
    assert messages.printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"
    assert messages.printable("\x1b[2J\r\n\u202e\x00\udcff\U000e0001.") == r"\x1b[2J\r\n\u202e\x00\udcff\U000e0001."
