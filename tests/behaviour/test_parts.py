"""The first batch comes from all workers, and nobody can tell from what is in it."""

from __future__ import annotations

import logging
import math
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectionLostError, RPCTimeoutError
from tests.conftest import wait_until
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Batched, Deadly, note, notes
from tests.support.devices import plug_in

pytestmark = pytest.mark.usefixtures("clean_client")

NUM_WORKERS = 4
LOCAL = f"local:{NUM_WORKERS}"


class Together(Augmented):
    """The samples of the first batch wait until as many processes are at work on it as there are workers."""

    def __init__(
        self,
        size: int,
        log: str,
        num_workers: int = NUM_WORKERS,
        batch_size: int = NUM_WORKERS,
        bad: tuple[int, ...] = (),
    ) -> None:
        super().__init__(size)
        self.log, self.num_workers, self.batch_size, self.bad = log, num_workers, batch_size, bad

    def __getitem__(self, index: int) -> Any:
        note(self.log, index, os.getpid())
        if index < self.batch_size:
            wait_until(lambda: len({line.split()[1] for line in notes(self.log)}) >= self.num_workers, 20, "the others")
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        return super().__getitem__(index)


class Once(Dataset[Any]):
    """Says which process made each sample."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


class Uneven(Once):
    """The samples of a batch are of two types."""

    def __init__(self, log: str = os.devnull) -> None:
        self.log = log

    def __getitem__(self, index: int) -> Any:
        note(self.log, index)
        return (index if index % 4 else float(index)), os.getpid()


@pytest.fixture
def log(tmp_path):
    return str(tmp_path / "log")


def load(dataset, **options):
    torch.manual_seed(3)
    return list(RPCDataloader(dataset, **{"batch_size": NUM_WORKERS, "shuffle": False, **options}))


def num_processes(batch) -> int:
    return len(set(batch[1].tolist()))


@pytest.mark.parametrize("where", ["here", "node server", "device", "out of order", "auto", "persistent"])
def test_first_batch_comes_from_all_workers_and_is_that_of_one(where, log, server, monkeypatch):
    options: dict[str, Any] = {"workers": LOCAL}
    if where == "node server":
        options = {"workers": server.address}
    elif where == "device":
        device = plug_in(monkeypatch)
        options["device"] = "cuda:0"
    elif where == "out of order":
        options["in_order"] = False
    elif where == "auto":
        options["num_workers"] = "auto"
    elif where == "persistent":
        options["persistent_workers"] = True
    expected = load(Augmented(18), workers="inline")
    batches = load(Together(18, log, 1 if where == "auto" else NUM_WORKERS), **options)
    if where == "device":
        assert all(device.holds(each) for each in batches[0].values() if isinstance(each, torch.Tensor))
        options.pop("device")
    if where == "out of order":
        batches.sort(key=lambda batch: batch["index"][0])
    assert_same(batches, expected)
    loaded = sorted(int(line.split()[0]) for line in notes(log))
    assert loaded == list(range(18))  # each once


def test_drop_last_and_an_odd_number_of_samples(log):
    for number, (batch_size, drop_last) in enumerate([(7, True), (5, False), (18, False), (1, False)]):
        options = {"batch_size": batch_size, "drop_last": drop_last}
        num_parts = math.ceil(batch_size / math.ceil(batch_size / NUM_WORKERS))
        dataset = Together(18, f"{log}{number}", num_parts, batch_size)
        assert_same(load(dataset, workers=LOCAL, **options), load(Augmented(18), workers="inline", **options))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_batches_of_ten_thousand(num_workers):
    dataset = list(range(20_000))
    batches = load(dataset, workers=f"local:{num_workers}", batch_size=10_000)
    assert torch.equal(torch.cat(batches), torch.arange(20_000))


def test_resumed_pass_goes_on_where_it_was(log):
    expected = load(Augmented(18), workers="inline")
    torch.manual_seed(3)
    loader = RPCDataloader(Together(18, log), batch_size=NUM_WORKERS, workers=LOCAL)
    batches = iter(loader)
    assert_same([next(batches), next(batches)], expected[:2])
    state = loader.state_dict()
    del batches
    again = RPCDataloader(Augmented(18), batch_size=NUM_WORKERS, workers="local:3")
    again.load_state_dict(state)
    assert_same(list(again), expected[2:])


def test_bad_samples_are_skipped_in_parts(log, caplog):
    options = {"on_error": "skip", "batch_size": 8}
    expected = load(Together(16, log, num_workers=1, bad=(1, 2, 3, 11)), workers="inline", **options)
    os.unlink(log)
    dataset = Together(16, log, NUM_WORKERS, 8, bad=(1, 2, 3, 11))
    caplog.clear()
    loader = RPCDataloader(dataset, workers=LOCAL, **options)
    torch.manual_seed(3)
    assert_same(list(loader), expected)
    assert loader.num_skipped == 4
    assert len(expected[0]["index"]) == 5
    assert "skipped 3 samples (indices 1, 2, 3): ValueError: bad sample 1" in caplog.text


def test_exception_is_that_of_the_first_sample_that_raises(log):
    dataset = Together(8, log, bad=(2, 3))
    batches = iter(RPCDataloader(dataset, workers=LOCAL, batch_size=NUM_WORKERS))
    with pytest.raises(ValueError, match="bad sample 2") as caught:
        next(batches)
    assert (
        "index 2 at position 2, batch 0" in "".join(caught.value.__notes__) if hasattr(caught.value, "__notes__") else 1
    )
    assert next(batches)["index"].tolist() == [4, 5, 6, 7]


def keep(samples):
    return samples


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Once(), {"collate_fn": keep}),
        (Batched(64), {}),
        (Uneven(), {}),
        (Once(), {"batch_size": None, "sampler": [[1]]}),
    ],
    ids=["collate_fn", "__getitems__", "samples that differ", "no batches"],
)
def test_other_batches_are_made_by_one_worker(dataset, options):
    for batch in load(dataset, **{"workers": LOCAL, "batch_size": 16, **options}):
        if isinstance(dataset, Batched):
            assert set(batch[2].tolist()) == {16}
        elif "collate_fn" in options:
            assert len({pid for _index, pid in batch}) == 1
        elif "sampler" not in options:
            assert num_processes(batch) == 1


def test_samples_that_differ_are_loaded_in_vain_once(log):
    loader = RPCDataloader(Uneven(log), batch_size=16, workers=LOCAL)
    torch.manual_seed(3)
    assert_same([batch[0] for batch in loader], [batch[0] for batch in load(Uneven(), workers="inline", batch_size=16)])
    assert 64 < len(notes(log)) <= 64 + 3 * 16
    os.unlink(log)
    assert len(list(loader)) == 4
    assert sorted(map(int, notes(log))) == list(range(64))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_batches_are_the_same_when_workers_die_at_parts(how, tmp_path):
    marker = str(tmp_path / "marker")
    dataset = Deadly(64, [5], how, marker=marker)
    assert torch.equal(torch.cat(load(dataset, workers=LOCAL, batch_size=16)), torch.arange(64))
    assert os.path.exists(marker)


def test_batch_that_always_kills_is_blamed_as_a_whole():
    loader = RPCDataloader(Deadly(32, [5], "SIGKILL"), workers=LOCAL, batch_size=16, max_retries=2)
    batches = iter(loader)
    with pytest.raises(ConnectionLostError, match=r"batch 0 \(indices \[0, .* has ended 2 workers in a row.*sample 5"):
        next(batches)
    assert next(batches).tolist() == list(range(16, 32))


def test_part_that_hangs_is_ended_by_task_timeout(caplog):
    caplog.set_level(logging.WARNING)
    dataset = Deadly(32, [5], "hang")
    loader = RPCDataloader(dataset, workers=LOCAL, batch_size=16, max_retries=1, task_timeout=1.0)
    batches = iter(loader)
    with pytest.raises(RPCTimeoutError, match=r"batch 0 \(indices .* took longer than 1 s") as caught:
        next(batches)
    assert "end_here" in str(caught.value)
    assert next(batches).tolist() == list(range(16, 32))


def test_killed_workers_lose_no_part(log):
    expected = load(Augmented(64), workers="inline")
    torch.manual_seed(3)
    batches = []
    for batch in RPCDataloader(Together(64, log), batch_size=NUM_WORKERS, workers=LOCAL):
        batches.append(batch)
        if len(batches) in (1, 3):
            os.kill(int(notes(log)[-1].split()[1]), signal.SIGKILL)
    assert_same(batches, expected)


def test_dataset_of_a_node_server_and_rank(log, server):
    expected = load(RPCDataset("inline", Augmented, 18), workers=None, partition=(1, 2))
    assert_same(load(RPCDataset(server.address, Together, 18, log, 2), partition=(1, 2)), expected)
