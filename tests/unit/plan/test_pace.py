from __future__ import annotations

import math

import pytest

from rpcdataloader.plan.workers import Pace, WorkerPace, keep_until, take_turns


def worker(pace=None) -> WorkerPace:
    return WorkerPace(0, None, pace or Pace(16), since=0.0)


def test_late_is_a_multiple_of_the_median_that_one_worker_cannot_move():
    pace = Pace(16)
    for seconds in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0):
        pace.answered(1.0, seconds)
    assert pace.late_seconds == math.inf  # too little is known
    pace.answered(1.0, 1000.0)
    assert pace.late_seconds == 10.0
    for _ in range(40):
        pace.answered(1.0, 4.0)
    assert pace.late_seconds == 20.0  # of recent ones


def test_time_counts_from_when_a_task_came_to_the_head_of_the_queue():
    pace = Pace(2)
    record = worker(pace)
    record.sent(0, 0.0)
    record.sent(1, 0.0)
    assert record.answered(0, 1.0, 8.0)
    assert pace.late_seconds == 40.0  # travelling included
    assert record.overdue_at() == 12.0
    assert record.answered(1, 1.0, 9.0)
    assert record.overdue_at() == math.inf
    assert record.stale_at() == 25.0


def test_task_that_is_cancelled_behind_another_one_changes_nothing_of_that():
    record = worker()
    record.sent(0, 0.0)
    record.sent(1, 0.0)
    assert not record.answered(1, None, 5.0)
    assert record.since == 0.0
    assert record.task_seconds is None


def test_answer_after_a_long_pause_replaces_what_was_known():
    record = worker()
    for number, now in (0, 0.0), (1, 20.0), (2, 40.0):
        record.sent(number, now)
        record.answered(number, 20.0, now + 20.0)
    assert record.finish == pytest.approx(20.0)
    record.sent(3, 60.0 + 16 * 20.0)
    record.answered(3, 1.0, 400.0)
    assert record.finish == pytest.approx(1.0)


def workers_that_take(*seconds: float) -> list[WorkerPace]:
    """Workers that have had one task each, and have nothing to do."""
    pace = Pace(2)
    records = [worker(pace) for _ in seconds]
    for record, each in zip(records, seconds, strict=True):
        record.sent(0, 0.0)
        record.answered(0, each, each)
    return records


def test_worker_is_overdue_by_its_own_pace():
    slow, fast = workers_that_take(8.0, 1.0)
    for record in slow, fast:
        record.sent(1, 10.0)
    assert (slow.overdue_at(), fast.overdue_at()) == (42.0, 14.0)


def test_task_is_kept_for_a_far_faster_worker_until_that_is_overdue():
    slow, fast, equal, later = workers_that_take(8.0, 1.0, 8.0, 1.0)
    fast.sent(1, 10.0)
    equal.sent(1, 10.0)
    later.sent(1, 13.0)
    assert keep_until(slow, [fast, equal], 10.0) == 14.0
    assert keep_until(slow, [equal], 10.0) == 10.0
    assert keep_until(slow, [fast], 14.0) == 14.0  # overdue
    assert keep_until(slow, [fast, later], 14.0) == 17.0


def test_task_is_kept_from_a_worker_that_is_overdue():
    stuck, other = workers_that_take(1.0, 8.0)
    stuck.sent(1, 10.0)
    other.sent(1, 10.0)
    assert keep_until(stuck, [other], 13.9) == 13.9
    assert keep_until(stuck, [other], 14.0) == pytest.approx(min(other.overdue_at(), stuck.stale_at()))


def test_idle_workers_that_are_about_as_fast_take_turns():
    """Or the fastest of them would hold the batches of all in its memory."""
    fast, same, slow = workers_that_take(1.0, 1.2, 1.5)
    given = []
    for now in range(10, 16):
        record = take_turns(fast, [fast, same, slow])
        record.sent(1, now)
        record.answered(1, record.task_seconds, now + 0.5)
        given.append(record)
    assert given == [fast, same] * 3
    for record in fast, same:
        record.sent(1, 20.0)
    assert take_turns(same, [fast, same]) is same  # which finishes first


def test_worker_that_has_failed_rests_as_long_as_answers_take_but_not_as_long_as_beginning_takes():
    pace = Pace(16)
    other, record = worker(pace), worker(pace)
    other.sent(0, 0.0)
    other.answered(0, 0.1, 60.0)  # it had to begin
    for number, now, rest in (0, 60.0, 0.1), (1, 60.2, 0.1):
        record.sent(number, now)
        record.answered(number, None, now, has_failed=True)
        assert record.rests_until == pytest.approx(now + rest)
    other.sent(1, 60.0)
    other.answered(1, 0.1, 60.5)  # five times as long as it worked: the machine is busy
    record.sent(2, 61.0)
    record.answered(2, None, 61.0, has_failed=True)
    assert record.rests_until == pytest.approx(61.5)
