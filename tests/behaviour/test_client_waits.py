"""Waits of a client for nodes: what the script is told meanwhile, and that its signal handlers act at once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.__main__ import main
from rpcdataloader.client.client import get_client
from rpcdataloader.errors import RemoteProtocolError
from tests.conftest import AT_ONCE, TIMEOUT_SCALE, close_client
from tests.support import datasets, tasks
from tests.support.clocks import shorten
from tests.support.datasets import Gated, Numbers
from tests.support.programs import run_original, run_sshd, serve_files

pytestmark = pytest.mark.usefixtures("clean_client")


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
        with pytest.raises(TimeoutError, match=r"^the script has waited long enough$"):
            wait(server.address, fifo, closed_port)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < AT_ONCE


def start_build(address, fifo):
    assert len(RPCDataset(address, Numbers)) == 20  # the session
    RPCDataset(address, build, fifo)


# What is waited for; and what is said of it, again and again.
TOLD = {
    "closed": (lambda _address, _fifo, closed, _silent: RPCDataset(closed, Numbers), "{closed}: connection refused"),
    "call": (lambda _address, _fifo, closed, _silent: rpc_async(closed, int).wait(), "{closed}: connection refused"),
    "silent": (lambda _address, _fifo, _closed, silent: RPCDataset(silent, Numbers), "{silent}: no answer"),
    "one of two": (
        lambda address, _fifo, closed, _silent: RPCDataset(f"{address},{closed}", Numbers),
        "{closed}: connection refused",
    ),
    "too few": (
        lambda address, _fifo, closed, _silent: RPCDataset(f"{address},{closed}", Numbers, min_workers=100),
        "min_workers=100: 4 workers are there",
    ),
    "register": (lambda _address, fifo, _closed, _silent: RPCDataset(f"@{fifo}s", Numbers), "registered in {fifo}s"),
    "build": (
        lambda address, fifo, _closed, _silent: start_build(address, fifo),
        "dataset build, which is being built",
    ),
    "answer": (
        lambda address, fifo, _closed, _silent: RPCDataset(address, Asked).ask(fifo),
        "an answer of dataset Asked, which worker",
    ),
}


class Told(Exception):
    """Ends a wait of a test."""


@pytest.mark.parametrize("name", TOLD)
def test_any_wait_for_nodes_is_told_with_the_reason_and_told_again(
    server, closed_port, silent_port, fifo, monkeypatch, caplog, name
):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    close_client()  # it has read the variable
    shorten(monkeypatch, "told", "told again")
    monkeypatch.setattr("rpcdataloader.loader.placement.PATIENCE", 600)
    wait, text = TOLD[name]
    text = text.format(closed=closed_port, silent=silent_port, fifo=fifo)
    with ended_when_told(caplog, text):
        wait(server.address, fifo, closed_port, silent_port)


@contextlib.contextmanager
def ended_when_told(caplog, text):
    """A wait, which ends when it has been told three times with this text."""

    def look(_number, _frame):
        lines = [line for line in caplog.messages if line.startswith("still waiting after ") and text in line]
        if len(lines) >= 3:
            raise Told

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(Told):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("moment", ["first contact", "first pass", "workers of a node", "workers of this machine"])
def test_wait_for_room_for_a_thread_is_told_though_there_is_none_that_could(server, monkeypatch, caplog, moment):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    close_client()  # it has read the variable, and has threads
    shorten(monkeypatch, "told", "told again")
    workers = "local:2" if moment in ("first pass", "workers of this machine") else server.address
    dataset = RPCDataset(server.address, Numbers) if moment == "workers of a node" else Numbers()
    if moment == "workers of this machine":
        _ = get_client().janitor
    loader = RPCDataloader(dataset, None, workers=None if isinstance(dataset, RPCDataset) else workers)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with ended_when_told(caplog, "room for a thread"):
            list(loader)
    assert len(list(loader)) == len(Numbers())


@pytest.mark.parametrize("wait", [node, workers])
def test_nothing_is_said_of_a_wait_that_a_signal_handler_has_ended(
    server, closed_port, silent_port, fifo, monkeypatch, caplog, wait
):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "600")
    close_client()  # it has read the variable
    shorten(monkeypatch, "told", "told again")

    def lines(address):
        return [line for line in list(caplog.messages) if line.startswith("still waiting") and address in line]

    def interrupted(address, wait):
        def look(_number, _frame):
            if len(lines(address)) >= 3:
                raise Told

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            with pytest.raises(Told):
                wait(server.address, fifo, address)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    interrupted(closed_port, wait)
    count = len(lines(closed_port))
    interrupted(silent_port, node)  # of which three lines are told meanwhile
    assert len(lines(closed_port)) <= count + 1
    caplog.clear()
    interrupted(closed_port, wait)  # which is told again


def test_missing_node_is_left_out_with_its_reason(server, closed_port, monkeypatch, caplog):
    shorten(monkeypatch, "patience")
    assert len(RPCDataset(f"{server.address},{closed_port}", Numbers)) == 20
    assert f"going on without {closed_port} until it comes: connection refused" in caplog.text


# Other programs at the address of a node server


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (serve_files, "an HTTP server answers there"),
        (run_original, "a worker of the original RPCDataloader listens there"),
        (run_sshd, "an SSH server answers there"),
    ],
)
def test_another_program_is_named_at_once(other, name, capfd):
    with contextlib.ExitStack() as stack:
        address = "{}:{}".format(*other(stack))
        begin = time.monotonic()
        with pytest.raises(RemoteProtocolError, match=f"{address}: {name}"):
            RPCDataset(address, Numbers)
        assert time.monotonic() - begin < AT_ONCE
        close_client()
    if other is run_original:
        with contextlib.ExitStack() as stack:
            assert main(["status", "{}:{}".format(*other(stack))]) != 0
            assert name in capfd.readouterr().out
