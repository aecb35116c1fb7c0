from __future__ import annotations

import gc
import pickle
from collections import defaultdict, deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.strings import set_apart
from tests.support.comparison import assert_same

LARGE = 1 << 16


def many(size: int = 3000, number: int = 30) -> list[bytes]:
    return [bytes([k]) * (size + k) for k in range(number)]


def texts(number: int = 30) -> list[str]:
    return [f"ünïcode \udcff {k} " * (200 + k) for k in range(number)]


def transfer(value: Any) -> tuple[Any, int, int]:
    """What arrives, the number of blocks, and the size of the pickle."""
    encoded = dumps_reply(value)
    blocks = []
    for buffer in encoded.buffers:
        block = Block(torch.empty(buffer.nbytes, dtype=torch.uint8))
        block.view[:] = buffer
        blocks.append(block)
    return loads(encoded.payload, blocks), len(blocks), len(encoded.payload)


class Own(list[Any]):
    pass


@pytest.mark.parametrize(
    ("value", "num_blocks"),
    [
        (bytes(LARGE), 1),
        ([bytes(LARGE), bytes([1]) * LARGE], 1),
        (many(), 1),
        (tuple(many()), 1),
        (texts(), 1),
        ([(many(), 3), {"a": many(), "b": [1, 2]}], 2),
        ([{"image": bytes([k]) * LARGE, "label": k, "tokens": [k] * 9} for k in range(5)], 5),
        ((0.5, [bytes(LARGE), 1, None, "text"], None), 1),
        ([b"", *many()], 1),
        ({b"key": many()}, 1),
    ],
)
def test_large_strings_are_blocks(value, num_blocks):
    found, blocks, size = transfer(value)
    assert_same(found, value)
    assert blocks == num_blocks
    assert size < 2000


@pytest.mark.parametrize(
    "value",
    [
        b"small",
        many(10),
        ["label"] * 10_000,
        [b"x" * 30_000] * 9,  # one object, which pickle writes once
        [*many(), "text"],
        [],
        (),
        {},
        [[], {}],
        bytearray(LARGE),
        {"a": 1, "b": [1, 2, 3]},
        Own(many()),
        np.zeros(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_others_are_left_as_they_are(value):
    assert set_apart(value) is value
    assert_same(transfer(value)[0], value)


def test_objects_that_are_one_stay_one():
    one, rest = many(), bytes(LARGE)
    found = transfer([one, rest, {"again": one, "rest": rest}])[0]
    assert found[0] is found[2]["again"]
    assert found[1] is found[2]["rest"]


def test_container_that_leads_back_to_itself_is_left_to_pickle():
    value: list[Any] = [bytes(LARGE)]
    value.append({"around": value})
    assert set_apart(value) is value
    found = transfer(value)[0]
    assert found[1]["around"] is found


def test_what_was_sent_apart_is_not_changed():
    value = {"a": [many(), bytes(LARGE)]}
    before = pickle.dumps(value)
    set_apart(value)
    assert pickle.dumps(value) == before


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Held:
    content: Any


def held_by_array(value):
    return np.array([value, None], dtype=object)


@pytest.mark.parametrize("content", [many, texts, lambda: {"key": many()}, lambda: [many(), [many()]]])
@pytest.mark.parametrize(
    "hold",
    [
        lambda value: Pair(value, 1),
        lambda value: Pair(1, Pair([value], 2)),
        Held,
        lambda value: defaultdict(list, key=value),
        lambda value: deque([value]),
        lambda value: {Pair: Held([{"key": value}])},
        held_by_array,
    ],
)
def test_container_that_another_object_refers_to_too_stays_one(hold, content):
    for is_first in False, True:
        value = content()
        batch = [hold(value), value] if is_first else [value, many(), hold(value)]
        received, _num_blocks, _size = transfer(batch)
        (holder, found) = received if is_first else (received[2], received[0])
        assert_same(found, value)
        assert any(each is found for each in reached_from(holder))


def reached_from(value: Any) -> list[Any]:
    """What an object refers to, at any depth."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        parts = each.ravel().tolist() if isinstance(each, np.ndarray) else gc.get_referents(each)
        parts = [part for part in parts if not isinstance(part, (type, ModuleType))]
        found += parts
        waiting += [part for part in parts if not isinstance(part, (str, bytes))]
    return found


def test_many_other_objects_let_strings_stay_in_the_pickle():
    value = many()
    others = [Held([index]) for index in range(20_000)]
    assert set_apart(small := [value, others[:10]]) is not small
    batch = [value, others]
    assert set_apart(batch) is batch


class Watched:
    """Whose class is asked for by code of its own."""

    @property  # type: ignore[misc]
    def __class__(self):
        raise ReferenceError("it has gone")


def test_no_code_of_other_objects_runs():
    value = many()
    holder = Held([Watched()])
    assert set_apart([value, holder])[1] is holder


@pytest.mark.parametrize("others", [[*range(20_000)], [*np.arange(20_000, dtype=np.float32)], [(1, "a")] * 20_000])
def test_numbers_let_strings_be_set_apart(others):
    value = many()
    assert set_apart([value, others])[0] is not value
    assert set_apart([value, Held(others)])[0] is not value
