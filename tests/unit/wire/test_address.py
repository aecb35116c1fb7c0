from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.wire.address import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node01:6543", Address("node01", 6543)),
        ("node01.cluster.example.org:1", Address("node01.cluster.example.org", 1)),
        ("gpu_node-7:65535", Address("gpu_node-7", 65535)),
        ("10.0.0.7:6543", Address("10.0.0.7", 6543)),
        ("[::1]:6543", Address("::1", 6543)),
        ("[2001:db8::7]:80", Address("2001:db8::7", 80)),
        ("[fe80::1%eth0]:80", Address("fe80::1%eth0", 80)),
        ("unix:/run/pool/socket", Address(path="/run/pool/socket")),
        ("unix:/tmp/a b:6543,c", Address(path="/tmp/a b:6543,c")),
    ],
)
def test_address_is_read_and_written_back(text, address):
    assert Address.parse(text) == address
    assert str(address) == text
    assert address.is_unix == text.startswith("unix:")


@pytest.mark.parametrize(
    "text",
    [
        "", "node01", "node01:", ":6543", "node01:http", "node01:0", "node01:65536", "node01:" + "9" * 5000,
        "node01:-1", "node01:+80", "node01:8_0", "node01:٨٠", " node01:6543", "node01:6543\n", "node\x0001:6543",
        "node 01:6543", "node..local:6543", "n" * 64 + ":6543", "node01,node02:6543", "node[01-04]:6543",
        "me@node01:6543", "node01:6543 node02:6543", "node01:6543;node02:6543", "::1", "::1:6543", "[::1]", "[::1",
        "[::1]6543", "[::1]:", "[node01]:6543", "[]:6543", "unix:", "unix:run/socket", "unix:/run/socket ",
        "tcp://node01:6543", "http://node01:6543/path", "tcp://",
    ],
)  # fmt: skip
def test_malformed_address_is_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match="cannot read the address") as caught:
        Address.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "write host:port (1 to 65535), [IPv6 address]:port or unix:/path" in message


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("localhost", "the port of its node server is missing, as in localhost:6543, or local for workers of this"),
        ("node01", "the port of its node server is missing, as in node01:6543"),
        ("a:1 b:2", "commas separate addresses: a:1,b:2"),
        ("a:1;b:2\n[::1]:3", "commas separate addresses: a:1,b:2,[::1]:3"),
    ],
)
def test_probable_meaning_of_a_malformed_address_is_told(text, guess):
    with pytest.raises(ValueError, match=re.escape(f"or unix:/path; {guess}")):
        Address.parse(text)


@settings(deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"(unix:|tcp://|\[)?[a-z0-9:.\]/]{0,20}:?[0-9]{0,6}"))
def test_every_text_is_an_address_that_round_trips_or_a_value_error(text):
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert Address.parse(str(address)) == address
    assert address.is_unix or 1 <= address.port <= 65535


@pytest.mark.parametrize(
    "fields", [{"host": "a", "path": "/b"}, {"port": 1, "path": "/b"}, {"host": "a", "port": -1}, {"port": 65536}]
)
def test_contradictory_address_is_refused_when_built(fields):
    with pytest.raises(ValueError, match=r"not both|is not in 0\.\.65535"):
        Address(**fields)


def test_port_zero_is_for_servers_only():
    assert str(Address("127.0.0.1", 0)) == "127.0.0.1:0"
    with pytest.raises(ValueError, match="cannot read the address"):
        Address.parse("127.0.0.1:0")
