"""Workers and nodes that die during an epoch: the same batches come, in the same order, each once."""

from __future__ import annotations

import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.errors import ConnectError, ConnectionLostError
from tests.conftest import is_running, wait_until
from tests.integration import datasets


def draw():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Fields(Dataset):
    """What a sample is, and which process made it."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.tensor([index, *draw()], dtype=torch.float64), os.getpid()


class Stream(IterableDataset):
    def __iter__(self):
        part = get_worker_info().id
        for number in range(30 + part):
            yield torch.tensor([number, part, *draw()], dtype=torch.float64), os.getpid()


class StatefulStream(Stream):
    """Remembers its place, and where it was iterated over from."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        part = get_worker_info().id
        first = self.number
        for self.number in range(first + 1, 31 + part):
            yield torch.tensor([self.number - 1, part, *draw()], dtype=torch.float64), os.getpid(), first

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class DeadlyStream(IterableDataset):
    """One part kills whoever reads its third sample."""

    def __iter__(self):
        part = get_worker_info().id
        for number in range(6):
            if part == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield part * 10 + number


@pytest.fixture
def workers(shared_server):
    return shared_server.address


def loader_of(dataset, workers, **options):
    generator = torch.Generator().manual_seed(3)
    return RPCDataloader(dataset, batch_size=3, workers=workers, generator=generator, **options)


def samples_of(batch):
    return batch[0].tolist()


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("dataset", [Fields(), Stream(), StatefulStream()], ids=lambda dataset: type(dataset).__name__)
def test_batches_are_the_same_when_workers_are_killed(workers, caplog, dataset, persistent_workers):
    undisturbed = [samples_of(batch) for batch in loader_of(dataset, workers, num_workers=2)]
    loader = loader_of(dataset, workers, num_workers=2, persistent_workers=persistent_workers)
    batches, victims = [], []
    for number, batch in enumerate(loader):
        batches.append(samples_of(batch))
        pid = int(batch[1][-1])
        if number in (1, 2, 9) and pid not in victims:
            os.kill(pid, signal.SIGKILL)
            victims.append(pid)
    assert batches == undisturbed
    assert len(victims) >= 2
    # Of one that died at the very end, with all of its batches answered, there may be no news yet.
    assert any(f"(pid {victims[0]}) on {workers} was killed by SIGKILL" in line for line in caplog.messages)


def test_stream_with_a_state_goes_on_and_is_not_read_again(workers):
    firsts = []
    for number, (_fields, pids, first) in enumerate(loader_of(StatefulStream(), workers, num_workers=1)):
        firsts += first.tolist()
        if number == 3:
            os.kill(int(pids[0]), signal.SIGKILL)
    assert set(firsts[:12]) == {0}
    assert firsts[-1] >= 12


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("SIGKILL", "was killed by SIGKILL"), ("SIGSEGV", "was killed by SIGSEGV"), ("exit", "exited with status 7")],
)
def test_batch_that_kills_every_worker_is_an_error_and_the_others_come(workers, how, reason, persistent_workers):
    loader = RPCDataloader(
        datasets.Deadly(40, 18, how), workers=workers, batch_size=4, persistent_workers=persistent_workers
    )
    for _epoch in range(2):
        iterator = iter(loader)
        seen = list(itertools.chain.from_iterable(next(iterator).tolist() for _ in range(4)))
        with pytest.raises(ConnectionLostError) as caught:
            next(iterator)
        text = str(caught.value)
        assert text.startswith("batch 4 (indices [16, 17, 18, 19]) has ended 3 workers in a row: worker ")
        assert text.count(reason) == 3
        assert text.count(f"on {workers}") == 3
        seen += itertools.chain.from_iterable(batch.tolist() for batch in iterator)
        assert seen == [*range(16), *range(20, 40)]


def test_number_of_retries_can_be_chosen(workers, tmp_path):
    dataset = datasets.Deadly(8, 5, "SIGKILL", str(tmp_path / "marker"))
    with pytest.raises(ConnectionLostError, match="has ended 1 workers in a row"):
        list(RPCDataloader(dataset, workers=workers, max_retries=1))
    assert [int(batch) for batch in RPCDataloader(dataset, workers=workers, max_retries=1)] == list(range(8))
    with pytest.raises(ValueError, match="max_retries must be at least 1, but is 0"):
        RPCDataloader(dataset, workers=workers, max_retries=0)


def test_long_list_of_indices_is_shortened(workers):
    loader = RPCDataloader(datasets.Deadly(100, 30, "SIGKILL"), workers=workers, batch_size=100)
    with pytest.raises(ConnectionLostError, match=r"batch 0 \(indices \[0, 1, .*, 15, ... 100 in all\]\) has ended"):
        next(iter(loader))


def test_stream_that_kills_every_worker_ends_with_an_error_and_the_others_go_on(workers):
    loader = RPCDataloader(DeadlyStream(), workers=workers, batch_size=1, num_workers=2)
    iterator = iter(loader)
    seen = [int(next(iterator)) for _ in range(5)]
    with pytest.raises(ConnectionLostError, match="has ended 3 workers in a row"):
        next(iterator)
    seen += [int(batch) for batch in iterator]
    assert seen == [0, 10, 1, 11, 2, 3, 4, 5]
    state = loader.state_dict()
    assert state["finished"]
    assert [num_samples for num_samples, *_ in state["streams"]] == [6, 2]


@pytest.mark.parametrize("dataset", [Fields(), Stream()], ids=lambda dataset: type(dataset).__name__)
def test_workers_of_a_node_that_is_lost_start_on_another(serve, shared_server, dataset):
    lost = serve("--num-workers", "2")
    addresses = [lost.address, shared_server.address]
    undisturbed = [samples_of(batch) for batch in loader_of(dataset, addresses, num_workers=4)]
    batches = []
    for number, batch in enumerate(loader_of(dataset, addresses, num_workers=4)):
        batches.append(samples_of(batch))
        if number == 3:
            lost.signal(signal.SIGKILL)
    assert batches == undisturbed


def test_workers_that_die_before_they_answer_end_the_pass(workers):
    def die(_worker_id):
        os._exit(3)

    with pytest.raises(ConnectionLostError, match="exited with status 3"):
        list(RPCDataloader(datasets.Numbers(), workers=workers, worker_init_fn=die))


def test_nothing_is_left_of_workers_that_were_replaced(serve):
    server = serve("--num-workers", "2")
    victims = set()
    for batch in loader_of(Fields(), server.address):
        pid = int(batch[1][0])
        if len(victims) < 2 and pid not in victims:
            os.kill(pid, signal.SIGKILL)
            victims.add(pid)
            wait_until(lambda pid=pid: not is_running(pid))
    assert len(victims) == 2
    wait_until(lambda: len(server.processes()) <= 1, what="only the session left")


def test_changes_of_the_dataset_reach_the_worker_that_takes_over(workers):
    dataset = RPCDataset(workers, datasets.State)
    dataset.epoch = 7
    samples = []
    for number, (index, epoch, _changes, pid) in enumerate(RPCDataloader(dataset, num_workers=1)):
        samples.append((int(index), int(epoch)))
        if number == 4:
            os.kill(int(pid), signal.SIGKILL)
    assert samples == [(index, 7) for index in range(20)]


def test_worker_that_is_lost_before_its_first_request_is_done_without(shared_server, monkeypatch):
    open_worker = RemoteDataset.open_worker

    def lose_the_first(*args):
        monkeypatch.undo()
        worker = open_worker(*args)
        worker.connection.close(ConnectError("connection refused"))
        return worker

    loader = RPCDataloader(datasets.Numbers(), workers=shared_server.address)
    monkeypatch.setattr(RemoteDataset, "open_worker", lose_the_first)
    assert [int(number) for number in loader] == list(range(20))
