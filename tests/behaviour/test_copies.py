"""A large dataset instance that is sent to a node server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader

MIB = 1 << 20


class Large(Dataset):
    """Sample i is the sum of row i, which is i, of each of its arrays."""

    def __init__(self, size_bytes):
        rows = size_bytes // 24
        self.array = np.arange(8, dtype=np.uint8).repeat(rows).reshape(8, rows)
        self.tensor = torch.from_numpy(self.array.copy())
        self.lines = [bytes(row) for row in self.array]
        self.where = Path("/dev/null")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        means = (
            self.array[index].mean(),
            self.tensor[index].double().mean(),
            np.frombuffer(self.lines[index], np.uint8).mean(),
        )
        self.array[index] += 100  # in this worker alone
        self.tensor[index] += 100
        return torch.tensor([float(mean) for mean in means], dtype=torch.float64)


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize("size_bytes", [3 * MIB, 96 * MIB])
def test_instance_arrives_whole_and_each_worker_has_its_own(unix_server, size_bytes):
    dataset = Large(size_bytes)
    loader = RPCDataloader(dataset, None, workers=unix_server.address, num_workers=2)
    for _epoch in range(2):
        # Workers are new in each epoch, and see nothing of what those of the last one wrote.
        assert [sample.tolist() for sample in loader] == [[i] * 3 for i in range(8)]
    assert dataset.array.max() == 7
