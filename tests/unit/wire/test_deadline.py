"""How much time is left."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from rpcdataloader.wire.transport import Deadline
from tests.conftest import TIMEOUT_SCALE


def test_deadline_spans_several_steps(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(2.5)
    assert deadline.remaining() == 2.5
    now += 2.0
    assert deadline.remaining() == 0.5
    now += 2.0
    assert deadline.remaining() == 0.0


def test_deadline_without_limit():
    assert Deadline(None).remaining() is None
    assert Deadline(None).pause(0.0)


def test_pause_beyond_the_deadline_is_not_made():
    assert not Deadline(5.0).pause(1000.0)


def test_cancelling_ends_pauses_and_leaves_no_time():
    deadline = Deadline(None)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(deadline.pause, 30 * TIMEOUT_SCALE)
        deadline.cancel()
        assert paused.result() is False
    assert deadline.remaining() == 0.0
    assert Deadline(None).remaining() is None


def test_cancelling_ends_the_latest_wait_of_another_kind_also_when_it_comes_too_late():
    deadline = Deadline(None)
    ended = []
    deadline.when_cancelled(lambda: ended.append("first"))
    deadline.when_cancelled(lambda: ended.append("second"))
    assert ended == []
    deadline.cancel()
    assert ended == ["second"]
    deadline.when_cancelled(lambda: ended.append("third"))
    assert ended == ["second", "third"]
