"""An RPCDataset in a loader of torch's works, sample by sample."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, Subset

from rpcdataloader import RPCDataset
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.mark.parametrize("where", ["node", "inline"])
def test_loader_of_torch_reads_the_dataset(shared_server, where):
    dataset = RPCDataset(shared_server.address if where == "node" else where, Numbers, 6)
    batches = [batch.tolist() for _epoch in range(2) for batch in DataLoader(dataset, 2)]
    assert batches == 2 * [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in DataLoader(Subset(dataset, [1, 2]), 2)] == [[1, 2]]
