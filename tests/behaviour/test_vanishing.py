"""Hosts that vanish without a word are noticed. One that answers for a process that is stopped is waited for: see
``tests/unit/wire/test_transport.py``. That an epoch goes on elsewhere, and takes hosts in again, is seen by chaos.

The tests have networks of their own. Most of them let keep-alive be as fast as the kernel allows (its unit is a
second); those marked slow wait for the real time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import ConnectError, ConnectionLostError
from tests.conftest import close_client, is_running, wait_until
from tests.support.clocks import REAL_KEEPALIVE, KeepAlive
from tests.support.datasets import Gated, Hosted
from tests.support.network import Cable, Network, why_not
from tests.support.quick import QuickServer, quick_server

pytestmark = pytest.mark.usefixtures("clean_client")


FAST = KeepAlive(1, 1, 2, 0.2)

# Seconds that a machine with a dozen nodes on it may take beyond that.
SLACK = 30.0


@pytest.fixture(params=[FAST, pytest.param(REAL_KEEPALIVE, marks=pytest.mark.slow)], ids=["fast", "real"])
def pace(request, monkeypatch):
    request.param.use(monkeypatch)
    return request.param


@pytest.fixture(scope="session")
def networks():
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def network(networks, zygote):  # noqa: ARG001  # the zygote stays outside
    network = Network()
    try:
        with network.trainer.entered():
            yield network
    finally:
        network.close()


@dataclass
class Node:
    """A node server on a host of its own."""

    server: QuickServer
    cable: Cable

    @property
    def address(self) -> str:
        return self.server.address


@pytest.fixture
def start_node(network, zygote, pace):
    """Start a node server on a host of its own."""
    with contextlib.ExitStack() as stack:

        def start():
            host, cable = network.add()
            options = ("--host", cable.address, "--num-workers", "1")
            before = f"{host.move_in}\n{pace.statement}"
            return Node(stack.enter_context(quick_server(zygote, *options, before=before)), cable)

        yield start


class Large(Dataset):
    """Batches that take a while to travel: more than the kernel keeps for a connection."""

    def __init__(self, size_bytes=2**28):
        self.size_bytes = size_bytes

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.zeros(self.size_bytes, dtype=torch.uint8)


# What a trainer waits for. Each is prepared while its node is there, and gives what is done when that has vanished.


def batch_that_is_computed(node, fifo):
    iterator = iter(RPCDataloader(Gated(10, 0, fifo), workers=node.address, reconnect_timeout=0))
    writer = os.open(fifo, os.O_WRONLY)  # it has begun

    def finish():
        try:
            next(iterator)
        finally:
            os.close(writer)

    return finish


def batch_that_is_received(node, _fifo):
    before = node.cable.received_bytes
    iterator = iter(RPCDataloader(Large(), workers=node.address, num_workers=1, reconnect_timeout=0))
    wait_until(lambda: node.cable.received_bytes - before > 2**24, 30, "a part of the batch")
    node.cable.cut()
    assert node.cable.received_bytes - before < 2**28
    return lambda: next(iterator)


def call_that_is_not_delivered(node, _fifo):
    rpc_async(node.address, os.getpid).wait()
    return lambda: rpc_async(node.address, os.getpid).wait()


def call_whose_worker_dies(node, _fifo):
    """On the node, that is; its session tells the client, and so has something unacknowledged under way."""
    pid = rpc_async(node.address, os.getpid).wait()

    def finish():
        os.kill(pid, signal.SIGKILL)
        rpc_async(node.address, os.getpid).wait()

    return finish


def first_batch(node, _fifo):
    """The worker for it cannot be reached any more."""
    dataset = RPCDataset(node.address, Hosted)
    return lambda: next(iter(RPCDataloader(dataset, reconnect_timeout=0)))


def change(node, _fifo):
    """Goes to the session itself, whose connection the others rely upon."""
    dataset = RPCDataset(node.address, Hosted)
    return lambda: dataset.call_all(len)


def large_build(node, _fifo):
    RPCDataset(node.address, Hosted)
    return lambda: RPCDataset(node.address, len, torch.zeros(2**22))


WAITS = [
    batch_that_is_computed,
    call_that_is_not_delivered,
    call_whose_worker_dies,
    first_batch,
    change,
    large_build,
    batch_that_is_received,  # last, as it begins when a part has come
]


def error_of(finish):
    try:
        finish()
    except Exception as exc:
        return exc
    return None


def test_host_that_vanishes_is_noticed_during_any_wait(start_node, pace, tmp_path):
    nodes, finishes = {}, {}
    for wait in WAITS:
        fifo = str(tmp_path / wait.__name__)
        os.mkfifo(fifo)
        nodes[wait.__name__] = start_node()
        finishes[wait.__name__] = wait(nodes[wait.__name__], fifo)
    sessions = {name: node.server.processes() for name, node in nodes.items()}
    with ThreadPoolExecutor(len(WAITS)) as threads:
        start = time.monotonic()
        for node in list(nodes.values())[:-1]:
            node.cable.cut()
        futures = {name: threads.submit(error_of, finish) for name, finish in finishes.items()}
        try:
            wait_until(lambda: all(future.done() for future in futures.values()), pace.limit + SLACK, "all waits")
        finally:
            left = [name for name, future in futures.items() if not future.done()]
            if left:  # threads that failed to notice
                close_client()
    ended = {name: future.result() for name, future in futures.items()}
    # Who has not been connected yet may be told so by the limit of connecting.
    assert all(isinstance(error, (ConnectError, ConnectionLostError)) for error in ended.values()), (ended, left)
    assert "lost: its host no longer answers" in str(ended["change"])
    for name, pids in sessions.items():
        rest = start + pace.limit + SLACK - time.monotonic()
        wait_until(lambda pids=pids: not any(map(is_running, pids)), max(rest, 1.0), f"end of {name} on its node")
