"""``loader.replay()`` repeats a few batches without end, for measuring a loop without its loader."""

from __future__ import annotations

import itertools
import logging
import random

import pytest
import torch
from torch.utils.data import Sampler

from rpcdataloader import RPCDataloader
from tests.support.causes import Causes
from tests.support.datasets import Numbers
from tests.support.streams import Parts

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture(params=["workers", "inline", "this process"])
def options(request, shared_server):
    """A loader of each kind."""
    where = {"workers": {"workers": shared_server.address}, "inline": {"workers": "inline"}, "this process": {}}
    return where[request.param]


def numbers(batches, count):
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def test_first_batches_come_again_and_again(options):
    loader = RPCDataloader(Numbers(100), batch_size=2, **options)
    assert numbers(loader.replay(3), 8) == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    loader = RPCDataloader(Numbers(4), batch_size=2, **options)  # with fewer batches, all of them
    assert numbers(loader.replay(), 3) == [[0, 1], [2, 3], [0, 1]]


def test_what_cannot_be_replayed_is_an_error_at_once(options):
    with pytest.raises(ValueError, match="num_batches must be at least 1, not 0"):
        RPCDataloader(Numbers(), **options).replay(0)
    with pytest.raises(ValueError, match="no batches"):
        RPCDataloader(Parts([0] * 4), **options).replay()
    with pytest.raises(IndexError, match="is not below 20"):
        RPCDataloader(Numbers(), sampler=[0, 20], **options).replay()


@pytest.mark.parametrize("persistent", [False, True])
def test_state_that_was_loaded_is_still_there_afterwards(shared_server, persistent):
    def make():
        return RPCDataloader(
            Numbers(10), batch_size=None, workers=shared_server.address, num_workers=2, persistent_workers=persistent
        )

    loader = make()
    batches = iter(loader)
    assert numbers(batches, 4) == [0, 1, 2, 3]
    state = loader.state_dict()
    loader.replay(3)
    assert loader.state_dict() == state
    resumed = make()
    resumed.load_state_dict(state)
    assert numbers(resumed.replay(2), 3) == [4, 5, 4]
    assert [batch.item() for batch in resumed] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("persistent", [False, True])
def test_pass_under_way_goes_on(options, persistent):
    kept = {"persistent_workers": True} if persistent and options else {}
    loader = RPCDataloader(Numbers(20), batch_size=None, **kept, **options)
    batches = iter(loader)
    assert numbers(batches, 4) == [0, 1, 2, 3]
    assert numbers(loader.replay(3), 4) == [0, 1, 2, 0]
    assert numbers(batches, 20) == list(range(4, 20))
    assert numbers(loader, 20) == list(range(20))


class Shuffled(Sampler):
    """Draws an order from a generator of its own."""

    def __init__(self):
        self.random = random.Random(1)

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(self.random.sample(range(20), 20))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"shuffle": True},
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
        lambda: {"sampler": Shuffled()},
        lambda: {"sampler": iter(range(20))},
    ],
    ids=["global generators", "generator", "sampler", "iterator"],
)
def test_later_epochs_keep_their_order(options, make):
    def epochs(replays):
        torch.manual_seed(3)
        loader = RPCDataloader(Numbers(), batch_size=5, **make(), **options)
        if replays:
            loader.replay(2)
        return [numbers(loader, 4) for _ in range(2)]

    assert epochs(replays=True) == epochs(replays=False)


def test_its_pass_is_neither_told_nor_diagnosed(shared_server, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.diagnosis")
    dataset = torch.utils.data.Subset(Causes(stall=0.02), range(30))
    loader = RPCDataloader(dataset, None, num_workers=1, workers=shared_server.address, persistent_workers=True)
    for _ in loader:
        pass
    assert "without the loader" in caplog.text
    caplog.clear()
    before = loader.diagnosis()
    loader.replay(100)
    assert caplog.text == ""
    assert loader.diagnosis() == before
