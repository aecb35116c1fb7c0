"""Rows of a folder of files, with pyarrow's datasets."""

from __future__ import annotations

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.dataset
from torch.utils.data import Dataset


def write(folder):
    """Four files."""
    table = pyarrow.table({"key": np.arange(40_000) % 12, "value": np.arange(40_000) * 0.5})
    options = {"max_rows_per_file": 10_000, "max_rows_per_group": 5000}
    pyarrow.dataset.write_dataset(table, f"{folder}/rows", format="parquet", **options)


class Rows(Dataset):
    """The constructor scans the keys, and a sample scans the rows of one, both with threads."""

    def __init__(self, source):
        self.rows = pyarrow.dataset.dataset(f"{source}/rows")
        found = self.rows.to_table(columns=["key"]).group_by("key").aggregate([("key", "count")])
        self.keys = sorted(found["key"].to_pylist())

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        rows = self.rows.to_table(filter=pyarrow.compute.field("key") == self.keys[index])
        return np.sort(rows["value"].to_numpy())[:50]
