"""Random numbers depend on the place in the epoch, and neither on who loads a sample nor on how many do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset, get_sample_seed, set_random_seeds
from tests.integration import datasets
from tests.integration.comparison import assert_same
from tests.integration.datasets import Augmented, augment_batch

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


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_batches_are_the_same_for_any_number_of_workers(addresses, expected, num_workers):
    assert_same(epochs(Augmented(), workers=addresses[0], num_workers=num_workers), expected)


def test_batches_are_the_same_for_16_workers(addresses, expected):
    assert_same(epochs(Augmented(), workers=addresses, num_workers=16), expected)


def test_batches_are_the_same_on_two_nodes_and_for_either_way_to_build(addresses, expected):
    for build in ("node", "worker"):
        assert_same(epochs(RPCDataset(addresses, Augmented, build=build)), expected)


def test_batches_are_the_same_whatever_is_prefetched_and_in_which_order_they_come(addresses, expected):
    options = {"workers": addresses[0], "num_workers": 3}
    assert_same(epochs(Augmented(), prefetch_factor=7, **options), expected)
    assert_same(epochs(Augmented(), max_in_flight_bytes=1, **options), expected)
    for epoch, batches in enumerate(epochs(Augmented(), in_order=False, **options)):
        by_first = {int(batch["index"][0]): batch for batch in batches}
        assert_same([by_first[int(batch["index"][0])] for batch in expected[epoch]], expected[epoch])


def test_epochs_of_persistent_workers_differ_and_depend_on_nothing_else(addresses):
    expected = epochs(Augmented(), 3, workers="inline", persistent_workers=True)
    assert len({tuple(map(tuple, draws(batches))) for batches in expected}) == 3
    for num_workers in (1, 4):
        options = {"workers": addresses[0], "num_workers": num_workers}
        assert_same(epochs(Augmented(), 3, persistent_workers=True, **options), expected)


def test_position_counts_from_the_start_of_each_epoch(addresses):
    # Leaving an epoch early changes nothing in the next.
    loaders = [
        RPCDataloader(Augmented(), 3, generator=generator(), workers=addresses[0], persistent_workers=True)
        for _ in range(2)
    ]
    for _batch in loaders[0]:
        break
    assert len(list(loaders[1])) == 7
    assert_same(list(loaders[0]), list(loaders[1]))


def test_other_seeds_give_other_numbers(addresses):
    options = {"workers": addresses[0], "num_workers": 2, "shuffle": False}
    ((one,), (other,)) = (epochs(Augmented(), 1, generator=generator(seed), **options) for seed in (1, 2))
    for name in ("draws", "seed", "mixing"):
        assert not set(flatten(draws(one, name))) & set(flatten(draws(other, name)))


def flatten(rows):
    return [number for row in rows for number in (row if isinstance(row, list) else [row])]


def test_torch_manual_seed_is_enough(addresses):
    def run():
        torch.manual_seed(5)
        return epochs(Augmented(), 1, generator=None, workers=addresses[0], num_workers=2)

    assert_same(run(), run())


def test_all_draws_of_an_epoch_differ(addresses):
    (batches,) = epochs(Augmented(), 1, workers=addresses[0], num_workers=2)
    numbers = flatten(draws(batches)) + flatten(draws(batches, "mixing"))
    assert len(set(numbers)) == len(numbers)
    seeds = draws(batches, "seed")
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_index_that_is_drawn_twice_is_augmented_differently(addresses):
    for workers in (addresses[0], "inline"):
        options = {"sampler": [4] * 12, "shuffle": None, "workers": workers}
        (batches,) = epochs(Augmented(), 1, **options)
        assert set(draws(batches, "index")) == {4}
        rows = draws(batches)
        assert len(set(map(tuple, rows))) == len(rows) == 12
        assert len(set(draws(batches, "seed"))) == 12


def test_ranks_with_equal_seeds_augment_differently(addresses):
    ranks = [
        epochs(Augmented(), 1, workers=addresses, num_workers=2, shuffle=False, partition=(rank, 2))[0]
        for rank in range(2)
    ]
    assert draws(ranks[0], "index") == draws(ranks[1], "index")
    for name in ("draws", "seed", "mixing"):
        assert not set(flatten(draws(ranks[0], name))) & set(flatten(draws(ranks[1], name)))


def test_one_sample_at_a_time_and_batches_at_once_have_seeds_too(addresses):
    for make, options in [(Augmented, {"batch_size": None}), (datasets.AugmentedBatches, {"batch_size": 4})]:
        options |= {"shuffle": False, "collate_fn": None}
        expected = epochs(make(), 1, workers="inline", **options)
        assert_same(epochs(make(), 1, workers=addresses[0], num_workers=3, **options), expected)
        seeds = [
            int(batch["seed"].flatten()[0] if torch.is_tensor(batch["seed"]) else batch["seed"])
            for batch in expected[0]
        ]
        assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("workers", ["inline", "remote"])
def test_generators_of_the_trainer_are_left_alone(addresses, workers):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(2).tolist()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    options = {"workers": addresses[0] if workers == "remote" else workers}
    epochs(Augmented(), 1, **options)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected


def reseed(number):
    set_random_seeds(123, number)


def test_init_function_may_use_set_random_seeds_and_does_not_disturb_the_samples(addresses, expected):
    assert_same(epochs(Augmented(), workers=addresses[0], worker_init_fn=reseed), expected)


def test_sample_seed_outside_of_a_loader_follows_torch():
    torch.manual_seed(3)
    first = get_sample_seed(), get_sample_seed()
    torch.manual_seed(3)
    assert (get_sample_seed(), get_sample_seed()) == first
    assert first[0] != first[1]
