"""At the end of a training, sessions let their datasets clean up after themselves, within a time limit."""

from __future__ import annotations

import os
import signal

import pytest
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader
from tests.conftest import TIMEOUT_SCALE, is_running, occupied, wait_until
from tests.support.clocks import in_server

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
