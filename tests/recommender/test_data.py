"""Parquet files of the recommender, and the batches that workers make of them."""

from __future__ import annotations

import gzip
import logging
import os
import zipfile

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from examples.recommender import data
from examples.recommender.loading import ParquetRows, as_combined, as_dict, standardise
from rpcdataloader import RPCDataloader, RPCDataset


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of 400 rows with 5 features of up to 4 ids."""
    path = str(tmp_path_factory.mktemp("data") / "rows.parquet")
    data.write(path, *data.generate(num_rows=400, num_features=5, max_length=4, table_rows=50, seed=1))
    return path


def bytes_of(path, **changed):
    options = {"num_rows": 100, "num_features": 2, "max_length": 2, "table_rows": 9, "seed": 0, **changed}
    data.write(path, *data.generate(**options))
    with open(path, "rb") as file:
        return file.read()


def test_generated_rows_depend_on_their_seed_only(tmp_path):
    first = bytes_of(str(tmp_path / "a"))
    assert bytes_of(str(tmp_path / "b")) == first
    assert bytes_of(str(tmp_path / "c"), seed=1) != first


def test_generated_rows_have_the_shape_of_criteos():
    _, parts = data.generate(num_rows=10_000, num_features=26, max_length=1, table_rows=1000, seed=0)
    rows = list(parts)
    assert sum(len(part.clicks) for part in rows) == 10_000
    assert rows[0].dense.shape[1] == 13
    assert len(rows[0].ids) == 26
    assert 0.2 < rows[0].clicks.mean() < 0.6
    for _values, lengths in rows[0].ids.values():
        assert set(lengths.tolist()) == {0, 1}
        assert np.mean(lengths == 0) == pytest.approx(0.1, abs=0.02)


def test_batches_have_what_the_file_has(path):
    table = pq.read_table(path)
    train, test = ParquetRows(path), ParquetRows(path, train=False)
    assert (len(train), len(test)) == (360, 40)
    assert train.tables == dict.fromkeys(["C1", "C2", "C3", "C4", "C5"], 50)
    for dataset, first in (train, 0), (test, 360):
        rows = [7, 3, 39, 3]
        batch = dataset.__getitems__(rows)
        expected = table.take([first + row for row in rows])
        assert batch.clicks.tolist() == expected["click"].to_pylist()
        lists = [ids for name in dataset.tables for ids in expected[name].to_pylist()]
        assert batch.lengths.ravel().tolist() == [len(ids) for ids in lists]
        assert batch.indices.tolist() == [k for ids in lists for k in ids]
        assert batch.dense.shape == (4, 13)
        assert dataset[39].indices.tolist() == [k for name in dataset.tables for k in expected[name][2].as_py()]


def test_both_forms_of_a_batch_hold_the_same(path):
    dataset = ParquetRows(path)
    batch = dataset.__getitems__(list(range(100, 140)))
    parts, combined = as_dict(batch), as_combined(batch)
    assert list(parts) == ["clicks", "dense", *(f"C{k}_{part}" for k in range(1, 6) for part in ("indices", "lengths"))]
    for part in "indices", "lengths":
        joined = torch.cat([parts[f"{name}_{part}"] for name in dataset.tables])
        assert joined.equal(combined[part])
    assert len({tensor.untyped_storage().data_ptr() for tensor in parts.values()}) == len(parts)  # own memory


def test_dense_columns_are_standardised_and_missing_numbers_become_the_mean():
    columns = np.array([[1.0, 5.0], [np.nan, 5.0], [1000.0, 5.0], [-3.0, 5.0]])
    found = standardise(columns)
    assert found[1].tolist() == [0, 0]
    assert found[:, 1].tolist() == [0, 0, 0, 0]
    present = found[[0, 2, 3], 0]
    assert present.mean() == pytest.approx(0)
    assert present.std() == pytest.approx(1)
    assert present.argsort().tolist() == [2, 0, 1]


def test_workers_share_what_their_node_has_read(path, shared_server, clean_client, caplog):  # noqa: ARG001
    with caplog.at_level(logging.WARNING, "rpcdataloader"):
        dataset = RPCDataset(shared_server.address, ParquetRows, path)
        batches = list(RPCDataloader(dataset, batch_size=50, collate_fn=as_combined))
    assert caplog.messages == []  # a constructor that starts threads would be run again in each worker
    local = ParquetRows(path)
    for k, batch in enumerate(batches):
        expected = as_combined(local.__getitems__(list(range(50 * k, min(50 * k + 50, 360)))))
        assert all(expected[name].equal(batch[name]) for name in expected)
    assert len(batches) == 8


# Of the public file: a click, 13 counts (some negative or missing), 26 hexadecimal categories (some missing).
CRITEO = [
    ["1", *map(str, range(1, 14)), *[f"{k:08x}" for k in range(995, 1021)]],
    ["0", "", "-1", *[""] * 11, "68fd1e64", *[""] * 24, "000003e8"],
]


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteos_file_is_read(tmp_path, name):
    path, parquet = str(tmp_path / name), str(tmp_path / "rows.parquet")
    with (gzip.open if name.endswith("gz") else open)(path, "wt") as file:
        file.writelines("\t".join(fields) + "\n" for fields in CRITEO)
    tables, parts = data.read_criteo(path, table_rows=1000)
    assert tables == {f"C{k}": 1000 for k in range(1, 27)}
    (rows,) = parts
    assert rows.clicks.tolist() == [1, 0]
    assert rows.dense[0].tolist() == list(range(1, 14))
    assert rows.dense[1, 1] == -1
    assert np.isnan(rows.dense[1]).sum() == 12
    found = [(values.tolist(), lengths.tolist()) for values, lengths in rows.ids.values()]
    assert found[0] == ([995, 0x68FD1E64 % 1000], [1, 1])
    assert found[5] == ([0], [1, 0])
    assert found[25] == ([20, 0], [1, 1])
    data.write(parquet, *data.read_criteo(path, table_rows=1000))
    assert len(ParquetRows(parquet)) == 2


MOVIELENS = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "7\t3\t4\t100\n8\t3\t3\t200\n7\t5\t5\t300\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "7\t30\tF\tdoctor\t12345\n8\t40\tM\tdoctor\t12999\n",
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "3\tOne\t1995\tDrama War\n5\tTwo\tunkonwn\tWar\n",
}


@pytest.fixture(params=["wheel", "folder"])
def movielens(request, tmp_path):
    path = tmp_path / "recbole-1.0-py3-none-any.whl"
    if request.param == "wheel":
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in MOVIELENS.items():
                wheel.writestr(f"recbole/dataset_example/ml-100k/{name}", text)
    else:
        path.mkdir()
        for name, text in MOVIELENS.items():
            (path / name).write_text(text)
    return path


def test_movielens_is_read(movielens):
    tables, (rows,) = data.read_movielens(str(movielens))
    assert tables == {"user": 2, "film": 2, "occupation": 1, "gender": 2, "zip": 1, "genres": 2}
    assert rows.clicks.tolist() == [1, 0, 1]
    assert rows.dense[:2].tolist() == [[30, 1995, 100], [40, 1995, 200]]
    assert np.isnan(rows.dense[2, 1])
    assert [part.tolist() for part in rows.ids["user"]] == [[0, 1, 0], [1, 1, 1]]
    assert [part.tolist() for part in rows.ids["genres"]] == [[0, 1, 0, 1, 1], [2, 2, 1]]


def test_movielens_of_recboles_wheel_is_read(tmp_path):
    wheel = os.environ.get("RPCDATALOADER_RECBOLE_WHEEL")
    if not wheel:
        pytest.skip("RPCDATALOADER_RECBOLE_WHEEL does not name the wheel that `pip download --no-deps recbole` loads")
    path = str(tmp_path / "rows.parquet")
    data.write(path, *data.read_movielens(wheel))
    dataset = ParquetRows(path)
    assert len(dataset) == 90_000
    assert (dataset.tables["user"], dataset.tables["film"]) == (943, 1682)
    assert dataset.dense.shape == (90_000, 3)
