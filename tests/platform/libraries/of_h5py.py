"""Rows of an HDF5 file, with h5py."""

from __future__ import annotations

import h5py
import numpy as np
from torch.utils.data import Dataset


def write(folder):
    """The file, in compressed chunks."""
    with h5py.File(f"{folder}/values.h5", "w") as file:
        values = np.arange(12 * 1000, dtype=np.float32).reshape(12, 1000)
        file.create_dataset("values", data=values, chunks=(2, 100), compression="gzip")


class Kept(Dataset):
    """The file stays open."""

    def __init__(self, source):
        self.values = h5py.File(f"{source}/values.h5", "r")["values"]
        self.mean = self.values[:].mean()

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] - self.mean


class OnFirstUse(Dataset):
    """Each process opens the file, the constructor's for its length and mean."""

    def __init__(self, source):
        self.source, self.values = f"{source}/values.h5", None
        with h5py.File(self.source, "r") as file:
            self.length, self.mean = len(file["values"]), file["values"][:].mean()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.values is None:
            self.values = h5py.File(self.source, "r")["values"]
        return self.values[index] - self.mean
