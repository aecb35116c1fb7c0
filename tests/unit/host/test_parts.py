"""Which objects of a dataset are found, and where; in workers, see ``tests/behaviour/test_idioms.py``."""

from __future__ import annotations

import collections
import functools
import pickle
import types

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from rpcdataloader.host.parts import find_held, find_parts, follow
from tests.support.datasets import Numbers


class OwnState:
    """Leaves a part of itself out of its pickle."""

    def __init__(self):
        self.kept, self.left_out = [1], [2]

    def __getstate__(self):
        return {"kept": self.kept}

    def __setstate__(self, state):
        self.__dict__.update(state)


def test_each_part_has_its_place_in_a_copy():
    first, second = Numbers(3), Numbers(4)
    first.table = {"names": ["a"], 5: second}
    whole = ConcatDataset([Subset(first, [0, 2]), second])
    copy = pickle.loads(pickle.dumps(whole))
    parts = find_parts(whole)
    assert all(type(follow(copy, path)) is type(part) for part, path in parts.values())
    assert follow(copy, parts[id(first)][1]) is copy.datasets[0].dataset
    assert follow(copy, parts[id(second)][1]) is copy.datasets[1]
    assert follow(copy, parts[id(first.table["names"])][1]) is copy.datasets[0].dataset.table["names"]


class Slotted:
    __slots__ = ("__private", "empty", "part")

    def __init__(self, part):
        self.part = self.__private = part


class Table(dict):
    pass


class Row(list):
    pass


def holding(part):
    return lambda: part


@pytest.mark.parametrize(
    "hold",
    [
        lambda part: Slotted(part),
        lambda part: Table(part=part),
        lambda part: Row([part]),
        lambda part: collections.OrderedDict(part=part),
        lambda part: collections.defaultdict(int, part=part),
        lambda part: collections.UserDict(part=part),
        lambda part: collections.deque([part]),
        lambda part: functools.partial(len, part),
        lambda part: functools.partial(dict, obj=part),
        lambda part: types.MethodType(len, part),
        holding,
    ],
)
def test_parts_are_found_in_what_users_keep_them_in(hold):
    whole, part = Numbers(3), ["a"]
    whole.holder = [hold(part)]
    found, path = find_parts(whole)[id(part)]
    assert found is part
    copy = cloudpickle.loads(cloudpickle.dumps(whole))
    assert follow(copy, path) == part
    follow(copy, path).append("b")
    assert find_parts(copy)[id(follow(copy, path))][0] == ["a", "b"]


def test_variables_that_functions_share_are_parts():
    variable = 1

    def get():
        return variable

    whole = Numbers(3)
    whole.get = get
    assert find_parts(whole)[id(get.__closure__[0])][0] is get.__closure__[0]


def test_what_a_copy_may_lack_is_no_part():
    whole = Numbers(3)
    whole.owner = OwnState()
    assert id(whole.owner) in find_parts(whole)
    assert id(whole.owner.left_out) not in find_parts(whole)


def test_search_ends_in_large_datasets_and_cycles():
    whole = Numbers(3)
    whole.itself, whole.samples = whole, [[number] for number in range(100_000)]
    assert len(find_parts(whole)) < 20_000


def test_what_is_held_is_found_at_both_ends_of_long_lists_and_in_all_else():
    first, middle, last, inner = Slotted(1), Slotted(2), Slotted(3), np.zeros(3)
    whole = Numbers(3)
    whole.samples = [first, *([number] for number in range(5000)), middle, *range(5000), last]
    whole.owner, whole.later = OwnState(), iter([{"view": inner[1:]}])
    held = find_held(whole)
    assert held[0] is whole
    found = {id(part) for part in held}
    assert {id(part) for part in (first, last, inner, whole.owner.left_out)} <= found
    assert id(middle) not in found
    assert len(held) < 20_000
