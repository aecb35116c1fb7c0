"""File systems that stall, and workers that are slow: nothing is asked for twice as often, and little is lost."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from rpcdataloader import RPCDataloader
from tests.conftest import wait_until
from tests.integration.crew import wait_for_crew

NUM_WORKERS = 8


class OnFileSystem(Dataset):
    """Reading blocks while the file system stalls: for everything, or for what is not in the page cache."""

    def __init__(self, folder, cached):
        self.stalled = os.path.join(folder, "stalled")
        self.log = os.path.join(folder, "log")
        self.cached = cached

    def __len__(self):
        return 400

    def __getitem__(self, index):
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        time.sleep(0.01)
        while index % 10 >= self.cached and os.path.exists(self.stalled):
            time.sleep(0.01)
        return torch.tensor([index, os.getpid()])


@pytest.mark.parametrize("cached", [0, 9], ids=["nothing cached", "most cached"])
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3.0, 120.0])
def test_file_system_that_stalls_is_waited_for(serve, tmp_path, caplog, cached, seconds):
    server = serve("--num-workers", str(NUM_WORKERS))
    dataset = OnFileSystem(str(tmp_path), cached)
    iterator = iter(RPCDataloader(dataset, batch_size=None, workers=server.address))
    wait_for_crew(iterator, NUM_WORKERS)
    batches = [next(iterator).tolist() for _ in range(100)]
    workers = {pid for _index, pid in batches}
    assert len(workers) == NUM_WORKERS
    processes = set(server.processes())
    stalled = tmp_path / "stalled"
    stalled.touch()
    timer = threading.Timer(seconds, stalled.unlink)
    timer.start()
    try:
        start = time.monotonic()
        batches += [batch.tolist() for batch in iterator]
        assert time.monotonic() - start > seconds
    finally:
        timer.join()
    assert [index for index, _pid in batches] == [*range(400)]
    assert {pid for _index, pid in batches} == workers
    # They end with the epoch, and none has come.
    wait_until(lambda: set(server.processes()) < processes, what="the end of workers")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    loads = Counter((tmp_path / "log").read_text().split())
    assert max(loads.values()) <= 2
    assert loads.total() - len(loads) <= 3, loads.most_common(20)


class OneSlow(Dataset):
    """One worker is 20 times slower than the others. Sleeps, so that it does not matter how many CPUs there are."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.8 if get_worker_info().id == NUM_WORKERS - 1 else 0.04)
        return index


def throughput_of(loader, seconds):
    """Batches per second, after a while."""
    iterator = iter(loader)
    for _ in range(100):
        next(iterator)
    start = time.monotonic()
    num_batches = 0
    while time.monotonic() - start < seconds:
        next(iterator)
        num_batches += 1
    return num_batches / (time.monotonic() - start)


@pytest.mark.slow
def test_worker_that_is_20_times_slower_costs_little_of_the_throughput_of_the_others(serve):
    server = serve("--num-workers", str(NUM_WORKERS))
    options = {"batch_size": None, "workers": server.address}
    without = throughput_of(RPCDataloader(OneSlow(), num_workers=NUM_WORKERS - 1, **options), 30)
    with_it = throughput_of(RPCDataloader(OneSlow(), num_workers=NUM_WORKERS, **options), 30)
    print(f"{without:.1f} batches/s of 7 workers, {with_it:.1f} with the slow one")  # noqa: T201
    assert with_it > 0.88 * without
