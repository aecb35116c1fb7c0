"""JSON objects as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rpcdataloader.wire.messages import from_json, read_json


@dataclass
class Inner:
    text: str


@dataclass
class Outer:
    number: int
    share: float
    flag: bool
    rank: int | None
    inner: Inner
    several: list[Inner]


FIELDS = {"number": 1, "share": 2, "flag": False, "rank": None, "inner": {"text": "a"}, "several": [{"text": "b"}]}


def test_fields_become_what_the_class_says_and_others_are_left_alone():
    expected = Outer(1, 2, False, None, Inner("a"), [Inner("b")])
    assert from_json(Outer, {**FIELDS, "unknown": 1}) == expected
    assert from_json(Outer, {**FIELDS, "rank": 3}).rank == 3


@pytest.mark.parametrize("name", FIELDS)
def test_field_that_is_missing_is_named(name):
    fields = {other: value for other, value in FIELDS.items() if other != name}
    with pytest.raises(ValueError, match=f"{name} is missing"):
        from_json(Outer, fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 1.0),
        ("number", True),
        ("number", "1"),
        ("number", None),
        ("share", "2"),
        ("share", True),
        ("flag", 0),
        ("rank", "3"),
        ("rank", 1.5),
        ("inner", "a"),
        ("inner", None),
        ("several", {"text": "b"}),
        ("several", ["b"]),
    ],
)
def test_field_of_another_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is of another type"):
        from_json(Outer, {**FIELDS, name: value})


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        ("{}".encode("utf-16"), "is not JSON"),
        (b"null", "is not a JSON object"),
        (b"[]", "is not a JSON object"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_no_object_is_refused(data, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        read_json(memoryview(data))
