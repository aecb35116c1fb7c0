"""Datasets find the rank of their trainer in the environment, wherever they are built and iterated over."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import pytest
import torch
import torch.distributed
from torch.utils.data import Dataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import close_client, wait_until
from tests.support.origins import run_ranks
from tests.support.tampering import Proxy

pytestmark = pytest.mark.usefixtures("clean_client")


def rank_here():
    return [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]


class Ranks(Dataset):
    """What the constructor sees, and what a worker sees."""

    def __init__(self):
        self.built = rank_here()

    def __getitem__(self, _index):
        return self.built, rank_here()


def seen_by(dataset, **options):
    (batch,) = RPCDataloader(dataset, batch_size=None, sampler=[0], collate_fn=list, **options)
    return batch


def see(address):
    dataset = RPCDataset(address, Ranks)
    return [*seen_by(dataset), *seen_by(Ranks(), workers=address), rpc_async(address, rank_here).wait()]


def test_ranks_on_one_node_server_each_see_their_own(serve, zygote):
    server = serve("--num-workers", "2", before='import os; os.environ.update(RANK="7", WORLD_SIZE="8")')
    for rank, seen in enumerate(run_ranks(zygote, see, 2, server.address)):
        # The instance that was sent was built by the trainer itself.
        assert seen == [[str(rank), "2"]] * 5


def test_rank_that_is_known_later_reaches_sessions_that_are_there(serve, monkeypatch):
    server = serve("--num-workers", "2")
    assert rpc_async(server.address, rank_here).wait() == ["0", "1"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert seen_by(RPCDataset(server.address, Ranks)) == [["1", "2"], ["1", "2"]]


def group_here():
    group = torch.distributed
    return [group.is_initialized(), group.is_initialized() and (group.get_rank(), group.get_world_size())]


class Groups(Dataset):
    """What ``torch.distributed`` tells the constructor, and a worker."""

    def __init__(self):
        self.built = group_here()

    def __getitem__(self, _index):
        return self.built, group_here()


@contextlib.contextmanager
def group_of(rank, world_size):
    """A process group as ``init_process_group`` makes it, without the other ranks."""
    torch.distributed.GroupMember.WORLD = torch.distributed.ProcessGroup(rank, world_size)
    try:
        yield
    finally:
        torch.distributed.GroupMember.WORLD = None


def test_process_group_of_the_trainer_tells_its_rank_in_workers(serve):
    address = serve("--num-workers", "3").address
    assert seen_by(RPCDataset(address, Groups)) == [[False, False], [False, False]]
    with group_of(1, 3):  # the session is there already
        in_group = [True, (1, 3)]
        assert seen_by(RPCDataset(address, Groups)) == [in_group, in_group]
        assert seen_by(Groups(), workers=address)[1] == in_group
    assert seen_by(RPCDataset(address, Groups)) == [[False, False], [False, False]]


def test_process_group_in_a_worker_connects_nothing(serve):
    with group_of(0, 2), pytest.raises((RuntimeError, ValueError)):
        rpc_async(serve("--num-workers", "2").address, torch.distributed.barrier).wait()


def test_worker_has_its_rank_however_late_its_session_hears_of_that(serve):
    """The first request to the session waits until a worker has answered, if one does."""
    has_answered = threading.Event()

    def hold(direction, connection, number, message):
        if (direction, connection, number) == ("up", 0, 2):
            has_answered.wait(0.5)
        elif (direction, connection) == ("down", 1):
            has_answered.set()
        return [message]

    with Proxy(serve("--num-workers", "1").address, hold) as proxy:
        assert rpc_async(proxy.address, rank_here).wait() == ["0", "1"]
        close_client()


class Noted(Dataset):
    """Notes the node server of each session in which it comes to be."""

    def __init__(self, log):
        self.log = log
        with open(log, "a") as file:
            print(os.getppid(), file=file)

    def __reduce__(self):
        return Noted, (self.log,)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("is_sent", [False, True])
def test_each_rank_builds_on_the_node_of_its_share_only(serve, tmp_path, monkeypatch, is_sent):
    servers = [serve("--num-workers", "2") for _ in range(2)]
    addresses = [server.address for server in servers]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, server in enumerate(servers):
        monkeypatch.setenv("RANK", str(rank))
        log = tmp_path / str(rank)
        dataset = Noted(str(log)) if is_sent else RPCDataset(addresses, Noted, str(log))
        loader = RPCDataloader(dataset, batch_size=None, **({"workers": addresses} if is_sent else {}))
        for _epoch in range(2):
            iterator = iter(loader)
            assert next(iterator) == 0
            looking = [thread for thread in threading.enumerate() if thread.name.startswith("rpcdl-seek")]
            wait_until(lambda looking=looking: not any(map(threading.Thread.is_alive, looking)), what="other nodes")
            assert list(iterator) == [*range(1, 20)]
        here = [str(os.getppid())] if is_sent else []
        assert log.read_text().split() == [*here, str(server.pid)]


def test_ranks_of_one_machine_divide_its_cpus(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():  # as torchrun does
        monkeypatch.setenv(name, value)
    num_cpus = len(os.sched_getaffinity(0))
    num_workers = max(1, num_cpus // 2)
    found = RPCDataloader([0], None, collate_fn=lambda _sample: get_worker_info().num_workers, workers="local")
    assert list(found) == [num_workers]
    said = f"[rank 1 of 2] local is {num_workers} workers: {num_cpus} CPUs are shared with the other ranks"
    assert num_cpus == 1 or said in caplog.text
