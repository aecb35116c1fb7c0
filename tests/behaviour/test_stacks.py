"""What a worker is doing, told by its session, and its end, whatever it is at."""

from __future__ import annotations

import inspect
import os
import re
import time
from pathlib import Path

import pytest

from rpcdataloader import RPCDataloader, rpc_async
from rpcdataloader.errors import ConnectionLostError
from tests.conftest import is_running, wait_until
from tests.support.peers import session_of

pytestmark = pytest.mark.usefixtures("clean_client")


# --- what users write


def sleep_in_python():
    time.sleep(600)


def hold_gil():
    re.match(r"(a+)+$", "a" * 64 + "b")


def say_and_hold_gil(marker):
    Path(marker).touch()
    hold_gil()


def line_of(func, text):
    """How faulthandler names a line of a function of this file."""
    lines, first = inspect.getsourcelines(func)
    (line,) = (number for number, line in enumerate(lines, first) if text in line)
    return f'File "{__file__}", line {line} in {func.__name__}'


# --- helpers


class Side:
    """The session of this process on a server, and its first worker, which serves ``rpc_async``."""

    def __init__(self, address):
        self.address = address
        self.session = session_of(address)
        self.pid = self.call(os.getpid)
        self.number = 1

    def call(self, func, *args):
        return rpc_async(self.address, func, args).wait()

    def start(self, func, *args):
        return rpc_async(self.address, func, args, timeout=None)

    def stack(self):
        return self.session.stack_of(self.number)

    def load(self):
        """Samples that another worker has loaded."""
        return list(RPCDataloader(range(3), None, workers=self.address, num_workers=1))


@pytest.fixture
def side(shared_server):
    return Side(shared_server.address)


def wait_for_stack(side, *texts):
    """Until all of ``texts`` are in its stack: the worker is on its way there."""
    found = []

    def look():
        found.append(side.stack())
        return all(text in found[-1] for text in texts)

    try:
        wait_until(look)
    except AssertionError:
        raise AssertionError(f"not all of {texts} are in:\n{found[-1]}") from None


# --- stacks


def test_session_serves_others_while_it_waits_for_a_stack(side, tmp_path):
    side.start(say_and_hold_gil, str(tmp_path / "runs"))
    wait_until((tmp_path / "runs").exists)
    wait = side.session.end_worker(side.number, "for a test")
    assert side.load() == [0, 1, 2]
    assert "R (running)\nno Python stack: it did not let another of its threads run" in wait()


# --- the end


@pytest.mark.parametrize(
    ("func", "text"), [(sleep_in_python, line_of(sleep_in_python, "sleep(600)")), (hold_gil, "no Python stack")]
)
def test_worker_that_hangs_is_ended_with_the_reason_and_its_stack(serve, func, text):
    server = serve()
    side = Side(server.address)
    hanging = side.start(func)
    wait_for_stack(side, text)
    wait = side.session.end_worker(side.number, "took longer than 5 s")
    assert text in wait()
    with pytest.raises(ConnectionLostError) as caught:
        hanging.wait()
    name = rf"worker {side.number} \(pid {side.pid}\) on {re.escape(server.address)}"
    assert re.fullmatch(rf"{name} was ended: took longer than 5 s", str(caught.value))
    wait_until(lambda: not is_running(side.pid))
    assert side.session.fate(side.number).reason == "was ended: took longer than 5 s"
    wait_until(lambda: "was ended: took longer than 5 s" in server.log)
    # The session goes on, and the next call has another worker.
    assert side.call(os.getppid) == side.session.wait().pid
