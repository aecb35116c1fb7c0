"""Rows of a zarr array."""

from __future__ import annotations

import numpy as np
import zarr
from torch.utils.data import Dataset


def write(folder):
    """The array, in many chunks."""
    values = zarr.open(f"{folder}/values.zarr", mode="w", shape=(12, 1000), chunks=(1, 100), dtype="float32")
    values[:] = np.arange(12 * 1000, dtype=np.float32).reshape(12, 1000)


class Rows(Dataset):
    """The constructor reads all of the array, and a sample its row, both by an event loop in a thread."""

    def __init__(self, source):
        self.values = zarr.open(f"{source}/values.zarr", mode="r")
        self.mean = self.values[:].mean()

    def __len__(self):
        return self.values.shape[0]

    def __getitem__(self, index):
        return self.values[index] - self.mean
