"""Forks: how they live, how they end, and what is known of it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rpcdataloader.server import processes
from rpcdataloader.server.processes import describe_exit, fork, reap_orphans
from tests.conftest import TIMEOUT_SCALE, is_running, stat_of, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(params=["pidfd", "old python", "old kernel"])
def every_way(request, monkeypatch):
    """Of seeing that a child has ended; the Pythons of conda and uv lack the function, Linux before 5.3 the call."""
    if request.param != "pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    if request.param == "old kernel":
        monkeypatch.setattr(processes, "_SYS_PIDFD_OPEN", 0xFFFFFF)


def wait_for(process):
    """How a child ended, as the loops of servers find out."""
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    assert poll.poll(30_000 * TIMEOUT_SCALE), "the child does not end"
    wait_until(process.reap)
    return process.ended


def tell(write_end, text):
    os.write(write_end, str(text).encode())


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def answer(run, pipe):
    """What ``run()`` returns in a fork, as text."""
    process = fork(lambda: tell(pipe[1], run()))
    assert wait_for(process) == "exited with status 0"
    return os.read(pipe[0], 65536).decode()


def sleep():
    signal.pause()


# --- ends


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: None, "exited with status 0"),
        (lambda: os._exit(7), "exited with status 7"),
        (lambda: sys.exit(3), "exited with status 1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (perhaps out of memory)"),
        (lambda: os.kill(os.getpid(), signal.SIGVTALRM), "was killed by SIGVTALRM"),
    ],
)
def test_end_is_told_in_words(run, expected):
    descriptors = set(os.listdir("/proc/self/fd"))
    assert wait_for(fork(run)) == expected
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3 << 8, "exited with status 3"),
        (signal.SIGKILL, "was killed by SIGKILL (perhaps out of memory)"),
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV (a crash in compiled code)"),
        (signal.SIGBUS, "was killed by SIGBUS (perhaps shared memory or a file that shrank)"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_every_status_has_words(status, text):
    assert describe_exit(status) == text


def test_child_dies_with_its_parent(pipe):
    """A grandchild, whose parent is killed."""

    def run():
        grandchild = fork(sleep)
        tell(pipe[1], grandchild.pid)
        sleep()

    process = fork(run)
    grandchild = int(os.read(pipe[0], 100))
    assert Path(f"/proc/{grandchild}").exists()
    process.kill("test")
    wait_for(process)
    wait_until(lambda: not is_running(grandchild))


# --- life


def test_signals_for_the_whole_group_do_not_reach_a_child(pipe):
    def run():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}
        return f"alive {len(blocked)}"

    assert answer(run, pipe) == "alive 0"


def test_what_a_child_starts_can_be_terminated(pipe):
    """As ``multiprocessing.Pool`` does at the end of a ``with`` block; for sessions and workers, which fork, too."""

    def terminate():
        program = subprocess.Popen(["sleep", "600"])
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        for process in program, forked:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(5 * TIMEOUT_SCALE)
        forked.join(5 * TIMEOUT_SCALE)
        ended = program.returncode, forked.exitcode
        for process in program, forked:
            process.kill()
        return str(ended)

    def run():
        # Forked from a fork, as workers are from their session.
        answered = terminate()
        read_end, write_end = os.pipe()
        child = fork(lambda: os.write(write_end, terminate().encode()))
        os.close(write_end)
        with open(read_end) as file:
            answered += file.read()
        wait_for(child)
        return answered

    assert answer(run, pipe) == "(-15, -15)(-15, -15)"


def test_what_the_parent_has_printed_is_not_printed_again(pipe, tmp_path):
    """Standard output that is a file or a pipe is buffered, and a fork copies the buffer."""

    def run():
        with (tmp_path / "out").open("w") as sys.stdout:
            print("parent")  # noqa: T201
            fork(lambda: print("child")).reap(wait=30.0)  # noqa: T201
            fork(lambda: None).reap(wait=30.0)
        return (tmp_path / "out").read_text()

    assert answer(run, pipe) == "parent\nchild\n"


def test_children_draw_different_random_numbers_and_use_one_thread(pipe):
    import random

    import numpy as np

    def run():
        return f"{torch.get_num_threads()} {random.random()} {np.random.random()} {torch.rand(()).item()}"

    first, second = answer(run, pipe).split(), answer(run, pipe).split()
    assert first[0] == second[0] == "1"
    assert not set(first[1:]) & set(second[1:])


# --- a system without room


def test_orphans_are_collected_and_nobody_else(pipe):
    """As process 1 of a container; here, in a fork that adopts orphans."""

    def run():
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        reap_orphans(())  # no child at all
        known = fork(lambda: os._exit(5))
        parent = fork(lambda: os.spawnlp(os.P_NOWAIT, "true", "true"))
        parent.reap(wait=30.0)
        # The grandchild is ours now, and will end.
        wait_until(lambda: num_zombies() == 2)
        reap_orphans({known.pid})
        if num_zombies() == 2:  # the known one came first
            known.reap()
            reap_orphans(())
        left = num_zombies()
        return f"{left} {known.reap()}"

    assert answer(run, pipe) in ("1 exited with status 5", "0 exited with status 5")


def num_zombies():
    return sum(stat_of(int(entry))[:2] == ["Z", str(os.getpid())] for entry in os.listdir("/proc") if entry.isdigit())


def test_workers_go_first_when_memory_runs_out(pipe):
    def run():
        processes.prefer_for_oom()
        return Path("/proc/self/oom_score_adj").read_text().strip()

    assert answer(run, pipe) == str(processes.WORKER_OOM_SCORE)
