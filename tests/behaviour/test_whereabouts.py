"""A worker that dies says at which sample, though it cannot say anything any more."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from torch.utils.data import Dataset, IterableDataset

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError, RPCTimeoutError


class Deadly(Dataset):
    """Sample 7 kills its worker, or never comes."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index in (7, "seven"):
            if self.how == "hang":
                time.sleep(600)
            os.kill(os.getpid(), getattr(signal, self.how))
        return index


class DeadlyBatches(Deadly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DeadlyStream(IterableDataset):
    def __iter__(self):
        yield from range(7)
        os._exit(3)


def die(samples):
    if 7 in samples:
        os._exit(3)
    return samples


def unchanged(samples):
    return samples


def error_of(loader, kind=ConnectionLostError):
    """The one error of a pass, and how many batches came."""
    iterator, num_batches, caught = iter(loader), 0, None
    while True:
        try:
            next(iterator)
            num_batches += 1
        except StopIteration:
            assert caught is not None
            return caught, num_batches
        except kind as error:
            assert caught is None
            caught = str(error)


NAMES = ["four", "five", "six", "seven", "eight"]


@pytest.mark.parametrize(
    ("dataset", "options", "how", "where"),
    [
        (Deadly("SIGKILL"), {"batch_size": 4}, "was killed by SIGKILL (perhaps out of memory)", "sample 7"),
        (Deadly("SIGSEGV"), {"batch_size": None}, "was killed by SIGSEGV (a crash in compiled code)", "sample 7"),
        # The sampler decides what an index is; the worker knows its position only.
        (
            Deadly("SIGKILL"),
            {"batch_sampler": [NAMES[:2], NAMES[2:]], "collate_fn": unchanged},
            "was killed by SIGKILL (perhaps out of memory)",
            "sample seven",
        ),
        (DeadlyBatches("SIGKILL"), {"batch_size": 4}, "was killed by SIGKILL (perhaps out of memory)", "batch 1"),
        (DeadlyStream(), {"batch_size": 3}, "exited with status 3", "sample 7 of its stream"),
    ],
    ids=["sample", "one by one", "names", "at once", "stream"],
)
def test_death_names_the_sample(shared_server, caplog, dataset, options, how, where):
    text, _num = error_of(RPCDataloader(dataset, workers=shared_server.address, num_workers=1, **options))
    assert len(re.findall(rf"{re.escape(how)} while it loaded {where}(?:;|$)", text)) == 3, text
    assert len(re.findall(rf"{re.escape(how)} while it loaded {where}; another worker starts", caplog.text)) >= 2


def test_death_after_the_last_sample_is_none_of_a_sample(shared_server):
    loader = RPCDataloader(range(12), 3, workers=shared_server.address, collate_fn=die)
    text, num_batches = error_of(loader)
    assert text.count("exited with status 3 after it had loaded batch 2") == 3
    assert num_batches == 3


def test_limit_of_time_names_the_sample(shared_server):
    loader = RPCDataloader(
        Deadly("hang"), 4, workers=shared_server.address, num_workers=1, task_timeout=1.0, max_retries=2
    )
    text, num_batches = error_of(loader, RPCTimeoutError)
    assert text.count("took longer than 1 s while it loaded sample 7") == 2
    assert num_batches == 2
