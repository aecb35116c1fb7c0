"""The threads that send for all connections and that print: woken by any thread, at any time."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading

import pytest

from rpcdataloader.client.background import Condition, Printer, Sender
from rpcdataloader.client.worker import PendingReply
from rpcdataloader.errors import ConnectError, RPCTimeoutError
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.unit.wire.test_transport import in_thread


class Outlet:
    def fileno(self) -> int:
        return -1

    def flush(self) -> bool:
        return True


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_it_closes_while_others_wake_it():
    """As finalizers do, also those of a connection that was lost before: an error there is nobody's."""
    failures = []

    def wake(sender, begun):
        begun.set()
        try:
            for _ in range(200):
                sender.wake(Outlet())
        except OSError as error:
            failures.append(error)

    for _ in range(500):
        sender, begun = Sender(), threading.Event()
        thread = threading.Thread(target=wake, args=(sender, begun))
        thread.start()
        begun.wait()
        sender.close()
        thread.join()
    assert not failures


# The printer


@pytest.fixture
def printer():
    printer = Printer()
    yield printer
    printer.close()
    assert printer._thread is None or not printer._thread.is_alive()


def test_lines_come_at_the_end_of_an_interpreter_that_starts_no_thread(printer, capsys, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    printer.put("node01:6543 worker 3", "last words")
    printer.close()
    assert capsys.readouterr().err == "(node01:6543 worker 3) last words\n"


def test_standard_error_that_is_gone_does_no_harm(printer, monkeypatch):
    for broken in None, io.BytesIO():
        monkeypatch.setattr(sys, "stderr", broken)
        printer.put("node", "lost")
        wait_until(lambda: not printer._lines)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    printer.put("node", "seen")
    wait_until(lambda: sys.stderr.getvalue() == "(node) seen\n")


class Interrupted(Exception):
    """Raised by a signal handler, as KeyboardInterrupt is."""


@pytest.fixture
def interrupt_soon():
    """A function that lets a signal handler raise after some CPU time of this process."""

    def interrupt(_number, _frame):
        raise Interrupted

    before = signal.signal(signal.SIGVTALRM, interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("wait", [lambda _condition: None, lambda condition: condition.wait(0)], ids=["with", "wait"])
def test_signal_handler_that_raises_leaves_no_condition_locked(interrupt_soon, wait):
    condition = Condition()

    def lock_again_and_again():
        interrupt_soon()
        while True:
            with condition:
                wait(condition)

    def can_be_locked():
        return condition.acquire(blocking=False) and condition.release() is None

    for _ in range(100):
        with pytest.raises(Interrupted):  # and nothing in its place
            lock_again_and_again()
        assert in_thread(can_be_locked).result()


def test_reply_comes_whose_wait_a_signal_handler_has_ended(interrupt_soon):
    def wait_again_and_again():
        interrupt_soon()
        while True:
            with contextlib.suppress(RPCTimeoutError):
                reply.wait(0)

    for _ in range(100):
        reply = PendingReply()
        with pytest.raises(Interrupted):
            wait_again_and_again()
        in_thread(reply.complete, ConnectError("not there")).result(30 * TIMEOUT_SCALE)
        with pytest.raises(ConnectError):
            reply.wait()
