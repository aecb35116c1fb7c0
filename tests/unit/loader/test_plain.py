"""States of users' objects, which JSON gives back as they were."""

from __future__ import annotations

import collections
import json
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcdataloader.loader.plain import StateCopier, from_plain, is_plain, to_plain
from tests.support.comparison import assert_same

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_from_json_with_their_keys_and_types(value):
    plain = to_plain(value)
    assert is_plain(plain)
    assert_same(from_plain(json.loads(json.dumps(plain))), value)
    again = to_plain(plain)  # a loader in a loader
    assert_same(from_plain(from_plain(json.loads(json.dumps(again)))), value)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(3).getstate(),
        {"__kind__": "mine"},
        collections.Counter({0: 3, 1: 2}),
        collections.Counter(a=3),
        collections.OrderedDict(a=[1], b=(2, 3)),
        collections.defaultdict(int, a=1),
        collections.OrderedDict({(0, 1): [1]}),
        collections.defaultdict(list, {0: [1]}),
        collections.defaultdict(None, {(0, 1): 2}),
        np.int64(3),
        np.datetime64(3, "ns"),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 2)),
        np.random.default_rng(3).bit_generator.state,
        torch.Generator().get_state(),
        torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2),
        torch.tensor(True),
        torch.empty(0, 3),
    ],
    ids=repr,
)
def test_what_samplers_keep_comes_back_from_json(value):
    found = from_plain(json.loads(json.dumps(to_plain({"value": value}))))["value"]
    assert_same(found, value)
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, [("index", "<i4"), ("weight", "<f8")]),
        np.zeros((), [("index", "<i4")])[()],
        np.rec.array([(1, 2.0)], [("index", "<i4"), ("weight", "<f8")]),
        np.ma.array([1, 2], mask=[True, False]),
    ],
    ids=repr,
)
def test_other_kinds_of_arrays_stay_as_they_are(value):
    found = from_plain(to_plain(value))
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)
    assert np.ma.getmaskarray(found).tolist() == np.ma.getmaskarray(value).tolist()


def test_what_has_no_other_form_stays_and_is_not_plain():
    for value in {1, 2}, object, np.array([object]), np.zeros(1 << 20), torch.zeros(1 << 20), b"text":
        assert not is_plain(to_plain([value]))


def test_results_share_nothing_with_the_state():
    state = {"order": [1, 2], "inside": {"left": [[3]]}, "many": {(0, 1): [4]}}
    plain = to_plain(state)
    loaded = from_plain(plain)
    for copy in plain, loaded:
        copy["order"].append(0)
        copy["inside"]["left"][0].append(0)
    assert state == {"order": [1, 2], "inside": {"left": [[3]]}, "many": {(0, 1): [4]}}
    assert from_plain(plain)["many"] == {(0, 1): [4]}


def test_copies_of_a_state_stay_as_they_were_and_share_a_long_list():
    copier, state = StateCopier(), {"order": list(range(9)), "at": 0, "seen": [], "each": {0: [[1], 2]}}
    copies = []
    for number in range(3):
        state["at"] = number
        state["seen"].append(number)
        state["each"][0][0].append(number)
        copies.append(copier.copy(state))
    assert copies[0]["order"] is copies[2]["order"]
    assert [copy["seen"] for copy in copies] == [[0], [0, 1], [0, 1, 2]]
    assert [copy["each"][0][0][1:] for copy in copies] == [[0], [0, 1], [0, 1, 2]]
    state["order"][8] = np.zeros(3)  # cannot be compared
    assert copier.copy(state)["order"][:8] == copies[0]["order"][:8]
    assert copies[0]["order"] == list(range(9))


class Counts(dict):
    """A mapping of the user, with an attribute."""

    unit = "samples"


def three():
    return 3


@pytest.mark.parametrize(
    "value",
    [Counts({0: 1, (1, 2): [3]}), collections.defaultdict(three, {0: 1})],
    ids=["of a subclass", "with a factory"],
)
def test_mappings_of_the_user_keep_their_type_in_memory_and_their_keys_in_json(value):
    value = {"value": value}
    found = pickle.loads(pickle.dumps(to_plain(value)))
    for each in to_plain(value), found, to_plain(from_plain(found)):
        back = from_plain(each)["value"]
        assert (type(back), back) == (type(value["value"]), value["value"])
        assert getattr(back, "default_factory", None) is getattr(value["value"], "default_factory", None)
    assert from_plain(json.loads(json.dumps(found)))["value"] == dict(value["value"])
