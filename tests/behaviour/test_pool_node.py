"""The node server beside an actor of an engine, which is an object of this process here."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.support.engine import SECRET, Engine, pool_on, process_of, start_actor

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def start():
    actors = []

    def start(*launch):
        actors.append(start_actor(*launch))
        return actors[-1]

    yield start
    for actor in actors:
        actor.stop()
        assert actor.ended.wait(10 * TIMEOUT_SCALE)


def test_loader_follows_a_pool_with_a_secret_of_its_own():
    engine = Engine()
    with pool_on(engine, 1) as workers:
        loader = RPCDataloader(RPCDataset(workers, TensorDataset, torch.arange(4000)), batch_size=4)
        batches = iter(loader)
        received = [next(batches)[0]]
        os.kill(engine.pids[0], signal.SIGKILL)
        received += [batch for (batch,) in batches]  # waits for the one that takes its place
        assert torch.equal(torch.cat(received), torch.arange(4000))
        for pid in engine.pids[1:]:
            assert SECRET.secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert SECRET.secret not in Path(f"/proc/{pid}/environ").read_bytes()
    assert len(engine.pids) == 2
    assert not any(map(is_running, engine.pids)), "the block has waited for them"


def leave_behind():
    pid = os.fork()
    if pid == 0:
        os.setsid()  # otherwise it ends with the server
        time.sleep(600)
    while os.getsid(pid) != pid:
        os.sched_yield()
    return pid


def find_helper():
    return sys.modules["starter"].helper.pid


def test_server_that_is_killed_is_replaced_while_what_user_code_has_started_lives_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # It holds the output of the server open.
    (tmp_path / "starter.py").write_text("import subprocess\nhelper = subprocess.Popen(['sleep', '600'])\n")
    engine = Engine()
    with pool_on(engine, 1, "--preload", "starter") as workers:
        children = [rpc_async(*workers, func).wait() for func in (leave_behind, find_helper)]
        os.kill(engine.pids[0], signal.SIGKILL)
        try:
            wait_until(lambda: len(engine.pids) == 2)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_server_drains_when_its_actor_is_dropped():
    actor = start_actor()
    wait_until(actor.address, 30)
    process, ended = process_of(actor), actor.ended
    del actor
    assert ended.wait(10 * TIMEOUT_SCALE)
    assert process.returncode == 0


def test_server_that_is_stopped_while_it_starts_ends_at_once(start):
    actor = start()
    actor.stop()
    assert actor.ended.wait(10 * TIMEOUT_SCALE)
    with pytest.raises(RuntimeError, match="a node server has ended with status -9"):
        actor.address()


def test_server_imports_nothing_from_the_folder_of_its_actor_and_takes_its_address_from_no_log(
    start, tmp_path, monkeypatch
):
    """Machines of an engine may be in any folder, as dask-jobqueue leaves them in /tmp."""
    (tmp_path / "rpcdataloader.py").write_text("raise SystemExit('a module of another user')")
    words = "rpcdataloader ready stranger.example:6543 num_workers=64 pid=1"
    (tmp_path / "chatty.py").write_text(f"import os, sys\nfor to in 1, 2:\n    os.write(to, b'{words}\\n')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, "lib"])
    (tmp_path / "lib").mkdir()
    (tmp_path / "chatty.py").rename(tmp_path / "lib" / "chatty.py")
    actor = start("--preload", "chatty", "--register", "pool")
    wait_until(actor.address, 30)
    assert actor.address().startswith("127.0.0.1:")
    assert len(list((tmp_path / "pool").iterdir())) == 1


def test_server_that_does_not_start_says_why(start):
    actor = start("--num-workers", "-1")
    assert actor.ended.wait(30 * TIMEOUT_SCALE)
    with pytest.raises(RuntimeError, match=r"with status 2: .*num_workers must not be negative"):
        actor.address()
