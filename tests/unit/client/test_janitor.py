from __future__ import annotations

import gc
import queue
import threading
import weakref

import pytest

from rpcdataloader.client.background import Janitor
from tests.conftest import TIMEOUT_SCALE

LIMIT = 10 * TIMEOUT_SCALE


@pytest.fixture
def janitor():
    janitor = Janitor()
    yield janitor
    janitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rpcdl-janitor"]


def test_functions_run_one_after_the_other_in_another_thread(janitor):
    calls = queue.SimpleQueue()
    for number in range(10):
        janitor.leave(lambda number=number: calls.put((number, threading.current_thread().name)))
    assert [calls.get(timeout=LIMIT) for _ in range(10)] == [(number, "rpcdl-janitor") for number in range(10)]


def test_leaving_does_not_wait_for_a_function_that_runs(janitor):
    gate, done = threading.Event(), threading.Event()
    janitor.leave(lambda: gate.wait(LIMIT))
    janitor.leave(done.set)
    assert not done.is_set()
    gate.set()
    assert done.wait(LIMIT)


def test_function_that_raises_is_logged_and_stops_nothing(janitor, caplog):
    done = threading.Event()

    def fail():
        raise ValueError("a mistake")

    janitor.leave(fail)
    janitor.leave(done.set)
    assert done.wait(LIMIT)
    assert "a mistake" in caplog.text


def test_finalizers_may_leave_functions(janitor):
    class Thing:
        pass

    done = threading.Event()
    cycle = [Thing()]
    weakref.finalize(cycle[0], janitor.leave, done.set)
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert done.wait(LIMIT)


def test_function_is_let_go_once_it_was_called(janitor):
    class Thing:
        def method(self):
            pass

    thing = Thing()
    finalized = threading.Event()
    weakref.finalize(thing, finalized.set)
    janitor.leave(thing.method)
    del thing
    assert finalized.wait(LIMIT)


def test_close_finishes_what_was_left():
    janitor = Janitor()
    calls = []
    for number in range(100):
        janitor.leave(lambda number=number: calls.append(number))
    janitor.close()
    assert calls == list(range(100))
