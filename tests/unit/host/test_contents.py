"""Whether an object has changed in place."""

from __future__ import annotations

import collections
import concurrent.futures
import random
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader
from rpcdataloader.host import contents
from rpcdataloader.host.contents import Content


class Own:
    limit = 1

    def __init__(self, **values):
        vars(self).update(values)


class Slotted:
    __slots__ = ("empty", "size")

    def __init__(self):
        self.size = 1


class OwnDict(dict):
    pass


def changed(value, change):
    before = Content(value)
    assert not before.has_changed(value)
    change(value)
    return before.has_changed(value)


def cyclic():
    found = []
    found.append(found)
    return found


CHANGES = {
    "dict": (lambda: {"a": {"b": [1]}}, lambda value: value["a"]["b"].append(2)),
    "order": (lambda: {"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "cycle": (cyclic, lambda value: value.append(1)),
    "type of a number": (lambda: [1], lambda value: value.__setitem__(0, True)),
    "instance": (lambda: Own(a=1), lambda value: setattr(value, "a", 2)),
    "instance in a tuple": (lambda: (Own(a=[1]),), lambda value: value[0].a.append(2)),
    "slot": (Slotted, lambda value: setattr(value, "size", 2)),
    "subclass of dict": (lambda: OwnDict(a=1), lambda value: value.update(a=2)),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda value: setattr(value, "a", 2)),
    "deque": (lambda: collections.deque([1]), lambda value: value.append(2)),
    "default dict": (lambda: collections.defaultdict(list), lambda value: value["a"]),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "generator": (lambda: random.Random(1), lambda value: value.random()),
    "generator of numpy": (lambda: np.random.default_rng(1), lambda value: value.random()),
    "generator of torch": (torch.Generator, lambda value: torch.rand(1, generator=value)),
    "array": (lambda: np.zeros(3), lambda value: value.__setitem__(0, 1)),
    "tensor": (lambda: [torch.zeros(3)], lambda value: value[0].add_(1)),
    "function in a registry": (lambda: {"a": lambda: 1}, lambda value: value.update(a=lambda: 1)),
    "lock among others": (lambda: [threading.Lock(), 1], lambda value: value.__setitem__(1, 2)),
    "path": (lambda: [Path("a")], lambda value: value.__setitem__(0, Path("b"))),
    "bytes": (lambda: bytearray(b"a"), lambda value: value.extend(b"b")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_in_place_is_seen(name):
    make, change = CHANGES[name]
    assert changed(make(), change)


class Loader(torch.utils.data.DataLoader):
    pass


SAME = {
    "pool of threads": (
        lambda: concurrent.futures.ThreadPoolExecutor(1),
        lambda value: value.submit(int).result() or value.shutdown(),
    ),
    "loader": (
        lambda: Loader(torch.utils.data.TensorDataset(torch.zeros(1))),
        lambda value: setattr(value, "epoch", 1),
    ),
    "loader of this package": (
        lambda: RPCDataloader(torch.utils.data.TensorDataset(torch.zeros(1))),
        lambda value: list(value),
    ),
    "lock": (threading.Lock, lambda value: value.acquire()),
    "function": (lambda: [changed], lambda _value: None),
    "class": (lambda: [Own], lambda _value: None),
    "large table": (lambda: [0.5] * (1 << 20), lambda value: value.append(1)),
    "large array": (lambda: np.zeros(1 << 20), lambda value: value.__setitem__(0, 1)),
    "deep": (lambda: eval("[" * 80 + "]" * 80), lambda _value: None),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_large_or_has_no_content_stays_the_same(name):
    make, change = SAME[name]
    assert not changed(make(), change)


def test_change_beside_what_is_large_is_seen():
    assert changed(Own(a=np.zeros(1 << 20), b=1), lambda value: setattr(value, "b", 2))


def test_another_object_with_the_id_of_one_that_is_gone_is_seen():
    registry = {"a": Own(function=lambda: 1)}
    before = Content(registry)
    number = id(registry["a"].function)
    registry["a"].function = None
    for _ in range(100):
        registry["a"].function = lambda: 2
        if id(registry["a"].function) == number:
            break
    assert before.has_changed(registry)


def test_digest_costs_no_more_than_its_limit_and_runs_no_code_of_the_user():
    class Eager(dict):
        def __getattr__(self, name):
            raise AssertionError(name)

        def __reduce_ex__(self, protocol):
            raise AssertionError(protocol)

        __iter__ = __len__ = __eq__ = __getstate__ = None

    assert Content([Eager(a=1)]).digest is not None
    large = Content([str(number) * 20 for number in range(1 << 20)])
    assert large.digest is None
    assert large.size_bytes <= contents.MAX_BYTES
