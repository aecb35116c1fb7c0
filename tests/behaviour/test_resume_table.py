"""Pairs of jobs, the one that saves and the one that goes on: each sample exactly once, or a ValueError.

Ranks are simulated by ``partition=``, one after the other in this process, and all load the state of rank 0 unless a
row says that each has its own.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from rpcdataloader import ResumableDistributedSampler, RPCDataloader
from tests.support.datasets import Failing, Numbers
from tests.support.differential import seed

SIZE = 32  # all numbers of ranks, times all batch sizes, divide it
NUMBERS = Counter(range(SIZE))


class ByRank:
    """A sampler that divides by itself, with other names for it."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        return iter(
            torch.randperm(SIZE, generator=torch.Generator().manual_seed(3))[self.rank :: self.world_size].tolist()
        )


class Hidden:
    """One that divides, and does not say so."""

    def __init__(self, rank, world_size):
        self.part = range(rank, SIZE, world_size)

    def __iter__(self):
        return iter(self.part)


class Stateful:
    """Shuffles, and has a state of its own, which it takes from its like only."""

    key = "left"

    def __init__(self):
        self.left = []
        self.goes_on = False

    def __iter__(self):
        if not self.goes_on:
            self.left = torch.randperm(SIZE).tolist()
        self.goes_on = False
        while self.left:
            yield self.left.pop()

    def state_dict(self):
        return {self.key: list(self.left)}

    def load_state_dict(self, state):
        self.left, self.goes_on = list(state[self.key]), True


class Planned(Stateful):
    key = "plan"


class Pairs(BatchSampler):
    """Puts samples into batches in an order of its own, as those by length do."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches[::2] + batches[1::2])


def shard(rank, world_size, batch_size, **options):
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = RandomSampler(DATASET, generator=torch.Generator().manual_seed(1))
    return data_loader.BatchSamplerShard(BatchSampler(sampler, batch_size, False), world_size, rank, **options)


def batched(sampler):
    """Makes arguments of a loader, of a function that makes a sampler for a rank."""
    return lambda rank, ranks, size: {"batch_size": size, "sampler": sampler(rank, ranks)}


def in_pairs(kind):
    return lambda rank, ranks, size: {"batch_sampler": Pairs(kind(DATASET, ranks, rank), size, False)}


DATASET: Any = range(SIZE)

# Arguments of the loader of a rank, of so many, with such batches.
SAMPLING = {
    "distributed": batched(lambda rank, ranks: DistributedSampler(DATASET, ranks, rank)),
    "resumable": batched(lambda rank, ranks: ResumableDistributedSampler(DATASET, ranks, rank)),
    "own batches, distributed": in_pairs(DistributedSampler),
    "own batches, resumable": in_pairs(ResumableDistributedSampler),
    "Accelerate": lambda rank, ranks, size: {"batch_sampler": shard(rank, ranks, size)},
    "Accelerate, split": lambda rank, ranks, size: {"batch_sampler": shard(rank, ranks, 2 * size, split_batches=True)},
    "own": batched(ByRank),
    "hidden": batched(Hidden),
    "list": batched(lambda rank, ranks: list(range(rank, SIZE, ranks))),
    "shuffled": lambda _rank, _ranks, size: {"batch_size": size, "shuffle": True},
    "in order": lambda _rank, _ranks, size: {"batch_size": size},
    "weighted": batched(lambda _rank, _ranks: WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False)),
    "stateful": batched(lambda _rank, _ranks: Stateful()),
    "planned": batched(lambda _rank, _ranks: Planned()),
    "single": lambda _rank, _ranks, _size: {"batch_size": None, "shuffle": True},
}
DIVIDED = list(SAMPLING)[:7]
SILENT = ["hidden", "list"]  # parts of which only the list is known to be the same on all ranks, but for its length
WHOLE = ["shuffled", "in order", "weighted", "stateful", "planned", "single"]  # each rank has all samples

# Job: kind of sampler, number of ranks, batch size.
JOBS = [(kind, *job) for kind in DIVIDED + SILENT for job in ((1, 4), (2, 4), (2, 2), (4, 2))]
JOBS += [(kind, *job) for kind in WHOLE for job in ((1, 4), (1, 2), (2, 4))]


def load(job, rank, where="inline"):
    """The loader of a rank, in a process of its own: with other numbers in the generators than any other."""
    kind, world_size, batch_size = job
    options = SAMPLING[kind](rank, world_size, batch_size)
    return RPCDataloader(Numbers(SIZE), **options, workers=where, partition=(rank, world_size))


def begin(job, num_batches=2, *, tell_end=False, where="inline"):
    """Samples and state of each rank."""
    seen, states = [], []
    for rank in range(job[1]):
        # Ranks that draw the parts of one order have the same seed.
        seed(5 + rank if job[0] in WHOLE else 5)
        loader = load(job, rank, where)
        iterator = iter(loader)
        seen.append(numbers_in(itertools.islice(iterator, num_batches)))
        if tell_end:
            assert next(iterator, None) is None
        states.append(json.loads(json.dumps(loader.state_dict())))
    return seen, states


def go_on(job, states):
    """What each rank has left, and what it has in the next epoch."""
    seed(99)
    loaders = [load(job, rank) for rank in range(job[1])]
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    return [numbers_in(loader) for loader in loaders], [numbers_in(loader) for loader in loaders]


def numbers_in(batches):
    return [int(number) for batch in batches for number in torch.as_tensor(batch).flatten()]


def flat(parts):
    return itertools.chain.from_iterable(parts)


def is_exact(saved, resumed):
    """What can be continued."""
    (kind, ranks, _size), (other_kind, other_ranks, _other_size) = saved, resumed
    if other_kind == "resumable" and kind in ("distributed", "resumable"):
        return True
    if kind == other_kind and kind == "single":
        return ranks == other_ranks
    return saved == resumed


def check_pair(saved, resumed, seen, states, own):
    kind, ranks, _batch_size = saved
    shown = f"{saved} to {resumed}, {'own states' if own else 'state of rank 0'}"
    try:
        rest, after = go_on(resumed, states if own else [states[0]] * resumed[1])
    except ValueError as error:
        text = str(error)
        must_hold = is_exact(saved, resumed) and (own or kind not in [*WHOLE, "hidden"])
        assert not must_hold, f"{shown}: {text}"
        assert "go on with" in text or "save a state on each rank" in text, text
        if ranks != resumed[1]:
            assert f" of {ranks}" in text, text
            assert "ResumableDistributedSampler" in text, text
        return
    assert is_exact(saved, resumed), shown
    check_rest(kind, seen, rest, after)


def check_rest(kind, seen, rest, after):
    if kind in WHOLE:
        assert all(Counter(begun + left) == NUMBERS for begun, left in zip(seen, rest, strict=True))
        assert all(Counter(numbers) == NUMBERS for numbers in after)
    else:
        assert Counter([*flat(seen), *flat(rest)]) == NUMBERS
        assert Counter(flat(after)) == NUMBERS


@pytest.mark.parametrize("saved", JOBS, ids=str)
def test_middle_of_an_epoch_goes_on_exactly_or_is_refused(saved):
    seen, states = begin(saved)
    for resumed in JOBS:
        if is_worth_trying(saved, resumed):
            for own in [False, True] if saved[1] == resumed[1] else [False]:
                check_pair(saved, resumed, seen, states, own)


def is_worth_trying(saved, resumed):
    """All jobs of the same kind, and of the two kinds that go on with each other's states; of others, one or two."""
    kinds = {saved[0], resumed[0]}
    return len(kinds) == 1 or kinds == {"distributed", "resumable"} or (saved[1:] == (2, 4) and resumed[2] == 4)


ENDS = [
    (kind, ranks, 8)
    for kind in ("distributed", "resumable", "own batches, resumable", "hidden", "shuffled", "stateful", "planned")
    for ranks in (1, 2)
] + [("single", 1, 8)]


@pytest.mark.parametrize("saved", ENDS, ids=str)
def test_end_and_beginning_of_an_epoch_go_on_with_anything(saved, shared_server):
    kind, ranks, batch_size = saved
    num_batches = SIZE // (1 if kind == "single" else batch_size) // (1 if kind in WHOLE else ranks)
    told = begin(saved, num_batches, tell_end=True)[1]
    untold = begin(saved, num_batches, where=shared_server.address)[1]
    first = begin(saved, 0)[1]
    choose = random.Random(str(saved)).choice  # half of all pairs for each, the same in each run
    for resumed in ENDS:
        rest, after = go_on(resumed, choose([told, first])[:1] * resumed[1])
        check_rest(resumed[0], [[]] * resumed[1], rest, after)
        # Workers have reached the end before the loop was told.
        rest, after = go_on(resumed, untold if saved == resumed else untold[:1] * resumed[1])
        assert not any(rest)
        check_rest(resumed[0], [[]] * resumed[1], after, after)


def test_end_and_beginning_of_an_epoch_fit_another_length():
    for num_batches in 0, 5:
        loaders = []
        for size in 12, 15:
            sampler = ResumableDistributedSampler(Numbers(size), 1, 0)
            loaders.append(RPCDataloader(sampler.dataset, 3, sampler=sampler, workers="inline"))
        list(itertools.islice(loaders[0], num_batches))
        loaders[1].load_state_dict(loaders[0].state_dict())
        assert len(list(loaders[1])) == 5


# What all ranks have delivered


@pytest.mark.parametrize("kind", ["distributed", "resumable"])
def test_ranks_that_are_not_in_step_need_their_own_states(kind):
    for options in {"in_order": False}, {"on_error": "skip"}:
        states = []
        for rank in range(2):
            dataset = Failing(SIZE, {0: (LookupError,), 1: (LookupError,)} if "on_error" in options else {})
            sampler = DistributedSampler if kind == "distributed" else ResumableDistributedSampler
            sampler = sampler(dataset, 2, rank, shuffle=False)
            loader = RPCDataloader(dataset, 1, sampler=sampler, workers="inline", partition=(rank, 2), **options)
            next(iter(loader))
            states.append(loader.state_dict())
            loader.load_state_dict(states[-1])
            next(iter(loader))
        loader.load_state_dict(states[0])
        with pytest.raises(ValueError, match=r"rank 0 of 2, and here is rank 1 of 2: .* save a state on each rank"):
            iter(loader)


# Epochs


@pytest.mark.parametrize("kind", ["distributed", "resumable", "own batches, resumable"])
def test_epoch_of_the_saved_pass_goes_on_whichever_the_script_names(kind):
    def make():
        loader = load((kind, 1, 4), 0)
        return loader, getattr(loader.sampler, "set_epoch", None) or loader.batch_sampler.sampler.set_epoch

    loader, set_epoch = make()
    set_epoch(3)
    seen = numbers_in(itertools.islice(loader, 2))
    for epochs in [], [4]:
        rest, set_epoch = make()
        rest.load_state_dict(loader.state_dict())
        for epoch in epochs:
            set_epoch(epoch)
        assert Counter(seen + numbers_in(rest)) == NUMBERS
