"""When workers may inherit what their session has built, and that it stays shared."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import weakref

import pytest
import torch

from rpcdataloader.host.generators import get_states
from rpcdataloader.server import datasets
from rpcdataloader.server.datasets import DatasetTable, why_not_shared
from rpcdataloader.server.processes import open_files
from rpcdataloader.wire.pickling import Build, dumps
from rpcdataloader.wire.slabs import Block


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


def add(table, key, *recipe):
    """Add what ``recipe`` makes."""
    block = Block(torch.frombuffer(bytearray(dumps(recipe).payload), dtype=torch.uint8))
    dataset, _reason = table.add(Build(key, "test", True, get_states(), None), [block])
    return dataset


def test_datasets_that_are_left_stay_out_of_the_collector_when_another_is_let_go(monkeypatch):
    monkeypatch.setattr(datasets, "WORTH_COLLECTING_BYTES", -(1 << 40))
    table = DatasetTable()
    for key in (1, 2):
        add(table, key, ["sample"])
    table.release([1])
    assert not any(known is table.get(2) for known in gc.get_objects())


_told: queue.SimpleQueue[str] = queue.SimpleQueue()


class Patient:
    """Its constructor waits until the log says where it is."""

    def __init__(self):
        self.text = _told.get(timeout=20)


def test_a_slow_construction_tells_where_it_is(monkeypatch):
    monkeypatch.setattr(datasets, "SLOW_BUILD_SECONDS", 0.01)
    monkeypatch.setattr(datasets.logger, "warning", lambda text, *values: _told.put(text % values))
    num_threads = threading.active_count()
    text = add(DatasetTable(), 1, Patient, (), {}).text
    assert text.startswith("dataset test is being built for 0.01 s, and is here:")
    assert "in __init__\n    self.text = " in text
    assert "server/datasets.py" not in text
    assert threading.active_count() == num_threads


class Knot:
    """Refers to itself."""

    def __init__(self):
        self.itself = self
        self.memory = bytearray(64 << 20)


def test_large_dataset_in_a_cycle_goes_when_it_is_let_go():
    table = DatasetTable()
    for key in (1, 2):  # what the first one leaves must not hide the second
        made = add(table, key, Knot, (), {})
        reference = weakref.ref(made)
        del made
        table.release([key])
        assert reference() is None


def test_dataset_that_goes_by_itself_costs_no_collection():
    table = DatasetTable()
    add(table, 1, ["sample"])
    seen = []
    gc.callbacks.append(see := lambda phase, info: seen.append((phase, info["generation"])))
    try:
        table.release([1])
    finally:
        gc.callbacks.remove(see)
    assert ("start", 2) not in seen
