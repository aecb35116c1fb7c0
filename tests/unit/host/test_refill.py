"""Objects that get the content of others, and stay the same objects."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import random
import types

import numpy as np
import pytest
import torch

from rpcdataloader.host.refill import refill
from tests.support.comparison import assert_same


class Slots:
    __slots__ = ("one", "other")

    def __init__(self, one):
        self.one = one


class Both(Slots):
    def __init__(self, one, **attributes):
        super().__init__(one)
        vars(self).update(attributes)


class Table(dict):
    """With attributes of its own, and a method that must not be called."""

    def __init__(self, content=(), name=""):
        dict.__init__(self, content)
        self.name = name

    def update(self, *_args):
        raise AssertionError


@dataclasses.dataclass
class Data:
    value: int = 0


class Chosen:
    """Keeps a part of itself from pickle."""

    def __init__(self, value, kept):
        self.value, self.kept = value, kept

    def __getstate__(self):
        return {"value": self.value}


def drawn(generator):
    generator.random()
    return generator


def content_of(obj):
    """What there is to compare of it."""
    if isinstance(obj, (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)):
        return str(state_of(obj))
    if isinstance(obj, Slots):
        return [getattr(obj, name, None) for name in Slots.__slots__], getattr(obj, "__dict__", None)
    if isinstance(obj, Table):
        return dict(obj), vars(obj)
    if isinstance(obj, (Chosen, types.SimpleNamespace)):
        return vars(obj)
    return obj.args if isinstance(obj, Exception) else obj


def state_of(generator):
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return getattr(generator, "getstate", getattr(generator, "get_state", None))()


KINDS = {
    "dict": ({"a": 1}, {"b": 2}),
    "list": ([1, 2], [3]),
    "set": ({1}, {2, 3}),
    "ordered": (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
    "deque": (collections.deque([1], 3), collections.deque([2, 3], 3)),
    "bytearray": (bytearray(b"a"), bytearray(b"bc")),
    "array": (array.array("i", [1]), array.array("i", [2, 3])),
    "subclass": (Table({"a": 1}, "one"), Table({"b": 2}, "other")),
    "random": (random.Random(1), drawn(random.Random(2))),
    "generator of numpy": (np.random.default_rng(1), drawn(np.random.default_rng(2))),
    "state of numpy": (np.random.RandomState(1), np.random.RandomState(2)),
    "generator of torch": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "exception": (ValueError(1), ValueError(2, 3)),
    "tensor": (torch.zeros(3), torch.ones(3)),
    "parameter": (torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))),
    "numpy": (np.zeros(3), np.ones(3)),
    "dataclass": (Data(), Data(3)),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(b=2)),
    "slots": (Slots(1), Slots(2)),
    "slots and attributes": (Both(1, a=1), Both(2, b=2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_object_has_the_content_of_the_other_which_stays_as_it_was(kind):
    obj, other = KINDS[kind]
    before = copy.deepcopy(content_of(other))
    assert refill(obj, other)
    assert_same(content_of(obj), before)
    assert_same(content_of(other), before)
    assert obj is not other


def test_what_an_object_keeps_from_pickle_stays():
    chosen = Chosen(1, "mine")
    assert refill(chosen, Chosen(2, "other"))
    assert vars(chosen) == {"value": 2, "kept": "mine"}


def test_attribute_that_the_other_lacks_goes():
    slots, other = Slots(1), Slots(2)
    slots.other = 3
    assert refill(slots, other)
    assert not hasattr(slots, "other")


def test_object_of_a_bound_method_is_filled():
    obj, other = Data(1), Data(2)
    assert refill(obj.__repr__, other.__repr__)
    assert obj.value == 2


def test_variable_of_a_context_has_the_value_of_the_other_one():
    variable, other = contextvars.ContextVar("one"), contextvars.ContextVar("other")
    other.set(3)
    assert refill(variable, other)
    assert variable.get() == 3


@pytest.mark.parametrize(
    ("obj", "other"),
    [
        ([1], (1,)),
        (1, 2),
        (torch.zeros(2), torch.zeros(3)),
        (np.zeros(2), np.zeros(2, np.int64)),
        (torch.zeros(1).expand(3), torch.ones(3)),
    ],
    ids=["another kind", "no content", "another shape", "another dtype", "expanded"],
)
def test_what_cannot_be_filled_is_left_to_the_caller(obj, other):
    assert not refill(obj, other)
