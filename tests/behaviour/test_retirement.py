"""Workers that end after a number of batches (``--max-tasks-per-worker``): the script does not notice."""

from __future__ import annotations

import collections
import logging
import os
import signal
import time

import pytest
import torch
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, rpc_async
from rpcdataloader.errors import ConnectError, ConnectionLostError
from tests.support import tasks
from tests.support.datasets import Fields, FieldStream, StatefulFieldStream
from tests.support.quick import quick_server

pytestmark = pytest.mark.usefixtures("clean_client")

MAX_TASKS = 3
PREFETCH = 2  # the default of loaders


@pytest.fixture(scope="module")
def server(zygote):
    # As many connections as the loaders below have workers: each gets its place from the one before it.
    options = ["--num-workers", "2", "--max-connections", "2", "--max-tasks-per-worker", str(MAX_TASKS)]
    with quick_server(zygote, *options) as server:
        yield server
        assert "WARNING" not in server.log
        assert "Traceback" not in server.log


def loader_of(dataset, workers, **options):
    generator = torch.Generator().manual_seed(3)
    return RPCDataloader(dataset, batch_size=3, num_workers=2, workers=workers, generator=generator, **options)


@pytest.mark.parametrize(
    ("dataset", "persistent_workers"),
    [(Fields(48), True), (FieldStream(18, 3), False), (StatefulFieldStream(18, 3), True)],
    ids=lambda value: type(value).__name__,
)
def test_batches_are_the_same_when_workers_retire(server, shared_server, caplog, dataset, persistent_workers):
    caplog.set_level(logging.WARNING)
    epochs, pids = {}, []
    for address in (shared_server.address, server.address):
        loader = loader_of(dataset, address, persistent_workers=persistent_workers)
        epochs[address] = []
        # Another pass may come before the server has noticed that the workers of the last one have gone.
        for _epoch in range(1 + persistent_workers):
            batches = list(loader)
            epochs[address].append([batch[0].tolist() for batch in batches])
            pids = [batch[1].tolist() for batch in batches]
    del loader
    assert epochs[server.address] == epochs[shared_server.address]
    assert caplog.messages == []
    # It answers what it has received by then.
    makers = [batch[0] for batch in pids]
    assert all(set(batch) == {maker} for batch, maker in zip(pids, makers, strict=True))
    assert max(makers.count(maker) for maker in makers) <= MAX_TASKS + PREFETCH


class Leaky(Dataset):
    """Fails for some samples, and dies of one, once."""

    def __init__(self, marker):
        self.marker = marker

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 9 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if index in (3, 4):
            raise KeyError(index)
        return index


def test_worker_for_each_batch_is_no_death_and_a_death_is_still_one(serve, tmp_path, caplog):
    server = serve("--num-workers", "1", "--max-tasks-per-worker", "1")
    iterator = iter(RPCDataloader(Leaky(str(tmp_path / "marker")), workers=server.address, max_retries=2))
    seen, failed = [], []
    for _ in range(20):
        try:
            seen.append(int(next(iterator)))
        except KeyError as error:
            failed.append(error.args[0])
    assert (failed, seen) == ([3, 4], [0, 1, 2, *range(5, 20)])
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rpcdataloader.loader"]
    assert "was killed by SIGKILL" in message
    assert "another worker starts there" in message


def test_worker_that_serves_calls_does_not_retire(serve):
    server = serve("--max-tasks-per-worker", "1")
    held = rpc_async(server.address, list, ((1, 2),), rref=True).wait()
    pids = {rpc_async(server.address, tasks.whereabouts).wait() for _ in range(5)}
    assert len(pids) == 1
    assert rpc_async(server.address, len, (held,)).wait() == 2


@pytest.mark.usefixtures("impatient")  # what is asked for after the end waits for another server in its place
def test_drain_does_not_wait_for_a_client_that_always_wants_more(serve):
    """A worker answers what it has received when it is told, and not what is asked of it meanwhile."""
    server = serve("--num-workers", "1")
    # Longer than workers look the other way while they have something to do.
    futures = collections.deque(rpc_async(server.address, time.sleep, (0.002,)) for _ in range(4))
    futures[0].wait()
    server.signal(signal.SIGTERM)

    def go_on():
        for _ in range(2000):
            futures.append(rpc_async(server.address, time.sleep, (0.002,)))
            futures.popleft().wait()

    # The other one of a client that was not there for a moment, and sends nothing before the server has ended.
    with pytest.raises((ConnectionLostError, ConnectError), match=r"not begun this request|refused"):
        go_on()
    torch.futures.wait_all([future.then(lambda _: None) for future in futures])
    assert server.wait() == 0
    assert "still busy" not in server.log
