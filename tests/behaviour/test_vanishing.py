"""Hosts that vanish without a word are noticed. One that answers for a process that is stopped is waited for: see
``tests/unit/wire/test_transport.py``.

The tests have networks of their own. Most of them let keep-alive be as fast as the kernel allows (its unit is a
second); those marked slow wait for the real time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time

import pytest
import torch
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import ConnectError, ConnectionLostError
from tests.behaviour.test_recovery import take
from tests.conftest import TIMEOUT_SCALE, close_client, is_running, wait_until
from tests.support.clocks import REAL_KEEPALIVE, KeepAlive, shorten
from tests.support.datasets import Filled, Gated, Hosted
from tests.support.network import Network, deafen, drop_incoming, why_not
from tests.support.peers import session_of
from tests.support.quick import quick_server

pytestmark = pytest.mark.usefixtures("clean_client")


FAST = KeepAlive(1, 1, 2, 0.2)

# Seconds that a busy machine may take beyond that.
SLACK = 20.0 * TIMEOUT_SCALE


# What a trainer waits for. Each is prepared while its node is there, and gives what is done when that has vanished.


def batch_that_is_computed(address, _cable, fifo):
    iterator = iter(RPCDataloader(Gated(10, 0, fifo), workers=address, reconnect_timeout=0))
    writer = os.open(fifo, os.O_WRONLY)  # it has begun

    def finish():
        try:
            next(iterator)
        finally:
            os.close(writer)

    return finish


def batch_that_is_received(address, cable, _fifo):
    before = cable.received_bytes
    # More than the kernel keeps for a connection.
    iterator = iter(RPCDataloader(Filled(10, 2**28), workers=address, num_workers=1, reconnect_timeout=0))
    wait_until(lambda: cable.received_bytes - before > 2**24, 30, "a part of the batch")
    cable.cut()
    assert cable.received_bytes - before < 2**28
    return lambda: next(iterator)


def call_that_is_not_delivered(address, _cable, _fifo):
    rpc_async(address, os.getpid).wait()
    return lambda: rpc_async(address, os.getpid).wait()


def call_whose_worker_dies(address, _cable, _fifo):
    """On the node, that is; its session tells the client, and so has something unacknowledged under way."""
    pid = rpc_async(address, os.getpid).wait()

    def finish():
        os.kill(pid, signal.SIGKILL)
        rpc_async(address, os.getpid).wait()

    return finish


def first_batch(address, _cable, _fifo):
    """The worker for it cannot be reached any more."""
    dataset = RPCDataset(address, Hosted)
    return lambda: next(iter(RPCDataloader(dataset, reconnect_timeout=0)))


def change(address, _cable, _fifo):
    """Goes to the session itself, whose connection the others rely upon."""
    dataset = RPCDataset(address, Hosted)
    return lambda: dataset.call_all(len)


def large_build(address, _cable, _fifo):
    RPCDataset(address, Hosted)
    return lambda: RPCDataset(address, len, torch.zeros(2**22))


WAITS = [
    batch_that_is_computed,
    call_that_is_not_delivered,
    call_whose_worker_dies,
    first_batch,
    change,
    large_build,
    batch_that_is_received,
]


needs_networks = pytest.mark.skipif(bool(reason := why_not()), reason=f"no networks of our own: {reason}")


@contextlib.contextmanager
def node_on(network, zygote, pace):
    """A node server on a host of its own, and the cable to that."""
    host, cable = network.add()
    options = ("--host", cable.address, "--num-workers", "1")
    with quick_server(zygote, *options, before=f"{host.move_in}\n{pace.statement}") as server:
        yield server, cable


@needs_networks
@pytest.mark.parametrize("pace", [FAST, pytest.param(REAL_KEEPALIVE, marks=pytest.mark.slow)], ids=["fast", "real"])
@pytest.mark.parametrize("wait", WAITS)
def test_host_that_vanishes_is_noticed_during_any_wait(zygote, monkeypatch, wait, pace, fifo):
    pace.use(monkeypatch)
    with (
        contextlib.closing(Network()) as network,
        network.trainer.entered(),
        node_on(network, zygote, pace) as (server, cable),
    ):
        finish = wait(server.address, cable, fifo)
        pids = server.processes()
        cable.cut()
        start = time.monotonic()
        # Who has not been connected yet may be told so by the limit of connecting.
        with pytest.raises((ConnectError, ConnectionLostError)):
            finish()
        wait_until(lambda: not any(map(is_running, pids)), pace.limit + SLACK, "the end of its session")
        assert time.monotonic() - start < pace.limit + SLACK
        close_client()


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(10**6))


class Deafened(IterableDataset):
    """Its worker hears nothing more once it is at sample 12, the first time."""

    def __init__(self, flag):
        self.flag = flag

    def __iter__(self):
        for index in range(40):
            if index == 12 and not self.flag.exists():
                self.flag.touch()
                deafen()
            yield index


def test_stream_goes_on_when_the_connection_of_its_worker_dies_alone(zygote, monkeypatch, caplog, tmp_path):
    FAST.use(monkeypatch)
    with quick_server(zygote, "--num-workers", "1", before=FAST.statement) as server:
        loader = RPCDataloader(Deafened(tmp_path / "flag"), batch_size=4, workers=server.address)
        start = time.monotonic()
        assert torch.equal(torch.cat(list(loader)), torch.arange(40))
        assert time.monotonic() - start < FAST.limit + SLACK
        assert re.search(
            r"worker 1 \(pid \d+\) on \S+ was ended: its connection no longer carries data, though its node answers; "
            "another worker starts there",
            caplog.text,
        )
        close_client()


def test_session_that_has_ended_behind_a_cut_is_made_again_at_once(zygote, caplog):
    """Its workers are refused, while the control connection still waits for a packet to be sent again."""
    with quick_server(zygote, "--num-workers", "2") as server:
        loader = RPCDataloader(Hosted(500), batch_size=None, workers=server.address, prefetch_factor=1)
        iterator = iter(loader)
        begun = [index for index, _pid in itertools.islice(iterator, 10)]
        session = session_of(server.address)
        drop_incoming(session.connection._channel.transport._sock)
        os.kill(session.welcome.pid, signal.SIGKILL)
        start = time.monotonic()
        assert begun + [index for index, _pid in iterator] == list(range(500))
        assert time.monotonic() - start < SLACK
        assert f"{server.address}: the node server refused this connection: there is no such session" in caplog.text
        assert f"{server.address} is back" in caplog.text
        close_client()


def test_path_that_drops_large_packets_ends_the_worker_behind_it(zygote, monkeypatch, caplog):
    """Replies are lost, while all that is small goes through: only the worker can see this."""
    FAST.use(monkeypatch)
    with quick_server(zygote, "--num-workers", "1", before=FAST.statement) as server:
        iterator = iter(RPCDataloader(Filled(8, 2**18), batch_size=1, num_workers=1, workers=server.address))
        received = [int(next(iterator)[0, 0])]
        (worker,) = session_of(server.address).workers
        drop_incoming(worker.connection._channel.transport._sock, above=1000)
        start = time.monotonic()
        received += [int(batch[0, 0]) for batch in iterator]
        assert received == [*range(8)]
        assert time.monotonic() - start < FAST.limit + SLACK
        assert re.search("worker 1 .* gave up: its connection no longer carries data; another worker", caplog.text)
        server.logged("worker 1 of .* gave up: its connection no longer carries data")
        close_client()


@needs_networks
def test_loop_that_waits_for_a_node_that_is_cut_off_alone_says_so_before_that_is_lost(zygote, monkeypatch, caplog):
    FAST.use(monkeypatch)
    shorten(monkeypatch, "long wait")
    with (
        contextlib.closing(Network()) as network,
        network.trainer.entered(),
        node_on(network, zygote, FAST) as (one, cable),
        node_on(network, zygote, FAST) as (other, _cable),
    ):
        iterator = iter(RPCDataloader(Counting(), batch_size=4, workers=[one.address, other.address]))
        for _ in range(8):
            next(iterator)
        caplog.clear()
        cable.cut()
        wait_until(lambda: next(iterator) is not None and "going on with 1 of 2" in caplog.text, what="the loss")
        told = rf"the loop has waited \d+ s for batch \d+.*, which is at worker 1 \(pid \d+\) on {one.address} "
        assert re.search(told, caplog.text[: caplog.text.index("going on")])
        close_client()


@needs_networks
def test_epoch_goes_on_elsewhere_and_takes_a_host_in_again_that_comes_back(zygote, monkeypatch, caplog):
    FAST.use(monkeypatch)
    with (
        contextlib.closing(Network()) as network,
        network.trainer.entered(),
        node_on(network, zygote, FAST) as (one, cable),
        node_on(network, zygote, FAST) as (other, _cable),
    ):
        iterator, indices = iter(RPCDataloader(Hosted(10**6), workers=[one.address, other.address])), []

        def servers_of_next():
            more, pids = take(iterator, 20)
            indices.extend(more)
            return pids

        wait_until(lambda: servers_of_next() == {one.pid, other.pid}, what="batches of both nodes")
        cable.cut()
        wait_until(lambda: servers_of_next() and "going on with 1 of 2" in caplog.text, what="the loss of a node")
        assert servers_of_next() == {other.pid}
        cable.mend()
        wait_until(lambda: servers_of_next() == {one.pid, other.pid}, what="the return of a node")
        assert indices == [*range(len(indices))]
        assert caplog.text.count("is back") == 1
        close_client()
