"""What else a trainer forks cannot use its workers. That it disturbs nothing is in the rows of ``in a fork``."""

from __future__ import annotations

import gc
import multiprocessing

import pytest
from torch.utils.data import DataLoader

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import LocalProtocolError
from tests.support.datasets import Numbers

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def test_iterator_belongs_to_its_process(shared_server):
    iterator = iter(RPCDataloader(Numbers(8), workers=shared_server.address))
    next(iterator)

    def go_on():
        with pytest.raises(LocalProtocolError, match=r"this iterator belongs to process \d+, of which"):
            next(iterator)

    child = multiprocessing.get_context("fork").Process(target=go_on)
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()
    assert [int(number) for number in iterator] == list(range(1, 8))


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
