"""A worker that dies says at which sample, though it cannot say anything any more."""

from __future__ import annotations

import os
import re

import pytest
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError
from tests.support.datasets import Deadly
from tests.support.differential import Raised, steps


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


def error_of(loader):
    """The one error of a pass, and how many batches came."""
    *taken, _end = steps(iter(loader))
    (error,) = [step for step in taken if isinstance(step, Raised)]
    assert error.type is ConnectionLostError
    return error.line, len(taken) - 1


KILLED = "was killed by SIGKILL (perhaps out of memory)"
CRASHED = "was killed by SIGSEGV (a crash in compiled code)"
NAMES = ["four", "five", "six", "seven", "eight"]


@pytest.mark.parametrize(
    ("dataset", "options", "how", "where"),
    [
        (Deadly(12, {7}, "SIGKILL"), {"batch_size": 4}, KILLED, "sample 7"),
        (Deadly(12, {7}, "SIGSEGV"), {"batch_size": None}, CRASHED, "sample 7"),
        # The sampler decides what an index is; the worker knows its position only.
        (Deadly(12, {"seven"}, "SIGKILL"), {"batch_sampler": [NAMES], "collate_fn": unchanged}, KILLED, "sample seven"),
        (DeadlyBatches(12, {7}, "SIGKILL"), {"batch_size": 4}, KILLED, "batch 1"),
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
