"""Forks: how they live, how they end, and what is known of it; and what they say."""

from __future__ import annotations

import contextlib
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
from rpcdataloader.server.events import Link, Printed, WantsStacks
from rpcdataloader.server.logs import Forwarding
from rpcdataloader.server.processes import Loop, describe_exit, fork
from tests.conftest import TIMEOUT_SCALE, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(params=["pidfd", "old python"])
def every_way(request, monkeypatch):
    """Of seeing that a child has ended; the Pythons of conda and uv lack the function."""
    if request.param != "pidfd":
        monkeypatch.delattr(os, "pidfd_open")


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


# --- ends


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: os._exit(7), "exited with status 7"),
        (lambda: sys.exit(3), "exited with status 1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (perhaps out of memory)"),
    ],
)
def test_end_is_told_in_words(run, expected):
    descriptors = set(os.listdir("/proc/self/fd"))
    assert wait_for(fork(run)) == expected
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # what other tests have left may go at any time


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (signal.SIGSEGV | 0x80, "was killed by SIGSEGV (a crash in compiled code)"),
        (signal.SIGBUS, "was killed by SIGBUS (perhaps shared memory or a file that shrank)"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_every_status_has_words(status, text):
    assert describe_exit(status) == text


# --- life


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
        tell(pipe[1], ended)

    # Forked from a fork, as workers are from their session.
    for run in terminate, lambda: wait_for(fork(terminate)):
        assert wait_for(fork(run)) == "exited with status 0"
        assert os.read(pipe[0], 65536) == b"(-15, -15)"


def test_children_draw_different_random_numbers_and_use_one_thread(pipe):
    import random

    import numpy as np

    def run():
        return f"{torch.get_num_threads()} {random.random()} {np.random.random()} {torch.rand(()).item()}"

    first, second = answer(run, pipe).split(), answer(run, pipe).split()
    assert first[0] == second[0] == "1"
    assert not set(first[1:]) & set(second[1:])


def test_workers_go_first_when_memory_runs_out(pipe):
    def run():
        processes.prefer_for_oom()
        return Path("/proc/self/oom_score_adj").read_text().strip()

    assert answer(run, pipe) == str(processes.WORKER_OOM_SCORE)


def test_lines_of_output_leave_room_for_events_that_must_go():
    server, session = Link.pair()
    with contextlib.closing(server), contextlib.closing(session):
        while not server.is_half_full:
            assert server.offer(Printed("x" * 900, "worker 1"))
        Forwarding(server, Loop()).take("one too many", "worker 1")
        assert server.offer(WantsStacks())
        events = iter(lambda: session.recv()[0], WantsStacks())
        assert {event.text for event in events} == {"x" * 900}
