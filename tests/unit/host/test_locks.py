"""What a signal handler that raises leaves behind in a thread that locks or waits."""

from __future__ import annotations

import contextlib
import signal

import pytest

from rpcdataloader.client.worker import PendingReply
from rpcdataloader.errors import ConnectError, RPCTimeoutError
from rpcdataloader.host.locks import Condition, Event, Lock, inherited
from tests.conftest import TIMEOUT_SCALE
from tests.support.forks import status_of_fork
from tests.unit.wire.test_transport import in_thread


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


def enter(condition):
    with condition:
        pass


def wait(condition):
    with condition:
        condition.wait(0)


@pytest.mark.parametrize(("kind", "use"), [(Lock, enter), (Condition, enter), (Condition, wait), (Event, Event.set)])
def test_signal_handler_that_raises_leaves_nothing_locked(interrupt_soon, kind, use):
    waited_for = kind()

    def use_again_and_again():
        interrupt_soon()
        while True:
            use(waited_for)

    for _ in range(100):
        with pytest.raises(Interrupted):  # and nothing in its place
            use_again_and_again()
        in_thread(use, waited_for).result(30 * TIMEOUT_SCALE)


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


def test_thread_that_forks_keeps_its_locks_in_the_child():
    lock = inherited(Lock())

    def leave():
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    with lock:
        assert status_of_fork(leave) == 0
