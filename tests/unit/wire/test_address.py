from __future__ import annotations

import pytest
from hypothesis import given
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
    ("text", "problem", "advice"),
    [
        ("", "the port is missing", "write host:port"),
        ("node01", "the port is missing", "write host:port"),
        ("node01:", "the port '' is not a number", "write host:port"),
        (":6543", "'' is not the name of one host", "write host:port"),
        ("node01:http", "the port 'http' is not a number", "write host:port"),
        ("node01:0", "the port 0 is not in 1..65535", "write host:port"),
        ("node01:65536", "the port 65536 is not in 1..65535", "write host:port"),
        ("node01:" + "9" * 5000, "is not in 1..65535", "write host:port"),
        ("node01:-1", "the port '-1' is not a number", "write host:port"),
        ("node01:+80", "the port '+80' is not a number", "write host:port"),
        ("node01:8_0", "the port '8_0' is not a number", "write host:port"),
        ("node01:٨٠", "the port '٨٠' is not a number", "write host:port"),
        (" node01:6543", "blanks or control characters", "write host:port"),
        ("node01:6543\n", "blanks or control characters", "write host:port"),
        ("node\x0001:6543", "blanks or control characters", "write host:port"),
        ("node 01:6543", "'node 01' is not the name of one host", "write host:port"),
        ("node..local:6543", "'node..local' between dots must have 1 to 63", "write host:port"),
        ("n" * 64 + ":6543", "between dots must have 1 to 63", "write host:port"),
        ("node01,node02:6543", "'node01,node02' is not the name of one host", "write host:port"),
        ("node[01-04]:6543", "'node[01-04]' is not the name of one host", "write host:port"),
        ("me@node01:6543", "'me@node01' is not the name of one host", "write host:port"),
        ("node01:6543 node02:6543", "it is more than one address", "separate them by commas"),
        ("node01:6543;node02:6543", "it is more than one address", "separate them by commas"),
        ("::1", "an IPv6 address needs brackets", "write [address]:port, such as [::1]:6543"),
        ("::1:6543", "an IPv6 address needs brackets", "write [address]:port, such as [::1]:6543"),
        ("[::1]", "the port is missing", "write [::1]:port"),
        ("[::1", "the port is missing", "write [::1]:port"),
        ("[::1]6543", "the port is missing", "write [::1]:port"),
        ("[::1]:", "the port '' is not a number", "write host:port"),
        ("[node01]:6543", "'node01' is not an IPv6 address", "write host:port"),
        ("[]:6543", "'' is not an IPv6 address", "write host:port"),
        ("unix:", "must be absolute", "write unix:/path"),
        ("unix:run/socket", "must be absolute", "write unix:/path"),
        ("unix:///run/socket", "it has a scheme", "write unix:/run/socket"),
        ("tcp://node01:6543", "it has a scheme", "write node01:6543"),
        ("http://node01:6543/path", "it has a scheme", "write node01:6543"),
        ("tcp://", "it has a scheme", "write host:port"),
    ],
)
def test_malformed_address_is_refused_with_what_to_write(text, problem, advice):
    with pytest.raises(ValueError, match="cannot read the address") as caught:
        Address.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert problem in message
    assert advice in message


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
    with pytest.raises(ValueError, match="the port 0"):
        Address.parse("127.0.0.1:0")
