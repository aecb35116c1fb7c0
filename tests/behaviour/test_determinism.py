"""Random numbers depend on the place in the epoch, and neither on who loads a sample nor on how many do."""

from __future__ import annotations

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, augment_batch

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def addresses(wide_servers):
    return [server.address for server in wide_servers]


def generator(seed=11):
    made = torch.Generator()
    made.manual_seed(seed)
    return made


def epochs(dataset, num_epochs=2, **options):
    options = {
        "batch_size": 3,
        "shuffle": True,
        "generator": generator(),
        "collate_fn": augment_batch,
        "partition": None,
        **options,
    }
    loader = RPCDataloader(dataset, **options)
    return [list(loader) for _epoch in range(num_epochs)]


def draws(batches, name="draws"):
    return torch.cat([batch[name] for batch in batches]).tolist()


@pytest.fixture(scope="module")
def expected():
    return epochs(Augmented(), workers="inline")


def test_batches_are_the_same_on_two_nodes_and_for_either_way_to_build(addresses, expected):
    for build in ("node", "worker"):
        assert_same(epochs(RPCDataset(addresses, Augmented, build=build)), expected)


def test_other_seeds_give_other_numbers(addresses):
    options = {"workers": addresses[0], "num_workers": 2, "shuffle": False}
    ((one,), (other,)) = (epochs(Augmented(), 1, generator=generator(seed), **options) for seed in (1, 2))
    for name in ("draws", "seed", "mixing"):
        assert not set(flatten(draws(one, name))) & set(flatten(draws(other, name)))


def flatten(rows):
    return [number for row in rows for number in (row if isinstance(row, list) else [row])]


def test_all_draws_of_an_epoch_differ(addresses):
    (batches,) = epochs(Augmented(), 1, workers=addresses[0], num_workers=2)
    numbers = flatten(draws(batches)) + flatten(draws(batches, "mixing"))
    assert len(set(numbers)) == len(numbers)
    seeds = draws(batches, "seed")
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ranks_with_equal_seeds_augment_differently(addresses):
    ranks = [
        epochs(Augmented(), 1, workers=addresses, num_workers=2, shuffle=False, partition=(rank, 2))[0]
        for rank in range(2)
    ]
    assert draws(ranks[0], "index") == draws(ranks[1], "index")
    for name in ("draws", "seed", "mixing"):
        assert not set(flatten(draws(ranks[0], name))) & set(flatten(draws(ranks[1], name)))
