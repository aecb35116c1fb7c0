"""Two samples are compared exactly, and what differs is named as the user would."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from rpcdataloader.check.probe import find_differences

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any


def image(value: int) -> PIL.Image.Image:
    return PIL.Image.new("L", (2, 2), value)


def of_itself(label: Any) -> list[Any]:
    sample: list[Any] = [label]
    sample.append(sample)
    return sample


ZEROS = torch.zeros(2, 3)
SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 1.0, {"sample": "int and float"}),
        ("a", "b", {"sample": "'a' and 'b'"}),
        ("a" * 99, "b" * 99, {"sample": "two str that are not the same"}),
        ({1, 2}, {1, 3}, {"sample": "{1, 2} and {1, 3}"}),
        ([1, 2], [1, 2, 3], {"sample": "The length of the sequences mismatch: 2 != 3"}),
        (({"image": ZEROS}, 1), ({"image": ZEROS + 0.5}, 1), {"sample[0]['image']": "Mismatched elements: 6 / 6"}),
        ({"a": ZEROS, "b": 2}, {"a": ZEROS}, {"sample": "Missing keys in the actual mapping"}),
        (Pair(1, ["2"]), Pair(1, ["3"]), {"sample.right[0]": "'2' and '3'"}),
        (Sample(ZEROS, "1"), Sample(ZEROS, "2"), {"sample.__dict__['label']": "'1' and '2'"}),
        (of_itself("1"), of_itself("2"), {"sample[0]": "'1' and '2'"}),
        (ZEROS, ZEROS.double(), {"sample": "The values for attribute 'dtype' do not match"}),
        (ZEROS, ZEROS.T, {"sample": "The values for attribute 'shape' do not match"}),
        (torch.tensor([0.0, math.nan]), torch.tensor([1.0, math.nan]), {"sample": "Mismatched elements: 1 / 2"}),
        (SPARSE, 2 * SPARSE, {"sample": "Mismatched elements: 2 / 2"}),
        (np.arange(4), np.array([0, 1, 2, 9]), {"sample": "Mismatched elements: 1 / 4"}),
    ],
    ids=str,
)  # fmt: skip
def test_differences_are_named_by_path(first, second, expected):
    found = dict(itertools.islice(find_differences(first, second), len(expected)))
    assert found.keys() == expected.keys()
    assert all(what.startswith(expected[path]) for path, what in found.items())
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
