"""Errors that name the attribute path of what cannot be pickled."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import threading
from typing import Any

import pytest
import torch

from rpcdataloader.errors import SerializationError
from rpcdataloader.wire.pickling import dumps, dumps_reply

LOCK = threading.Lock()


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        pass


class Slotted:
    __slots__ = ("lock", "name")

    def __init__(self) -> None:
        self.name, self.lock = "a", LOCK


@dataclasses.dataclass
class Sample:
    first: int
    second: Any


class Refuses:
    def __reduce__(self) -> str:
        raise RuntimeError("not me")


class Open(collections.abc.Mapping):
    """Like an open file of h5py: its items are on disk."""

    def __getitem__(self, key: str) -> Any:
        return LOCK

    def __iter__(self) -> Any:
        return iter("ab")

    def __len__(self) -> int:
        return 2

    def __reduce__(self) -> str:
        raise RuntimeError("open")


class Constructed:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __reduce__(self) -> Any:
        return Constructed, (self.lock,)


Pair = collections.namedtuple("Pair", ["left", "right"])


def closure_over(captured: Any) -> Any:
    return lambda: captured


def local_class() -> Any:
    class Local:
        lock = LOCK

    return Local


def in_a_cycle() -> Holder:
    parent: Any = Holder(name="parent")
    parent.child = Holder(parent=parent)
    parent.lock = LOCK
    return parent


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (LOCK, "dataset is a _thread.lock"),
        (Holder(reader=Holder(env=LOCK)), "dataset.reader.env is a _thread.lock"),
        (Holder(a=1, b=[0, {"k": (5, LOCK)}]), "dataset.b[1]['k'][1] is a _thread.lock"),
        (Holder(tensor=torch.ones(3), lock=LOCK), "dataset.lock is a _thread.lock"),
        ({LOCK}, "dataset[0] is a _thread.lock"),
        (Slotted(), "dataset.lock is a _thread.lock"),
        (Sample(1, LOCK), "dataset.second is a _thread.lock"),
        (Pair(1, LOCK), "dataset[1] is a _thread.lock"),
        (collections.deque([1, LOCK]), "dataset[1] is a _thread.lock"),
        (collections.OrderedDict(a=LOCK), "dataset['a'] is a _thread.lock"),
        (collections.defaultdict(threading.Lock, a=LOCK), "dataset['a'] is a _thread.lock"),
        (Holder(x=Refuses()), f"dataset.x is a {Refuses.__module__}.Refuses"),
        (Holder(x=Open()), f"dataset.x is a {Open.__module__}.Open"),
        (Constructed(LOCK), "dataset.lock is a _thread.lock"),
        (closure_over(Holder(lock=LOCK)), "dataset.<closure>.captured.lock is a _thread.lock"),
        (Holder(transform=functools.partial(print, file=LOCK)), "dataset.transform.keywords['file'] is a _thread.lock"),
        (functools.partial(closure_over(LOCK)), "dataset.func.<closure>.captured is a _thread.lock"),
        (lambda: LOCK, "dataset.<globals>.LOCK is a _thread.lock"),
        (Holder(lock=LOCK).method, "dataset.__self__.lock is a _thread.lock"),
        (local_class(), "dataset.lock is a _thread.lock"),
        (local_class()(), "dataset.__class__.lock is a _thread.lock"),
        (in_a_cycle(), "dataset.lock is a _thread.lock"),
        ((n for n in "ab"), "dataset is a generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("encode", [dumps, dumps_reply])
def test_error_names_the_path_and_the_type(obj, path, encode):
    with pytest.raises(SerializationError) as caught:
        encode(obj, name="dataset")
    assert str(caught.value).startswith(f"{path}, which cannot be pickled (")
    assert caught.value.__cause__ is not None


def test_error_says_why_and_shows_the_factory_form():
    with pytest.raises(SerializationError) as caught:
        dumps(Holder(env=LOCK), name="dataset")
    assert "cannot pickle '_thread.lock' object" in str(caught.value)
    assert "RPCDataset(workers, MyDataset, *args)" in str(caught.value)


def test_error_of_a_reply_speaks_of_the_result():
    with pytest.raises(SerializationError, match=r"result\[0\] is a _thread.lock.*worker sends back"):
        dumps_reply([LOCK])


@pytest.mark.parametrize("error", [SystemExit(2), RecursionError("deep"), GeneratorExit()])
def test_whatever_a_reducer_raises_is_an_error_of_the_package(error):
    class Raises:
        def __getstate__(self):
            raise error

    with pytest.raises(SerializationError, match=r"object\['x'\] is a .*Raises"):
        dumps({"x": Raises()})


def test_endless_nesting_is_an_error_of_the_package():
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(SerializationError, match="recursion"):
        dumps(nested)


def test_what_succeeds_when_tried_again_is_still_reported():
    class Once:
        attempts = 0

        def __reduce__(self):
            type(self).attempts += 1
            if self.attempts == 1:
                raise OSError("try again")
            return int, ()

    with pytest.raises(SerializationError, match=r"object is a .*Once.*OSError: try again"):
        dumps(Once())
