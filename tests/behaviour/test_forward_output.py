"""``forward_output=``: what workers print appears in the training process, with its origin and within limits."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import close_client, wait_until
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


class Talks(Numbers):
    """Prints in all the ways that there are."""

    def __init__(self):
        super().__init__(1)
        print("built")  # noqa: T201

    def __getitem__(self, index):
        print("printed é")  # noqa: T201
        sys.stderr.write("error\n")
        os.write(1, b"descriptor\n")
        libc = ctypes.CDLL(None)
        libc.puts(b"C library")
        libc.fflush(None)
        subprocess.run(["echo", "program"], check=True)
        sys.stdout.write("10 %\r20 %\r\n")
        print("\x1b[2Jescaped")  # noqa: T201
        return super().__getitem__(index)


LINES = ["C library", "\\x1b[2Jescaped", "20 %", "descriptor", "error", "printed é", "program"]


class Floods(Numbers):
    def __getitem__(self, index):
        os.write(1, b"x" * 99 + b"\n" if index else b"")
        for _ in range(2000):
            os.write(1, (b"x" * 99 + b"\n") * 10)
        return super().__getitem__(index)


@pytest.fixture
def shown(capsys):
    """The lines of this process's standard error so far."""
    texts = []

    def shown():
        texts.append(capsys.readouterr().err)
        return "".join(texts).splitlines()

    return shown


@pytest.fixture
def server(serve):
    return serve("--num-workers", "2")


def test_lines_of_session_and_workers_come_with_their_origin_and_stay_in_the_log(server, shown):
    dataset = RPCDataset(server.address, Talks, forward_output=True)
    assert len(list(RPCDataloader(dataset, num_workers=1))) == 1
    wait_until(lambda: len(shown()) == 1 + len(LINES))
    first, *others = shown()
    assert first == f"({server.address} session) built"
    assert sorted(others) == [f"({server.address} worker 1) {line}" for line in sorted(LINES)]
    assert all(f"worker 1] {line}" in server.log for line in ("printed é", "program"))


def test_without_it_they_stay_there(server, shown):
    assert len(list(RPCDataloader(RPCDataset(server.address, Talks)))) == 1
    wait_until(lambda: "program" in server.log)
    close_client()
    assert shown() == []


def test_flood_holds_up_nothing_and_is_counted(server, shown):
    def num_left_out():
        return sum(int(match[1]) for line in shown() if (match := re.search(r"(\d+) lines left out$", line)))

    list(RPCDataloader(RPCDataset(server.address, Floods, 4, forward_output=True)))
    wait_until(lambda: num_left_out() > 40_000)
    close_client()
    passed = sum(line.endswith("x") for line in shown())
    assert 0 < passed < 20_000
    assert passed + num_left_out() <= 4 * 20_001


def test_client_that_leaves_in_a_flood_does_not_end_the_server_for_others(server, shown, capsys):
    next(iter(RPCDataloader(RPCDataset(server.address, Floods, 100, forward_output=True))))
    close_client()
    capsys.readouterr()
    # The note to the first client was due before the one to this.
    list(RPCDataloader(RPCDataset(server.address, Floods, 2, forward_output=True)))
    wait_until(lambda: any("left out" in line for line in shown()))


class Stopped:
    """A terminal that is stopped."""

    def __init__(self):
        self.goes_on = threading.Event()

    def write(self, text):
        self.goes_on.wait()
        return len(text)

    def flush(self):
        pass


def test_terminal_that_is_stopped_holds_up_no_training(server, monkeypatch):
    stopped = Stopped()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stopped)
        dataset = RPCDataset(server.address, Floods, 4, forward_output=True)
        for _epoch in range(2):
            assert len(list(RPCDataloader(dataset))) == 4
        assert len(RPCDataset(server.address, Numbers, 3)) == 3  # the connection on which lines come goes on
        stopped.goes_on.set()


SCRIPT = """
import os, sys
from torch.utils.data import Dataset
from rpcdataloader import RPCDataloader, RPCDataset

class Last(Dataset):
    def __init__(self, dies):
        self.dies = dies

    def __len__(self):
        return 4

    def __getitem__(self, index):
        print("loading", index)
        if index == 3 and self.dies:
            import faulthandler
            faulthandler.enable()
            os.kill(os.getpid(), 11)
        return index

dataset = RPCDataset(sys.argv[1], Last, len(sys.argv) > 2, forward_output=True)
for _batch in RPCDataloader(dataset, max_retries=1, num_workers=1):
    pass
"""


def test_lines_of_the_last_batch_come_once_though_the_script_ends(server, zygote):
    ended = zygote.start(SCRIPT, server.address).wait(30)
    lines = [f"({server.address} worker 1) loading {index}" for index in range(4)]
    assert (ended.status, ended.errors.splitlines()) == (0, lines), ended.errors


def test_output_of_workers_of_this_machine_goes_where_that_of_the_script_goes(zygote):
    ended = zygote.start(SCRIPT, "local:1").wait(30)
    lines = [f"loading {index}" for index in range(4)]
    assert (ended.status, ended.output.splitlines(), ended.errors) == (0, lines, "")


def test_last_words_of_a_worker_come_though_the_script_fails(server, zygote):
    ended = zygote.start(SCRIPT, server.address, "dies").wait(30)
    assert ended.status == 1
    assert f"({server.address} worker 1) Fatal Python error: Segmentation fault" in ended.errors
