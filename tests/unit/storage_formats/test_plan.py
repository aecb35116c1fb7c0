"""Which runs there are, and how long their epochs."""

from __future__ import annotations

import pytest

from examples.storage_formats.errors import StudyError
from examples.storage_formats.plan import Format, Link, Loader, Run, default_runs, multiply, size_epochs

LINKS: list[Link | None] = [Link(0.01, 20e6, 100e6), Link(0.05, 50e6, 400e6)]


def test_what_is_typed_is_parsed():
    assert Link.parse("0.01:20e6:100e6") == LINKS[0]
    assert Loader.parse("rpc:16") == Loader("rpc", 16)
    assert Format.parse("tfrecord-50") == Format("tfrecord", 50)
    assert Format.parse("objects") == Format("objects")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (Link.parse, "0.01"),
        (Link.parse, "0.01:20e6:100e6:1"),
        (Link.parse, "a:b:c"),
        (Link.parse, "-1:20e6:100e6"),
        (Link.parse, "0.01:0:100e6"),
        (Link.parse, "0.01:20e6:1e6"),
        (Link.parse, "nan:20e6:1e9"),
        (Loader.parse, "torch"),
        (Loader.parse, "dask:4"),
        (Loader.parse, "rpc:0"),
        (Loader.parse, "rpc:-1"),
        (Format.parse, "tfrecord"),
        (Format.parse, "tfrecord-0"),
        (Format.parse, "objects-8"),
        (Format.parse, "zip-8"),
    ],
)
def test_what_is_wrong_is_shown_with_what_would_be_right(parse, text):
    with pytest.raises(StudyError, match=f"(is|has) .*, but not {text!r}"):
        parse(text)


def test_epochs_grow_with_workers_and_are_whole_for_shards_and_ranks():
    loaders = [Loader("torch", 0), Loader("rpc", 4), Loader("rpc", 16), Loader("rpc", 64)]
    runs = size_epochs(multiply([None], [1, 4], [0.0], loaders, [Format("objects")]), [8, 50], 75, 1600)
    sizes = {(run.ranks, run.loader.workers): run.num_samples for run in runs}
    assert sizes[1, 0] == 200
    assert sizes[1, 4] == 400
    assert sizes[1, 16] == sizes[4, 4] == 1200
    assert sizes[1, 64] == sizes[4, 16] == sizes[4, 64] == 1600
    assert all(size % 8 == size % 50 == size % 4 == 0 for size in sizes.values())


def test_runs_whose_workers_would_have_no_shard_are_impossible():
    few, enough = (Run(None, 4, 0.0, Loader("rpc", 16), Format("tfrecord", 50), size) for size in (1600, 3200))
    assert not few.is_possible
    assert enough.is_possible


def test_tensorflow_reads_its_own_format_only():
    runs = multiply([None], [1], [0.0], [Loader("tensorflow", 0)], [Format("objects"), Format("tfrecord", 8)])
    assert [run.is_possible for run in size_epochs(runs, [8], 75, 100)] == [False, True]


def test_published_runs_are_possible_and_each_is_there_once():
    runs = size_epochs(default_runs(LINKS, [8, 50], 0.02), [8, 50], 75, 1600)
    assert all(run.is_possible for run in runs)
    assert len(set(runs)) == len(runs)
    assert {run.ranks for run in runs} == {1, 4}
    assert {run.link for run in runs} == set(LINKS)
