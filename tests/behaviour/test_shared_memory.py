"""Batches of workers on the trainer's own machine: in memory that both see, and whole whatever happens to either."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import re
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectionLostError, RPCError
from tests.conftest import wait_until
from tests.support.crew import wait_for_crew, workers_of
from tests.support.datasets import Filled
from tests.support.devices import plug_in

pytestmark = pytest.mark.usefixtures("clean_client")

MIB = 1 << 20
SAMPLE_BYTES = MIB // 4
BATCH_SIZE = 4


class Images(Filled):
    """The worker of one may die."""

    def __init__(self, size=24, sample_bytes=SAMPLE_BYTES, deadly=None):
        super().__init__(size, sample_bytes)
        self.deadly = deadly

    def __getitem__(self, index):
        if self.deadly is not None and index == 13 and not os.path.exists(self.deadly):
            Path(self.deadly).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def as_dict(samples):
    return {"images": default_collate(samples), "array": np.stack([sample.numpy() for sample in samples])}


@pytest.fixture
def workers(unix_server):
    return unix_server.address


def expected(number, size=BATCH_SIZE):
    return [(number * size + i) % 256 for i in range(size)]


def first_bytes(batch):
    values = batch[:, 0].tolist()
    assert values == batch[:, -1].tolist() == batch[:, 1000].tolist()
    return values


def is_shared(memory):
    """Whether a tensor or an array lies in a worker's memory."""
    address = memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.ctypes.data
    for start, end in re.findall(r"^(\w+)-(\w+) .*memfd:rpcdataloader", Path("/proc/self/maps").read_text(), re.M):
        if int(start, 16) <= address < int(end, 16):
            return True
    return False


def num_mappings():
    return Path("/proc/self/maps").read_text().count("memfd:rpcdataloader")


def test_large_batches_are_in_memory_of_the_worker(workers):
    batches = list(RPCDataloader(Images(), BATCH_SIZE, workers=workers))
    assert [first_bytes(batch) for batch in batches] == [expected(number) for number in range(6)]
    # The first one of each worker may have been made before the trainer had mapped its memory.
    assert sum(map(is_shared, batches)) >= 2
    assert not any(map(is_shared, RPCDataloader(Images(sample_bytes=100), BATCH_SIZE, workers=workers)))


def test_what_a_users_function_makes_is_in_memory_of_the_worker(workers):
    batches = list(RPCDataloader(Images(), BATCH_SIZE, workers=workers, collate_fn=as_dict))
    for number, batch in enumerate(batches):
        assert first_bytes(batch["images"]) == first_bytes(batch["array"]) == expected(number)
        assert batch["images"].is_contiguous()
        assert batch["array"].flags.writeable
    assert sum(is_shared(batch["images"]) and is_shared(batch["array"]) for batch in batches) >= 2


def test_changes_in_place_are_the_trainers_alone(workers):
    kept = []

    def collate(samples):
        if kept and not torch.equal(*kept):
            raise ValueError("the trainer has changed the worker's batch")
        batch = default_collate(samples)
        kept[:] = batch, batch.clone()
        return batch

    for _epoch in range(2):
        loader = RPCDataloader(Images(40), BATCH_SIZE, workers=workers, collate_fn=collate, persistent_workers=True)
        for number, batch in enumerate(loader):
            assert first_bytes(batch) == expected(number)
            batch.fill_(99)


def test_batches_outlive_their_workers(workers):
    iterator = iter(RPCDataloader(Images(40), BATCH_SIZE, workers=workers))
    wait_for_crew(iterator, 2)  # one that has not started has the number 0, which stands for this process's group
    kept = [next(iterator) for _ in range(4)]
    for worker in workers_of(iterator):
        os.kill(worker.pid, signal.SIGKILL)
    kept += iterator
    assert [first_bytes(batch) for batch in kept] == [expected(number) for number in range(10)]
    del iterator, worker
    gc.collect()
    assert any(map(is_shared, kept))
    kept[0].fill_(1)
    assert [first_bytes(batch) for batch in kept[1:]] == [expected(number) for number in range(1, 10)]
    del kept
    gc.collect()
    wait_until(lambda: num_mappings() == 0, what="the end of the mappings")


@pytest.mark.parametrize("sample_bytes", [1, 1 << 14, 1 << 16, SAMPLE_BYTES])
def test_worker_killed_in_the_middle_of_a_batch(workers, tmp_path, sample_bytes):
    loader = RPCDataloader(Images(40, sample_bytes, deadly=str(tmp_path / "died")), BATCH_SIZE, workers=workers)
    kept = list(loader)
    assert (tmp_path / "died").exists()
    assert [batch[:, -1].tolist() for batch in kept] == [expected(number) for number in range(10)]


def twice(samples):
    batch = default_collate(samples)
    return [batch, batch, batch[:2]]


def test_one_tensor_twice_in_a_batch(workers):
    for number, (one, other, part) in enumerate(RPCDataloader(Images(), BATCH_SIZE, workers=workers, collate_fn=twice)):
        assert one is other
        part.fill_(9)
        assert first_bytes(one) == expected(number)
        one.fill_(8)
        assert part.unique().tolist() == [9]


def test_connection_to_a_hostile_worker_ends_with_an_error_that_names_the_lie(serve, tmp_path, caplog):
    lie = "from rpcdataloader.wire import shared\nblock = shared.SharedBlock\n"
    lie += "shared.SharedBlock = lambda _mapping, offset, size: block(9, offset, size)"
    server = serve("--host", f"unix:{tmp_path}/socket", before=lie)
    told = []
    try:  # other workers take its place, up to a limit
        list(RPCDataloader(Images(200), BATCH_SIZE, workers=server.address))
    except RPCError as exc:
        told.append(str(exc))
    assert "a block of shared memory 9, which it never gave" in "".join([*told, caplog.text])


TRAINING = """
import sys, time
from rpcdataloader import RPCDataloader
from tests.behaviour.test_shared_memory import Images, is_shared

if __name__ == "__main__":
    kept = []
    for batch in RPCDataloader(Images(400), 4, workers=sys.argv[1]):
        if not kept and not is_shared(batch):  # the first ones come before the mapping is confirmed
            continue
        kept.append(batch)
        if len(kept) == 10:
            print(is_shared(kept[-1]), flush=True)
        if len(kept) > 10:
            time.sleep(0.01)
"""


def test_nothing_stays_after_a_trainer_was_killed(zygote, serve, tmp_path):
    server = serve("--host", f"unix:{tmp_path}/socket", "--num-workers", "2")
    trainer = zygote.start(TRAINING, server.address)
    wait_until(lambda: "\n" in trainer.output or trainer.errors, what="ten batches")
    assert (trainer.output, trainer.errors) == ("True\n", "")
    assert any(map(maps_shared_memory, server.processes()))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not server.processes(), what="the end of its workers")
    assert not maps_shared_memory(server.pid)


def maps_shared_memory(pid):
    try:
        return "memfd:rpcdataloader" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("size", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hundreds_of_kept_batches_with_few_descriptors(serve, tmp_path, size):
    """The soft limit of descriptors is 256, and each batch is a block of its own, of 64 KiB."""
    less = "from rpcdataloader.wire import shared\nshared.MIN_SHARED_BYTES = 1 << 16"
    server = serve("--host", f"unix:{tmp_path}/socket", before=less)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        kept = list(RPCDataloader(Images(size, 1 << 16), 1, workers=server.address))
        assert sum(map(is_shared, kept[-10:])) == 10
        assert num_mappings() < 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [first_bytes(batch) for batch in kept] == [expected(number, 1) for number in range(size)]


def test_batches_dropped_in_other_threads(workers):
    places = [[] for _ in range(4)]
    for number, batch in enumerate(RPCDataloader(Images(160), BATCH_SIZE, workers=workers)):
        assert first_bytes(batch) == expected(number)
        places[number % 4].append(batch)
        if number % 8 == 7:
            del batch
            threads = [threading.Thread(target=place.clear) for place in places]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_of_the_trainer_keeps_the_batches_that_it_inherits(workers):
    context = multiprocessing.get_context("fork")
    iterator = iter(RPCDataloader(Images(200), BATCH_SIZE, workers=workers))
    kept = [next(iterator) for _ in range(8)]
    ours, theirs = context.Pipe()

    def check():
        theirs.recv()
        theirs.send([bytes(batch.numpy()[:, 7]) for batch in kept])

    child = context.Process(target=check)
    child.start()
    kept.clear()
    for number, batch in enumerate(iterator, 8):
        assert first_bytes(batch) == expected(number)
    ours.send("the memory would have been used again")
    assert ours.recv() == [bytes(expected(number)) for number in range(8)]
    child.join()
    assert child.exitcode == 0
    for end in (ours, theirs, child):
        end.close()


def test_forks_take_no_descriptors_of_others_and_leave_none(workers, zygote):
    """Again and again while a loader waits, in two threads at once."""
    ended = zygote.start(FORKS, workers).wait(60)
    assert (ended.status, ended.output, ended.errors) == (0, "0 descriptors more, and 0 errors\n", "")


FORKS = """
import os, sys, threading, warnings
from rpcdataloader import RPCDataloader
from tests.behaviour.test_shared_memory import Images, num_descriptors

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says so of forks beside threads

def fork(number=1):
    for _ in range(number):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)

def open_and_close():
    while not is_over:
        os.close(os.open("/dev/null", os.O_RDONLY))

is_over, errors = False, []
sys.unraisablehook = threading.excepthook = errors.append
loader = RPCDataloader(Images(), 4, workers=sys.argv[1], persistent_workers=True)
batches = list(loader)
before = num_descriptors()
threads = [threading.Thread(target=fork, args=(100,)) for _ in range(2)]
other = threading.Thread(target=open_and_close)
for thread in (*threads, other):
    thread.start()
for thread in threads:
    thread.join()
is_over = True
other.join()
fork()  # which lets those go that have ended
print(f"{max(0, num_descriptors() - before - 2)} descriptors more, and {len(errors)} errors")
sys.stdout.flush()
os._exit(0)
"""


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def memory_group():
    """A new memory cgroup: its folder, and the name of its limit."""
    groups = Path("/proc/self/cgroup").read_text()
    own = dict(re.findall(r"^\d+:([\w,]*):(.*)$", groups, re.M))
    root = Path("/sys/fs/cgroup")
    old = root / "memory" / own["memory"].strip("/") if "memory" in own else None
    folder = (old or root / own.get("", "/").strip("/")) / f"rpcdl-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if old else "memory.max"
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        pytest.skip("this machine swaps")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    if not (folder / limit).exists():
        folder.rmdir()
        pytest.skip("this cgroup cannot limit memory")
    yield folder, limit
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (folder.parent / "cgroup.procs").write_text(pid)
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="the end of the processes of the cgroup")
    folder.rmdir()


@pytest.mark.slow
def test_workers_at_the_limit_of_their_memory_cgroup(serve, tmp_path, memory_group):
    """The kernel kills them, and what starts others. The loop hears of it, and what it has taken stays whole."""
    folder, limit = memory_group
    server = serve("--host", f"unix:{tmp_path}/socket")
    loader = RPCDataloader(Images(4000), BATCH_SIZE, workers=server.address, reconnect_timeout=1)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(10)]
    for pid in [server.pid, *server.processes()]:
        with contextlib.suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))
    (folder / limit).write_text(str(200 * MIB))
    with pytest.raises(ConnectionLostError):
        kept.extend(iterator)
    assert sum(map(is_shared, kept)) > 50
    assert [first_bytes(batch) for batch in kept] == [expected(number) for number in range(len(kept))]


def test_without_shared_memory_batches_are_sent(serve, tmp_path):
    """As where a sandbox forbids memfd_create."""
    refuse = (
        "from rpcdataloader.wire import shared\ndef refuse(_size): raise PermissionError\nshared.create_memory = refuse"
    )
    server = serve("--host", f"unix:{tmp_path}/socket", before=refuse)
    batches = list(RPCDataloader(Images(), BATCH_SIZE, workers=server.address))
    assert [first_bytes(batch) for batch in batches] == [expected(number) for number in range(6)]
    assert not any(map(is_shared, batches))


# What a script does with workers of its own machine.
SHARES = """
from rpcdataloader import RPCDataloader
from tests.behaviour.test_shared_memory import Images, is_shared

batches = list(RPCDataloader(Images(), 4, workers="local:1"))
print(sum(map(len, batches)), is_shared(batches[-1]))
"""
SMALL_DEV_SHM = """
import ctypes, subprocess, sys
if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
    sys.exit(77)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", "/dev/shm"], check=True)
"""
# As the Pythons of conda, for machines with an older C library.
NO_MEMFD = """
import fcntl, os
del os.memfd_create
for name in [name for name in dir(fcntl) if "SEAL" in name]:
    delattr(fcntl, name)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@pytest.mark.parametrize("before", [pytest.param(SMALL_DEV_SHM, marks=needs_root), NO_MEMFD], ids=["shm", "memfd"])
def test_memory_is_shared_whatever_dev_shm_and_python_have(zygote, before):
    ended = zygote.start(before + SHARES, ends_quickly=True).wait(60)
    if ended.status == 77:
        pytest.skip("this system has no mount namespaces")
    assert (ended.status, ended.output, ended.errors) == (0, "24 True\n", "")


# To a device, which reads memory of the workers; they keep it until then


@pytest.fixture
def device(monkeypatch):
    return plug_in(monkeypatch)


def load_to_device(workers):
    return RPCDataloader(Images(48), BATCH_SIZE, workers=workers, device="cuda:0")


def test_device_reads_memory_of_the_worker(device, workers):
    iterator = iter(load_to_device(workers))
    assert [first_bytes(batch) for batch in iterator] == [expected(number) for number in range(12)]
    page_lock = device.pinned.page_lock
    shared = [page_lock.holds(block) for blocks in device.copied for block in blocks]
    # The first one of each worker may have been made before the trainer had mapped its memory.
    assert len(shared) == 12
    assert sum(shared) >= 8
    num_registered = len(page_lock.ranges)
    del iterator
    device.copied.clear()
    wait_until(lambda: not page_lock.ranges)
    assert page_lock.num_unregistered == num_registered


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_batches_are_copied_if_that_is_refused(device, workers, error, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.client")
    device.pinned.page_lock.error = error
    for _ in range(2):
        assert [first_bytes(batch) for batch in load_to_device(workers)] == [expected(number) for number in range(12)]
    assert len(device.copied) == 24
    assert 24 <= len(device.pinned.blocks) <= 36  # with parts of the first batches
    assert [error.__name__ in line for line in caplog.messages if "pinned memory" in line] == [True]


def test_child_of_the_trainer_leaves_the_driver_alone(device, workers):
    gc.collect()  # blocks of other tests
    page_lock = device.pinned.page_lock
    batches = iter(load_to_device(workers))
    next(batches)
    if not (pid := os.fork()):
        page_lock.unregister = lambda _address: os._exit(1)
        del batches
        device.copied.clear()
        gc.collect()
        os._exit(0 if page_lock.ranges else 2)
    assert os.waitpid(pid, 0)[1] == 0
    assert page_lock.ranges
