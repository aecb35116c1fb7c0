"""Sums of the groups of a table, with polars."""

from __future__ import annotations

import numpy as np
import polars
from torch.utils.data import Dataset


def write(folder):
    """The table."""
    keys = np.arange(60_000) % 12
    polars.DataFrame({"key": keys, "value": np.arange(60_000) * 0.5}).write_parquet(f"{folder}/table.parquet")


class Groups(Dataset):
    """The constructor groups the table, and a sample is computed from the rows of its key."""

    def __init__(self, source):
        self.table = polars.read_parquet(f"{source}/table.parquet")
        self.sums = self.table.group_by("key").agg(polars.col("value").sum()).sort("key")

    def __len__(self):
        return self.sums.height

    def __getitem__(self, index):
        key, total = self.sums.row(index)
        rows = self.table.filter(polars.col("key") == key).group_by("key").agg(polars.all().mean().name.suffix("_mean"))
        return total, rows["value_mean"][0]
