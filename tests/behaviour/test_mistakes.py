"""Mistakes that users make: which exception comes, and in which words, where no other test holds them.

After each of them the same process loads as if nothing had happened, and no worker is left; after all of them, no
process, thread, descriptor or file is.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import threading

import pytest
from torch.utils.data import Subset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectError, LocalProtocolError, RPCTimeoutError, SerializationError
from tests.conftest import TIMEOUT_SCALE, close_client, process_name, wait_until
from tests.support.datasets import Deadly, Numbers
from tests.support.quick import quick_server


class WithLock(Numbers):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def no_scratch(_worker):
    raise OSError("no scratch disk")


def load(address, dataset=None, **options):
    return list(RPCDataloader(dataset or Numbers(8), workers=address, **options))


def load_from_nobody(_address):
    with socket.socket() as nobody, pytest.MonkeyPatch.context() as patch:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens
        patch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(TIMEOUT_SCALE))
        close_client()
        try:
            load("{}:{}".format(*nobody.getsockname()))
        finally:
            close_client()  # it has read the variable


def ask_for_too_many(address):
    load(address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(TIMEOUT_SCALE))
        load(address, min_workers=3)


def nothing():
    """Makes a dataset, and forgets to return it."""


# By name: what is done with the address of a node server, what it raises, and a pattern of its text and its notes.
# fmt: off
MISTAKES = {
    "no server": (load_from_nobody, ConnectError,
        r"connection refused \(is `python -m rpcdataloader\.launch` running there, on that port, and with --host"),
    "more workers than there are": (ask_for_too_many, ConnectError,
        r"min_workers=3, but 2 workers were there for this process within \S+ s; missing: no node"),
    "collate function with a lock": (lambda a: load(a, collate_fn=WithLock().__getitem__), SerializationError,
        r"collate_fn\S* is a _thread\.lock, .*: open it on first use instead of in the constructor"),
    "RPCDataset in a dataset": (lambda a: load(a, Subset(RPCDataset(a, Numbers), [1])), LocalProtocolError,
        r"an RPCDataset belongs to this process and cannot be sent: to use a part of it, .*Subset"),
    "no dataset": (lambda a: RPCDataset(a, object), TypeError,
        "object made no dataset: it has no __getitem__, and is no IterableDataset"),
    "function without return": (lambda a: list(RPCDataloader(RPCDataset(a, nothing, build="worker"))), TypeError,
        "nothing made no dataset"),
    "hang": (lambda a: load(a, Deadly(8, {0}, "hang"), task_timeout=1.0, max_retries=1), RPCTimeoutError,
        r"took longer than 1 s while it loaded sample 0.*in __getitem__"),
    "init function that fails": (lambda a: load(a, worker_init_fn=no_scratch), OSError,
        r"no scratch disk.*worker_init_fn\(\d\), worker"),
}
# fmt: on


@pytest.fixture(scope="module")
def server(zygote, tmp_path_factory):
    """The node server of all mistakes. At the end, nothing is left of them."""
    folder = tmp_path_factory.mktemp("left")
    close_client()
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch, quick_server(zygote, "--num-workers", "2") as server:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        yield server
        gc.collect()
        close_client()
        wait_until(lambda: not server.processes(), what="processes of mistakes")
        wait_until(lambda: not any(thread.name.startswith("rpcdl") for thread in threading.enumerate()), what="threads")
        assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named(server, name):
    make, expected, words = MISTAKES[name]
    with pytest.raises(expected) as caught:
        make(server.address)
    error = caught.value
    text = " ".join([str(error), *getattr(error, "__notes__", ()), str(error.__cause__ or "")])  # Python 3.10: no notes
    assert re.search(words, text, re.DOTALL), text
    del caught, error
    assert [int(index) for index in load(server.address, num_workers=1)] == [*range(8)]
    gc.collect()
    wait_until(lambda: "rpcdl-worker" not in map(process_name, server.processes()), what="workers of a mistake")
