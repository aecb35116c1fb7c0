"""What a source says without being run."""

from __future__ import annotations

from rpcdataloader.host.literals import literals_of, set_later_in

SOURCE = b"""
import os
level, size = 1, 2
table = {"a": [1]}
number = 4
read = [2]
name: str = "a"
filled = {}
filled["a"] = os.getpid()
twice = 1
if read or number:
    twice = 2
computed = os.getpid()
first = second = 1

def set_up(value):
    global name
    name = value
    filled.clear()

class Limits:
    by_name = {}
    limit = -1
    class Inner:
        depth = 3
    def get(self, limit=4):
        return limit

class Late:
    size = 1
Late.size = 2
"""


def test_literals_that_are_named_once_are_found():
    assert literals_of(SOURCE) == {
        "table": {"a": [1]},
        "number": 4,
        "name": "a",
        "Limits.by_name": {},
        "Limits.limit": -1,
        "Limits.Inner.depth": 3,
    }


def test_source_that_cannot_be_parsed_says_nothing():
    assert literals_of(b"1 +") == literals_of(b"\0") == {}


def test_source_with_an_expression_of_thousands_of_terms_has_none():
    assert literals_of(b"level = 1\ntable = " + b" + ".join([b"[0]"] * 3000)) == {}


def test_names_that_functions_of_a_module_set_are_found():
    source = b"a = b = 1\ndef f():\n    global a\n    a = c = 2\n    Kept.one, kept.two[0] = 1, kept.three\n"
    assert set_later_in(source) == {"a", "one"}
    assert set_later_in(b"def") == frozenset()
