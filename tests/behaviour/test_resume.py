"""A pass that was interrupted goes on as if it had not been: in a new process, with other workers, on other ranks."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import pickle
import random
import re
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from rpcdataloader import CostBatchSampler, ResumableDistributedSampler, RPCDataloader, RPCDataset, get_sample_seed
from rpcdataloader.errors import LocalProtocolError, RPCError
from rpcdataloader.loader import inline
from rpcdataloader.loader.driver import Driver
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Failing, Gated, Numbers, Recorded, Sliced, augment_batch, notes
from tests.support.differential import seed, seeded, steps
from tests.support.kinds import as_is
from tests.support.samplers import SAMPLERS as STATEFUL_SAMPLERS
from tests.support.samplers import Counted, Covered, Total, Twofold, Unplaced
from tests.support.streams import Buffered, Drawn, Parts, Seekable, Steps, Stumbling

SIZE = 20
QUICK = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # making a failure smaller may take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# The trainer


def generators():
    """Where the trainer's global generators are."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(states) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def through_json(state):
    return json.loads(json.dumps(state))


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(make, stops, num_epochs, where, keep=through_json):
    """Batches of some epochs, or errors in their place, in a process that is interrupted and goes on elsewhere.

    Args:
        make: Makes the loader in a new process; called with one of ``where``, in turn.
        stops: Numbers of batches, ascending. With a half more, an epoch that ends there is told to the loop first.
    """
    seed(5)
    places = itertools.cycle(where)
    loader = make(next(places))
    batches, stops, epoch = [], list(stops), 0
    while epoch < num_epochs:
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for step in steps(iter(loader)):
            if isinstance(step, str):  # the end
                epoch += 1
                break
            batches.append(step)
            if stops and len(batches) >= stops[0]:
                break
        if stops and len(batches) >= stops[0] - 0.5:
            stops.pop(0)
            saved, trainer = keep(loader.state_dict()), generators()
            seed(99)
            loader = make(next(places))
            loader.load_state_dict(saved)
            assert keep(loader.state_dict()) == saved
            restore(trainer)
    return batches


# Samplers


class Faulty(Augmented):
    """One of its samples cannot be read."""

    def __getitem__(self, index):
        if index == 7:
            raise LookupError("a bad sample")
        return super().__getitem__(index)


class Listed:
    """Gives batches of a list, each other time from its end, and has a state: how much it has given."""

    def __init__(self, batches):
        self.batches = list(batches)
        self.given = self.first = self.epoch = 0

    def __iter__(self):
        self.given, self.first = self.first, 0
        for batch in self.batches[:: (-1) ** self.epoch][self.given :]:
            self.given += 1
            yield batch
        self.epoch += 1

    def state_dict(self):
        return {"given": self.given, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.first, self.epoch = state["given"], state["epoch"]


class Buckets:
    """Batches of any size, in an order of numpy's and python's generators."""

    def __iter__(self):
        order = list(np.random.permutation(7))
        random.shuffle(order)
        return iter([tuple(range(int(number) + 1)) for number in order])


class Bare:
    """Its iterator is not iterable: loaders only take its next."""

    def __iter__(self):
        return self.Iterator()

    class Iterator:
        def __init__(self):
            self.numbers = iter(range(SIZE))

        def __next__(self):
            return next(self.numbers)


class Refilled:
    """Fills one list, or array, for each batch."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        batch = self.kind([0, 0])
        for first in range(0, SIZE, 2):
            batch[:] = first, first + 1
            yield batch


class Given:
    """Says nothing about itself, apart from such attributes."""

    def __init__(self, gives, **attributes):
        self.gives = gives
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.gives)


SAMPLERS = {
    "in order": lambda: {"batch_size": 3},
    "dropping the last": lambda: {"batch_size": 3, "drop_last": True},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "shuffled by a generator": lambda: {"batch_size": 3, "shuffle": True, "generator": seeded()},
    "without batches": lambda: {"batch_size": None, "shuffle": True},
    "with replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SIZE), True, 33)},
    "more than there is": lambda: {"batch_size": 4, "sampler": RandomSampler(range(SIZE), num_samples=33)},
    "two generators": lambda: {
        "batch_size": 2,
        "sampler": RandomSampler(range(SIZE), generator=seeded(1)),
        "generator": seeded(2),
    },
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 17)},
    "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 14), seeded())},
    "distributed": lambda: {"batch_size": 2, "sampler": DistributedSampler(Numbers(SIZE), 2, 1)},
    "resumable": lambda: {"batch_size": 2, "sampler": ResumableDistributedSampler(range(SIZE), 2, 1)},
    "resumable, dropping": lambda: {
        "batch_size": 3,
        "drop_last": True,
        "sampler": ResumableDistributedSampler(range(SIZE), 3, 0, drop_last=True),
    },
    "list": lambda: {"batch_size": 3, "sampler": [5, 5, 2, 7, 1, 0, 9]},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "with a state": lambda: {"batch_sampler": Listed(BatchSampler(range(SIZE), 3, False))},
    "in one list": lambda: {"batch_sampler": Refilled(list)},
    "in one list of another class": lambda: {"batch_sampler": Refilled(type("Own", (list,), {}))},
    "in one array": lambda: {"batch_sampler": Refilled(np.array)},
    "bare": lambda: {"batch_size": None, "sampler": Bare()},
}


@pytest.fixture(scope="module")
def address(wide_servers):
    return wide_servers[0].address


def maker(address, options, **more):
    def make(where):
        collate_fn = None if options().get("batch_size", 1) is None else augment_batch
        given = {"collate_fn": collate_fn, **options(), **more}
        if where == "inline":
            return RPCDataloader(Faulty(), workers="inline", **given)
        return RPCDataloader(Faulty(), workers=address, num_workers=where, **given)

    return make


PLACES = st.lists(st.sampled_from(["inline", 1, 2, 5]), min_size=1, max_size=3)


@pytest.mark.parametrize("name", SAMPLERS)
@settings(QUICK, max_examples=2)
@given(data=st.data())
def test_rest_and_next_epochs_are_the_same_bit_for_bit(address, name, data):
    persistent = data.draw(st.booleans())
    keep = data.draw(st.sampled_from([through_json, through_torch]))
    make = maker(address, SAMPLERS[name], persistent_workers=persistent)
    expected = train(make, [], 2, ["inline"])
    half = len(expected) // 2
    assert half >= 2
    stops = st.sampled_from([half, half + 0.5]) | st.integers(1, len(expected) - 1)
    stops = sorted(data.draw(st.sets(stops, min_size=1, max_size=3)))
    assert_same(train(make, stops, 2, data.draw(PLACES), keep), expected)


class Sorting(Numbers):
    def __getitems__(self, indices):
        indices.sort()
        return indices


def test_dataset_that_changes_its_list_of_indices_can_be_resumed():
    loader = RPCDataloader(Sorting(SIZE), 3, shuffle=True, workers="inline")
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    assert_same(list(loader), list(batches))


def test_state_of_the_beginning_begins_anew_with_persistent_workers(address):
    loader = RPCDataloader(Augmented(SIZE), shuffle=True, workers=address, persistent_workers=True)
    beginning, epochs = {**loader.state_dict(), "_iterator_finished": False}, []  # as Accelerate keeps states
    for _ in range(2):
        loader.load_state_dict(beginning)
        torch.manual_seed(5)
        epochs.append(list(loader))
    assert_same(*epochs)


class Each(IterableDataset):
    def __init__(self, fifth):
        self.fifth = fifth

    def give(self, number):
        return self.fifth() if number == 5 else number

    def __iter__(self):
        return map(self.give, range(10))


@pytest.mark.parametrize("fifth", [lambda: 1 / 0, sys.exit, threading.Lock, lambda: os._exit(3)])
def test_error_in_place_of_a_batch_of_a_stream_comes_once(address, fifth):
    options = {"batch_size": 3, "collate_fn": list, "workers": address, "num_workers": 1, "max_retries": 1}
    first, second = (RPCDataloader(Each(fifth), **options) for _ in range(2))
    iterator = iter(first)
    assert next(iterator) == [0, 1, 2]
    with pytest.raises((ArithmeticError, RPCError)):
        next(iterator)
    second.load_state_dict(first.state_dict())
    assert list(second) == list(iterator)


def fail_in_first(worker_id):
    if worker_id == 0:
        raise OSError("the first part is away")


class Away(IterableDataset):
    def __init__(self, open_part):
        self.open_part = open_part

    def __iter__(self):
        self.open_part(get_worker_info().id)
        return iter(range(4))


@pytest.mark.parametrize(("dataset", "init"), [(Away(fail_in_first), None), (Away(abs), fail_in_first)])
def test_error_in_place_of_a_stream_comes_once(address, dataset, init):
    options = {"collate_fn": list, "workers": address, "num_workers": 2, "worker_init_fn": init}
    first, second = (RPCDataloader(dataset, 2, **options) for _ in range(2))
    iterator = iter(first)
    with pytest.raises(OSError, match="the first part is away"):
        next(iterator)
    assert next(iterator) == [0, 1]
    second.load_state_dict(first.state_dict())
    assert list(second) == list(iterator) == [[2, 3]]


@pytest.mark.parametrize("where", ["inline", 2])
def test_pass_of_persistent_workers_goes_on_with_others(address, where):
    def make(persistent):
        return maker(address, SAMPLERS["shuffled"], persistent_workers=persistent)(where)

    expected = train(make, [], 2, [True])
    assert_same(train(make, [9], 2, [True, False]), expected)


@pytest.mark.parametrize("where", ["inline", "workers"])
def test_loaders_that_take_turns_go_on(address, where):
    """Each draws from the global generators between the beginning of the other one and its first batch."""

    def make():
        return [RPCDataloader(Numbers(SIZE), 4, shuffle=True, workers=places[where]) for _ in range(2)]

    places = {"inline": "inline", "workers": address}
    seed(5)
    expected = list(zip(*make(), strict=True))
    seed(5)
    loaders, others = make(), make()
    batches = list(itertools.islice(zip(*loaders, strict=True), 2))
    for loader, other in zip(loaders, others, strict=True):
        other.load_state_dict(through_json(loader.state_dict()))
    assert_same(batches + list(zip(*others, strict=True)), expected)


# Iterable-style datasets


class Bad(Parts):
    """One of its records cannot be read."""

    def __iter__(self):
        return Stumbling(self)


def transform(sample):
    return sample, random.random()


STREAMS = {kind.__name__: kind for kind in (Parts, Bad, Drawn, Buffered, Seekable)}
STREAMS["transformed"] = Parts


@pytest.mark.parametrize("kind", STREAMS)
@settings(QUICK, max_examples=4)
@given(data=st.data())
def test_streams_go_on_where_they_were(wide_servers, kind, data):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any))
    batch_size = data.draw(st.sampled_from([None, 1, 3]))
    drop_last = batch_size is not None and data.draw(st.booleans())
    in_order = kind == "transformed" or data.draw(st.booleans())
    persistent = data.draw(st.booleans())

    def make(where):
        num_workers = len(sizes) * (where != "inline")
        options = {"drop_last": drop_last, "in_order": in_order, "persistent_workers": persistent}
        if kind == "transformed":
            options |= {"transform": transform, "source_workers": len(sizes)}
            num_workers = data.draw(st.integers(1, 3)) if num_workers else 0
        options |= {"collate_fn": as_is, "workers": where, "num_workers": num_workers}
        return RPCDataloader(STREAMS[kind](sizes), batch_size, **options)

    # One stream may be this process's own.
    where = [server.address for server in wide_servers] + ["inline"] * (len(sizes) == 1)
    expected = train(make, [], 2, where[-1:])
    stops = st.integers(1, max(len(expected) - 1, 1)) | st.just(len(expected) // 2 + 0.5)
    stops = sorted(data.draw(st.sets(stops, max_size=2)))
    found = train(make, stops, 2, where)
    if not in_order:
        found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    assert_same(found, expected)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
def test_as_many_streams_go_on_whatever_number_of_workers_is_asked_for(address, before, after):
    loader, rest = (RPCDataloader(Parts([8] * 4), 4, workers=address, num_workers=each) for each in (before, after))
    expected = [100 * stream + number for stream in range(4) for number in range(8)]
    seen = list(itertools.islice(loader, 2))
    rest.load_state_dict(loader.state_dict())
    assert sorted(torch.cat([*seen, *rest]).tolist()) == expected[: 8 * before]
    assert sorted(torch.cat(list(rest)).tolist()) == expected[: 8 * after]


@pytest.mark.parametrize("kind", ["Parts", "Buffered", "Seekable"])
def test_only_a_stream_without_a_state_is_read_again(address, tmp_path, kind):
    logs = [str(tmp_path / name) for name in ("first", "second")]
    first, second = (RPCDataloader(STREAMS[kind]([20, 20], log), None, num_workers=2, workers=address) for log in logs)
    rest = list(itertools.islice(first, 10)) and first.state_dict()
    second.load_state_dict(rest)
    assert len(list(second)) == 30
    # Of the 10 samples before, those in a shuffle buffer have been read, too.
    assert len(notes(logs[1])) == {"Parts": 40, "Seekable": 30, "Buffered": 24}[kind]


# Ranks


def test_state_of_another_rank_goes_on_as_that_of_this_one():
    def make(rank):
        sampler = DistributedSampler(range(20), 2, rank, seed=1)
        return RPCDataloader(range(20), 2, sampler=sampler, workers="inline", collate_fn=list)

    expected, state = list(make(1)), None
    for loader in make(0), make(1), make(1):
        if state is not None:
            loader.load_state_dict(state)
        seen = next(iter(loader))
        state = loader.state_dict()
    assert seen == expected[2]


def test_refused_state_takes_nothing_from_the_epoch_that_begins_instead():
    def make(rank):
        dataset = Failing(12, {0: (ValueError,), 2: (ValueError,)})
        sampler = ResumableDistributedSampler(dataset, 2, rank, shuffle=False)
        return RPCDataloader(dataset, 1, sampler=sampler, workers="inline", on_error="skip", collate_fn=list)

    first, second = make(0), make(1)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="each rank has delivered batches of other numbers"):
        list(second)
    second.load_state_dict(make(1).state_dict())
    assert list(second) == list(make(1))


def test_other_ranks_go_on_with_what_nobody_has_seen_and_with_its_random_numbers(address):
    """Which places are whose, with any numbers of samples and ranks, is tested with the sampler."""
    size = 29

    def make(rank, num_ranks, batch_size):
        sampler = ResumableDistributedSampler(range(size), num_ranks, rank, seed=1)
        sampler.set_epoch(2)
        where = {"workers": address} if rank == 1 else {"workers": "inline"}
        return RPCDataloader(Augmented(size), batch_size, sampler=sampler, **where)

    seed(4)
    before = generators()
    (whole,) = RPCDataloader(Augmented(size), size, workers="inline")
    order = torch.randperm(size, generator=seeded(1 + 2)).tolist()
    expected = dict(zip(order, whole["draws"].tolist(), strict=True))  # they belong to the place

    saved, seen = None, []
    for num_ranks, batch_size, num_batches in [(3, 2, 2), (1, 4, 2), (2, 2, size)]:
        for rank in range(num_ranks):
            restore(before)
            loader = make(rank, num_ranks, batch_size)
            if saved is not None:
                loader.load_state_dict(saved)
            for batch in itertools.islice(loader, num_batches):
                seen += zip(batch["index"].tolist(), batch["draws"].tolist(), strict=True)
        saved = through_json(loader.state_dict())
    _padding = seen.pop()
    assert sorted(index for index, _draws in seen) == list(range(size))
    assert dict(seen) == expected


class Seeds(Dataset):
    """Its samples are their index and seed."""

    def __len__(self):
        return 120

    def __getitem__(self, index):
        return index, get_sample_seed()


def with_seed(samples):
    return samples, get_sample_seed()


@pytest.mark.parametrize("kind", ["resumable", "planned", "taken over"])
def test_other_ranks_get_random_numbers_that_nobody_has_had(address, kind):
    def make(rank, num_ranks, **options):
        dataset = Seeds()
        if kind == "planned":
            costs = [1 + index % 5 for index in range(len(dataset))]
            options["batch_sampler"] = CostBatchSampler(costs, 10, num_replicas=num_ranks, rank=rank)
        else:
            is_taken = kind == "taken over" and num_ranks == 4
            sampler = DistributedSampler if is_taken else ResumableDistributedSampler
            options |= {"sampler": sampler(dataset, num_ranks, rank, seed=1), "batch_size": 2}
        partition = rank, num_ranks
        return RPCDataloader(dataset, collate_fn=with_seed, partition=partition, persistent_workers=True, **options)

    seed(4)
    before, saved, epochs = generators(), None, [[], []]
    for num_ranks, num_batches in (4, 3), (2, 3), (3, 2), (3, None):
        for rank in range(num_ranks):
            restore(before)
            where = {"workers": address, "num_workers": 1} if rank == 0 else {"workers": "inline"}
            loader = make(rank, num_ranks, **where)
            if saved is not None:
                loader.load_state_dict(saved)
            epochs[0] += itertools.islice(loader, num_batches)
            if num_batches is None:
                epochs[1] += loader
        saved = through_json(loader.state_dict())
    for batches in epochs:
        samples = [sample for batch, _seed in batches for sample in batch]
        assert {index for index, _seed in samples} == set(range(120))
        for pairs in samples, batches:
            assert len({number for _what, number in pairs}) == len(pairs)


# What is loaded, and what is left alone


def test_nothing_is_loaded_twice_but_what_was_on_its_way(address, tmp_path):
    logs = [str(tmp_path / name) for name in ("first", "second")]
    first, second = (RPCDataloader(RPCDataset(address, Recorded, 40, log, 1), 4, num_workers=2) for log in logs)
    iterator = iter(first)
    for _ in range(5):
        next(iterator)
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 5
    loaded = [int(line.split()[0]) for line in notes(logs[1])]
    assert sorted(loaded) == list(range(20, 40))


@pytest.mark.parametrize("kind", [list, Listed])
def test_what_was_delivered_ahead_is_not_loaded_again_and_must_be_the_same(address, fifo, kind):
    batches = [[2 * number, 2 * number + 1] for number in range(10)]
    options = {"in_order": False, "workers": address, "num_workers": 2}
    loader = RPCDataloader(Gated(SIZE, 0, fifo), batch_sampler=kind(batches), **options)
    iterator = iter(loader)
    ahead = [next(iterator).tolist() for _ in range(3)]
    state = through_json(loader.state_dict())
    open(fifo, "w").close()
    earlier = {number: [size, None, None] for number, (size, *_others) in state["ahead"].items()}
    for where, saved in ("inline", {**state, "ahead": earlier}), (address, state):
        rest = RPCDataloader(Numbers(SIZE), batch_sampler=kind(batches), in_order=False, workers=where)
        rest.load_state_dict(saved)
        assert sorted(ahead + [batch.tolist() for batch in rest]) == batches
        assert rest.state_dict()["num_batches"] == 10
        assert rest.state_dict()["ahead"] == {}
    with pytest.raises(ValueError, match="go on with the same samplers"):
        RPCDataloader(Numbers(SIZE), 2, shuffle=True, workers="inline").load_state_dict(state)
    batches[batches.index(ahead[0])] = [0, 1]
    other = RPCDataloader(Numbers(SIZE), batch_sampler=kind(batches), in_order=False, workers="inline")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="gives other indices now"):
        list(other)
    other.load_state_dict(without(state, "digest"))
    assert len(list(other)) == 7


@pytest.mark.parametrize("kind", [Total, Counted])
def test_late_first_batch_of_a_later_epoch_is_that_of_the_sampler_with_a_state(address, fifo, kind):
    def make(dataset, **options):
        sampler = kind(SIZE)
        return sampler, RPCDataloader(dataset, 2, sampler=sampler, in_order=False, **options)

    _sampler, loader = make(Numbers(SIZE), workers="inline")
    list(loader)
    end = loader.state_dict()
    sampler, loader = make(Gated(SIZE, loader.sampler.order(1)[0], fifo), workers=address, num_workers=2)
    loader.load_state_dict(end)
    batches = iter(loader)
    ahead = list(itertools.islice(batches, 3))
    state = through_json(loader.state_dict())
    open(fifo, "w").close()
    assert state["num_batches"] == 0
    _sampler, rest = make(Numbers(SIZE), workers="inline")
    rest.load_state_dict(state)
    assert sorted(torch.cat([*ahead, *rest]).tolist()) == list(range(SIZE))
    assert torch.cat(list(rest)).tolist() == sampler.order(2)


def test_planned_batches_that_came_early_need_the_same_ranks(address, fifo):
    def make(num_ranks, dataset, **options):
        sampler = CostBatchSampler([1] * SIZE, 2, num_replicas=num_ranks, rank=0)
        return RPCDataloader(dataset, batch_sampler=sampler, in_order=False, **options)

    third = list(CostBatchSampler([1] * SIZE, 2, num_replicas=1, rank=0))[2]
    loader = make(1, Gated(SIZE, third[0], fifo), workers=address, num_workers=2)
    iterator = iter(loader)
    list(itertools.islice(iterator, 3))
    state = loader.state_dict()
    open(fifo, "w").close()
    other = make(2, Numbers(SIZE), workers="inline")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="with batches missing: go on with the same ranks"):
        iter(other)


def test_batches_that_the_dataset_loads_at_once_need_the_same_ranks():
    def make(num_ranks):
        sampler = BatchSampler(ResumableDistributedSampler(range(40), num_ranks, 0), 4, False)
        return RPCDataloader(Sliced(40), None, sampler=sampler, workers="inline")

    loader, rest = make(1), make(1)
    begun = list(itertools.islice(loader, 3))
    rest.load_state_dict(loader.state_dict())
    assert sorted(torch.cat([*begun, *rest]).tolist()) == list(range(0, 400, 10))
    with pytest.raises(ValueError, match=r"go on with as many ranks as before, 1$"):
        make(2).load_state_dict(loader.state_dict())


def breaking():
    yield from range(3)
    raise OSError("the list of samples cannot be read")


def test_sampler_that_raises_does_not_end_a_pass():
    loader = RPCDataloader(Numbers(SIZE), None, sampler=breaking(), workers="inline")
    *taken, error, end = steps(iter(loader), 5)
    assert taken == [0, 1, 2]
    assert error.type is OSError
    assert end.line.startswith("OSError has ended the sampler before its end")
    assert not loader.state_dict()["finished"]


class Interrupted(Steps):
    """By Ctrl-C, once."""

    is_due = True

    def __next__(self):
        if self.number == 4 and Interrupted.is_due:
            Interrupted.is_due = False
            raise KeyboardInterrupt
        return super().__next__(), torch.rand(()).item()


class Drawing(Parts):
    is_due = False

    def __iter__(self):
        if Drawing.is_due:
            Drawing.is_due = False
            raise KeyboardInterrupt
        return Interrupted(self)


@pytest.mark.parametrize("at", ["iterator", "sample", "batch"])
def test_pass_over_a_stream_that_is_interrupted_here_ends_and_goes_on_from_its_state(at, monkeypatch):
    def collate(samples):
        if len(fails) > 1 and fails.pop():
            raise KeyboardInterrupt
        return samples, random.random()

    def begin():
        seed(5)
        return RPCDataloader(Drawing([9]), 3, collate_fn=collate, workers="inline")

    fails = []
    monkeypatch.setattr(Interrupted, "is_due", False)
    expected = list(begin())
    fails = [False, True, False] if at == "batch" else []
    Interrupted.is_due, Drawing.is_due = at == "sample", at == "iterator"
    loader = begin()
    iterator = iter(loader)
    batches = [] if at == "iterator" else [next(iterator)]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^KeyboardInterrupt has interrupted this pass"):
            next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert batches + list(loader) == expected
    assert loader.state_dict()["streams"] == [[9, 3, "", None, False, 0]]


@pytest.mark.parametrize("where", ["inline", "workers"])
def test_interrupt_at_the_end_of_a_pass_leaves_a_state_of_its_end(address, where, monkeypatch):
    loader = RPCDataloader(Numbers(6), 2, workers="inline" if where == "inline" else address)
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 3))) == 3
    with monkeypatch.context() as patch:
        for owner in inline, Driver:
            patch.setattr(owner, "tell", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    state = loader.state_dict()
    assert not state["finished"]
    assert list(batches) == []
    assert loader.state_dict()["finished"]
    loader.load_state_dict(state)
    assert [len(list(loader)) for _epoch in range(2)] == [0, 3]


def test_second_interrupt_while_a_first_one_is_noted_hides_nothing(monkeypatch):
    """Of a launcher that sends two signals."""
    batches = iter(RPCDataloader(Interrupting([9]), 3, collate_fn=list, workers="inline"))
    assert next(batches) == [0, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(inline.InlineIterator, "_fail", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            next(batches)
    with pytest.raises(RuntimeError, match="an exception has interrupted this pass"):
        next(batches)


class Interrupting(Parts):
    def __iter__(self):
        for number in super().__iter__():
            if number == 4:
                raise KeyboardInterrupt
            yield number


def test_interrupt_of_iter_leaves_a_loaded_state_to_the_next_one(monkeypatch):
    loader = RPCDataloader(Numbers(6), 2, workers="inline")
    first = next(iter(loader)).tolist()
    loader.load_state_dict(loader.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(RPCDataloader, "_make_recorder", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert first + torch.cat(list(loader)).tolist() == list(range(6))


@pytest.mark.parametrize("num_before", [0, 3])
def test_stream_whose_sampler_an_interrupt_has_ended_says_so(address, num_before, monkeypatch):
    """torch's samplers of streams are generators, which an exception ends; they never end by themselves."""

    def count(_sampler):
        for number in itertools.count():
            if number == 20 and interrupts:
                raise interrupts.pop()
            yield None

    monkeypatch.setattr(_InfiniteConstantSampler, "__iter__", count)
    interrupts, found = [KeyboardInterrupt], []
    loader = RPCDataloader(Parts([20, 19]), 2, workers=address, num_workers=2)
    batches = iter(loader)
    found += itertools.islice(batches, num_before)
    with pytest.raises(KeyboardInterrupt):
        found += map(next, itertools.repeat(batches))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt has ended the sampler before its end"):
        found += map(next, itertools.repeat(batches))
    loader.load_state_dict(loader.state_dict())
    found += loader
    assert sorted(torch.cat(found).tolist()) == sorted([*range(20), *range(100, 119)])


def test_state_stays_as_it_was_when_the_loader_goes_on():
    loader, rest = (RPCDataloader(Buffered([9]), 2, workers="inline") for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = through_json(state)
    list(iterator)
    assert through_json(state) == before
    for _ in range(2):
        rest.load_state_dict(state)
        assert len(list(rest)) == 4
        assert through_json(state) == before


class Circular(Given):
    """Leads back to itself, over another one."""

    def __init__(self):
        super().__init__([[0, 1], [2, 3]])
        self.sampler = Given([], batch_sampler=self)


class Mocked(Given):
    """Has whatever it is asked for."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Mocked([])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Circular, lambda: Mocked([[0, 1], [2, 3]])])
def test_samplers_without_an_innermost_one_are_resumed(make):
    loader, rest = (RPCDataloader(Numbers(SIZE), batch_sampler=make(), workers="inline") for _ in range(2))
    next(iter(loader))
    rest.load_state_dict(loader.state_dict())
    assert torch.cat(list(rest)).tolist() == [2, 3]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["inline", "workers"])
def test_iterator_from_before_a_state_was_loaded_is_refused_until_another_has_begun(address, where, persistent):
    def make(size=SIZE):
        where_to = {"inline": "inline", "workers": address}[where]
        return RPCDataloader(Numbers(size), 2, shuffle=True, workers=where_to, persistent_workers=persistent)

    first, loader = make(), make()
    expected = list(itertools.islice(first, 4))
    state = first.state_dict()
    for num_before in 0, 3:  # load_state_dict between iter and the first batch, and between two batches
        open_before = iter(loader)
        list(itertools.islice(open_before, num_before))
        for _twice in range(2):
            loader.load_state_dict(state)
            with pytest.raises(LocalProtocolError, match=r"load_state_dict\(\) was called while .* go on with iter"):
                next(open_before)
            assert through_json(loader.state_dict()) == through_json(state)
        rest = list(loader)
        assert sorted(torch.cat([*expected, *rest]).tolist()) == list(range(SIZE))
        assert loader.state_dict()["num_batches"] == SIZE // 2
    if not persistent:  # whose iterators are one, as torch's
        loader = make()
        other = iter(loader)
        begun = list(itertools.islice(other, 3))
        loader.load_state_dict(state)
        again = iter(loader)
        assert len(list(other)) == SIZE // 2 - len(begun), "an iterator beside that of the state goes on, as any"
        assert len(list(again)) == SIZE // 2 - 4


def test_end_of_a_pass_stays_its_end_when_a_state_is_loaded():
    loader = RPCDataloader(Numbers(SIZE), 2, workers="inline")
    batches = iter(loader)
    list(batches)
    loader.load_state_dict(loader.state_dict())
    assert next(batches, None) is None


# What does not fit


class Unseeded(Given):
    """Draws another order in each process."""

    def __iter__(self):
        return iter(random.Random(os.urandom(8)).sample(self.gives, len(self.gives)))


class UnseededStream(Parts):
    def __iter__(self):
        return iter(random.Random(os.urandom(8)).sample(range(self.sizes[0]), self.sizes[0]))


@pytest.mark.parametrize("where", ["inline", 1])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("in_order", [True, False])
def test_order_that_is_drawn_anew_is_refused(address, where, is_stream, in_order):
    def make():
        places = {"workers": where} if where == "inline" else {"workers": address, "num_workers": where}
        if is_stream:
            return RPCDataloader(UnseededStream([90]), 4, in_order=in_order, **places)
        return RPCDataloader(Numbers(90), 4, sampler=Unseeded(range(90)), in_order=in_order, **places)

    loader = make()
    list(itertools.islice(loader, 3))
    state = through_json(loader.state_dict())
    rest = make()
    rest.load_state_dict(state)
    with pytest.raises(ValueError, match=r"gives other (indices|samples) now than those that were delivered: .*seed"):
        next(iter(rest))
    # A user may want to go on, and states of earlier versions have no digest.
    rest = make()
    rest.load_state_dict(without(state, "digest"))
    assert sum(map(len, rest)) == 90 - 3 * 4


def without(state, *keys):
    return {key: value for key, value in state.items() if key not in keys}


def saved_by(*args, stop=2, **options):
    loader = RPCDataloader(*args, **{"workers": "inline", **options})
    list(itertools.islice(loader, stop))
    return loader.state_dict()


@pytest.mark.parametrize("where", ["inline", 2])
def test_state_of_a_sampler_that_leads_to_another_batch_is_refused(where):
    def make():
        place = {"workers": "inline"} if where == "inline" else {"num_workers": where}
        return RPCDataloader(Numbers(12), 3, sampler=Unplaced(12), **place)

    loader = make()
    seen = list(itertools.islice(loader, 2))
    state = through_json(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"other batches than those that followed .* must tell the position"):
        list(loader)
    del state["digest"]
    loader.load_state_dict(state)
    assert_same(list(loader)[:2], seen)


class Whole:
    """A sampler whose state at the end of an epoch is that of the next one's beginning; two samples an epoch."""

    epoch, left = 0, None

    def __iter__(self):
        if self.left is None:
            self.left = [10 * self.epoch, 10 * self.epoch + 1]
        while self.left:
            yield self.left.pop(0)
        self.left, self.epoch = None, self.epoch + 1

    def state_dict(self):
        return {"epoch": self.epoch, "left": self.left}

    def load_state_dict(self, state):
        self.epoch, self.left = state["epoch"], state["left"]


@pytest.mark.parametrize("batch_size", [1, 2, 4, None])
def test_beginning_of_an_epoch_of_few_batches_is_followed_by_the_next_epoch(batch_size):
    def make():
        return RPCDataloader(range(100), batch_size, sampler=Whole(), workers="inline", collate_fn=as_is)

    expected, saved, resumed = make(), make(), make()
    iter(saved)
    resumed.load_state_dict(saved.state_dict())
    assert [list(resumed) for _ in range(4)] == [list(expected) for _ in range(4)]


class Curriculum:
    """A sampler that counts epochs, of which one has no sample."""

    epoch = 0

    def __iter__(self):
        yield from range(10 * self.epoch, 10 * self.epoch + (1, 0, 2, 1)[self.epoch % 4])
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def test_epoch_without_a_batch_is_followed_by_the_next_one():
    def make():
        return RPCDataloader(range(100), 2, sampler=Curriculum(), workers="inline", collate_fn=as_is)

    expected, saved, resumed = make(), make(), make()
    for loader in expected, saved:
        assert [list(loader), list(loader)] == [[[0]], []]
    resumed.load_state_dict(saved.state_dict())
    assert [list(resumed) for _ in range(4)] == [list(expected) for _ in range(4)]


def check_each_moment(make, caplog, num_taken=None):
    """Save a job at each moment of its first epochs: as one begins, after each batch, and when the loop has ended.

    Args:
        num_taken: Number of batches after which the epochs before that one are left; None for all.
    """

    def begin():
        seed(5)
        loader = make()
        for _epoch in range(epoch):
            list(itertools.islice(loader, num_taken))
        return loader

    for epoch in range(2):
        loader = begin()
        expected = [list(loader) for _epoch in range(3)]
        for number in [*range(len(expected[0]) + 1), None]:  # None for the end of the loop
            loader = begin()
            begun = list(itertools.islice(loader, number))
            saved, trainer = through_json(loader.state_dict()), generators()
            seed(99)
            loader = make()
            loader.load_state_dict(saved)
            restore(trainer)
            found = [begun if number is None else begun + list(loader)]
            found += [list(loader) for _epoch in range(2)]
            assert found == expected, f"saved in epoch {epoch}, after {number}: {saved['sampler']}"
    assert not caplog.records


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(None, False), (1, False), (2, False), (2, True), (5, False), (9, False)]
)
@pytest.mark.parametrize("kind", [*STATEFUL_SAMPLERS.values(), Twofold])
def test_sampler_with_a_state_goes_on_from_each_moment_with_all_later_epochs(kind, batch_size, drop_last, caplog):
    def make():
        options = {"sampler": kind(5), "workers": "inline", "collate_fn": as_is}
        return RPCDataloader(range(5), batch_size, drop_last=drop_last, **options)

    check_each_moment(make, caplog)


@pytest.mark.parametrize("num_taken", [None, 1])
@pytest.mark.parametrize("kind", [*STATEFUL_SAMPLERS.values(), Twofold])
def test_batch_sampler_over_a_sampler_with_a_state_goes_on_also_after_an_epoch_left_early(kind, num_taken, caplog):
    def make():
        batch_sampler = Covered(kind(5), 2, drop_last=False)
        return RPCDataloader(range(5), batch_sampler=batch_sampler, workers="inline", collate_fn=as_is)

    check_each_moment(make, caplog, num_taken)


class Outer(BatchSampler):
    """Has a state, its number of batches, without that of the sampler inside."""

    first = number = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for self.number, batch in enumerate(super().__iter__(), 1):
            if self.number > first:
                yield batch

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.first = state["number"]


def test_state_without_that_of_the_sampler_inside_is_told(caplog):
    def make():
        batch_sampler = Outer(Unplaced(6), 2, False)
        return RPCDataloader(range(6), batch_sampler=batch_sampler, workers="inline", collate_fn=as_is)

    loader = make()
    assert len([*loader, *loader]) == 6
    saved = through_json(loader.state_dict())
    make().load_state_dict(saved)
    (record,) = caplog.records
    assert "the state_dict() of Outer must tell all that decides, also of samplers inside" in record.getMessage()


def test_batch_sampler_of_torchdata_goes_on_from_each_moment(caplog):
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def make():
        sampler = samplers.BatchSampler(RandomSampler(range(7)), 3, False)  # which draws from the global generator
        return RPCDataloader(range(7), batch_sampler=sampler, workers="inline", collate_fn=as_is)

    check_each_moment(make, caplog)


class Named(Total):
    """Gives objects as indices."""

    def __iter__(self):
        return (Index(number) for number in super().__iter__())


@dataclasses.dataclass
class Index:
    number: int

    def __index__(self):
        return self.number


def test_beginning_of_an_epoch_of_objects_as_indices_is_that_of_the_sampler():
    def make():
        return RPCDataloader(range(12), 3, sampler=Named(12), workers="inline")

    loader = make()
    epochs = [list(loader) for _epoch in range(2)]
    loader = make()
    list(loader)
    batches = iter(loader)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader = make()
    loader.load_state_dict(state)
    assert_same(list(loader), epochs[1])
    assert_same(list(batches), epochs[1])


def test_loader_without_workers_has_no_state():
    loader = RPCDataloader(Numbers())
    for use in loader.state_dict, lambda: loader.load_state_dict(saved_by(Numbers())):
        with pytest.raises(LocalProtocolError, match=r"this loader has no workers, .* give num_workers=1 or more, or"):
            use()


def epochs_beside(make, where, loaded=None):
    """Two epochs in which the script draws from the loader's generator, too, and states after the batches of the first.

    Args:
        loaded: State to go on from, the number of batches delivered before, and the global generators then.
    """
    seed(5)
    generator = seeded(3)
    loader = RPCDataloader(**{"dataset": Numbers(SIZE), **make(generator)}, **where)
    number, states, found = 0, [], []
    if loaded is not None:
        state, number, trainer = loaded
        loader.load_state_dict(state)
        restore(trainer)
    for epoch in range(2):
        for batch in loader:
            found.append(batch)
            number += 1
            if number in (1, 2, 4):
                found.append(torch.randperm(5, generator=generator))
            if epoch == 0:
                states.append(((through_json(loader.state_dict()), number, generators()), len(found)))
        found.append(torch.rand(2, generator=generator))
    return found, states


@pytest.mark.parametrize("where", [{"workers": "inline"}, {"num_workers": 2}])
@pytest.mark.parametrize(
    "make",
    [
        lambda _generator: {"batch_size": 3, "shuffle": True},
        lambda generator: {"batch_size": 3, "sampler": RandomSampler(range(SIZE), generator=generator)},
        lambda _generator: {"batch_size": 3, "sampler": Total(SIZE)},
        lambda _generator: {"batch_size": 3, "sampler": ours()},
        lambda _generator: {"dataset": Parts([9, 9])},
        lambda _generator: {"dataset": Parts([9, 9]), "transform": torch.as_tensor},
    ],
    ids=["shuffle", "sampler", "state", "position", "stream", "transform"],
)
def test_script_may_draw_from_the_generator_of_a_loader_in_its_passes(make, where):
    def make_with_generator(generator):
        return {**make(generator), "generator": generator}

    whole, states = epochs_beside(make_with_generator, where)
    for loaded, num_found in states:
        rest, _states = epochs_beside(make_with_generator, where, loaded)
        assert_same(rest, whole[num_found:])


@pytest.mark.parametrize("where", [{"workers": "inline"}, {"num_workers": 2}])
def test_sampler_that_draws_after_the_script_in_a_pass_goes_on_exactly_or_is_refused(where):
    def make(generator):  # draws 32 indices at once
        return {"batch_size": 9, "sampler": RandomSampler(range(SIZE), True, 99, generator)}

    whole, states = epochs_beside(make, where)
    refused = []
    for loaded, num_found in states:
        try:
            rest, _states = epochs_beside(make, where, loaded)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert_same(rest, whole[num_found:])
    assert refused
    pattern = "from which nothing else draws|other indices now than those that were delivered"
    assert all(re.search(pattern, text) for text in refused)


class Live(Sampler):
    """Draws each index from a global generator when it is asked for it."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        for _number in range(SIZE):
            yield int(torch.randint(SIZE, ()))


class Breaks(Sampler):
    """Raises in place of one of its indices, and goes on."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        self._number = 0
        return self

    def __next__(self):
        self._number += 1
        if self._number == 10:
            raise OSError("for a moment")
        if self._number > SIZE:
            raise StopIteration
        return self._number


def outcomes(batches):
    """What a loop gets that goes on after errors."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except OSError as error:
            yield str(error)


@pytest.mark.parametrize("where", [{"workers": "inline"}, {"num_workers": 2}])
@pytest.mark.parametrize("kind", [Live, Breaks])
def test_a_resumed_pass_asks_the_sampler_for_no_more_than_was_drawn(kind, where):
    def make():
        return RPCDataloader(range(SIZE + 1), batch_size=None, sampler=kind(), collate_fn=as_is, **where)

    for stop in range(1, 10):
        torch.manual_seed(0)
        loader = make()
        iterator = iter(loader)
        given = list(itertools.islice(outcomes(iterator), stop))
        if "for a moment" in given:
            break
        saved, trainer = through_json(loader.state_dict()), generators()
        expected = list(outcomes(iterator))
        assert len(given) + len(expected) == SIZE
        torch.manual_seed(99)
        loader = make()
        loader.load_state_dict(saved)
        restore(trainer)
        assert list(outcomes(iter(loader))) == expected


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("where", [{"workers": "inline"}, {"num_workers": 2}])
def test_next_epoch_may_have_another_batch_size_from_where_the_last_batch_was_delivered(where, batch_size):
    def make(size):
        return RPCDataloader(Numbers(SIZE), size, shuffle=True, generator=seeded(), collate_fn=as_is, **where)

    def samples(batches):
        return [sample for batch in batches for sample in (batch if isinstance(batch, list) else [batch])]

    loader = make(batch_size)
    iterator = iter(loader)
    for _number in range(len(loader)):
        next(iterator)
    saved = through_json(loader.state_dict())
    assert next(iterator, None) is None
    expected = [[], samples(loader), samples(loader)]
    for size in 4, 7, None:
        loader = make(size)
        loader.load_state_dict(saved)
        assert_same([samples(loader) for _epoch in range(3)], expected)


def of_version_4(state, following):
    """The state as version 4 had it; ``following`` is the digest of the next batch."""
    start = {**state["start"]}
    if "inside" in start:
        start["inside"] = start["inside"]["states"]
    lacks = {name: each for name, each in state.items() if name not in ("drawn", "last")}
    return {**lacks, "version": 4, "next": following, "start": start}


@pytest.mark.parametrize(("stop", "following"), [(0, None), (2, 3106207857), (2, 1), (7, None), (None, None)])
def test_state_of_version_4_goes_on(stop, following):
    def make():
        return RPCDataloader(Augmented(SIZE), 3, shuffle=True, generator=seeded(3), workers="inline")

    loader = make()
    iterator = iter(loader)
    list(itertools.islice(iterator, stop))
    state = of_version_4(loader.state_dict(), following)
    if stop == 2 and following != 1:
        assert state["digest"] == 7676152494195562133  # as recorded with that package
    expected = ([] if stop is None else [list(iterator)]) + [list(loader)]
    loader = make()
    loader.load_state_dict(through_json(state))
    if following == 1:
        with pytest.raises(ValueError, match="goes on with other batches than those that followed"):
            iter(loader)
    else:
        assert_same([list(loader) for _epoch in expected], expected)
        assert loader.state_dict()["version"] == 6


def test_state_of_version_4_is_refused_where_it_does_not_tell_of_a_sampler_inside():
    def make():
        return RPCDataloader(range(9), batch_sampler=Covered(Total(9), 2, False), workers="inline", collate_fn=as_is)

    for stop in 0, 2, None:
        loader = make()
        iterator = iter(loader)
        list(itertools.islice(iterator, stop))
        state, loader = of_version_4(loader.state_dict(), None), make()
        if stop == 2:
            loader.load_state_dict(state)
            assert [*loader] == [*iterator]
        else:
            with pytest.raises(ValueError, match=r"of version 4 is not from the middle .* load one from the middle"):
                loader.load_state_dict(state)


@pytest.mark.parametrize("where", ["loader", "sampler"])
def test_state_from_before_the_first_pass_has_the_generators_of_the_loader(where):
    def make(number):
        generator = torch.Generator().manual_seed(number)
        if where == "loader":
            options = {"shuffle": True, "generator": generator}
        else:
            options = {"sampler": RandomSampler(range(SIZE), generator=generator)}
        return RPCDataloader(Numbers(SIZE), batch_size=4, workers="inline", **options)

    loader = make(1)
    saved = through_json(loader.state_dict())
    other = make(2)
    other.load_state_dict(saved)
    assert through_json(other.state_dict()) == saved
    assert_same([*other, *other], [*loader, *loader])


def test_rank_takes_its_own_state_from_before_the_first_pass():
    def make(rank, number):
        generator = torch.Generator().manual_seed(number)
        options = {"shuffle": True, "generator": generator, "partition": (rank, 2), "workers": "inline"}
        return RPCDataloader(Numbers(SIZE), batch_size=4, **options)

    loaders = [make(rank, rank) for rank in range(2)]
    saved = through_json([loader.state_dict() for loader in loaders])
    for rank, loader in enumerate(loaders):
        other = make(rank, 9)
        other.load_state_dict(saved)
        assert_same([*other], [*loader])


def over(sampler):
    return {"sampler": sampler}


def ours(size=SIZE):
    return ResumableDistributedSampler(range(size), 1, 0)


def distributed(size=SIZE, num_ranks=1, **options):
    return DistributedSampler(range(size), num_ranks, 0, **options)


OF_STREAM = {"dataset": Parts([9])}


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        # What is no state, or is of another kind of loader
        (lambda: 1, {}, "or a list of what it returned on all ranks, but is a int"),
        (lambda: None, {}, "must be what state_dict() returned, or a list"),
        (lambda: [1], {}, "but is a int"),
        (list, {}, "empty list: give the states of all ranks"),
        (dict, {}, "ValueError: this is not a state that this RPCDataloader can read: its version is None"),
        (lambda: {"version": 1}, {}, "its version is 1, not 4 to 6; end its epoch with the package that saved it"),
        (lambda: {"version": 6, "base_seed": 1}, {}, "ValueError: this is only a part of a state"),
        (lambda: {"version": 6, "base_seed": None, "epoch": 1}, {}, "ValueError: this is only a part of a state"),
        (OF_STREAM, {}, "ValueError: the state is of a loader with an iterable-style dataset"),
        ({}, OF_STREAM, "ValueError: the state is of a loader with a map-style"),
        (OF_STREAM, {**OF_STREAM, "transform": abs}, "here is an iterable-style dataset with a tr"),
        ({**OF_STREAM, "transform": abs}, OF_STREAM, "with an iterable-style dataset with a tr"),
        # Of other samplers
        ({"generator": seeded()}, {}, "draw from 1 generators of their own, but here there are 0"),
        ({}, over(ours()), "of BatchSampler over SequentialSampler on rank 0 of 1, and here is Batch"),
        # Of other values
        (over(ours()), over(ours(19)), "ValueError: this state belongs to a dataset of 20 samples, but"),
        ({"stop": 9}, {"dataset": Numbers(5)}, "epoch of SequentialSampler(length=20), and here is"),
        ({"batch_size": 3}, {"batch_size": 4}, "BatchSampler(batch_size=4): go on with the same batch size"),
        (over(distributed(seed=1)), over(distributed(seed=2)), "go on with the same seed"),
        (over(distributed()), over(distributed(shuffle=False)), "go on with the same shuffle"),
        (over(distributed(20, 4)), over(distributed(19, 4)), "go on with the same length"),
        (over(RandomSampler(range(20), True, 20)), over(RandomSampler(range(20), False, 20)), "the same replacement"),
        (over(WeightedRandomSampler([1, 2], 9)), over(WeightedRandomSampler([1, 2], 8)), "the same num samples"),
        (over(SubsetRandomSampler(range(9))), over(SubsetRandomSampler(range(8))), "go on with the same length"),
        (over(Given([0] * 9, epoch=1)), over(Given([0] * 9, epoch=0)), "go on with the same epoch"),
        # Of samplers that say nothing about themselves
        ({"batch_sampler": [[1], [2]] * 2}, {"batch_sampler": [[1]]}, "list(length=4), and here"),
        ({"batch_sampler": Given([[0]] * 9)}, {"batch_sampler": Given([[0]])}, "sampler has only 1 now"),
        ({"batch_size": None, "sampler": Given([0] * 9)}, {"batch_size": None, "sampler": Given([0])}, "only 1 now"),
        ({"sampler": Given([0] * 9), "stop": 3}, {"sampler": Given([0])}, "had delivered 3 batches, but th"),
        ({"batch_sampler": Given([[0]] * 9)}, {"batch_sampler": Given([[0, 1]] * 9)}, "sampler gives 4 in as many"),
    ],
)
def test_state_that_does_not_fit_is_refused(address, saved, here, message):
    state = saved_by(**{"dataset": Numbers(), **saved}) if isinstance(saved, dict) else saved()
    for where in "inline", address:
        loader = RPCDataloader(**{"dataset": Numbers(), **here}, workers=where)
        with pytest.raises((TypeError, ValueError)) as caught:
            loader.load_state_dict(state) or iter(loader)
        assert message in f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("kind", [Parts, Buffered, Seekable])
def test_shorter_or_other_iterable_dataset_is_refused(address, kind):
    state = saved_by(kind([9]), None, stop=7)
    where = {"workers": address, "num_workers": 1}
    other = Seekable([3]) if kind is Parts else Parts([9])
    for options in {"workers": "inline"}, where:
        loader = RPCDataloader(Parts([3]) if kind is Parts else other, None, **options)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"delivered more samples than this|has no load_state_dict"):
            next(iter(loader))


def test_state_of_several_streams_needs_workers(address):
    loader = RPCDataloader(Parts([5, 5]), num_workers=2, workers=address)
    next(iter(loader))
    other = RPCDataloader(Parts([5, 5]), workers="inline")
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="the state is of 2 workers"):
        iter(other)


def test_state_is_kept_when_the_pass_cannot_begin(address):
    dataset = Numbers(6)
    loader = RPCDataloader(dataset, workers=address)
    loader.load_state_dict(saved_by(Numbers(6), stop=4))
    dataset.size = 2
    with pytest.raises(ValueError, match="go on with the same length"):
        iter(loader)
    dataset.size = 6
    assert [int(number) for number in loader] == [4, 5]


class OneObject:
    """A sampler with a state that gives the same object for each sample, with another content, and begins anew."""

    def __init__(self):
        self.job, self.number = {}, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == 4:
            self.number = 0
            raise StopIteration
        self.job["index"] = self.number
        self.number += 1
        return self.job

    def __len__(self):
        return 4

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class OfJobs(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, job):
        return job["index"]


@pytest.mark.parametrize("where", [{"workers": "inline"}, {"num_workers": 1}], ids=["inline", "worker"])
def test_sampler_that_gives_one_object_again_and_begins_anew_is_as_with_torch(where):
    assert list(DataLoader(OfJobs(), None, sampler=OneObject())) == [0, 1, 2, 3]
    loader = RPCDataloader(OfJobs(), None, sampler=OneObject(), **where)
    assert [list(loader), list(loader)] == [[0, 1, 2, 3]] * 2


class OwnIterator:
    """A sampler with a state that is its own iterator, and begins anew in ``__iter__``."""

    def __init__(self, size):
        self.size, self.number = size, 0

    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        if self.number == self.size:
            raise StopIteration
        self.number += 1
        return self.number - 1

    def __len__(self):
        return self.size

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_sampler_that_is_its_own_iterator_gives_batches_as_with_torch():
    def make(loader, **options):
        return loader(range(10), 4, drop_last=True, sampler=OwnIterator(10), collate_fn=list, **options)

    expected = list(make(DataLoader))
    loader = make(RPCDataloader, workers="inline")
    assert list(itertools.islice(loader, 4)) == expected
    begun = list(itertools.islice(loader, 1))
    state = loader.state_dict()
    loader = make(RPCDataloader, workers="inline")
    loader.load_state_dict(state)
    assert begun + list(itertools.islice(loader, 4)) == expected


@pytest.mark.parametrize(
    ("kind", "is_told"),
    # Nothing has told the end of one whose iterator alone has a state.
    [
        (kind, told)
        for kind in STATEFUL_SAMPLERS.values()
        for told in (False, True)
        if told or hasattr(kind, "state_dict")
    ],
)
@pytest.mark.parametrize("other", [1, 3, 8])
def test_epoch_after_one_that_ended_with_another_batch_size_is_whole(kind, is_told, other):
    def make(batch_size):
        return RPCDataloader(range(20), batch_size, sampler=kind(20), workers="inline", collate_fn=list)

    loader = make(8)
    assert len(list(loader if is_told else itertools.islice(loader, 3))) == 3
    state = loader.state_dict()
    loader = make(other)
    loader.load_state_dict(state)
    assert is_told or list(loader) == []
    for _epoch in range(2):
        assert sorted(itertools.chain.from_iterable(loader)) == [*range(20)]
