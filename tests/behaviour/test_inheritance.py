"""What workers inherit from the session that has built their dataset, and what they must not share."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import socket
import subprocess
import threading
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


class Hooked(Numbers):
    """Whose samples are True in a process that has called the hooks of multiprocessing after its fork."""

    def __init__(self) -> None:
        super().__init__(4)
        self.is_fresh = False
        multiprocessing.util.register_after_fork(self, Hooked.begin)

    def begin(self) -> None:
        self.is_fresh = True

    def __getitem__(self, index: int) -> bool:
        return self.is_fresh


def test_hooks_of_multiprocessing_are_called_in_workers(shared_server):
    """Otherwise, all workers would talk over one connection to a Manager."""
    dataset = RPCDataset(shared_server.address, Hooked)
    assert all(map(all, RPCDataloader(dataset, batch_size=2)))


class Processes(IterableDataset[Any]):
    """What multiprocessing says of each worker."""

    def __iter__(self) -> Any:
        process: Any = multiprocessing.current_process()
        yield process.name, process._identity, process.pid == os.getpid(), process.is_alive()


@pytest.mark.parametrize("place", ["node server", "this machine"])
def test_workers_are_processes_of_multiprocessing_with_numbers_of_their_own(place, shared_server):
    options: dict[str, Any] = {"workers": shared_server.address} if place == "node server" else {}
    loader = RPCDataloader(Processes(), batch_size=None, collate_fn=tuple, num_workers=2, **options)
    names, identities, *facts = zip(*loader, strict=True)
    assert len(set(names)) == len(set(identities)) == 2
    assert all(name == f"Process-{number}" for name, (number,) in zip(names, identities, strict=True))
    assert facts == [(True, True)] * 2


_kept: list[Any] = []  # as a library keeps connections


class Connected(Numbers):
    """Has one connection, or two ends of one."""

    def __init__(self, path: str, keeper: str) -> None:
        super().__init__(4)
        self.queue: Any = multiprocessing.Queue()  # made to be shared
        self.unconnected = socket.socket()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        match keeper:
            case "dataset":
                self.connection = connection
            case "file":
                self.file = connection.makefile()
            case "pair":
                self.pair = socket.socketpair()
            case "program":
                self.program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            case "library":
                _kept.append(connection)
            case "cycle":
                cycle: list[Any] = [connection]
                cycle.append(cycle)


@pytest.mark.parametrize("keeper", ["dataset", "file", "pair", "program", "library", "cycle"])
def test_workers_share_no_connection_that_the_dataset_holds_and_others_are_named(serve, tmp_path, caplog, keeper):
    path, server = str(tmp_path / "database"), serve("--num-workers", "1")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        RPCDataset(server.address, Connected, path, keeper)
    texts = "\n".join(record.getMessage() for record in caplog.records)
    assert (f"share the connections of dataset Connected to {path}," in texts) == (keeper == "library")
    assert ("it holds a connection or a pipe" in texts) == (keeper not in ("library", "cycle"))


class Threaded(Numbers):
    def __init__(self, name: str) -> None:
        super().__init__(4)
        threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()


def test_threads_of_a_session_that_forks_are_named_once(serve, caplog):
    dataset = RPCDataset(serve("--num-workers", "2").address, Threaded, "reads ahead")
    for _epoch in range(2):
        assert len(list(RPCDataloader(dataset))) == 4
    texts = [record.getMessage() for record in caplog.records]
    assert ["a session that has threads of its own (reads ahead)" in text for text in texts] == [True]


class Length(Numbers):
    def __init__(self, data: bytes) -> None:
        super().__init__(len(data) >> 20)

    def __getitem__(self, index: int) -> int:
        return os.getppid()


def own_bytes(session: int) -> int:
    with open(f"/proc/{session}/statm") as file:
        _size, resident, of_files, *_rest = map(int, file.read().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def test_arguments_of_a_shared_dataset_do_not_stay(shared_server):
    session = RPCDataset(shared_server.address, Length, bytes(1 << 20))[0]
    before = own_bytes(session)
    dataset = RPCDataset(shared_server.address, Length, os.urandom(64 << 20))
    wait_until(lambda: own_bytes(session) < before + (32 << 20), what="the end of the argument")
    assert dataset[0] == session


class Filled(Numbers):
    """Is in a cycle, with an array that is just small enough for the heap."""

    def __init__(self, values: Any) -> None:
        super().__init__(4)
        self.values, self.itself = values, self


def test_memory_of_datasets_that_are_gone_goes_back(serve):
    witness = RPCDataset(address := serve("--num-workers", "1").address, Length, bytes(1 << 20))
    before = own_bytes(session := witness[0])
    for number in range(10):
        dataset = RPCDataset(address, Filled, np.full(4_000_000, float(number)))
        assert len(list(RPCDataloader(dataset, batch_size=4))) == 1
        del dataset
    wait_until(lambda: own_bytes(session) < before + (48 << 20), what="the end of the datasets")
