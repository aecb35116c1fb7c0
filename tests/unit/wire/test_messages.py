"""Payloads: what one side encodes is what the other side decodes, and everything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire.messages import (
    Busy,
    Exited,
    Goaway,
    Log,
    StackRequest,
    Welcome,
    pack_handles,
    unpack_handles,
)
from rpcdataloader.wire.pickling import Build

MESSAGES = [
    Welcome("node07", 4711, "ab" * 16, 32),
    Welcome("node07", 4711, "ab" * 16, 32, worker=3),
    Busy("all 8 connections are in use"),
    Exited(3, 4711, "was killed by SIGKILL (perhaps out of memory)"),
    StackRequest(3),
    StackRequest(3, "took longer than 5 s"),
    Goaway(17),
    Goaway(17, retired=True),
    Log(30, "py.warnings", "UserWarning: déjà vu\n日本"),
    Log(0, "", "loading 17", "worker 3"),
]
KINDS = [Welcome, Busy, Exited, StackRequest, Goaway, Log]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_round_trip(message, kind):
    assert type(message).decode(kind(message.encode())) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80\x05.",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"other": 1}',
        b"{",
        b"\xff",
        b'{"reason": 1, "x": 2}',
        b"[" * 100_000,
    ],
)
def test_malformed_payload_is_refused(kind, payload):
    with pytest.raises(RemoteProtocolError, match=f"malformed {kind.__name__} message"):
        kind.decode(payload)


def test_build_round_trip():
    build = Build(3, "ImageFolder", True, ("python", "numpy", b"torch"), (1234, 9, 5, (100, 1 << 30)))
    assert Build.decode(memoryview(build.encode())) == build


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_handles_round_trip(handles):
    assert unpack_handles(memoryview(pack_handles(handles))) == handles
    assert pack_handles(iter(handles)) == b"".join(handle.to_bytes(8, "little") for handle in handles)


@pytest.mark.parametrize("size", [1, 7, 9, 15])
def test_handles_of_a_wrong_size_are_refused(size):
    with pytest.raises(RemoteProtocolError, match=f"a RELEASE message of {size} bytes"):
        unpack_handles(bytes(size))
