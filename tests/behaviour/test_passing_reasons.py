"""What passes by itself, such as a limit on processes that was reached for a moment, costs a pause and no training."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.client.discovery import ask_status
from rpcdataloader.errors import ConnectError, ConnectionLostError
from rpcdataloader.host.resources import process_use
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import load_credentials
from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.support.clocks import in_server, shorten
from tests.support.crew import wait_for_crew, workers_of
from tests.support.datasets import Filled, Numbers
from tests.support.peers import session_of
from tests.support.tampering import Proxy, dial

pytestmark = pytest.mark.usefixtures("clean_client")

# In the server: forks of its sessions fail while there is a file, and those of workers beyond a number at once.
LIMITED = """
import errno, os, threading
def limited(real, path=%r, most=%d, server=os.getpid()):
    def fork():
        if os.getpid() != server and (os.path.exists(path) or num_children() >= most):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()
    return fork
def num_children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return len(file.read().split())
os.fork = limited(os.fork)
"""

# The same for threads of workers.
WITHOUT_THREADS = """
import os, threading
def limited(real, path=%r):
    def start(self):
        if self.name == "rpcdl-watch" and os.path.exists(path):
            raise RuntimeError("can't start new thread")
        real(self)
    return start
threading.Thread.start = limited(threading.Thread.start)
"""


@pytest.fixture
def limit(tmp_path):
    """A file that makes the system full while it is there."""
    return tmp_path / "full"


def test_epoch_begins_while_no_process_can_be_forked(serve, limit, caplog):
    server = serve("--num-workers", "2", before=LIMITED % (str(limit), 99))
    loader = RPCDataloader(RPCDataset(server.address, Numbers, 8), None, reconnect_timeout=60)
    assert list(loader) == list(range(8))
    limit.touch()
    iterator = iter(loader)
    server.logged("WARNING .*no worker can be forked: Resource temporarily unavailable")
    why = "the node server cannot serve this connection now: no worker can be forked: Resource temporarily unavailable"
    wait_until(lambda: f"waiting for a worker: {server.address}: {why}" in caplog.text)
    limit.unlink()
    assert list(iterator) == list(range(8))


def test_error_of_a_pass_that_has_waited_in_vain_tells_the_reason(serve, limit, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "1")
    server = serve("--num-workers", "2", before=LIMITED % (str(limit), 0))
    with pytest.raises(ConnectError, match="no worker can be forked: Resource temporarily unavailable"):
        list(RPCDataloader(Numbers(8), None, workers=server.address, reconnect_timeout=2))


class Slow(Numbers):
    """The consumer waits for it: one that does not needs no further worker, and asks for none."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return index


def test_place_whose_worker_could_not_be_replaced_is_filled_in_mid_epoch(serve, limit, caplog):
    server = serve("--num-workers", "2", before=LIMITED % (str(limit), 99))
    iterator = iter(RPCDataloader(Slow(1000), None, workers=server.address, prefetch_factor=1))
    wait_for_crew(iterator, 2)
    limit.touch()
    os.kill(workers_of(iterator)[0].pid, signal.SIGKILL)
    wait_until(lambda: "going on with 1 of 2 workers" in caplog.text)
    limit.unlink()
    delivered = []
    while iterator.driver.engine.num_workers < 2 and len(delivered) < 900:
        delivered.append(next(iterator))
    assert 0 < len(delivered) < 900
    assert [*delivered, *iterator] == list(range(1000))


def test_node_with_room_for_some_of_its_workers_is_told_of_once(serve, limit, monkeypatch, caplog):
    monkeypatch.setattr("rpcdataloader.plan.crew.FIRST_FULL_PAUSE", 0.1)
    monkeypatch.setattr("rpcdataloader.plan.crew.MAX_FULL_PAUSE", 0.1)
    server = serve("--num-workers", "4", before=LIMITED % (str(limit), 2))
    iterator = iter(RPCDataloader(Slow(2000), None, workers=server.address, prefetch_factor=1))
    num_delivered = 0
    while iterator.driver.engine.crew._num_opened < 12 and num_delivered < 1900:
        num_delivered += next(iterator) is not None
    assert num_delivered < 1900
    assert iterator.driver.engine.num_workers == 2
    del iterator
    for _epoch in range(2):
        assert len(list(RPCDataloader(Numbers(64), None, workers=server.address))) == 64
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) <= 3, [record.getMessage() for record in told]
    assert len(re.findall("cannot|refused|no room|forked", server.log)) <= 2


def test_worker_that_has_no_room_for_its_threads_waits_for_it(serve, limit):
    server = serve("--num-workers", "2", before=WITHOUT_THREADS % str(limit))
    limit.touch()
    iterator = iter(RPCDataloader(Numbers(100), None, workers=server.address))
    wait_until(lambda: len([worker for worker in workers_of(iterator) if worker.number]) == 2)
    assert iterator.driver.engine.crew.num_deaths == 0
    limit.unlink()
    assert list(iterator) == list(range(100))


def test_training_process_without_descriptors_waits_for_one(serve, monkeypatch, caplog):
    server = serve("--num-workers", "2")
    loader = RPCDataloader(RPCDataset(server.address, Numbers, 8), None)
    assert list(loader) == list(range(8))
    with monkeypatch.context() as patch:
        error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        patch.setattr("rpcdataloader.wire.connecting._connect_socket", Mock(side_effect=error))
        iterator = iter(loader)
        wait_until(lambda: f"waiting for a worker: cannot connect to {server.address}: Too many" in caplog.text)
    assert list(iterator) == list(range(8))


@pytest.mark.parametrize("last", [0, 2], ids=["hello", "welcome"])
def test_connection_that_breaks_at_first_contact_is_made_again(shared_server, last):
    broken = []

    def tamper(direction, connection, number, frame):
        if direction == "down" and number == last and len(broken) < 3:
            broken.append(connection)
            raise EOFError
        return [frame]

    with Proxy(shared_server.address, tamper) as proxy:
        assert list(RPCDataloader(RPCDataset(proxy.address, Numbers, 8), None)) == list(range(8))
    assert len(broken) == 3


def test_first_contact_that_always_breaks_is_given_up_soon(shared_server):
    broken = []

    def tamper(direction, connection, number, frame):
        if (direction, number) == ("down", 0):
            broken.append(connection)
            raise EOFError
        return [frame]

    with (
        Proxy(shared_server.address, tamper) as proxy,
        pytest.raises(ConnectionLostError, match="closed the connection during the handshake"),
    ):
        RPCDataset(proxy.address, Numbers, 8)
    assert 1 < len(broken) < 12  # with those that ask whether it is the original's server


class Forking(Slow):
    """Its constructor needs another process, for which there is no room while there is a file."""

    def __init__(self, size, full, log):
        super().__init__(size)
        if os.path.exists(full):
            Path(log).touch()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_node_whose_dataset_cannot_be_built_for_a_moment_joins_when_it_can(serve, limit, tmp_path, monkeypatch):
    shorten(monkeypatch, "search")
    lost, other = [serve("--num-workers", "1") for _ in range(2)]
    dataset = RPCDataset([lost.address, other.address], Forking, 5000, str(limit), str(tmp_path / "tried"))
    iterator = iter(RPCDataloader(dataset, None, prefetch_factor=1))
    wait_for_crew(iterator, 2)
    limit.touch()
    lost.end(signal.SIGKILL)
    serve("--num-workers", "1", "--port", lost.address.rpartition(":")[2])
    while not (tmp_path / "tried").exists():
        next(iterator)
    limit.unlink()
    while iterator.driver.engine.num_workers < 2:
        next(iterator)


@pytest.mark.parametrize("has_other", [False, True])
def test_pass_begins_while_a_node_cannot_build_the_dataset_for_a_moment(
    serve, limit, tmp_path, monkeypatch, caplog, has_other
):
    shorten(monkeypatch, "search")
    servers = [serve("--num-workers", "1") for _ in range(1 + has_other)]
    log = tmp_path / "tried"
    dataset = RPCDataset([server.address for server in servers], Forking, 500, str(limit), str(log))
    loader = RPCDataloader(dataset, None, prefetch_factor=1)
    assert list(loader) == list(range(500))
    limit.touch()
    servers[0].end(signal.SIGKILL)
    server = serve("--num-workers", "1", "--port", servers[0].address.rpartition(":")[2])
    session_of(server.address).wait()  # so that the pass finds it there
    iterator = iter(loader)
    assert log.exists()
    assert (
        f"{server.address} has no room for dataset Forking: [Errno 11] Resource temporarily unavailable" in caplog.text
    )
    delivered = [next(iterator)] if has_other else []
    limit.unlink()
    assert [*delivered, *iterator] == list(range(500))


def test_first_build_without_room_is_an_error_at_once(serve, limit, tmp_path):
    server = serve("--num-workers", "1")
    limit.touch()
    with pytest.raises(BlockingIOError):
        RPCDataset(server.address, Forking, 8, str(limit), str(tmp_path / "tried"))


LATE_SESSIONS = """
import os
def late(real, path=%r):
    return lambda *args: not os.path.exists(path) and real(*args)
clients.Clients._offer = late(clients.Clients._offer)
"""


def test_worker_whose_session_is_late_is_not_refused_as_a_stranger(serve, limit):
    server = serve(before=LATE_SESSIONS % str(limit) + "node.PROOF_TIMEOUT = 0.3")
    session_of(server.address).wait()
    limit.touch()
    call = rpc_async(server.address, os.getpid)
    wait_until(lambda: session_of(server.address).workers)
    with dial(server.address) as stranger:
        server.logged("refused .*no handshake within 0.3 s")
        assert not stranger.recv(1)
    with dial(server.address) as stranger:  # which came later
        assert not stranger.recv(1)
    limit.unlink()
    assert call.wait() in server.processes()
    assert server.log.count("no handshake") == 1  # a line per cause


def test_idle_workers_of_several_loaders_leave_room_for_others_without_a_word(serve, caplog):
    """One loader for training and four for validation, whose persistent workers stay between their epochs."""
    addresses = [serve("--num-workers", "2").address for _ in range(2)]
    loaders = [
        RPCDataloader(Named(32, name), 8, workers=addresses, persistent_workers=True)
        for name in ("train", "clean", "noisy", "small", "large")
    ]
    for _epoch in range(2):
        assert [len(list(loader)) for loader in loaders] == [4] * 5
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class Named(Numbers):
    """Each a dataset of its own."""

    def __init__(self, size, name):
        super().__init__(size)
        self.name = name


def test_idle_persistent_worker_gives_back_the_memory_of_its_batches(serve):
    server = serve("--num-workers", "1", before=in_server("idle"))
    loader = RPCDataloader(Filled(24, 8 << 20), 4, workers=server.address, persistent_workers=True, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    (worker,) = workers_of(iterator)
    before = process_use(worker.pid).memory_bytes
    assert sum(1 for _ in iterator) == 5
    wait_until(lambda: process_use(worker.pid).memory_bytes < before - (16 << 20))
    assert sum(1 for _ in loader) == 6


WITHOUT_MEMORY_FILES = """
import errno, os
from rpcdataloader.wire import memory
from rpcdataloader.server import status
def refuse(_name):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
memory.memory_file = status.memory_file = refuse
"""


def test_node_where_files_in_memory_are_forbidden_serves_as_ever(serve, tmp_path):
    server = serve("--host", f"unix:{tmp_path}/socket", "--num-workers", "1", before=WITHOUT_MEMORY_FILES)
    iterator = iter(RPCDataloader(Filled(6, 1 << 20), 1, workers=server.address))
    assert [int(batch[0, 0]) for batch in iterator] == list(range(6))
    rpc_async(server.address, time.sleep, (600,), timeout=None)

    def stacks():
        node, _channel = ask_status(
            Address.parse(server.address), load_credentials(), None, Deadline(60 * TIMEOUT_SCALE), stacks=True
        )
        return [worker.stack for client in node.clients for worker in client.workers]

    wait_until(lambda: any("Main thread (most recent call first):" in stack for stack in stacks()))


def test_worker_without_room_for_the_thread_that_sends_sends_itself(serve):
    server = serve(before=WITHOUT_THREADS.replace("rpcdl-watch", "rpcdl-send") % os.devnull)
    batches = [batch[0, 0].item() for batch in RPCDataloader(Filled(6, 1 << 16), batch_size=1, workers=server.address)]
    assert batches == [0, 1, 2, 3, 4, 5]
