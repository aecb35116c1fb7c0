"""What stands for the dataset where it is."""

from __future__ import annotations

import random
import sys
import types

import pytest
from torch.utils.data import IterableDataset

from rpcdataloader.check.probe import Facts, Probe, Timed
from rpcdataloader.fetch import seeding
from rpcdataloader.wire.pickling import dumps_reply


class Batched(list):
    def __getitems__(self, indices):
        return [("batched", self[index]) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Drawn:
    def __getitem__(self, index):
        return random.random()


@pytest.fixture(autouse=True)
def _no_sample_afterwards():
    """A process that checks is not meant to be used for anything else; this one is."""
    with seeding.generators_restored():
        yield


@pytest.fixture
def probe(monkeypatch):
    """Makes a probe of what it is given, or of what that makes."""

    def probe(given):
        module = types.ModuleType("checked")
        module.given = given
        monkeypatch.setitem(sys.modules, "checked", module)
        return Probe("checked:given")

    return probe


def test_samples_are_those_of_the_indices(probe):
    found = probe(lambda: [10, 11, 12, 13])
    assert [found[index] for index in (3, 1)] == [[13], [11]]
    assert probe(Batched([10, 11]))[1] == [("batched", 11)]


def test_stream_begins_again_where_it_is_asked_for_another_place_than_the_next(probe):
    found = probe(Stream)
    assert [found[place] for place in (0, 1, 2, 0, 1)] == [[0], [1], [2], [0], [1]]
    # As of the worker after one that has died.
    assert probe(Stream)[3] == [3]
    assert [found[place] for place in (0, 0)] == [[0], [0]]
    assert [found[place] for place in range(7)] == [[0], [1], [2], [3], [4], [], []]


def test_sample_that_is_timed_stays_there(probe):
    ((seconds, size_bytes),) = probe(lambda: ["a" * 90])[Timed(0)]
    assert 0 < seconds < 60
    assert size_bytes == dumps_reply("a" * 90).size_bytes


def test_seed_depends_on_the_index_alone(probe):
    found = probe(Drawn)
    state = random.getstate()
    forwards = [found[index] for index in (0, 1)]
    backwards = [found[index] for index in (1, 0)]
    random.setstate(state)
    assert forwards == backwards[::-1]
    assert forwards[0] != forwards[1]


@pytest.mark.parametrize(
    ("given", "text", "length"),
    [
        ([1, 2], "list of 2 samples", 2),
        (lambda: range(1000), "range of 1,000 samples", 1000),
        (Stream, f"{__name__}.Stream, which is iterable,", None),
        (Stream(), f"{__name__}.Stream, which is iterable,", None),
        (Drawn, f"{__name__}.Drawn, which has no length (RPCDataloader needs a sampler),", None),
    ],
)
def test_facts(probe, given, text, length):
    assert probe(given).facts == Facts(text, length, not_shared=None, connections="")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (lambda: None, TypeError, "checked:given gives NoneType, which has no __getitem__ .* is a return missing?"),
        (5, TypeError, "checked:given gives int, which has no __getitem__"),
        (list, ValueError, "list is empty: its length is 0. Is the path right"),
    ],
)
def test_what_is_no_dataset(probe, given, kind, message):
    with pytest.raises(kind, match=message):
        probe(given)
