"""At their end, sessions and workers let user code clean up, within a time limit; programs end with them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import RPCTimeoutError
from tests.conftest import TIMEOUT_SCALE, close_client, is_running, occupied, wait_until
from tests.support.clocks import in_server
from tests.support.crew import workers_of
from tests.support.datasets import Numbers
from tests.support.peers import session_of

TRAINING = """
import atexit, os, sys, tempfile, time
from pathlib import Path
from rpcdataloader import RPCDataloader, RPCDataset

class Lock:
    def __init__(self, path):
        self.path = path
        path.touch()

    def __del__(self):
        self.path.unlink()

class Cached:
    def __init__(self, folder, seconds):
        self.cache = tempfile.TemporaryDirectory(dir=folder)
        self.lock = Lock(Path(folder, "lock"))
        lasting = Path(folder, "lasting")
        lasting.touch()
        atexit.register(lasting.unlink)
        atexit.register(time.sleep, float(seconds))  # before the others

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.path.isdir(self.cache.name) and self.lock.path.exists()

workers, folder, seconds = sys.argv[1:]
dataset = RPCDataset(workers, Cached, folder, seconds)
for _epoch in range(2):
    assert all(map(all, RPCDataloader(dataset, num_workers=2, batch_size=2)))
assert len(os.listdir(folder)) == 3
"""


@pytest.mark.parametrize("pool", ["server", "local:2"])
def test_temporary_files_of_a_dataset_go_with_the_training(zygote, shared_server, tmp_path, pool):
    workers = shared_server.address if pool == "server" else pool
    ended = zygote.start(TRAINING, workers, tmp_path, 0, ends_quickly=True).wait(60)
    assert (ended.status, ended.errors) == (0, "")
    wait_until(lambda: not os.listdir(tmp_path), what="the end of the session")


def test_session_that_does_not_come_to_its_end_is_ended(zygote, serve, tmp_path):
    server = serve(before=in_server("end of a session"))
    ended = zygote.start(TRAINING, server.address, tmp_path, 1000, ends_quickly=True).wait(60)
    assert (ended.status, ended.errors) == (0, "")
    wait_until(lambda: not server.processes(), what="the end of the session")
    assert (tmp_path / "lasting").exists()


CALLER = """
import atexit, multiprocessing, os, sys, tempfile, time
from pathlib import Path
from rpcdataloader import run_worker

folder = sys.argv[1]
cache = tempfile.TemporaryDirectory(dir=folder)
atexit.register(Path(folder, "ended").touch)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
child.start()
print(child.pid, flush=True)
run_worker(f"unix:{folder}/socket", 0)
"""


def test_session_leaves_what_the_caller_of_run_worker_will_clean_up(zygote, tmp_path, monkeypatch):
    data, place = tmp_path / "data", tmp_path / "caller"
    data.mkdir()
    place.mkdir()
    caller = zygote.start(CALLER, place)
    try:
        monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(30 * TIMEOUT_SCALE))
        ended = zygote.start(TRAINING, f"unix:{place}/socket", data, 0, ends_quickly=True).wait(60)
        assert (ended.status, ended.errors) == (0, "")
        wait_until(lambda: not os.listdir(data), what="the end of the session")
        wait_until(lambda: len(occupied(caller.pid)) == 0, what="the end of its processes")
        assert is_running(int(caller.output))
        assert len(os.listdir(place)) == 2  # the socket, and the cache
    finally:
        os.kill(caller.pid, signal.SIGTERM)
        assert caller.wait().status == 0
    assert os.listdir(place) == ["ended"]


class Opened(IterableDataset):
    """Closes its files when its iterator goes."""

    is_closed = False

    def __iter__(self):
        try:
            yield from range(9)
        finally:
            self.is_closed = True


@pytest.mark.parametrize("workers", [None, "inline"])
def test_stream_that_the_loop_leaves_in_this_process_is_closed_at_once(workers):
    dataset = Opened()
    loader = RPCDataloader(dataset, 2, workers=workers)
    for _batch in loader:
        break
    assert dataset.is_closed


# Workers


class Unpacked(IterableDataset):
    """Unpacks into a folder of each stream, and writes a log, to a buffered file."""

    def __init__(self, folder, seconds=0.0):
        self.folder = folder
        self.seconds = seconds

    def __iter__(self):
        stream = get_worker_info().id
        with tempfile.TemporaryDirectory(dir=self.folder), open(f"{self.folder}/log-{stream}", "w") as log:
            try:
                for number in range(1000):
                    log.write(f"{number}\n")
                    yield number
            finally:
                time.sleep(self.seconds)


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_streams_that_the_loop_leaves_clean_up(shared_server, tmp_path, persistent_workers):
    dataset = RPCDataset(shared_server.address, Unpacked, str(tmp_path))
    loader = RPCDataloader(dataset, 5, num_workers=2, persistent_workers=persistent_workers)
    for _epoch in range(2):
        iterator = iter(loader)
        assert len([next(iterator) for _ in range(2)]) == 2  # one of each stream
        del iterator
    del loader, dataset
    close_client()
    logs = ["log-0", "log-1"]
    wait_until(lambda: sorted(os.listdir(tmp_path)) == logs, what=lambda: f"{os.listdir(tmp_path)} {shared_server.log}")
    for stream in range(2):
        assert (tmp_path / f"log-{stream}").read_text().startswith("0\n1\n")


@pytest.mark.usefixtures("clean_client")
def test_worker_that_does_not_come_to_its_end_is_ended(serve, tmp_path):
    server = serve("--num-workers", "1", before=in_server("end of a worker"))
    iterator = iter(RPCDataloader(RPCDataset(server.address, Unpacked, str(tmp_path), 1000.0), 5, num_workers=1))
    next(iterator)
    (worker,) = workers_of(iterator)
    del iterator
    server.logged("worker 1 of .*its end.* took too long")
    assert not is_running(worker.pid)


class Scratch(Numbers):
    """Has a folder, a file that goes with it, and one that goes with its process."""

    def __init__(self, folder):
        super().__init__(8)
        self.folder = tempfile.TemporaryDirectory(dir=folder)
        self.file = Path(folder, f"file-{os.getpid()}")
        self.file.touch()
        lasting = Path(folder, f"lasting-{os.getpid()}")
        lasting.touch()
        atexit.register(lasting.unlink)

    def __getitem__(self, index):
        assert os.path.isdir(self.folder.name)
        return index

    def __del__(self):
        self.file.unlink()


@pytest.mark.usefixtures("clean_client")
def test_datasets_that_workers_have_built_clean_up(shared_server, tmp_path):
    dataset = RPCDataset(shared_server.address, Scratch, str(tmp_path), build="worker")
    for _epoch in range(2):
        assert list(RPCDataloader(dataset, None, num_workers=2)) == list(range(8))
    del dataset
    close_client()
    wait_until(lambda: not os.listdir(tmp_path), what=lambda: str(os.listdir(tmp_path)))


@pytest.mark.usefixtures("clean_client")
def test_datasets_that_workers_have_inherited_stay(shared_server, tmp_path):
    dataset = RPCDataset(shared_server.address, Scratch, str(tmp_path))
    for _epoch in range(3):
        assert list(RPCDataloader(dataset, None, num_workers=2)) == list(range(8))
    assert len(os.listdir(tmp_path)) == 3
    close_client()
    wait_until(lambda: not os.listdir(tmp_path), what=lambda: str(os.listdir(tmp_path)))


# Programs


def start_program(folder):
    """A program that has started another one, whose number it has written down."""
    script = f"sleep 1000 & echo $! > {folder}/part-{os.getpid()}; mv {folder}/part-* {folder}/program; wait"
    subprocess.Popen(["sh", "-c", script])


def run_program(folder):
    start_program(folder)
    os.wait()


def program_of(folder):
    """Wait for the program."""
    wait_until((folder / "program").exists)
    return int((folder / "program").read_text())


class Hanging(Numbers):
    def __init__(self, folder):
        super().__init__(8)
        self.folder = folder

    def __getitem__(self, index):
        run_program(self.folder)
        return index


@pytest.mark.usefixtures("clean_client")
def test_programs_end_with_a_worker_that_takes_too_long(shared_server, tmp_path):
    dataset = RPCDataset(shared_server.address, Hanging, str(tmp_path))
    loader = RPCDataloader(dataset, None, num_workers=1, task_timeout=1, max_retries=1)
    with pytest.raises(RPCTimeoutError):
        next(iter(loader))
    program = program_of(tmp_path)
    wait_until(lambda: not is_running(program))


@pytest.mark.parametrize(
    ("by", "killed"),
    [
        ("session", "session"),
        ("session", "node server"),
        ("worker", "worker"),
        ("worker", "session"),
        ("worker", "node server"),
        ("worker", None),
    ],
)
def test_programs_end_with_whatever_is_killed_above_them_and_with_their_client(serve, tmp_path, by, killed):
    server = serve("--num-workers", "1")
    session = session_of(server.address)
    if by == "session":
        session.call(start_program, str(tmp_path)).wait()
    else:
        rpc_async(server.address, run_program, args=(str(tmp_path),), timeout=None)
    program = program_of(tmp_path)
    assert is_running(program)
    pids = {"node server": server.pid, "session": session.wait().pid}
    if killed == "worker":
        (pids["worker"],) = (worker.pid for worker in session.workers)
    if killed is None:
        close_client()
    else:
        os.kill(pids[killed], signal.SIGKILL)
    wait_until(lambda: not is_running(program))


WITH_PROGRAM = """
import sys
from rpcdataloader import RPCDataloader, RPCDataset
from tests.behaviour.test_clean_up import Hanging, start_program

dataset = RPCDataset("local:1", Hanging, sys.argv[1])
if sys.argv[2] == "session":
    dataset._access.local.current.call(start_program, sys.argv[1]).wait()
next(iter(RPCDataloader(dataset, None, num_workers=1)))
"""


@pytest.mark.parametrize("by", ["session", "worker"])
def test_programs_end_with_a_training_that_is_killed(zygote, tmp_path, by):
    training = zygote.start(WITH_PROGRAM, str(tmp_path), by)
    program = program_of(tmp_path)
    assert is_running(program)
    os.kill(training.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(program))


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize("by", ["session", "worker"])
def test_programs_end_with_a_session_of_this_machine_that_is_killed(by, tmp_path):
    dataset = RPCDataset("local:1", Hanging, str(tmp_path))
    session = dataset._access.local.current
    if by == "session":
        session.call(start_program, str(tmp_path)).wait()
    else:
        batches = iter(RPCDataloader(dataset, None, num_workers=1))  # it asks for some
        session = next(other for other in dataset._access._sessions if other is not session)
    program = program_of(tmp_path)
    assert is_running(program)
    os.kill(session.wait().pid, signal.SIGKILL)
    wait_until(lambda: not is_running(program))
    batches = None  # noqa: F841  the next session has begun, perhaps
