from __future__ import annotations

import pickle

import pytest
import torch

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.fetch import remote
from tests.unit.fetch.loading import Augmented, CountingAllocator, assert_same, floats, load, make_spec

pytestmark = pytest.mark.usefixtures("_process_restored")


def test_worker_opens_one_loader_and_loads():
    spec = pickle.loads(pickle.dumps(make_spec(world_size=2, rank=1)))
    remote.open_loader(Augmented(), spec)
    metrics, batch, *_rest = remote.load([1, 2], 4, 1)
    assert len(metrics) == 2
    assert_same(batch, load(Augmented(), [1, 2], 4, 1, world_size=2, rank=1))
    remote.start_epoch(None, 0, (), 3, 0)
    assert_same(remote.load([1], 4, 1)[1], load(Augmented(), [1], 4, 1, world_size=2, rank=1, epoch=3))


def test_worker_recycles_memory(monkeypatch):
    pool = CountingAllocator()
    monkeypatch.setattr(remote, "PageablePool", lambda: pool)
    remote.open_loader([floats(200, 200)], make_spec())
    remote.load([0, 0], 0, 0)
    assert pool.sizes == [320000]


def test_large_batches_of_a_worker_can_be_kept():
    remote.open_loader([torch.full((400, 400), float(i)) for i in range(8)], make_spec())
    batches = [remote.load([i, i], i, i)[1] for i in range(8)]
    assert [batch.unique().tolist() for batch in batches] == [[i] for i in range(8)]


@pytest.mark.parametrize("call", [lambda: remote.load([1], 0, 0), lambda: remote.start_epoch(None, 0, (), 1, 0)])
def test_loading_before_opening_is_refused(call):
    with pytest.raises(LocalProtocolError, match="no loader is open in this worker"):
        call()
