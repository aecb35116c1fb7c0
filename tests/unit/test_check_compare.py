"""Two samples are compared bit by bit, and what differs is named as the user would."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from rpcdataloader.check.probe import (
    AGAIN,
    HERE,
    OTHER_NODE,
    OTHER_WORKER,
    SENT,
    explain,
    find_differences,
)

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    image: Any
    label: int


class Slotted:
    __slots__ = ("label",)

    def __init__(self, label: int) -> None:
        self.label = label


class Tagged(torch.Tensor):
    pass


def tagged(value: float) -> Tagged:
    return torch.full((2,), value).as_subclass(Tagged)


def image(value: int) -> PIL.Image.Image:
    return PIL.Image.new("L", (2, 2), value)


def of_itself(label: int) -> list[Any]:
    sample: list[Any] = [label]
    sample.append(sample)
    return sample


ZEROS = torch.zeros(2, 3)
SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 2, {"sample": "1 and 2"}),
        (1, 1.0, {"sample": "int and float"}),
        (0.0, -0.0, {"sample": "0.0 and -0.0"}),
        ("a" * 99, "b" * 99, {"sample": "two str that are not the same"}),
        ({1, 2}, {1, 3}, {"sample": "{1, 2} and {1, 3}"}),
        ([1, 2], [1, 2, 3], {"sample": "2 and 3 items"}),
        (({"image": ZEROS}, 1), ({"image": ZEROS + 0.5}, 1), {"sample[0]['image']": "6 of 6 values, by up to 0.5"}),
        ({"a": ZEROS, "b": 2}, {"a": ZEROS}, {"sample": "keys ['a', 'b'] and ['a']"}),
        ({"a": ZEROS, "b": 1}, {"a": ZEROS + 1, "c": 1}, {"sample": "keys ['a', 'b'] and ['a', 'c']"}),
        (Pair(1, [2]), Pair(1, [3]), {"sample.right[0]": "2 and 3"}),
        (Sample(ZEROS, 1), Sample(ZEROS, 2), {"sample.__reduce__()[2]['label']": "1 and 2"}),
        (Slotted(1), Slotted(2), {"sample.__reduce__()[2][1]['label']": "1 and 2"}),
        (image(1), image(2), {"sample.__reduce__()[2][4]": "b'\\x01\\x01\\x01\\x01' and b'\\x02\\x02\\x02\\x02'"}),
        (of_itself(1), of_itself(2), {"sample[0]": "1 and 2"}),
        (ZEROS, ZEROS.double(), {"sample": "dtype torch.float32 and torch.float64"}),
        (ZEROS, ZEROS.T, {"sample": "shape (2, 3) and (3, 2)"}),
        (torch.tensor(1), torch.tensor(3), {"sample": "1 of 1 values, by up to 2"}),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), {"sample": "1 of 1 values"}),
        (torch.tensor([0.0, math.nan]), torch.tensor([1.0, math.nan]), {"sample": "1 of 2 values"}),
        (torch.tensor([1, 2]).bfloat16(), torch.tensor([1, 4]).bfloat16(), {"sample": "1 of 2 values, by up to 2"}),
        (tagged(1), tagged(2), {"sample": "2 of 2 values, by up to 1"}),
        (SPARSE, 2 * SPARSE, {"sample.__reduce__()[1][1][1]": "2 of 2 values, by up to 1"}),
        (np.arange(4), np.array([0, 1, 2, 9]), {"sample": "1 of 4 values, by up to 6"}),
        (np.array([3], np.uint8), np.array([250], np.uint8), {"sample": "1 of 1 values, by up to 247"}),
        (np.array(["a", "b"]), np.array(["a", "c"]), {"sample[1]": "'b' and 'c'"}),
        (np.array([{"a": 1}, 2]), np.array([{"a": 3}, 2]), {"sample[0]['a']": "1 and 3"}),
        (np.float32(1), np.float32(2), {"sample": "1 of 1 values, by up to 1"}),
        (np.zeros(2), np.zeros(3), {"sample": "shape (2,) and (3,)"}),
    ],
    ids=str,
)  # fmt: skip
def test_differences_are_named_by_path(first, second, expected):
    assert dict(find_differences(first, second)) == expected
    assert list(find_differences(first, first)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": [1, "x", None, b"y", 2j, math.nan], ("b",): {1, 2}, "c": frozenset([3])},
        lambda: torch.tensor([math.nan, 1.0]),
        lambda: (torch.arange(6).reshape(2, 3).T, torch.empty(0, 3), torch.tensor(True)),
        lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.array([None, "a"], dtype=object),
        lambda: np.ma.masked_array([1, 2], [True, False]),
        lambda: Sample(image(3), 1),
        lambda: collections.OrderedDict(a=1),
        lambda: of_itself(1),
        lambda: Sample,
        lambda: len,
    ],
)  # fmt: skip
def test_equal_samples_have_no_differences(make):
    assert list(find_differences(make(), make())) == []


def test_layout_in_memory_is_no_difference():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert list(find_differences(tensor, tensor.T.contiguous().T)) == []


@pytest.mark.parametrize(
    ("runs", "cause"),
    [
        ([AGAIN, OTHER_WORKER, HERE], "a random generator of its own that is never seeded, the time"),
        ([AGAIN], "state kept from sample to sample"),
        ([OTHER_WORKER, SENT, HERE], "the id of the process"),
        ([HERE], "the order of a set"),
        ([OTHER_NODE, HERE], "the order of a set"),
    ],
)
def test_cause_follows_from_the_runs_that_differ(runs, cause):
    assert explain(runs).startswith(cause)
