"""When workers may inherit what their session has built, and that it stays shared."""

from __future__ import annotations

import gc
import itertools

import pytest

from rpcdataloader.server import datasets
from rpcdataloader.server.datasets import DatasetTable, Recipe, why_not_shared
from rpcdataloader.server.processes import open_files
from rpcdataloader.wire.generators import get_states
from rpcdataloader.wire.pickling import dumps


@pytest.fixture
def threads(monkeypatch):
    """Let the process have so many threads, each time it is asked."""

    def have(*numbers):
        asked = itertools.chain(numbers, itertools.repeat(numbers[-1]))
        monkeypatch.setattr(datasets, "num_threads", lambda: next(asked))

    return have


def test_threads_that_are_ending_do_not_matter(threads):
    threads(3, 2, 1)
    assert why_not_shared(1, open_files()) is None


def test_threads_that_stay_and_files_are_named(threads, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "THREAD_END_TIMEOUT", 0.02)
    files = open_files()
    threads(2)
    assert "threads" in why_not_shared(1, files)
    with open(tmp_path / "file", "w"):
        assert "files" in why_not_shared(2, files)


def test_datasets_that_are_left_stay_out_of_the_collector_when_another_is_let_go():
    table = DatasetTable()
    for key in (1, 2):
        instance = dumps(([["sample"]],))
        table.add(key, Recipe("list", get_states(), bytes(instance.payload), ()), shared=True)
    table.release([1])
    assert not any(known is table.get(2) for known in gc.get_objects())
