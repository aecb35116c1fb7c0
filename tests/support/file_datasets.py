"""Datasets that hold files open, which processes must not share; apart from the others, for what these import."""

from __future__ import annotations

import zipfile
from typing import Any

import h5py
import lmdb
import numpy as np

from tests.support.datasets import Numbers


class Hdf5(Numbers):
    def __init__(self, path: str) -> None:
        super().__init__(20)
        self.file = h5py.File(path)

    def __getitem__(self, index: int) -> Any:
        return int(self.file["numbers"][index])


class Lmdb(Numbers):
    def __init__(self, path: str) -> None:
        super().__init__(20)
        self.env = lmdb.open(path, readonly=True)

    def __getitem__(self, index: int) -> Any:
        with self.env.begin() as transaction:
            return int(transaction.get(str(index).encode()) or -1)


class Zip(Numbers):
    def __init__(self, path: str) -> None:
        super().__init__(20)
        self.file = zipfile.ZipFile(path)

    def __getitem__(self, index: int) -> Any:
        return int(self.file.read(str(index)))


def write_numbers(folder: str) -> dict[str, str]:
    """Write each index times two in three formats; returns the paths."""
    with h5py.File(f"{folder}/numbers.h5", "w") as file:
        file["numbers"] = np.arange(20) * 2
    with lmdb.open(f"{folder}/numbers.lmdb", map_size=1 << 20) as env, env.begin(write=True) as transaction:
        for index in range(20):
            transaction.put(str(index).encode(), str(index * 2).encode())
    with zipfile.ZipFile(f"{folder}/numbers.zip", "w") as file:
        for index in range(20):
            file.writestr(str(index), str(index * 2))
    return {kind: f"{folder}/numbers.{kind}" for kind in ("h5", "lmdb", "zip")}
