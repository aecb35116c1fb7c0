"""Batches that kill their workers after a while: one error for each, and every other sample once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError
from tests.integration import datasets

LATE_SECONDS = 0.1


class SlowDeadly(datasets.Numbers):
    """Some samples end their process, as the out-of-memory killer does, after they have taken their time."""

    def __init__(self, length, deadly, seconds):
        super().__init__(length)
        self.deadly = deadly
        self.seconds = seconds

    def __getitem__(self, index):
        if index in self.deadly:
            time.sleep(self.seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class SlowDeadlyStreams(IterableDataset):
    """Some streams end their process at their third sample."""

    def __init__(self, deadly, seconds):
        self.deadly = deadly
        self.seconds = seconds

    def __iter__(self):
        part = get_worker_info().id
        for number in range(6):
            if part in self.deadly and number == 2:
                time.sleep(self.seconds)
                os.kill(os.getpid(), signal.SIGKILL)
            yield part * 10 + number


@pytest.fixture
def soon_late(monkeypatch):
    """A second copy is sent after a tenth of a second instead of one."""
    monkeypatch.setattr("rpcdataloader.plan.workers._LATE_SECONDS", LATE_SECONDS)


@pytest.fixture
def workers(server):
    return server.address


def consume(loader):
    """Samples that were delivered, and the errors in place of batches."""
    samples, errors = [], []
    iterator = iter(loader)
    while True:
        try:
            samples += [int(sample) for sample in next(iterator)]
        except StopIteration:
            return samples, errors
        except ConnectionLostError as exc:
            errors.append(str(exc))
            # A loader that is at its end raises the same error at every call.
            assert len(errors) < 20


def check(loader, deadly, batch_size, length):
    samples, errors = consume(loader)
    lost = {
        first for first in range(0, length, batch_size) if any(first <= index < first + batch_size for index in deadly)
    }
    expected = [index for index in range(length) if index - index % batch_size not in lost]
    assert sorted(samples) == expected
    assert len(errors) == len(lost)
    for text in errors:
        assert "has ended 3 workers in a row: worker" in text
        assert text.count("was killed by SIGKILL") == 3


@pytest.mark.usefixtures("soon_late")
@pytest.mark.parametrize(("num_workers", "in_order"), [(2, True), (4, False)])
@pytest.mark.parametrize("times_late", [0, 1.2])
def test_batch_that_kills_its_workers_late_is_one_error(workers, times_late, num_workers, in_order):
    dataset = SlowDeadly(200, {103}, times_late * LATE_SECONDS)
    loader = RPCDataloader(dataset, workers=workers, batch_size=8, num_workers=num_workers, in_order=in_order)
    check(loader, {103}, 8, 200)


@pytest.mark.usefixtures("soon_late")
@pytest.mark.parametrize("num_workers", [1, 4])
def test_each_of_many_batches_that_kill_their_workers_late_is_one_error(workers, num_workers):
    # More than are ever under way at once, side by side: for some time, there is no answer at all.
    deadly = {9, *range(40, 40 + 8 * 10, 8)}
    dataset = SlowDeadly(160, deadly, 1.2 * LATE_SECONDS)
    check(RPCDataloader(dataset, workers=workers, batch_size=8, num_workers=num_workers), deadly, 8, 160)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("seconds", [0, 0.5, 1.2, 3])
def test_batch_that_kills_its_workers_late_is_one_error_in_real_time(workers, seconds, num_workers):
    dataset = SlowDeadly(400, {203}, seconds)
    check(RPCDataloader(dataset, workers=workers, batch_size=8, num_workers=num_workers), {203}, 8, 400)


@pytest.mark.usefixtures("soon_late")
@pytest.mark.parametrize(("deadly", "in_order"), [({1}, True), ({0, 1, 2, 3}, False)])
def test_streams_that_kill_their_workers_late_end_with_one_error_each(workers, deadly, in_order):
    dataset = SlowDeadlyStreams(deadly, 1.2 * LATE_SECONDS)
    samples, errors = consume(RPCDataloader(dataset, workers=workers, num_workers=4, in_order=in_order))
    assert sorted(samples) == [10 * part + number for part in range(4) for number in range(2 if part in deadly else 6)]
    assert len(errors) == len(deadly)
