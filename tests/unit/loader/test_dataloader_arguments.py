"""What the constructors accept and refuse. Nothing here starts a process, a thread or a connection."""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import threading
import warnings

import numpy as np
import pytest
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    random_split,
)

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.host.environment import Module
from rpcdataloader.loader.waits import WantedWorkers
from tests.support.datasets import Numbers

ADDRESS = "node07.invalid:6543"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __repr__(self):
        return "Stream()"


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    monkeypatch.delenv("RPCDATALOADER_WORKERS", raising=False)
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads  # some of earlier tests may end meanwhile
    assert not multiprocessing.active_children()


# A DataLoader by its public face


def test_arguments_of_torch_come_first_in_the_same_order_with_the_same_defaults():
    theirs = list(inspect.signature(DataLoader).parameters.values())
    ours = list(inspect.signature(RPCDataloader).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


# Those of torch are in tests/behaviour/differential_rows.py.
ARGUMENTS = {
    "workers": [ADDRESS],
    "partition": (1, 2),
    "max_retries": 2,
    "reconnect_timeout": 7.0,
    "task_timeout": 60.0,
    "retry_on": OSError,
    "on_error": "skip",
    "max_skipped": 7,
    "device": "cpu",
    "max_in_flight_bytes": 1000,
    "env": {"TZ": "UTC"},
    "py_modules": (Module("helpers", {"helpers.py": b""}),),
    "forward_output": True,
    "min_workers": 2,
    "snapshot_every_n_steps": 5,
}


def test_every_argument_stays_an_attribute():
    # Lightning and others rebuild loaders from their attributes.
    dataset = range(10)
    loader = RPCDataloader(dataset, num_workers=2, **ARGUMENTS)
    assert {name: getattr(loader, name) for name in ARGUMENTS} == ARGUMENTS
    assert loader.dataset is dataset
    sampler, batch_sampler = SequentialSampler(dataset), BatchSampler(SequentialSampler(dataset), 2, False)
    assert RPCDataloader(dataset, sampler=sampler, workers=ADDRESS).sampler is sampler
    assert RPCDataloader(dataset, batch_sampler=batch_sampler, workers=ADDRESS).batch_sampler is batch_sampler
    assert isinstance(RPCDataloader(dataset, shuffle=True, workers=ADDRESS).sampler, RandomSampler)
    ours = inspect.signature(RPCDataloader).parameters.keys() - inspect.signature(DataLoader).parameters.keys()
    assert ARGUMENTS.keys() == ours - {"transform", "source_workers", "in_order"}  # which torch 2.4 lacks


def test_workers_cannot_be_changed_later():
    """Nothing would happen."""
    loader = RPCDataloader(range(10), workers=ADDRESS)
    with pytest.raises(ValueError, match="workers attribute should not be set after RPCDataloader is initialized"):
        loader.workers = "local:2"


# Refused for torch's reason


@pytest.mark.parametrize("workers", [None, ADDRESS, "inline"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": -1},
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"drop_last": 3},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "thread"},
        {"shuffle": True, "dataset": range(0)},
        {"shuffle": True, "dataset": None},
        {"shuffle": True, "dataset": Stream()},
        {"sampler": [1], "dataset": Stream()},
        {"batch_sampler": [[1]], "dataset": Stream()},
    ],
    ids=str,
)
def test_refused_as_by_torch(options, workers):
    options = {"dataset": range(10), "num_workers": 1, **options}
    with pytest.raises((ValueError, TypeError)) as theirs:
        DataLoader(**options)
    with pytest.raises((ValueError, TypeError)) as ours:
        RPCDataloader(**options, workers=workers)
    assert ours.type is theirs.type
    if options["dataset"] is not None and "prefetch_factor" not in options:
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "options", [{"prefetch_factor": 2}, {"persistent_workers": True}, {"multiprocessing_context": "fork"}], ids=str
)
def test_what_needs_workers_is_refused_without(options):
    with pytest.raises(ValueError) as theirs:  # noqa: PT011  compared below
        DataLoader(range(10), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        RPCDataloader(range(10), **options)
    assert str(ours.value) == str(theirs.value)


def test_more_workers_than_cpus_warn_as_torch_does():
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        DataLoader(range(10), num_workers=1000)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        RPCDataloader(range(10), num_workers=1000)
        RPCDataloader(range(10), num_workers=1000, workers=ADDRESS)  # those are not on this machine
    assert [str(warning.message) for warning in ours] == [str(warning.message) for warning in theirs]
    assert len(theirs) == 1


# Refused for reasons of ours


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        # Where the workers are; more of it in client/test_discovery.py
        ({"workers": []}, ValueError, "workers names no worker; write host:port"),
        ({"workers": 4}, TypeError, "workers must be a string or a list of strings, but is 4"),
        ({"workers": [("node07", 6543)]}, TypeError, "workers must be strings"),
        ({"workers": "local:2", "min_workers": 2}, ValueError, "name them in workers="),
        ({"min_workers": -1}, ValueError, "min_workers must be 0 or more, but is -1"),
        ({"min_workers": 4, "num_workers": 2}, ValueError, "num_workers=2 and min_workers=4 contradict"),
        ({"partition": (2, 2)}, ValueError, "rank 2 of world size 2"),
        ({"partition": "all"}, ValueError, r"partition must be 'auto', None or \(rank, world size\)"),
        ({"partition": (0.5, 2)}, ValueError, r"partition must be .* but is \(0.5, 2\)"),
        # What they load
        ({"dataset": Numbers}, TypeError, r"dataset is a class: give an object, or RPCDataset\(workers, Numbers, \."),
        ({"dataset": None, "sampler": [1]}, TypeError, "dataset of type NoneType has no __getitem__"),
        ({"dataset": {1}}, TypeError, "set has no __getitem__"),
        ({"dataset": Stream(), "num_workers": "auto"}, ValueError, "'auto' cannot be used with an iterable-style"),
        ({"dataset": Stream(), "retry_on": OSError}, ValueError, "retry_on is for map-style datasets"),
        ({"transform": abs}, ValueError, "transform is for iterable-style datasets"),
        ({"dataset": Stream(), "transform": abs, "workers": None}, ValueError, "transform needs workers"),
        ({"dataset": Stream(), "transform": 3}, TypeError, "transform must be a function of a sample, but is 3"),
        ({"dataset": Stream(), "transform": abs, "source_workers": 0}, ValueError, "must be at least 1, but is 0"),
        ({"dataset": Stream(), "source_workers": 2}, ValueError, "source_workers iterate over a dataset with a transf"),
        # How
        ({"num_workers": "2"}, TypeError, "num_workers must be a whole number or 'auto', but is '2'"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1, but is 0"),
        ({"max_in_flight_bytes": 0}, ValueError, "must be at least 1, and finite, but is 0"),
        ({"max_in_flight_bytes": math.inf}, ValueError, "must be at least 1, and finite, but is inf"),
        ({"max_in_flight_bytes": "1GB"}, TypeError, "max_in_flight_bytes must be a number, but is '1GB'"),
        ({"max_retries": 0}, ValueError, "max_retries must be at least 1, but is 0"),
        ({"max_retries": None}, TypeError, "max_retries must be a whole number, but is None"),
        ({"prefetch_factor": 2.5}, TypeError, "prefetch_factor must be a whole number, but is 2.5"),
        ({"reconnect_timeout": None}, TypeError, "reconnect_timeout must be a number, but is None"),
        ({"reconnect_timeout": -1}, ValueError, "reconnect_timeout must be a number of seconds, 0 or more, but is -1"),
        ({"task_timeout": 0}, ValueError, "task_timeout must be a number of seconds above 0, or None, but is 0"),
        ({"task_timeout": "5"}, TypeError, "task_timeout must be a number, but is '5'"),
        ({"workers": None, "task_timeout": 5}, ValueError, "task_timeout and retry_on need workers"),
        ({"workers": None, "retry_on": OSError}, ValueError, "task_timeout and retry_on need workers"),
        ({"retry_on": "OSError"}, TypeError, "retry_on must be exception classes, but is 'OSError'"),
        ({"retry_on": [OSError, 5]}, TypeError, "retry_on must be exception classes, but one is 5"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'skip', but is 'ignore'"),
        ({"workers": None, "on_error": "skip"}, ValueError, "on_error='skip' needs workers: give workers or num_work"),
        ({"max_skipped": -1}, ValueError, "max_skipped must be 0 or more, but is -1"),
        ({"device": "gpu"}, ValueError, "device='gpu' is not available"),
        ({"device": "xpu"}, ValueError, "device='xpu' is not available: torch .* sees no xpu device"),
    ],
    ids=str,
)
def test_bad_values_are_named(options, error, message):
    with pytest.raises(error, match=message):
        RPCDataloader(**{"dataset": range(10), "workers": ADDRESS, **options})


@pytest.mark.parametrize("workers", [None, "inline"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("transform", abs, "transform (is for iterable|needs workers)"), ("source_workers", 2, "source_workers iterate")],
)
def test_what_is_set_later_is_checked_by_the_next_pass(workers, name, value, message):
    loader = RPCDataloader(range(3), workers=workers)
    setattr(loader, name, value)
    with pytest.raises(ValueError, match=message):
        iter(loader)


def test_numbers_of_numpy_are_numbers():
    numbers = {"num_workers": 2, "max_in_flight_bytes": 1 << 30, "max_retries": 2, "prefetch_factor": 3}
    RPCDataloader(range(10), workers=ADDRESS, **{name: np.int64(number) for name, number in numbers.items()})
    assert json.dumps(WantedWorkers(np.int64(1), np.int64(0)).number(present=1, more=2)) == "1"  # for a report


# RPCDataset


@pytest.mark.parametrize(
    ("workers", "dataset", "options", "error", "message"),
    [
        ("inline", range(10), {}, TypeError, r"must be a callable that makes the dataset, but is a range; an instan"),
        (Numbers, 10, {}, TypeError, "workers come first"),
        ("inline", Numbers, {"build": "Node"}, ValueError, "build must be 'node' or 'worker', but is 'Node'"),
        ("inline", object, {}, TypeError, "object is not a dataset: define __getitem__"),
    ],
)
def test_bad_values_of_an_rpc_dataset_are_named(workers, dataset, options, error, message):
    with pytest.raises(error, match=message):
        RPCDataset(workers, dataset, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "inline"}, "workers contradicts the RPCDataset, which has its own: leave it out"),
        ({"env": ["X"]}, "env is too late for an RPCDataset"),
    ],
)
def test_what_an_rpc_dataset_has_decided_is_no_argument_of_its_loader(options, message):
    with pytest.raises(ValueError, match=message):
        RPCDataloader(RPCDataset("inline", Numbers), **options)


@pytest.mark.parametrize(
    "part",
    [
        lambda dataset: random_split(dataset, [1, len(dataset) - 1])[0],
        lambda dataset: ConcatDataset([Numbers(), dataset]),
        lambda dataset: StackDataset(a=Subset(dataset, [1])),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"workers": "inline"}], ids=str)
def test_part_of_an_rpc_dataset_is_refused_however_it_would_be_loaded(part, options):
    """Without workers, each sample would be a call."""
    with pytest.raises(LocalProtocolError, match="to use a part of it, give RPCDataloader a sampler"):
        RPCDataloader(part(RPCDataset("inline", Numbers)), **options)


def test_chain_of_an_iterator_is_not_used_up_when_the_loader_is_made():
    chain = ChainDataset(iter([Stream(), Stream()]))
    loader = RPCDataloader(chain, None, workers="inline")
    assert [sample for sample in loader] == 2 * list(Stream())  # noqa: C416  # list() asks for the length, which counts


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_malformed_connect_timeout_is_named(monkeypatch, value):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", value)
    with pytest.raises(ValueError, match="RPCDATALOADER_CONNECT_TIMEOUT must be a number of seconds above 0"):
        RPCDataset(ADDRESS, Numbers)
