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
from torch.utils.data import default_collate

from rpcdataloader.check.compare import (
    AGAIN,
    HERE,
    OTHER_NODE,
    OTHER_ORDER,
    OTHER_WORKER,
    Differences,
    explain,
    find_differences,
    find_uncollatable,
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
    tag: str


def tagged(value: float, tag: str) -> Tagged:
    tensor = torch.full((2,), value).as_subclass(Tagged)
    tensor.tag = tag
    return tensor


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
        ({"a": 1, "b": 2}, {"a": 1}, {"sample['b']": "one of them has no such key"}),
        ({"a": 1}, {"a": 1, "b": 2}, {"sample['b']": "one of them has no such key"}),
        (Pair(1, [2]), Pair(1, [3]), {"sample.right[0]": "2 and 3"}),
        (Sample(ZEROS, 1), Sample(ZEROS, 2), {"sample.label": "1 and 2"}),
        (Slotted(1), Slotted(2), {"sample.label": "1 and 2"}),
        (image(1), image(2), {"sample": "two objects PIL.Image.Image that are not the same"}),
        (of_itself(1), of_itself(2), {"sample[0]": "1 and 2"}),
        (ZEROS, ZEROS.double(), {"sample": "dtype torch.float32 and torch.float64"}),
        (ZEROS, ZEROS.T, {"sample": "shape (2, 3) and (3, 2)"}),
        (torch.tensor(1), torch.tensor(3), {"sample": "its value, by 2"}),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), {"sample": "its value"}),
        (torch.tensor([0.0, math.nan]), torch.tensor([1.0, math.nan]), {"sample": "1 of 2 values"}),
        (torch.tensor([1, 2]).bfloat16(), torch.tensor([1, 4]).bfloat16(), {"sample": "1 of 2 values, by up to 2"}),
        (tagged(1, "x"), tagged(2, "y"), {"sample": "2 of 2 values, by up to 1", "sample.tag": "'x' and 'y'"}),
        (SPARSE, 2 * SPARSE, {"sample": "two objects torch.Tensor that are not the same"}),
        (np.arange(4), np.array([0, 1, 2, 9]), {"sample": "1 of 4 values, by up to 6"}),
        (np.array([3], np.uint8), np.array([250], np.uint8), {"sample": "its value, by 247"}),
        (np.array(["a", "b"]), np.array(["a", "c"]), {"sample": "1 of 2 values"}),
        (np.array([{"a": 1}, 2]), np.array([{"a": 3}, 2]), {"sample[0]['a']": "1 and 3"}),
        (np.float32(1), np.float32(2), {"sample": "its value, by 1"}),
        (np.zeros(2), np.zeros(3), {"sample": "shape (2,) and (3,)"}),
    ],
    ids=str,
)  # fmt: skip
def test_differences_are_named_by_path(first, second, expected):
    assert {difference.path: difference.what for difference in find_differences(first, second)} == expected
    assert find_differences(first, first) == []


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
    assert find_differences(make(), make()) == []


def test_layout_in_memory_is_no_difference():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert find_differences(tensor, tensor.T.contiguous().T) == []


def test_paths_are_gathered_over_samples_and_runs():
    differences = Differences()
    differences.add(AGAIN, [(1, 2), (1, 2)], [(1, 2), (1, 3)])
    differences.add(HERE, [(1, 2), (1, 2)], [(1, 5), (4, 3), (0, 0)])
    assert differences.found == {
        "sample[1]": {AGAIN: "2 and 3", HERE: "2 and 5"},
        "sample[0]": {HERE: "1 and 4"},
        "the number of samples": {HERE: "2 and 3"},
    }
    assert differences.places == {"sample[1]": {0, 1}, "sample[0]": {1}, "the number of samples": set()}
    assert differences.by_runs() == {
        (AGAIN, HERE): ["sample[1]"],
        (HERE,): ["the number of samples", "sample[0]"],
    }


@pytest.mark.parametrize(
    ("runs", "cause"),
    [
        ([AGAIN, OTHER_WORKER, OTHER_ORDER, HERE], "a random generator of its own that nobody seeds, the time"),
        ([AGAIN, OTHER_ORDER], "state that is kept from sample to sample"),
        ([OTHER_ORDER], "state that is kept from sample to sample"),
        ([OTHER_WORKER, OTHER_ORDER, HERE], "something of the process"),
        ([HERE], "the order of a set"),
        ([OTHER_NODE, HERE], "the order of a set"),
    ],
)
def test_cause_follows_from_the_runs_that_differ(runs, cause):
    assert explain(runs).startswith(cause)


@pytest.mark.parametrize(
    ("samples", "path", "error"),
    [
        ([{"a": 1, "b": torch.zeros(n)} for n in (1, 2)], "sample['b']", "stack expects each tensor to be equal size"),
        ([(1, Pair(1, image(n))) for n in (1, 2)], "sample[1].right", "batch must contain tensors"),
        ([image(1)], "sample", "batch must contain tensors"),
        ([{"a": 1}, {"b": 1}], "sample", "'a'"),
        ([[1, 2], [1]], "sample", "equal size"),
    ],
)
def test_part_that_does_not_collate_is_named(samples, path, error):
    found_path, found_error = find_uncollatable(samples, default_collate)
    assert found_path == path
    assert error in found_error
