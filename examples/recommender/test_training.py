"""The recommender: its batches, what it learns, on one rank and two, and how it goes on in the middle of an epoch.

This takes more time than the users of an example have: ``make study`` runs it.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from examples.recommender import data
from examples.recommender.loading import ParquetRows
from tests.conftest import wait_until
from tests.support.quick import quick_server

pytestmark = pytest.mark.study

ROOT = str(Path(__file__).parents[2])
SOURCE = "import os, sys, tempfile; sys.path.insert(0, {root!r}); os.environ.update({env!r}); tempfile.tempdir = None; "
SOURCE += "from examples.recommender.__main__ import main; main(sys.argv[1:])"


def start(zygote, *options, **env):
    source = SOURCE.format(root=ROOT, env={name: str(value) for name, value in env.items()})
    return zygote.start(source, *map(str, options), ends_quickly=not env.get("TMPDIR"))


def start_ranks(zygote, *options):
    """As torchrun does it: the processes meet at a store of their parent."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return store, [start(zygote, *options, RANK=rank, LOCAL_RANK=rank, **job) for rank in range(2)]


LINE = re.compile(r"epoch +(\d+)  loss (\d\.\d{4})  test AUC ([01]\.\d{4})  +\d+ rows/s  waiting for data +\d+%")


def results(output):
    """Loss and AUC of each epoch."""
    matches = [LINE.fullmatch(line) for line in output.splitlines()]
    assert all(matches), output
    return {int(match[1]): (float(match[2]), float(match[3])) for match in matches}


def results_of(script):
    ended = script.wait(110)
    assert ended.status == 0, ended.errors
    return results(ended.output)


@pytest.fixture
def server(library_zygote):
    with quick_server(library_zygote, "--num-workers", "2", "--max-connections", "64") as server:
        yield server.address


def test_batches_have_what_the_file_has(tmp_path):
    path = str(tmp_path / "rows.parquet")
    data.write(path, *data.generate(num_rows=400, num_features=5, max_length=4, table_rows=50, seed=1))
    table = pq.read_table(path)
    train, test = ParquetRows(path), ParquetRows(path, train=False)
    assert (len(train), len(test)) == (360, 40)
    for dataset, first in (train, 0), (test, 360):
        rows = [7, 3, 39, 3]
        batch = dataset.__getitems__(rows)
        expected = table.take([first + row for row in rows])
        assert batch.clicks.tolist() == expected["click"].to_pylist()
        lists = [ids for name in dataset.tables for ids in expected[name].to_pylist()]
        assert batch.lengths.ravel().tolist() == [len(ids) for ids in lists]
        assert batch.indices.tolist() == [k for ids in lists for k in ids]


def test_two_ranks_compute_the_same_as_one_and_with_overlap(zygote, tmp_path):
    source = f"import sys; sys.path.insert(0, {ROOT!r}); from examples.recommender.two_ranks import check_recommender"
    calls = [f"{source}; check_recommender({rank}, {str(tmp_path)!r})" for rank in range(2)]
    scripts = [zygote.start(call, ends_quickly=True) for call in calls]
    for script in scripts:
        ended = script.wait(100)
        assert ended.status == 0, ended.errors


def test_sparse_features_make_predictions_clearly_better(library_zygote):
    dense = start(library_zygote, "--dense-only", "--num-workers", 1)
    sparse = results_of(start(library_zygote, "--num-workers", 1))
    assert set(sparse) == {1, 2}
    assert sparse[2][1] > sparse[1][1]
    assert sparse[2][1] > 0.72
    assert results_of(dense)[2][1] < 0.65


def test_two_ranks_learn_the_same_as_one_and_with_or_without_passes(library_zygote, server, tmp_path):
    options = ("--data", tmp_path / "rows.parquet", "--workers", server, "--rows", 20_000, "--features", 9)
    one = results_of(start(library_zygote, *options))
    plain = start(library_zygote, *options, "--no-passes")
    _store, (first, second) = start_ranks(library_zygote, *options, "--batch-size", 256)
    two, nothing = results_of(first), results_of(second)
    assert nothing == {}
    for epoch in 1, 2:
        assert two[epoch] == pytest.approx(one[epoch], abs=0.002)
    assert results_of(plain)[2] == pytest.approx(one[2], abs=0.002)


def test_training_that_is_told_to_stop_goes_on_with_the_next_batch(library_zygote, server, tmp_path):
    options = ("--data", tmp_path / "rows.parquet", "--workers", server, "--features", 9, "--epochs", 2)
    checkpoint = tmp_path / "checkpoint.pt"
    first = start(library_zygote, *options, "--checkpoint", checkpoint)
    wait_until(lambda: "epoch  1" in first.output, 60, "an epoch")
    os.kill(first.pid, signal.SIGUSR1)
    whole = start(library_zygote, *options)
    assert first.wait(60).status == os.EX_TEMPFAIL
    saved = torch.load(checkpoint, weights_only=True)
    steps = saved["parameters"]["tables.C1.weight"]["step"]
    assert saved["epoch"] == 1
    assert 106 < steps < 2 * 106  # batches of 512 out of 54,000
    # With two ranks, each of which has a part of the tables; then, from the same place, with one.
    copied = tmp_path / "copied.pt"
    copied.write_bytes(checkpoint.read_bytes())
    _store, ranks = start_ranks(library_zygote, *options, "--checkpoint", copied, "--batch-size", 256)
    expected = results_of(whole)[2]
    shared = results_of(ranks[0])
    rest = results_of(start(library_zygote, *options, "--checkpoint", checkpoint))
    assert set(rest) == set(shared) == {2}
    assert rest[2][1] == expected[1]
    assert shared[2][1] == pytest.approx(expected[1], abs=0.002)
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 2


def test_training_that_is_told_to_stop_at_the_last_batch_of_an_epoch_goes_on(library_zygote, server, tmp_path):
    options = ("--data", tmp_path / "rows.parquet", "--workers", server, "--checkpoint", tmp_path / "checkpoint.pt")
    options = (*options, "--features", 2, "--rows", 500, "--batch-size", 1000)  # each batch is the last one
    first = start(library_zygote, *options, "--epochs", 10_000)
    wait_until(lambda: "epoch  1" in first.output, 60, "an epoch")
    os.kill(first.pid, signal.SIGUSR1)
    assert first.wait(60).status == os.EX_TEMPFAIL
    epoch = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"]
    assert set(results_of(start(library_zygote, *options, "--epochs", epoch + 2))) == {epoch + 2}


def test_interrupted_training_leaves_nothing(library_zygote, server, tmp_path):
    script = start(library_zygote, "--workers", server, "--epochs", 50, TMPDIR=tmp_path)
    wait_until(lambda: "epoch  1" in script.output, 60, "an epoch")
    assert [name.startswith("recommender-") for name in os.listdir(tmp_path)] == [True]
    os.kill(script.pid, signal.SIGINT)
    assert script.wait(30).status != 0
    assert os.listdir(tmp_path) == []
