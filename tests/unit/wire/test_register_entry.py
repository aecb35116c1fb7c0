"""What a node server writes about itself."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from rpcdataloader.wire.address import Address
from rpcdataloader.wire.register import Entry

NODE = Entry(Address("node01", 6543), 32, "node01", 4711, "the machine", 1795264940.5)

CONTENT = b"""{
 "address": "node01:6543",
 "num_workers": 32,
 "host": "node01",
 "pid": 4711,
 "machine": "the machine",
 "started": 1795264940.5
}
"""


def test_content_of_a_file():
    assert NODE.encode() == CONTENT
    assert Entry.decode(CONTENT) == NODE


@pytest.mark.parametrize("address", [Address("::1", 1), Address(path="/run/a pool"), Address("10.0.0.1", 65535)])
def test_every_kind_of_address(address):
    entry = dataclasses.replace(NODE, address=address)
    assert Entry.decode(entry.encode()) == entry


def test_part_of_a_file_is_refused_wherever_it_ends():
    for size in range(len(CONTENT) - 1):
        with pytest.raises(ValueError, match=r"\w"):
            Entry.decode(CONTENT[:size])


def changed(**fields):
    return json.dumps({**json.loads(CONTENT), **fields}).encode()


def test_fields_of_later_versions_are_left_alone():
    assert Entry.decode(changed(more=[1, 2])) == NODE


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not JSON"),
        (b"\0" * 100, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 4096, "is n"),  # "is nested too deeply", or from Python 3.12 on "is not JSON"
        (b"{}", "address is of another type"),
        (changed(address=None), "address is of another type"),
        (changed(address="node01"), "cannot read the address 'node01': write host:port"),
        (changed(address="node01:0"), "cannot read the address"),
        (changed(address="unix:socket"), "cannot read the address"),
        (changed(address="node01:6543\x1b[2J"), "cannot read the address"),
        (changed(address="\ud800:1"), "cannot read the address"),
        (changed(num_workers=True), "num_workers is of another type"),
        (changed(num_workers=2.0), "num_workers is of another type"),
        (changed(started="now"), "started is of another type"),
    ],
)
def test_anything_else_is_refused(content, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        Entry.decode(content)


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        (Address("127.0.0.1", 1), True),
        (Address("127.1.2.3", 1), True),
        (Address("::1", 1), True),
        (Address("localhost", 1), True),
        (Address(path="/run/pool"), True),
        (Address("10.0.0.1", 1), False),
        (Address("fe80::1", 1), False),
        (Address("node01", 1), False),
    ],
)
def test_addresses_that_are_for_their_machine_alone(address, alone):
    assert dataclasses.replace(NODE, address=address).is_for_its_machine_alone is alone


def test_names_of_files_are_names_of_files():
    assert NODE.file_name("0a1b") == "node01-6543-4711-0a1b.server.json"
    odd = dataclasses.replace(NODE, host="../.node 1", address=Address(path="/run/pool"))
    assert odd.file_name("0a1b") == "____node_1-unix-4711-0a1b.server.json"
