"""An RPCDataset in a loader of torch's works, and is not what it is for."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import DataLoader, Subset

from rpcdataloader import RPCDataloader, RPCDataset
from tests.integration.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


def test_loader_of_torch_is_warned_of_once_at_the_loop_over_it(shared_server):
    dataset = RPCDataset(shared_server.address, Numbers, 6)
    with pytest.warns(UserWarning, match=r"RPCDataset\(Numbers, .*every sample makes a trip of its own") as found:
        batches = [batch.tolist() for _epoch in range(2) for batch in DataLoader(dataset, 2)]
    assert batches == 2 * [[0, 1], [2, 3], [4, 5]]
    assert [warning.filename for warning in found] == [__file__]
    # Another one has its own.
    with pytest.warns(UserWarning, match="trip of its own"):
        list(DataLoader(Subset(RPCDataset(shared_server.address, Numbers, 6), [1, 2])))


def test_no_warning_where_there_are_no_trips_or_somebody_asked_for_one(shared_server):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = RPCDataset(shared_server.address, Numbers, 6)
        assert [int(dataset[index]) for index in range(6)] == list(range(6))
        assert len(list(RPCDataloader(dataset, 2))) == 3
        assert len(list(DataLoader(RPCDataset("inline", Numbers, 6), 2))) == 3
