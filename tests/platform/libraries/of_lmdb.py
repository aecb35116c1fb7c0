"""Records of an LMDB environment."""

from __future__ import annotations

import lmdb
import numpy as np
from torch.utils.data import Dataset


def write(folder):
    """The environment."""
    with lmdb.open(f"{folder}/records", map_size=16 << 20) as records, records.begin(write=True) as transaction:
        for number in range(12):
            transaction.put(b"%02d" % number, np.full(1000, number, np.float32).tobytes())


def opened(source):
    return lmdb.open(f"{source}/records", readonly=True, lock=False)


class Kept(Dataset):
    """The environment stays open."""

    def __init__(self, source):
        self.records = opened(source)
        self.length = self.records.stat()["entries"]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.records.begin() as transaction:
            return np.frombuffer(transaction.get(b"%02d" % index), np.float32).copy()


class OnFirstUse(Kept):
    """Each process opens the environment, the constructor's for its length."""

    def __init__(self, source):
        super().__init__(source)
        self.records.close()
        self.source, self.records = source, None

    def __getitem__(self, index):
        if self.records is None:
            self.records = opened(self.source)
        return super().__getitem__(index)
