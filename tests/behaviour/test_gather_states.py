"""Checkpoints with the states of all ranks, from which each takes its own."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader
from rpcdataloader.integrations import gather_states

pytestmark = pytest.mark.usefixtures("clean_client")


class OfRank(IterableDataset):
    """Samples say which stream of which rank they are of, and what was drawn for them."""

    def __iter__(self):
        rank, info = int(os.environ["RANK"]), get_worker_info()
        for number in range(7):
            yield rank, int(os.environ["WORLD_SIZE"]), info.id, info.num_workers, number, random.random(), info.seed


@pytest.fixture
def run(monkeypatch, shared_server):
    """Run the loaders of all ranks of a job, one after the other; returns their samples, and their states."""

    def run(num_ranks, states=None, num_batches=None):
        samples, after = [], []
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
            torch.manual_seed(rank)  # ranks need not begin with the same seed
            loader = RPCDataloader(OfRank(), 2, num_workers=2, collate_fn=list, workers=shared_server.address)
            if states is not None:
                loader.load_state_dict(states)
            samples += itertools.chain.from_iterable(itertools.islice(loader, num_batches))
            after.append(json.loads(json.dumps(loader.state_dict())))
        return samples, after

    return run


def test_each_rank_takes_its_own_of_the_states_of_all(run):
    """They are gathered in ``test_accelerate``."""
    assert gather_states({"of": "this rank"}) == [{"of": "this rank"}]  # without others
    whole, _states = run(3)
    begun, states = run(3, num_batches=3)
    rest, _states = run(3, random.sample(states, 3))  # in any order
    assert sorted(begun + rest) == sorted(whole)


def test_streams_on_another_number_of_ranks_are_refused(run):
    _begun, states = run(2, num_batches=2)
    for after, given in itertools.product((1, 4), (states, states[0])):
        with pytest.raises(ValueError, match=r"rank 0 of 2, and here is .*: .*go on with as many ranks as before, 2"):
            run(after, given)
