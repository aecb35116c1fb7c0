"""The thread that sends for all connections: woken by any thread, at any time."""

from __future__ import annotations

import sys
import threading

import pytest

from rpcdataloader.client.background import Sender


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
