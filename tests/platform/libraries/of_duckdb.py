"""Sums of the groups of a table, with DuckDB."""

from __future__ import annotations

import duckdb
from torch.utils.data import Dataset

QUERY = "SELECT sum(value), avg(value) FROM numbers WHERE key = ?"


def write(folder):
    """The table, of several groups of rows, so that threads read it."""
    rows = "SELECT range % 12 AS key, (0.5 * range)::DOUBLE AS value FROM range(400000)"
    duckdb.sql(f"COPY ({rows}) TO '{folder}/table.parquet' (ROW_GROUP_SIZE 40000)")


class Kept(Dataset):
    """A database in memory, with the connection that the constructor has made."""

    def __init__(self, source):
        self.database = duckdb.connect()
        self.database.execute(f"CREATE TABLE numbers AS FROM '{source}/table.parquet'")
        self.keys = self.database.execute("SELECT DISTINCT key FROM numbers ORDER BY key").fetchall()

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        return self.database.execute(QUERY, self.keys[index]).fetchone()


class OnFirstUse(Dataset):
    """Each process connects, the constructor's for the keys."""

    def __init__(self, source):
        self.source, self.database = f"{source}/table.parquet", None
        with duckdb.connect() as database:
            self.keys = database.execute(f"SELECT DISTINCT key FROM '{self.source}' ORDER BY key").fetchall()

    def __len__(self):
        return len(self.keys)

    def __getitem__(self, index):
        if self.database is None:
            self.database = duckdb.connect()
            self.database.execute(f"CREATE VIEW numbers AS FROM '{self.source}'")
        return self.database.execute(QUERY, self.keys[index]).fetchone()
