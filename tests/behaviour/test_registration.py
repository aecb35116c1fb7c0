"""Batches of workers on this machine that go to a device: it reads their memory, which the workers keep until then."""

import contextlib
import functools
import gc
import logging
import os
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader
from rpcdataloader.loader.copying import StreamCarrier
from tests.conftest import wait_until
from tests.support.devices import FakeDevice, FakePinned

pytestmark = pytest.mark.usefixtures("clean_client")

BATCH_SIZE = 4


class Images(Dataset):
    """Sample i is full of i."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((1 << 18,), index, dtype=torch.uint8)


@pytest.fixture
def device(monkeypatch):
    device = FakeDevice()
    for module in "dataloader", "settings":
        monkeypatch.setattr(f"rpcdataloader.loader.{module}.find_device", lambda name: name and torch.device(name))
    monkeypatch.setattr("rpcdataloader.loader.intake.make_carrier", lambda _device, _pageable: device)
    return device


def load(workers):
    return RPCDataloader(Images(), BATCH_SIZE, workers=workers, device="cuda:0")


def check(batches):
    for number, batch in enumerate(batches):
        first = number * BATCH_SIZE
        assert batch.unique().tolist() == list(range(first, first + BATCH_SIZE))
        assert (batch == torch.arange(first, first + BATCH_SIZE)[:, None]).all()


def test_device_reads_memory_of_the_worker(device, unix_server):
    iterator = iter(load(unix_server.address))
    check(iterator)
    registration = device.pinned.registration
    shared = [registration.holds(block) for blocks in device.copied for block in blocks]
    # The first one of each worker may have been made before the trainer had mapped its memory.
    assert len(shared) == 12
    assert sum(shared) >= 8
    num_registered = len(registration.ranges)
    del iterator
    device.copied.clear()
    wait_until(lambda: not registration.ranges)
    assert registration.num_unregistered == num_registered


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_batches_are_copied_if_that_is_refused(device, unix_server, error, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.client")
    device.pinned.registration.error = error
    for _ in range(2):
        check(load(unix_server.address))
    assert len(device.pinned.blocks) == len(device.copied) == 24
    assert [error.__name__ in line for line in caplog.messages if "pinned memory" in line] == [True]


def test_child_of_the_trainer_leaves_the_driver_alone(device, unix_server):
    gc.collect()  # blocks of other tests
    registration = device.pinned.registration
    batches = iter(load(unix_server.address))
    next(batches)
    if not (pid := os.fork()):
        registration.unregister = lambda _address: os._exit(1)
        del batches
        device.copied.clear()
        gc.collect()
        os._exit(0 if registration.ranges else 2)
    assert os.waitpid(pid, 0)[1] == 0
    assert registration.ranges


class Driver:
    """What torch has for each type of device; copies are done when their event says so."""

    def __init__(self):
        self.events = []
        self.waits = []  # for the end of which copies

    def Stream(self, device=None):
        return device

    def Event(self, enable_timing=False):  # noqa: ARG002
        event = Mock(query=Mock(return_value=False))
        event.synchronize = functools.partial(self.waits.append, len(self.events))
        self.events.append(event)
        return event

    def device(self, _device):
        return contextlib.nullcontext()

    stream = device


def test_blocks_are_kept_until_their_copies_are_done():
    driver = Driver()
    carrier = StreamCarrier(torch.device("cpu"), FakePinned(), driver)
    freed = []
    for number in range(3):
        block = torch.zeros(100, dtype=torch.uint8)
        weakref.finalize(block, freed.append, number)
        carrier.copy([block])
        del block
    driver.events[1].query.return_value = True
    assert not freed
    carrier.copy([torch.zeros(1, dtype=torch.uint8)])
    assert freed == [1]
    del carrier
    assert sorted(freed) == [0, 1, 2]
    assert driver.waits == [0, 2, 3]
