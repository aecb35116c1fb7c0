"""Waits of a client for nodes: what the script is told meanwhile, and that its signal handlers act at once."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import AT_ONCE, TIMEOUT_SCALE, close_client
from tests.support import datasets, tasks
from tests.support.datasets import Gated, Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def closed_port():
    """An address where no server listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*sock.getsockname())


class Asked(Numbers):
    def ask(self, fifo):
        datasets.wait_for(fifo)


def build(fifo):
    datasets.wait_for(fifo)
    return Numbers()


# What a script waits for, without an end.


def answer_of_a_call(address, fifo, _closed):
    rpc_async(address, tasks.read_all, (fifo,), timeout=None).wait()


def chain_of_a_call(address, fifo, _closed):
    rpc_async(address, tasks.read_all, (fifo,), timeout=None).then(lambda done: done.wait()).wait()


def build_of_a_dataset(address, fifo, _closed):
    RPCDataset(address, build, fifo)


def answer_of_a_dataset(address, fifo, _closed):
    RPCDataset(address, Asked).ask(fifo)


def batch(address, fifo, _closed):
    next(iter(RPCDataloader(Gated(4, 0, fifo), workers=address)))


def node(_address, _fifo, closed):
    RPCDataset(closed, Numbers)


def call_to_a_node(_address, _fifo, closed):
    rpc_async(closed, int, timeout=None).wait()


def workers(address, _fifo, closed):
    RPCDataset(f"{address},{closed}", Numbers, min_workers=100)


def register(_address, fifo, _closed):
    RPCDataset(f"@{fifo}", Numbers)


WAITS = [
    answer_of_a_call,
    answer_of_a_dataset,
    batch,
    build_of_a_dataset,
    call_to_a_node,
    chain_of_a_call,
    node,
    register,
    workers,
]


@pytest.mark.parametrize("wait", WAITS)
def test_exception_of_a_signal_handler_of_the_script_comes_out_of_any_wait_at_once(
    server, closed_port, fifo, wait, monkeypatch
):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    close_client()  # it has read the variable

    def handle(_number, _frame):
        raise TimeoutError("the script has waited long enough")

    before = signal.signal(signal.SIGALRM, handle)
    begin = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5 * TIMEOUT_SCALE)
    try:
        with pytest.raises(TimeoutError, match="^the script has waited long enough$"):
            wait(server.address, fifo, closed_port)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < AT_ONCE
