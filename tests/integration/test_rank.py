"""Datasets find the rank of their trainer in the environment, wherever they are built and iterated over."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.integration.origins import run_ranks

pytestmark = pytest.mark.usefixtures("clean_client")


def rank_here():
    return [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]


class Ranks(Dataset):
    """What the constructor sees, and what a worker sees."""

    def __init__(self):
        self.built = rank_here()

    def __getitem__(self, _index):
        return self.built, rank_here()


def seen_by(dataset, **options):
    (batch,) = RPCDataloader(dataset, batch_size=None, sampler=[0], collate_fn=list, **options)
    return batch


def see(address):
    dataset = RPCDataset(address, Ranks)
    return [*seen_by(dataset), *seen_by(Ranks(), workers=address), rpc_async(address, rank_here).wait()]


def test_ranks_on_one_node_server_each_see_their_own(serve, zygote):
    server = serve("--num-workers", "2", before='import os; os.environ.update(RANK="7", WORLD_SIZE="8")')
    for rank, seen in enumerate(run_ranks(zygote, see, 2, server.address)):
        # The instance that was sent was built by the trainer itself.
        assert seen == [[str(rank), "2"]] * 5


def test_workers_and_datasets_made_from_now_on_see_a_rank_that_is_known_late(shared_server, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    early = RPCDataset(shared_server.address, Ranks)
    assert seen_by(early) == [["0", "1"], ["0", "1"]]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert seen_by(early) == [["0", "1"], ["1", "2"]]
    assert seen_by(RPCDataset(shared_server.address, Ranks)) == [["1", "2"], ["1", "2"]]
