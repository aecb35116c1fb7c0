"""What the constructors accept and refuse. Nothing here starts a process, a thread or a connection."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import threading
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.host.environment import pack

ADDRESS = "node07.invalid:6543"


class Numbers:
    def __init__(self, size=10):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def identity(value):
    return value


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch):
    monkeypatch.delenv("RPCDATALOADER_WORKERS", raising=False)
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads
    assert not multiprocessing.active_children()


# A DataLoader by its public face


def test_it_is_a_dataloader():
    assert isinstance(RPCDataloader(Numbers(), workers=ADDRESS), DataLoader)


def test_arguments_of_torch_come_first_in_the_same_order_with_the_same_defaults():
    theirs = list(inspect.signature(DataLoader).parameters.values())
    ours = list(inspect.signature(RPCDataloader).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


GENERATOR = torch.Generator()
ARGUMENTS = {
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": identity,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 2.5,
    "worker_init_fn": identity,
    "multiprocessing_context": multiprocessing.get_context("spawn"),
    "generator": GENERATOR,
    "prefetch_factor": 5,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
    "in_order": False,
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
    "py_modules": (pack("helpers", {"helpers.py": b""}),),
    "forward_output": True,
    "min_workers": 2,
    "snapshot_every_n_steps": 5,
}


def test_every_argument_stays_an_attribute():
    # Lightning and others rebuild loaders from their attributes.
    dataset = Numbers()
    loader = RPCDataloader(dataset, **ARGUMENTS)
    assert {name: getattr(loader, name) for name in ARGUMENTS} == ARGUMENTS
    assert loader.dataset is dataset
    sampler, batch_sampler = SequentialSampler(dataset), BatchSampler(SequentialSampler(dataset), 2, False)
    assert RPCDataloader(dataset, sampler=sampler, workers=ADDRESS).sampler is sampler
    assert RPCDataloader(dataset, batch_sampler=batch_sampler, workers=ADDRESS).batch_sampler is batch_sampler
    assert isinstance(RPCDataloader(dataset, shuffle=True, workers=ADDRESS).sampler, RandomSampler)
    assert set(ARGUMENTS) | {"dataset", "shuffle", "sampler", "batch_sampler", "transform", "source_workers"} == set(
        inspect.signature(RPCDataloader).parameters
    )


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"prefetch_factor": 3, "num_workers": 2}])
def test_attributes_are_those_of_torch(options):
    theirs, ours = DataLoader(Numbers(), **options), RPCDataloader(Numbers(), **options)
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "collate_fn"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_fixes_at_construction_is_fixed(name):
    loader = RPCDataloader(Numbers(), workers=ADDRESS)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after RPCDataloader is initialized"):
        setattr(loader, name, None)


@pytest.mark.parametrize("size", [0, 1, 10, 12])
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}, {"shuffle": True}]
)
def test_length_is_that_of_torch(size, options):
    if not size and "shuffle" in options:
        return
    expected = len(DataLoader(Numbers(size), **options))
    assert len(RPCDataloader(Numbers(size), **options, workers=ADDRESS)) == expected


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_have_the_same_arguments(copied):
    loader = RPCDataloader(Numbers(), batch_size=3, persistent_workers=True, workers=ADDRESS, partition=(1, 2))
    other = copied(loader)
    for name in ("batch_size", "persistent_workers", "workers", "partition", "prefetch_factor"):
        assert getattr(other, name) == getattr(loader, name)
    assert len(other) == len(loader)


# Refused for torch's reason


@pytest.mark.parametrize("workers", [None, ADDRESS, "inline"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": -1},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"drop_last": 3},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "thread"},
        {"multiprocessing_context": 3},
        {"shuffle": True, "dataset": Numbers(0)},
        {"shuffle": True, "dataset": {}},
        {"shuffle": True, "dataset": None},
    ],
    ids=str,
)
def test_refused_as_by_torch(options, workers):
    options = {"dataset": Numbers(), "num_workers": 1, **options}
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
        DataLoader(Numbers(), **options)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        RPCDataloader(Numbers(), **options)
    assert str(ours.value) == str(theirs.value)


def test_more_workers_than_cpus_warn_as_torch_does():
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("always")
        DataLoader(Numbers(), num_workers=1000)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        RPCDataloader(Numbers(), num_workers=1000)
        RPCDataloader(Numbers(), num_workers=1000, workers=ADDRESS)  # those are not on this machine
    assert [str(warning.message) for warning in ours] == [str(warning.message) for warning in theirs]
    assert len(theirs) == 1


# Refused for reasons of ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": []}, "workers names no worker; write host:port"),
        ({"workers": ""}, "workers names no worker"),
        ({"workers": " , "}, "workers names no worker"),
        ({"workers": "node07"}, "node07"),
        ({"workers": ["node07:6543", "node08:port"]}, "node08:port"),
        ({"workers": "node07:65536"}, "65536"),
        ({"workers": "::1:6543"}, r"\[IPv6 address\]"),
        ({"workers": "tcp://node07:6543"}, "tcp://"),
        ({"workers": "unix:relative/path"}, "relative/path"),
        ({"workers": "local:0"}, "asks for no worker"),
        ({"workers": "local:x"}, "local:x"),
        ({"workers": [ADDRESS, "other.invalid:1", ADDRESS]}, f"names {ADDRESS} more than once"),
        ({"workers": "local:2", "num_workers": 3}, "workers='local:2' and num_workers=3 contradict each other"),
        ({"workers": ADDRESS, "prefetch_factor": 0}, "prefetch_factor must be at least 1, but is 0"),
        ({"workers": ADDRESS, "max_in_flight_bytes": 0}, "max_in_flight_bytes must be at least 1, but is 0"),
        ({"workers": ADDRESS, "partition": (2, 2)}, "rank 2 of world size 2"),
        ({"workers": ADDRESS, "partition": "all"}, r"partition must be 'auto', None or \(rank, world size\)"),
        ({"workers": ADDRESS, "partition": (1, 2, 3)}, "partition must be"),
        ({"workers": ADDRESS, "partition": 3}, "partition must be .* but is 3"),
    ],
    ids=str,
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RPCDataloader(Numbers(), **options)


@pytest.mark.parametrize("workers", [[("node07", 6543)], [b"node07:6543"], [None]])
def test_workers_must_be_strings(workers):
    with pytest.raises(TypeError, match="workers must be strings"):
        RPCDataloader(Numbers(), workers=workers)


def test_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_WORKERS", "node07")
    with pytest.raises(ValueError, match=r"environment variable RPCDATALOADER_WORKERS: .*node07"):
        RPCDataloader(Numbers())


def test_environment_variable_decides_when_workers_is_left_out(monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_WORKERS", ADDRESS)
    assert RPCDataloader(Numbers(), prefetch_factor=3).prefetch_factor == 3  # there are workers
    with pytest.raises(ValueError, match="local:1"):
        RPCDataloader(Numbers(), workers="local:1", num_workers=2)


def test_dataset_without_getitem_is_refused():
    with pytest.raises(TypeError, match="dataset of type object has no __getitem__"):
        RPCDataloader(object(), sampler=[1], workers=ADDRESS)


# RPCDataset


def test_workers_contradict_an_rpc_dataset():
    with pytest.raises(ValueError, match="workers contradicts the RPCDataset"):
        RPCDataloader(RPCDataset("inline", Numbers), workers="inline")


@pytest.mark.parametrize("dataset", [Numbers(), None, 3])
def test_rpc_dataset_wants_a_callable(dataset):
    with pytest.raises(TypeError, match=r"dataset must be a callable .* but is a .*given to RPCDataloader directly"):
        RPCDataset("inline", dataset)


@pytest.mark.parametrize("make", [Numbers, identity])
def test_rpc_dataset_without_workers_says_that_they_come_first(make):
    with pytest.raises(TypeError, match="workers come first"):
        RPCDataset(make, 10)


@pytest.mark.parametrize("workers", [3, 2.5, True])
def test_workers_must_be_a_list_or_a_string(workers):
    with pytest.raises(TypeError, match="workers must be a string or a list of strings"):
        RPCDataloader(Numbers(), workers=workers)


@pytest.mark.parametrize("build", ["Node", "", None, "session"])
def test_rpc_dataset_knows_two_ways_to_build(build):
    with pytest.raises(ValueError, match=f"build must be 'node' or 'worker', but is {build!r}"):
        RPCDataset("inline", Numbers, build=build)


@pytest.mark.parametrize("workers", [[], "node07", [ADDRESS, ADDRESS], "local:0"])
def test_rpc_dataset_refuses_malformed_workers(workers):
    with pytest.raises(ValueError, match=r"workers names|node07|asks for no worker"):
        RPCDataset(workers, Numbers)


def test_what_is_built_inline_must_be_a_dataset():
    with pytest.raises(TypeError, match="object is not a dataset: define __getitem__"):
        RPCDataset("inline", object)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_rpc_dataset_stays_in_its_process(use):
    with pytest.raises(LocalProtocolError, match="an RPCDataset belongs to this process and cannot be sent"):
        use(RPCDataset("inline", Numbers))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"task_timeout": 0}, ValueError, "task_timeout must be a number of seconds above 0, or None, but is 0"),
        ({"retry_on": "OSError"}, TypeError, "retry_on must be exception classes, but is 'OSError'"),
        ({"retry_on": 3}, TypeError, "retry_on must be exception classes, but is 3"),
        ({"max_in_flight_bytes": "1GB"}, TypeError, "max_in_flight_bytes must be a number of bytes, but is '1GB'"),
        ({"retry_on": [OSError, 5]}, TypeError, "retry_on must be exception classes, but one is 5"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'skip', but is 'ignore'"),
        ({"max_skipped": -1}, ValueError, "max_skipped must be 0 or more, but is -1"),
        (
            {"workers": None, "on_error": "skip"},
            ValueError,
            "on_error='skip' needs workers: give workers or num_workers",
        ),
        ({"workers": None, "retry_on": OSError}, ValueError, "task_timeout and retry_on need workers"),
        ({"workers": None, "task_timeout": 5}, ValueError, "task_timeout and retry_on need workers"),
    ],
)
def test_wrong_limits_are_named(options, error, text):
    with pytest.raises(error, match=text):
        RPCDataloader(Numbers(), **{"workers": ADDRESS, **options})


def test_streams_are_not_asked_again():
    with pytest.raises(ValueError, match="retry_on is for map-style datasets"):
        RPCDataloader(Stream(), workers=ADDRESS, retry_on=OSError)
