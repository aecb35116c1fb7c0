"""What else a trainer forks does not disturb its workers, and cannot use them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from tests.support.datasets import Numbers, Processes

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def fork(function):
    """Run it in a fork of this process; returns the exit status."""
    child = multiprocessing.get_context("fork").Process(target=function)
    child.start()
    child.join()
    status = child.exitcode
    child.close()
    return status


def test_forks_in_the_middle_of_an_epoch_disturb_nothing(shared_server):
    dataset = RPCDataset(shared_server.address, Processes, 65)
    iterator = iter(RPCDataloader(dataset, persistent_workers=True))
    samples = []

    def consume(count):
        samples.extend(tuple(map(int, next(iterator))) for _ in range(count))

    def go_on():
        with pytest.raises(LocalProtocolError, match=r"this iterator belongs to process \d+, of which"):
            next(iterator)

    for fork_something in (
        lambda: subprocess.run([sys.executable, "-c", ""], check=True).returncode == 0,
        lambda: os.system("true") == 0,
        lambda: fork(lambda: None) == 0,
        lambda: fork(go_on) == 0,
        lambda: fork(lambda: sys.exit(3)) == 3,
        lambda: fork(lambda: os._exit(4)) == 4,
    ):
        consume(5)
        assert fork_something()
    consume(5)
    beside = DataLoader(Numbers(8), num_workers=2)
    assert [int(number) for number in beside] == list(range(8))
    consume(5)
    theirs = iter(beside)
    next(theirs)
    consume(5)
    del theirs
    consume(20)
    assert [index for index, _, _ in samples] == list(range(65))
    assert len({pid for _, pid, _ in samples}) <= 2
    assert len({session for _, _, session in samples}) == 1
    with pytest.raises(StopIteration):
        next(iterator)


def test_torch_workers_cannot_use_an_rpc_dataset_and_say_so(shared_server):
    dataset = RPCDataset(shared_server.address, Numbers)
    iterator = iter(DataLoader(dataset, sampler=[0], num_workers=1))
    with pytest.raises(LocalProtocolError, match="dataset Numbers belongs to process"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    del iterator
    gc.collect()  # the traceback refers to it, and it to pipes
    assert [int(number) for number in DataLoader(dataset)] == list(range(20))
