"""What a worker is doing, told by its session, and its end, whatever it is at."""

from __future__ import annotations

import inspect
import os
import re
import time

import pytest

from rpcdataloader import RPCDataloader, rpc_async
from rpcdataloader.errors import ConnectionLostError
from tests.conftest import is_running, wait_until
from tests.support.peers import session_of

pytestmark = pytest.mark.usefixtures("clean_client")


def sleep_in_python():
    time.sleep(600)


def hold_gil():
    re.match(r"(a+)+$", "a" * 64 + "b")


def line_of(func, text):
    """How faulthandler names a line of a function of this file."""
    lines, first = inspect.getsourcelines(func)
    (line,) = (number for number, line in enumerate(lines, first) if text in line)
    return f'File "{__file__}", line {line} in {func.__name__}'


def test_session_serves_others_while_it_waits_for_a_stack(shared_server):
    address, session = shared_server.address, session_of(shared_server.address)
    rpc_async(address, hold_gil, timeout=None)
    wait_until(lambda: "no Python stack" in session.stack_of(1))
    wait = session.end_worker(1, "for a test")
    assert list(RPCDataloader(range(3), None, workers=address, num_workers=1)) == [0, 1, 2]
    assert "R (running)\nno Python stack: it did not let another of its threads run" in wait()


@pytest.mark.parametrize(
    ("func", "text"), [(sleep_in_python, line_of(sleep_in_python, "sleep(600)")), (hold_gil, "no Python stack")]
)
def test_worker_that_hangs_is_ended_with_the_reason_and_its_stack(serve, func, text):
    server = serve()
    session, pid = session_of(server.address), rpc_async(server.address, os.getpid).wait()
    hanging = rpc_async(server.address, func, timeout=None)
    wait_until(lambda: text in session.stack_of(1), what=lambda: session.stack_of(1))
    wait = session.end_worker(1, "took longer than 5 s")
    assert text in wait()
    with pytest.raises(ConnectionLostError) as caught:
        hanging.wait()
    assert str(caught.value) == f"worker 1 (pid {pid}) on {server.address} was ended: took longer than 5 s"
    wait_until(lambda: not is_running(pid))
    assert session.fate(1).reason == "was ended: took longer than 5 s"
    wait_until(lambda: "was ended: took longer than 5 s" in server.log)
    # The session goes on, and the next call has another worker.
    assert rpc_async(server.address, os.getppid).wait() == session.wait().pid
