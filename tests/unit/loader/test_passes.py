from __future__ import annotations

import itertools
import json
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rpcdataloader.loader.passes import begin_pass, draw_base_seed, undone_afterwards
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.states import to_state


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Own:
    """Batches of a generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self):
        for number in torch.randperm(9, generator=self.generator).tolist():
            yield [number] * (number + 1)


class Counted(BatchSampler):
    """With a state of its own."""

    def __init__(self):
        super().__init__(range(22), 3, False)
        self.given = self.first = 0

    def __iter__(self):
        self.given, self.first = self.first, 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.first = state["given"]


def batched(sampler, batch_size=4, drop_last=False):
    return {"sampler": BatchSampler(sampler, batch_size, drop_last)}


def generator():
    return torch.Generator().manual_seed(3)


SAMPLERS = {
    "in order": lambda: batched(SequentialSampler(range(22))),
    "dropping the last": lambda: batched(SequentialSampler(range(22)), drop_last=True),
    "single": lambda: batched(RandomSampler(range(7)), 1),
    "one batch": lambda: batched(RandomSampler(range(7)), 100),
    "shuffled": lambda: batched(RandomSampler(range(22))),
    "generator": lambda: batched(RandomSampler(range(22), generator=(own := generator()))) | {"generator": own},
    "two generators": lambda: batched(RandomSampler(range(22), generator=generator())) | {"generator": generator()},
    "with replacement": lambda: batched(RandomSampler(range(22), True, 70)),
    "more than there is": lambda: batched(RandomSampler(range(22), num_samples=70)),
    "weighted": lambda: batched(WeightedRandomSampler([1.0, 2.0], 30)),
    "subset": lambda: batched(SubsetRandomSampler(range(5, 20))),
    "without batches": lambda: {"sampler": RandomSampler(range(22)), "auto_collation": False},
    "own batches": lambda: {"sampler": Own()},
    "own state": lambda: {"sampler": Counted()},
    "list of batches": lambda: {"sampler": [[1], [2, 3], (4,), np.arange(3)]},
}


def make_settings(name):
    options = {"dataset": None, "auto_collation": True, "iterable": False, "collate_fn": list, **SAMPLERS[name]()}
    return PassSettings(**options)


def tasks_of(begun):
    return list(begun.source)


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_going_on_gives_the_rest_and_leaves_generators_as_without_an_interruption(name, data):
    seed(3)
    before = make_settings(name)
    begun = begin_pass(before)
    expected = tasks_of(begun)
    last_state = to_state(before, begun.progress)["generators"]
    num_delivered = data.draw(st.integers(0, len(expected)))
    ahead = data.draw(st.sets(st.integers(num_delivered + 1, len(expected) + 1)))
    for task in expected:
        if task.number < num_delivered or task.number in ahead:
            begun.progress.delivered(task)
    saved = json.loads(json.dumps(to_state(before, begun.progress)))
    seed(77)
    trainers = torch.get_rng_state()
    after = make_settings(name)
    with undone_afterwards(saved):
        again = begin_pass(after, saved)
    assert torch.equal(torch.get_rng_state(), trainers)
    assert again.progress.base_seed == begun.progress.base_seed
    assert tasks_of(again) == [task for task in expected if task.number >= num_delivered and task.number not in ahead]
    assert to_state(after, again.progress)["generators"] == last_state


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_seed_and_order_are_drawn_as_by_torchs_loader(shuffle, own):
    found = []
    for make in range(2):
        seed(8)
        options = {"batch_size": 3, "shuffle": shuffle, "generator": generator() if own else None}
        loader = DataLoader(list(range(10)), **options)
        if make == 0:
            iterator = iter(loader)
            found.append([iterator._base_seed, [batch.tolist() for batch in iterator]])
        else:
            begun = begin_pass(
                PassSettings(
                    dataset=None,
                    sampler=loader.batch_sampler, auto_collation=True, iterable=False, collate_fn=list,
                    generator=loader.generator,
                )
            )  # fmt: skip
            found.append([begun.progress.base_seed, [task.indices for task in begun.source]])
        found[-1].append(torch.get_rng_state().tolist())
    assert found[0] == found[1]


def test_later_epochs_keep_the_seed_and_draw_none():
    pass_settings = make_settings("in order")
    before = torch.get_rng_state()
    begun = begin_pass(pass_settings, before=(5, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (begun.progress.base_seed, begun.progress.epoch) == (5, 2)
    draw_base_seed(None)
    assert not torch.equal(torch.get_rng_state(), before)
