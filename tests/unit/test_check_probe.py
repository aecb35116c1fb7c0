"""What is asked of a dataset where it is."""

from __future__ import annotations

import random

from torch.utils.data import IterableDataset

from rpcdataloader.check.probe import Description, Failure, Load, Measure, Measured, Probe, describe
from rpcdataloader.wire.pickling import dumps_reply

WANTED = [(3, 0), (1, 1), (2, 2)]


class Batched(list):
    def __getitems__(self, indices):
        return [("batched", self[index]) for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_measuring_ends_with_the_time_but_not_before_the_first_sample():
    measured = Probe(lambda: list(range(9)))[Measure(WANTED, 1e-9)]
    assert measured.num_samples == 1
    assert measured.samples_per_second > 0
    measured = Probe(lambda: ["", "a" * 90, "a" * 10, "a" * 50])[Measure(WANTED, 60.0)]
    sizes = [dumps_reply("a" * number).size_bytes for number in (50, 90, 10)]
    assert isinstance(measured, Measured)
    assert measured.num_samples == 3
    assert (measured.smallest_bytes, measured.largest_bytes) == (min(sizes), max(sizes))
    assert measured.mean_bytes == sum(sizes) / 3


def test_samples_are_those_of_the_indices_or_the_first_of_a_stream():
    load = Load(WANTED)
    assert Probe(lambda: [10, 11, 12, 13])[load] == [13, 11, 12]
    assert Probe(lambda: Batched([10, 11, 12, 13]))[load] == [("batched", 13), ("batched", 11), ("batched", 12)]
    assert Probe(Stream)[load] == [0, 1, 2]
    assert Probe(Stream)[Load([(0, place) for place in range(9)])] == [0, 1, 2, 3, 4]


def test_failures_name_the_sample_and_the_line():
    failure = Probe(lambda: [1, 2])[Load(WANTED)]
    assert isinstance(failure, Failure)
    assert failure.what == "dataset[3]: IndexError: list index out of range"

    def make():
        raise ValueError("no files")

    failure = Probe(make)[describe]
    assert failure.what == "ValueError: no files"
    assert failure.frames[-1] == '    raise ValueError("no files")'
    assert failure.frames[-2].startswith(__file__)


def test_description():
    assert describe([1, 2]) == Description("list", "map", 2)
    assert describe(Stream()).style == "iterable"
    assert describe(5) == Description("int", "", None)


def test_seed_depends_on_the_position_alone():
    class Drawn:
        def __getitem__(self, index):
            return random.random()

    state = random.getstate()
    forwards = Probe(Drawn)[Load([(0, 0), (1, 1)])]
    backwards = Probe(Drawn)[Load([(5, 1), (6, 0)])]
    random.setstate(state)
    assert forwards == backwards[::-1]
    assert forwards[0] != forwards[1]
