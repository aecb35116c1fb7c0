"""Random numbers depend on the place in the epoch, and neither on who loads a sample nor on how many do."""

from __future__ import annotations

import itertools
import random

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, set_random_seeds
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Numbers, augment_batch, draw
from tests.support.differential import seeded

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def addresses(wide_servers):
    return [server.address for server in wide_servers]


def epochs(dataset, **options):
    options = {"shuffle": True, "generator": seeded(1), "partition": None, **options}
    loader = RPCDataloader(dataset, 3, collate_fn=augment_batch, **options)
    return [list(loader) for _epoch in range(2)]


@pytest.mark.parametrize("build", ["node", "worker"])
def test_batches_are_the_same_on_two_nodes_and_for_either_way_to_build(addresses, build):
    expected = epochs(Augmented(), workers="inline")
    assert_same(epochs(RPCDataset(addresses, Augmented, build=build)), expected)


def test_no_sample_or_batch_has_numbers_of_another(addresses):
    """Of another seed, rank, epoch or position."""
    numbers = []
    for number, rank in (1, 0), (1, 1), (2, 0):
        # Passes of workers that stay have one seed.
        options = {"num_workers": 2, "persistent_workers": True, "partition": (rank, 2)}
        found = epochs(Augmented(), workers=addresses, generator=seeded(number), **options)
        for batch in itertools.chain(*found):
            numbers += [value for name in ("draws", "mixing", "seed") for value in batch[name].flatten().tolist()]
    assert len(numbers) == 3 * 2 * (20 * 5 + 7 * 3)
    assert len(set(numbers)) == len(numbers)


class Shuffled(Numbers):
    """Draws random numbers when it is made."""

    def __init__(self, size):
        super().__init__(size)
        self.order = random.sample(range(size), size)
        self.drawn = draw()

    def __getitem__(self, index):
        return self.order[index]


@pytest.mark.parametrize("build", ["node", "worker"])
def test_random_constructor_gives_the_same_dataset_everywhere(addresses, build):
    set_random_seeds(7, 0)
    dataset = RPCDataset(addresses, Shuffled, 50, build=build)
    found = dataset.order, dataset.drawn
    samples = [int(sample) for sample in RPCDataloader(dataset, None, num_workers=2)]  # one on each node
    set_random_seeds(7, 0)
    local = Shuffled(50)
    assert found == (local.order, local.drawn)
    assert samples == local.order
