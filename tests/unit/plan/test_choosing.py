from __future__ import annotations

from rpcdataloader.plan.workers import Pace, WorkerPace, choose, choose_second, keep_until


def workers(*task_seconds, hosts=(None,) * 9) -> list[WorkerPace]:
    """Idle ones, each with this task time."""
    pace = Pace(16)
    records = [WorkerPace(order, hosts[order], pace, since=0.0) for order in range(len(task_seconds))]
    for record, seconds in zip(records, task_seconds, strict=True):
        for number in range(2):
            record.sent(number, 0.0)
            record.answered(number, seconds, 0.0)
    return records


def test_earliest_expected_finish_is_chosen_and_who_is_overdue_comes_last():
    fast, slow, new = workers(1.0, 3.0, 1.0)
    assert choose([slow, fast, new], 0.0) is fast
    fast.sent(10, 0.0)
    assert choose([slow, fast, new], 0.0) is new
    assert choose([slow, fast], 0.0) is fast
    assert choose([slow, fast], 4.0) is slow
    slow.sent(11, 0.0)
    assert choose([slow, fast], 12.0) is fast  # both are


def test_second_copy_goes_to_a_full_worker_rather_than_one_that_is_overdue_or_draining():
    first, full, idle = workers(1.0, 1.0, 1.0)
    for number in range(3):
        full.sent(number, 0.0)
    idle.draining = True
    assert choose_second([first, full, idle], first, 3.9) is full
    assert choose_second([first, full, idle], first, 4.0) is None


def test_second_copy_goes_to_another_host_if_possible():
    first, near, far = workers(1.0, 2.0, 9.0, hosts=["x", "x", "y"])
    assert choose_second([first, near, far], first, 0.0) is far
    assert choose_second([first, near], first, 0.0) is near


def test_task_is_kept_for_a_faster_worker_until_that_is_overdue_or_the_slow_one_is_stale():
    fast, slow = workers(1.0, 20.0)
    fast.sent(10, 0.0)
    fast.sent(11, 0.0)
    assert keep_until(slow, [fast], 1.0) == 4.0
    assert keep_until(slow, [fast], 4.0) <= 4.0  # now it may have it
    fast.since = 319.0
    assert keep_until(slow, [fast], 319.5) == 320.0  # 16 times 20
    assert keep_until(slow, [fast], 320.0) <= 320.0
