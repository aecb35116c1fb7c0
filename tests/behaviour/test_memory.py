"""Memory and threads that do not grow: of workers nobody listens to, and over many epochs."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.__main__ import main
from rpcdataloader.server.processes import give_back_freed_memory
from rpcdataloader.wire.slabs import give_back_free_memory
from tests.conftest import wait_until
from tests.support.crew import wait_for_crew
from tests.support.datasets import Filled, Numbers, note, notes

pytestmark = pytest.mark.usefixtures("clean_client")

MIB = 1 << 20


def private_bytes(pid):
    """Memory that a process has for itself; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))


def is_waiting(server, worker):
    """Whether a worker waits for room."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        main(["status", server.address, "--stacks", "--json"])
    (client,) = json.loads(told.getvalue())["nodes"][0]["clients"]
    (stack,) = [each["stack"] for each in client["workers"] if each["pid"] == worker]
    return re.search(r"outbox\.py\", line \d+ in join", stack)


# --- asked for more than is read

CLIENT = """
import sys, torch
from rpcdataloader import rpc_async
from tests.behaviour.test_memory import produce
address, log, size_bytes, num_calls = *sys.argv[1:3], *map(int, sys.argv[3:])
futures = [rpc_async(address, produce, (log, size_bytes), timeout=None) for _ in range(num_calls)]
print("asked", flush=True)
total = 0
for future in futures:
    total += len(future.wait())
print(total)
"""


def produce(log, size_bytes):
    note(log, os.getpid())
    return torch.zeros(size_bytes, dtype=torch.uint8)


# 480 MiB, of which a worker may have far less at a time.
NUM_CALLS = 24


def test_worker_whose_client_does_not_read_stops_computing(serve, zygote, tmp_path):
    server, log = serve(), str(tmp_path / "log")
    script = zygote.start(CLIENT, server.address, log, 20 * MIB, NUM_CALLS)
    wait_until(lambda: notes(log), what="first call")
    os.kill(script.pid, signal.SIGSTOP)
    try:
        worker = int(notes(log)[0])
        wait_until(lambda: is_waiting(server, worker), what="a worker that waits")
        assert private_bytes(worker) < 300 * MIB
    finally:  # or it would be left behind
        os.kill(script.pid, signal.SIGCONT)
    ended = script.wait()
    assert ended.output.split() == ["asked", str(NUM_CALLS * 20 * MIB)], ended.errors
    assert len(notes(log)) == NUM_CALLS


# --- many epochs


def usage(pid):
    """Descriptors, threads, and mappings of memory that a worker shares."""
    num_shared = Path(f"/proc/{pid}/maps").read_text().count("memfd:rpcdataloader")
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), num_shared


def memory_in_use(pids):
    """Without what this process keeps for more batches: that depends on how many were under way at once, and where."""
    give_back_free_memory()
    give_back_freed_memory()
    return {pid: private_bytes(pid) for pid in pids}


def test_memory_goes_back_with_the_last_loader(server):
    loaders = [RPCDataloader(Filled(6, 32 * MIB), batch_size=1, workers=server.address) for _ in range(2)]
    before = private_bytes(os.getpid())
    for loader in loaders:
        assert len(list(loader)) == 6  # all at the same time
    held = private_bytes(os.getpid())
    assert held - before > 100 * MIB
    loaders.pop()
    gc.collect()
    assert private_bytes(os.getpid()) > held - 10 * MIB  # for the other one
    del loader
    loaders.pop()
    wait_until(lambda: gc.collect() is not None and private_bytes(os.getpid()) < before + 40 * MIB)


@pytest.mark.parametrize("num_rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["127.0.0.1", "unix:{}/socket"])
def test_many_epochs_leave_nothing_behind(serve, tmp_path, where, num_rounds):
    server = serve("--num-workers", "2", "--host", where.format(tmp_path))
    loaders = [
        RPCDataloader(Filled(6, MIB), batch_size=2, workers=server.address, shuffle=True, persistent_workers=persistent)
        for persistent in (False, True)
    ]

    def run(num_rounds):
        for _ in range(num_rounds):
            for loader in loaders:
                assert len(list(loader)) == 3
                next(iter(loader))  # and no more of it
            assert len(list(RPCDataloader(RPCDataset(server.address, Filled, 6, MIB), 2, num_workers=1))) == 3
        gc.collect()
        # Server, session, and the workers that persist.
        wait_until(lambda: len(server.processes()) == 3, what="only persistent workers")
        return [os.getpid(), server.pid, *sorted(server.processes())]

    pids = run(2)
    memory = memory_in_use(pids)
    wait_until(lambda: [thread.name[:10] for thread in threading.enumerate()].count("rpcdl-recv") == 3)
    before = {pid: usage(pid) for pid in pids}
    assert run(num_rounds) == pids
    # Some of the first rounds may still have been closing when they were counted.
    wait_until(
        lambda: all(now <= then for pid in pids for now, then in zip(usage(pid), before[pid], strict=True)),
        what=lambda: f"descriptors, threads and mappings: {before} before, {[usage(pid) for pid in pids]} now",
    )
    for pid, size_bytes in memory_in_use(pids).items():
        assert size_bytes < memory[pid] + 24 * MIB


def test_training_process_has_one_thread_per_worker_and_a_few_more(wide_servers):
    loader = RPCDataloader(Numbers(200), batch_size=1, workers=wide_servers[0].address, persistent_workers=True)
    iterator = iter(loader)
    wait_for_crew(iterator, 8)
    assert len(list(iterator)) == 200
    threads = Counter(thread.name.split()[0] for thread in threading.enumerate() if thread.name.startswith("rpcdl"))
    assert threads.pop("rpcdl-recv") == 9  # the session's, too
    assert threads.pop("rpcdl-send") == 1
    assert threads.total() <= 4
