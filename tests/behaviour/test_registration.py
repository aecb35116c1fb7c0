"""Batches of workers on this machine that go to a device: it reads their memory, which the workers keep until then."""

import gc
import logging
import os

import pytest
import torch

from rpcdataloader import RPCDataloader
from tests.conftest import wait_until
from tests.support.datasets import Filled
from tests.support.devices import plug_in

pytestmark = pytest.mark.usefixtures("clean_client")

BATCH_SIZE = 4


@pytest.fixture
def device(monkeypatch):
    return plug_in(monkeypatch)


def load(workers):
    return RPCDataloader(Filled(48, 1 << 18), BATCH_SIZE, workers=workers, device="cuda:0")


def check(batches):
    for number, batch in enumerate(batches):
        first = number * BATCH_SIZE
        assert batch.unique().tolist() == list(range(first, first + BATCH_SIZE))
        assert (batch == torch.arange(first, first + BATCH_SIZE)[:, None]).all()


def test_device_reads_memory_of_the_worker(device, unix_server):
    iterator = iter(load(unix_server.address))
    check(iterator)
    page_lock = device.pinned.page_lock
    shared = [page_lock.holds(block) for blocks in device.copied for block in blocks]
    # The first one of each worker may have been made before the trainer had mapped its memory.
    assert len(shared) == 12
    assert sum(shared) >= 8
    num_registered = len(page_lock.ranges)
    del iterator
    device.copied.clear()
    wait_until(lambda: not page_lock.ranges)
    assert page_lock.num_unregistered == num_registered


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_batches_are_copied_if_that_is_refused(device, unix_server, error, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.client")
    device.pinned.page_lock.error = error
    for _ in range(2):
        check(load(unix_server.address))
    assert len(device.pinned.blocks) == len(device.copied) == 24
    assert [error.__name__ in line for line in caplog.messages if "pinned memory" in line] == [True]


def test_child_of_the_trainer_leaves_the_driver_alone(device, unix_server):
    gc.collect()  # blocks of other tests
    page_lock = device.pinned.page_lock
    batches = iter(load(unix_server.address))
    next(batches)
    if not (pid := os.fork()):
        page_lock.unregister = lambda _address: os._exit(1)
        del batches
        device.copied.clear()
        gc.collect()
        os._exit(0 if page_lock.ranges else 2)
    assert os.waitpid(pid, 0)[1] == 0
    assert page_lock.ranges
