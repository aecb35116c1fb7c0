"""A dataset is the same on all nodes, also one that draws random numbers when it is made."""

import random

import numpy as np
import pytest
import torch

import rpcdataloader
from rpcdataloader import RPCDataloader, RPCDataset

pytestmark = pytest.mark.usefixtures("clean_client")


def _make():
    class Shuffled:
        def __init__(self, number):
            self.order = random.sample(range(number), number)
            self.drawn = [float(random.random()), float(np.random.rand()), float(torch.rand(()))]

        def __len__(self):
            return len(self.order)

        def __getitem__(self, index):
            return self.order[index]

    return Shuffled


@pytest.mark.parametrize("build", ["node", "worker"])
def test_random_constructor_gives_the_same_dataset_everywhere(shared_server, second_server, build):
    rpcdataloader.set_random_seeds(7, 0)
    dataset = RPCDataset([shared_server.address, second_server.address], _make(), 50, build=build)
    found = dataset.order, dataset.drawn
    batches = [int(sample) for sample in RPCDataloader(dataset, batch_size=None, num_workers=2)]  # one on each node
    rpcdataloader.set_random_seeds(7, 0)
    local = _make()(50)
    assert found == (local.order, local.drawn)
    assert batches == local.order


def test_trainer_generators_are_left_alone(shared_server):
    before = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    RPCDataset([shared_server.address], _make(), 50)
    assert before == (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())
