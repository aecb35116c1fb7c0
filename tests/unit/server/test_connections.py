"""The log of connections: lines that programs can read, and in which nobody can write what is not his."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdataloader.server.logs import AcceptedConnection, Origin, describe

ORIGIN = Origin("gpu01:2304", 0, "4711")
KEYS = ["event", "kind", "peer", "client", "rank", "job", "worker", "seconds", "received", "sent", "reason"]


def parse(line):
    """As the documentation says that a line can be taken apart."""
    pairs, _, reason = line.partition(" reason=")
    values = dict(pair.split("=") for pair in pairs.split(" "))
    assert re.fullmatch('"[^"]*"', reason)
    return {**values, "reason": reason[1:-1]}


def test_golden_lines():
    assert describe("accepted", "control", "10.0.0.7:51234", ORIGIN) == (
        "event=accepted kind=control peer=10.0.0.7:51234 client=gpu01:2304 rank=0 job=4711 worker=- seconds=- "
        'received=- sent=- reason="-"'
    )
    closed = describe(
        "closed", "worker", "[::1]:5", ORIGIN, worker=3, seconds="1.500", received=0, sent=7, reason="exited: a b"
    )
    assert closed == (
        "event=closed kind=worker peer=[::1]:5 client=gpu01:2304 rank=0 job=4711 worker=3 seconds=1.500 "
        'received=0 sent=7 reason="exited: a b"'
    )
    assert describe("refused", None, "", reason="unknown session") == (
        "event=refused kind=- peer=- client=- rank=- job=- worker=- seconds=- received=- sent=- "
        'reason="unknown session"'
    )


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("a b", r"a\x20b"),
        ("x\nevent=accepted", r"x\x0aevent\x3daccepted"),
        ('"', r"\x22"),
        ("\\x20", r"\x5cx20"),
        ("\x1b[31m", r"\x1b[31m"),
        ("é", r"\xe9"),
        ("日", r"\u{65e5}"),
        ("\u2028", r"\u{2028}"),
        ("\ud800", r"\u{d800}"),
        ("h" * 300, "h" * 255 + "..."),
    ],
)
def test_names_are_escaped_and_cut(name, written):
    assert parse(describe("accepted", "control", "-", Origin(name, 0, "")))["client"] == written


@given(st.text(), st.text(), st.text(), st.text())
def test_nobody_writes_a_pair_or_a_line_that_is_not_his(peer, client, job, reason):
    line = describe("refused", "worker", peer, Origin(client, None, job), reason=reason)
    assert list(parse(line)) == KEYS
    assert parse(line)["event"] == "refused"
    assert line.isascii()
    assert line.isprintable()
    assert line.count("event=") == line.count("client=") == 1
    assert len(line) < 20_000


def test_connection_writes_a_line_at_both_ends(caplog):
    caplog.set_level(logging.DEBUG, "rpcdataloader.connections")
    traffic = memoryview(bytearray(16)).cast("q")
    connection = AcceptedConnection("10.0.0.7:51234", ORIGIN, traffic, worker=2)
    traffic[0], traffic[1] = 10, 20
    connection.closed("was killed by SIGKILL")
    accepted, closed = map(parse, caplog.messages)
    assert (accepted["event"], accepted["kind"], accepted["worker"], accepted["sent"]) == (
        "accepted",
        "worker",
        "2",
        "-",
    )
    assert (closed["event"], closed["received"], closed["sent"]) == ("closed", "10", "20")
    assert closed["reason"] == "was killed by SIGKILL"
    assert 0 <= float(closed["seconds"]) < 60
