from __future__ import annotations

import gc
import queue
import threading
import time
import weakref

import pytest

from rpcdataloader.client import background as module
from rpcdataloader.client.background import Alarm
from tests.conftest import TIMEOUT_SCALE

LIMIT = 10 * TIMEOUT_SCALE


@pytest.fixture
def alarm():
    alarm = Alarm()
    yield alarm
    alarm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rpcdl-alarm"]


@pytest.fixture
def calls():
    return queue.SimpleQueue()


def test_functions_are_called_in_the_order_of_their_times(alarm, calls):
    start = time.monotonic()
    for seconds in (0.9, 0.3, 0.6):
        alarm.call_after(seconds, lambda seconds=seconds: calls.put((seconds, time.monotonic() - start)))
    called = [calls.get(timeout=LIMIT) for _ in range(3)]
    assert [seconds for seconds, _elapsed in called] == [0.3, 0.6, 0.9]
    assert all(elapsed >= seconds for seconds, elapsed in called)


def test_equal_times_keep_the_order_of_the_calls(alarm, calls):
    for number in range(50):
        alarm.call_after(-1.0, lambda number=number: calls.put(number))
    assert [calls.get(timeout=LIMIT) for _ in range(50)] == list(range(50))


def test_earlier_time_overtakes_one_that_is_waited_for(alarm, calls):
    alarm.call_after(60, lambda: calls.put("late"))
    alarm.call_after(0.01, lambda: calls.put("early"))
    assert calls.get(timeout=LIMIT) == "early"


def test_cancelled_function_is_not_called(alarm, calls):
    timer = alarm.call_after(0.5, lambda: calls.put("cancelled"))
    alarm.call_after(0.5, lambda: calls.put("called"))
    timer.cancel()
    timer.cancel()
    assert calls.get(timeout=LIMIT) == "called"
    assert calls.empty()


def test_function_may_cancel_itself_and_call_again(alarm, calls):
    def again():
        timers[0].cancel()
        alarm.call_after(0, lambda: calls.put("again"))

    timers = []
    timers.append(alarm.call_after(0.01, again))
    assert calls.get(timeout=LIMIT) == "again"


def test_cancelled_functions_leave_nothing_behind(alarm):
    class Owner:
        def method(self):
            pass

    owner = Owner()
    reference = weakref.ref(owner)
    timer = alarm.call_after(60, owner.method)
    del owner
    assert reference() is not None
    timer.cancel()
    gc.collect()
    assert reference() is None


def test_function_is_let_go_once_it_was_called(alarm, calls):
    class Owner:
        def method(self):
            calls.put("called")

    owner = Owner()
    finalized = threading.Event()
    weakref.finalize(owner, finalized.set)
    alarm.call_after(0.01, owner.method)
    del owner
    assert calls.get(timeout=LIMIT) == "called"
    assert finalized.wait(LIMIT)


def test_deadlines_of_calls_that_were_answered_do_not_pile_up(alarm, calls, monkeypatch):
    monkeypatch.setattr(module, "MAX_CANCELLED", 10)
    pending = [alarm.call_after(60, lambda: None) for _ in range(5)]
    for _ in range(1000):
        alarm.call_after(120, lambda: None).cancel()
        assert len(alarm) <= 5 + 11
    # Those that are not cancelled are still in order.
    alarm.call_after(0.01, lambda: calls.put("called"))
    assert calls.get(timeout=LIMIT) == "called"
    for timer in pending:
        timer.cancel()


def test_time_beyond_all_clocks_is_waited_for(alarm, calls):
    for seconds in (float("inf"), 1e300):
        alarm.call_after(seconds, lambda: calls.put("at the end of time"))
    alarm.call_after(0.01, lambda: calls.put("soon"))
    assert calls.get(timeout=LIMIT) == "soon"


def test_function_that_raises_stops_nothing(alarm, calls, caplog):
    def fail():
        raise ValueError("a mistake")

    alarm.call_after(0.0, fail)
    alarm.call_after(0.01, lambda: calls.put("called"))
    assert calls.get(timeout=LIMIT) == "called"
    assert "a mistake" in caplog.text


def test_close_calls_nothing_any_more_and_may_come_from_a_function(calls):
    alarm = Alarm()
    alarm.call_after(0.01, lambda: (alarm.close(), calls.put("closed")))
    alarm.call_after(60, lambda: calls.put("late"))
    assert calls.get(timeout=LIMIT) == "closed"
    alarm.close()
    alarm.call_after(0.0, lambda: calls.put("too late"))
    assert not [thread for thread in threading.enumerate() if thread.name == "rpcdl-alarm"]
    assert calls.empty()
    assert len(alarm) == 0


def test_thread_starts_with_the_first_function():
    alarm = Alarm()
    assert not [thread for thread in threading.enumerate() if thread.name == "rpcdl-alarm"]
    alarm.close()
