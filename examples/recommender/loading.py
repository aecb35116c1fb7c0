"""What runs on workers: a dataset over a Parquet file, and two forms of a batch.

A batch of N sparse features is either a dict of 2N small tensors, as most models take it, or *combined*: the ids of
all features in one tensor and the lengths of all lists in another, feature after feature.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import data

_TEST_SHARE = 10  # one row in so many, the last ones


@dataclass
class Jagged:
    """Rows of a batch, with their lists of ids in the combined form.

    Attributes:
        clicks: 1 or 0 for each row.
        dense: Standardised numbers, (rows, columns).
        indices: Ids of all features, feature after feature, and within each one row after row.
        lengths: How many of them belong to each feature and row, (features, rows).
        features: Names, in this order.
    """

    clicks: np.ndarray
    dense: np.ndarray
    indices: np.ndarray
    lengths: np.ndarray
    features: list[str]


class ParquetRows(Dataset):
    """The rows of a file for training or testing, in memory: once on each node, whatever the number of workers.

    It takes a whole batch of indices at once, and so costs the same for each feature, be it one or a thousand.

    Args:
        path: A file that :func:`examples.recommender.data.write` wrote, where the workers see it.
        train: All rows but the last tenth, or these.
    """

    def __init__(self, path: str, train: bool = True) -> None:
        table, self.tables = data.read(path)
        split = table.num_rows - table.num_rows // _TEST_SHARE
        first, last = (0, split) if train else (split, table.num_rows)
        columns = {
            name: column.combine_chunks() for name, column in zip(table.column_names, table.columns, strict=True)
        }
        dense = columns["dense"].flatten().to_numpy().reshape(table.num_rows, -1)
        self.dense = standardise(dense)[first:last].astype(np.float32)
        self.num_dense = dense.shape[1]
        self.clicks = columns["click"].to_numpy()[first:last].astype(np.float32)
        parts = [columns[name][first:last] for name in self.tables]
        lengths = np.stack([np.diff(part.offsets.to_numpy()) for part in parts])
        self.ids = transpose(np.concatenate([part.flatten().to_numpy() for part in parts]), lengths)
        self.lengths = np.ascontiguousarray(lengths.T)
        self.ends = np.cumsum(self.lengths.sum(axis=1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> Jagged:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Jagged:
        lengths = self.lengths[indices]
        ends = self.ends[indices]
        starts = ends - lengths.sum(axis=1)
        ids = np.concatenate([self.ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
        return Jagged(
            self.clicks[indices],
            self.dense[indices],
            transpose(ids, lengths),
            np.ascontiguousarray(lengths.T),
            list(self.tables),
        )


def standardise(columns: np.ndarray) -> np.ndarray:
    """Take logarithms, since counts have long tails, shift and scale; what is missing becomes the mean."""
    logs = np.sign(columns) * np.log1p(np.abs(columns))
    scale = np.nanstd(logs, axis=0)
    return np.nan_to_num((logs - np.nanmean(logs, axis=0)) / np.where(scale > 0, scale, 1))


def transpose(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reorder lists that stand row after row so that they stand column after column; ``lengths`` is (rows, columns)."""
    counts = lengths.T.ravel()
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape).T.ravel()
    places = np.repeat(starts - np.cumsum(counts) + counts, counts)
    places += np.arange(len(places))
    return values[places]


def as_dict(batch: Jagged) -> dict[str, Tensor]:
    """The form that models take as they are: ``NAME_indices`` and ``NAME_lengths`` of each feature, with own memory."""
    found = {"clicks": torch.from_numpy(batch.clicks), "dense": torch.from_numpy(batch.dense)}
    parts = np.split(batch.indices, np.cumsum(batch.lengths.sum(axis=1))[:-1])
    for name, indices, lengths in zip(batch.features, parts, batch.lengths, strict=True):
        found[f"{name}_indices"] = torch.tensor(indices)
        found[f"{name}_lengths"] = torch.tensor(lengths)
    return found


def as_combined(batch: Jagged) -> dict[str, Tensor]:
    """The form for :func:`~examples.recommender.passes.combine_sparse_inputs`: two tensors, whatever the features."""
    return {
        "clicks": torch.from_numpy(batch.clicks),
        "dense": torch.from_numpy(batch.dense),
        "indices": torch.from_numpy(batch.indices),
        "lengths": torch.from_numpy(batch.lengths.ravel()),
    }
