from __future__ import annotations

import math
from collections import deque

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Entry, Table


def start(workers="ab", batch_size_bytes=0, **options) -> Table:
    scheduler = Table(PlanOptions(**{"num_workers": len(workers) or 1, **options}), batch_size_bytes)
    for worker in workers:
        scheduler.worker_joined(worker, 0.0)
    return scheduler


def fill(scheduler, now=0.0, num_tasks=math.inf) -> list[tuple[str, int]]:
    """The driver's loop over an input that never ends; what was sent where."""
    sent: list[tuple[str, int]] = []
    while scheduler.wants_input:
        scheduler.add_task("indices")
    while len(sent) < num_tasks and (assigned := scheduler.assign(now)) is not None:
        sent.append(assigned)
    return sent


def give(scheduler, worker) -> int:
    """A task goes to this worker, whichever is the best; returns its number."""
    number = scheduler.add_task(None)
    scheduler._waiting.remove(number)
    scheduler._send(scheduler._workers[worker], scheduler.tasks[number], 0.0)
    return number


def reply(scheduler, worker, number, *, size_bytes=1, task_seconds=1.0, now=0.0) -> Entry | None:
    return scheduler.replied(worker, number, size_bytes=size_bytes, task_seconds=task_seconds, now=now)


def deliver(scheduler) -> list[int]:
    numbers = []
    while (task := scheduler.pop_deliverable()) is not None:
        numbers.append(task.number)
    return numbers


def teach(scheduler, **task_seconds) -> None:
    """Make each worker known as one with this task time; leaves nothing in flight."""
    for _ in range(3):
        for worker, seconds in task_seconds.items():
            number = give(scheduler, worker)
            assert reply(scheduler, worker, number, task_seconds=seconds)
            deliver(scheduler)


# The window and the limits per worker


def test_first_tasks_go_round_robin_until_the_window_is_full():
    scheduler = start("abc", prefetch_factor=2)
    assert fill(scheduler) == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert not scheduler.wants_input


def test_answers_open_the_window_only_when_delivered():
    scheduler = start("ab")
    fill(scheduler)
    reply(scheduler, "b", 1)
    assert fill(scheduler) == []
    reply(scheduler, "a", 0)
    assert deliver(scheduler) == [0, 1]
    assert [number for _, number in fill(scheduler)] == [4, 5]


def test_window_does_not_grow_with_workers_that_join():
    scheduler = start("abcdefgh", num_workers=2, prefetch_factor=2)
    assert fill(scheduler) == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]


def test_worker_gets_prefetch_factor_tasks_at_most():
    scheduler = start("a", num_workers=4, prefetch_factor=3)
    assert fill(scheduler) == [("a", 0), ("a", 1), ("a", 2)]
    assert scheduler.in_flight("a") == [0, 1, 2]


def test_no_worker_no_task():
    scheduler = start("", num_workers=1)
    assert fill(scheduler) == []


def test_tasks_are_sent_in_order_with_what_was_added():
    scheduler = start("ab", num_workers=3, prefetch_factor=1)
    for payload in "xyz":
        scheduler.add_task(payload)
    assert fill(scheduler) == [("a", 0), ("b", 1)]
    assert [scheduler.tasks[number].payload for number in range(3)] == ["x", "y", "z"]
    reply(scheduler, "b", 1)
    assert fill(scheduler) == [("b", 2)]


# Delivery


def test_delivery_is_in_order():
    scheduler = start("ab")
    fill(scheduler)
    reply(scheduler, "b", 1)
    assert deliver(scheduler) == []
    reply(scheduler, "a", 0)
    assert deliver(scheduler) == [0, 1]


def test_delivery_out_of_order_follows_the_answers():
    scheduler = start("ab", in_order=False)
    fill(scheduler)
    assert deliver(scheduler) == []
    reply(scheduler, "b", 3)
    reply(scheduler, "a", 2)
    reply(scheduler, "b", 1)
    assert deliver(scheduler) == [3, 2, 1]


def test_finished_when_input_has_ended_and_all_is_delivered():
    scheduler = start("a")
    fill(scheduler)
    scheduler.end_of_input()
    assert not scheduler.finished
    reply(scheduler, "a", 0)
    reply(scheduler, "a", 1)
    assert fill(scheduler) == []
    assert not scheduler.finished
    assert deliver(scheduler) == [0, 1]
    assert scheduler.finished


def test_empty_input_is_finished_at_once():
    scheduler = start("a")
    scheduler.end_of_input()
    assert scheduler.finished
    assert scheduler.assign(0.0) is None


def test_payload_is_kept_until_delivered():
    scheduler = start("a")
    number = scheduler.add_task([3, 1, 2])
    assert scheduler.assign(0.0) == ("a", number)
    reply(scheduler, "a", number)
    assert scheduler.tasks[number].payload == [3, 1, 2]
    deliver(scheduler)
    assert not scheduler.tasks


# Late and duplicate answers, workers that leave


def test_duplicate_answer_is_ignored():
    scheduler = start("a")
    fill(scheduler)
    assert reply(scheduler, "a", 0)
    assert not reply(scheduler, "a", 0)
    assert deliver(scheduler) == [0]
    assert not reply(scheduler, "a", 0)
    assert deliver(scheduler) == []


def test_answer_from_the_wrong_worker_is_ignored():
    scheduler = start("ab")
    fill(scheduler)
    assert not reply(scheduler, "b", 0)
    assert scheduler.in_flight("a") == [0, 2]


def test_tasks_of_a_worker_that_left_go_to_others_lowest_first():
    scheduler = start("ab", num_workers=3)
    fill(scheduler)
    scheduler.worker_left("a")
    assert not reply(scheduler, "a", 0)
    scheduler.worker_joined("c", 1.0)
    assert fill(scheduler, 1.0) == [("c", 0), ("c", 2)]
    assert not reply(scheduler, "a", 2)
    assert reply(scheduler, "c", 2)


def test_answered_tasks_survive_their_worker():
    scheduler = start("ab")
    fill(scheduler)
    reply(scheduler, "a", 0)
    scheduler.worker_left("a")
    assert deliver(scheduler) == [0]


def test_requeued_tasks_are_sent_although_the_window_is_full():
    scheduler = start("ab", prefetch_factor=1)
    fill(scheduler)
    reply(scheduler, "b", 1)
    scheduler.worker_left("a")
    assert not scheduler.wants_input
    assert fill(scheduler) == [("b", 0)]


def test_worker_that_left_may_join_again():
    scheduler = start("a")
    fill(scheduler)
    scheduler.worker_left("a")
    scheduler.worker_joined("a", 0.0)
    assert scheduler.in_flight("a") == []
    assert fill(scheduler) == [("a", 0), ("a", 1)]


def test_draining_worker_answers_and_gets_nothing_new():
    scheduler = start("ab")
    fill(scheduler)
    scheduler.worker_draining("a")
    assert reply(scheduler, "a", 0)
    assert reply(scheduler, "b", 1)
    assert deliver(scheduler) == [0, 1]
    assert fill(scheduler) == [("b", 4)]
    assert scheduler.in_flight("a") == [2]
    scheduler.worker_draining("a")  # said twice
    scheduler.worker_left("a")


# Who gets the next task


def test_task_goes_where_it_is_expected_to_be_finished_first():
    scheduler = start("abc", num_workers=6, prefetch_factor=4)
    teach(scheduler, a=3.0, b=1.0, c=1.4)
    # Expected: b 1, c 1.4, b 2, c 2.8, a 3, b 3, b 4
    assert "".join(worker for worker, _ in fill(scheduler, num_tasks=7)) == "bcbcabb"


def test_new_worker_comes_first():
    scheduler = start("a", num_workers=4, prefetch_factor=3)
    teach(scheduler, a=1.0)
    scheduler.worker_joined("b", 0.0)
    assert "".join(worker for worker, _ in fill(scheduler)) == "bbbaaa"


def test_first_answer_of_a_worker_does_not_make_it_slow():
    scheduler = start("ab", num_workers=4, prefetch_factor=2)
    teach(scheduler, a=1.0)
    for seconds in (60.0, 1.0):
        number = give(scheduler, "b")
        reply(scheduler, "b", number, task_seconds=seconds)
        deliver(scheduler)
    assert "".join(worker for worker, _ in fill(scheduler)) == "abab"


def test_single_outlier_does_not_make_a_worker_slow():
    scheduler = start("ab")
    teach(scheduler, a=1.0, b=1.0)
    number = give(scheduler, "b")
    reply(scheduler, "b", number, task_seconds=1000.0)
    deliver(scheduler)
    assert sorted(worker for worker, _ in fill(scheduler)) == ["a", "a", "b", "b"]


def test_time_of_zero_is_not_kept_for_ever():
    scheduler = start("a")
    teach(scheduler, a=0.0)
    for _ in range(60):
        teach(scheduler, a=1.0)
    assert scheduler._workers["a"].finish == pytest.approx(1.0)


def test_slow_worker_is_passed_over_while_a_full_one_is_faster():
    scheduler = start("ab", num_workers=4)
    teach(scheduler, a=1.0, b=20.0)
    assert fill(scheduler, now=0.0) == [("a", 6), ("a", 7)]
    reply(scheduler, "a", 6, now=1.0)
    assert fill(scheduler, now=1.0) == [("a", 8)]


def test_somewhat_slower_worker_is_used():
    scheduler = start("ab", num_workers=4)
    teach(scheduler, a=1.0, b=2.0)
    assert "".join(worker for worker, _ in fill(scheduler)) == "aabb"


def test_slow_worker_is_used_when_it_is_the_only_one():
    scheduler = start("ab", num_workers=4)
    teach(scheduler, a=1.0, b=20.0)
    fill(scheduler)
    scheduler.worker_draining("a")
    assert [worker for worker, _ in fill(scheduler)] == ["b", "b"]


def test_slow_worker_is_tried_again_after_a_while():
    scheduler = start("ab", num_workers=4)
    teach(scheduler, a=1.0, b=20.0)
    now = 0.0
    while "b" not in [worker for worker, _ in fill(scheduler, now)]:
        now += 1.0
        reply(scheduler, "a", scheduler.in_flight("a")[0], now=now)
        deliver(scheduler)
    assert 300 < now < 350
    # Now it is fast, and soon as busy as any.
    for _ in range(30):
        now += 1.0
        for worker in "ab":
            if scheduler.in_flight(worker):
                reply(scheduler, worker, scheduler.in_flight(worker)[0], now=now)
        deliver(scheduler)
        fill(scheduler, now)
    assert len(scheduler.in_flight("b")) == 2


def test_overdue_worker_gets_nothing_while_another_may_take_it():
    scheduler = start("ab", num_workers=5, prefetch_factor=3)
    teach(scheduler, a=1.0, b=1.0)
    assert fill(scheduler, num_tasks=2) == [("a", 6), ("b", 7)]
    reply(scheduler, "b", 7, now=4.5)
    sent = fill(scheduler, now=4.5)
    assert sent[:3] == [("b", 8), ("b", 9), ("b", 10)]  # and a, which has fewer, none
    assert sent[3:] == [("b", 6)]  # late by far


def test_overdue_workers_get_tasks_when_all_are():
    scheduler = start("ab", num_workers=2)
    teach(scheduler, a=1.0, b=1.0)
    assert len(fill(scheduler, num_tasks=3)) == 3
    assert fill(scheduler, now=100.0) == [("b", 9)]


def test_task_that_waited_behind_another_is_not_overdue_when_it_begins():
    scheduler = start("ab", num_workers=3, prefetch_factor=3)
    teach(scheduler, a=1.0, b=1.0)
    fill(scheduler)
    reply(scheduler, "a", scheduler.in_flight("a")[0], now=100.0)
    deliver(scheduler)
    assert fill(scheduler, now=101.0)[0][0] == "a"


def test_task_of_a_worker_that_was_idle_is_not_overdue_when_it_begins():
    scheduler = start("ab", num_workers=3, prefetch_factor=3)
    teach(scheduler, a=1.0, b=1.0)
    assert fill(scheduler, now=100.0, num_tasks=2) == [("a", 6), ("b", 7)]
    reply(scheduler, "b", 7, now=101.0)
    assert sorted(worker for worker, _ in fill(scheduler, now=101.0, num_tasks=3)) == ["a", "b", "b"]


# Bytes


def test_answered_and_expected_bytes_stay_below_the_limit():
    scheduler = start("abcd", max_in_flight_bytes=350)
    assert len(fill(scheduler)) == 8  # nothing is known
    for number in range(8):
        reply(scheduler, "abcd"[number % 4], number, size_bytes=100)
    assert deliver(scheduler) == list(range(8))
    assert len(fill(scheduler)) == 3
    reply(scheduler, "a", 8, size_bytes=100)
    assert fill(scheduler) == []  # answered bytes count until delivered
    deliver(scheduler)
    assert len(fill(scheduler)) == 1


def test_estimate_can_be_carried_over_from_an_earlier_epoch():
    assert len(fill(start("abcd", max_in_flight_bytes=350, batch_size_bytes=100))) == 3


@pytest.mark.parametrize("in_order", [True, False])
def test_one_task_is_allowed_however_small_the_limit(in_order):
    scheduler = start("ab", max_in_flight_bytes=1, batch_size_bytes=1000, in_order=in_order)
    for number in range(5):
        ((worker, sent),) = fill(scheduler)
        assert sent == number
        reply(scheduler, worker, sent, size_bytes=1000)
        assert fill(scheduler) == []
        assert deliver(scheduler) == [number]


def test_requeued_task_that_all_wait_for_is_sent_over_the_limit():
    scheduler = start("ab", max_in_flight_bytes=500)
    fill(scheduler)
    reply(scheduler, "b", 1, size_bytes=500)
    reply(scheduler, "b", 3, size_bytes=500)
    scheduler.worker_left("a")
    assert fill(scheduler) == [("b", 0)]  # and not 2, which also waits


def test_size_estimate_follows_the_largest_and_sinks_slowly():
    scheduler = start("a")
    estimates = []
    for size_bytes in (100, 900, *[100] * 50):
        ((worker, number),) = fill(scheduler, num_tasks=1)
        reply(scheduler, worker, number, size_bytes=size_bytes)
        deliver(scheduler)
        estimates.append(scheduler.batch_size_bytes)
    assert estimates[:3] == [100, 900, 850]
    assert 100 < estimates[-1] < 150


def test_no_task_is_taken_when_the_window_is_full_or_the_input_has_ended():
    scheduler = start("a")
    assert [scheduler.add_task(None) for _ in range(3)] == [0, 1, None]
    scheduler = start("a")
    scheduler.end_of_input()
    assert scheduler.add_task(None) is None


def hang(scheduler) -> None:
    """The first worker hangs at task 0, while the others answer what they have, each task after 1 s."""
    assert fill(scheduler)[0] == ("a", 0)
    for now in 1.0, 2.0:
        for worker in scheduler._workers:
            if worker != "a":
                reply(scheduler, worker, scheduler.in_flight(worker)[0], now=now)


# Second copies


def test_batch_that_everybody_waits_for_goes_to_a_second_worker_and_the_first_answer_counts():
    scheduler = start("abc")
    hang(scheduler)
    assert scheduler.due(1.5) == 5.0  # five times the median
    assert scheduler.assign(4.9) is None
    assert scheduler.assign(5.0) == ("b", 0)
    assert scheduler.assign(5.0) is None  # one at a time
    assert [holder.id for holder in reply(scheduler, "b", 0, now=6.0).holders] == ["a"]
    assert deliver(scheduler) == [0, 1, 2]
    assert not reply(scheduler, "a", 0, now=7.0)
    assert scheduler.in_flight("a") == [3]
    assert scheduler._num_in_flight == 1


def test_nothing_is_sent_twice_before_enough_answers_are_known():
    scheduler = start("ab")
    fill(scheduler)
    reply(scheduler, "b", 1, now=1.0)
    assert scheduler.due(1.0) == math.inf
    assert scheduler.assign(1000.0) is None
    reply(scheduler, "b", 3, now=2.0)
    assert scheduler.assign(1000.0) == ("b", 0)


def test_second_copy_goes_to_another_host_and_never_to_a_worker_that_is_draining():
    for draining, expected in ("", "d"), ("d", "b"), ("bcd", None):
        scheduler = start("", num_workers=4)
        for worker, host in ("a", 1), ("b", 1), ("c", 1), ("d", 2):
            scheduler.worker_joined(worker, 0.0, host)
        hang(scheduler)
        for worker in draining:
            scheduler.worker_draining(worker)
        assigned = scheduler.assign(20.0)
        assert (assigned and assigned[0]) == expected
        assert scheduler.due(20.0) == math.inf


def test_worker_that_leaves_does_not_put_back_what_another_one_has():
    scheduler = start("abc")
    hang(scheduler)
    assert scheduler.assign(10.0) == ("b", 0)
    assert scheduler.running("a") == 0
    scheduler.worker_left("a")
    assert not scheduler.blame(0, "it died")
    scheduler.worker_left("b")


def test_deaths_do_not_condemn_a_batch_that_another_worker_has():
    for answered in True, False:
        scheduler = start("abc", max_retries=1)
        hang(scheduler)
        assert scheduler.assign(10.0) == ("b", 0)
        scheduler.worker_left("a")
        assert not scheduler.blame(0, "it died")
        if answered:
            assert reply(scheduler, "b", 0, now=12.0)
            assert not scheduler.blame(0, "it died")
        else:
            scheduler.worker_left("b")
            assert scheduler.blame(0, "it died")
        assert deliver(scheduler) == [0, 1, 2]


def test_copy_that_nobody_waits_for_does_not_hold_back_the_next_task():
    scheduler = start("abc", in_order=False, max_in_flight_bytes=3)
    hang(scheduler)
    deliver(scheduler)
    assert scheduler.assign(10.0) == ("b", 0)
    assert reply(scheduler, "b", 0, size_bytes=100, now=11.0)
    assert reply(scheduler, "a", 3, now=11.0)
    deliver(scheduler)
    assert scheduler.in_flight("a") == [0]
    assert len(fill(scheduler, 11.0)) == 1


# Task timeouts


def test_task_timeout_counts_from_when_a_task_came_to_the_head_of_the_queue():
    scheduler = start("ab", task_timeout=10.0)
    fill(scheduler)
    assert scheduler.due(0.0) == 10.0
    reply(scheduler, "a", 0, now=9.0)
    assert scheduler.timed_out(9.9) == []
    assert scheduler.timed_out(10.0) == [("b", 1)]
    assert scheduler.timed_out(10.0) == []  # said once
    assert scheduler.due(10.0) == 19.0
    assert scheduler.timed_out(19.0) == [("a", 2)]
    assert scheduler.due(19.0) == math.inf


def test_worker_that_left_is_never_over_its_time():
    scheduler = start("a", task_timeout=10.0)
    fill(scheduler)
    scheduler.worker_left("a")
    assert scheduler.due(1.0) == math.inf
    assert scheduler.timed_out(100.0) == []


def test_batch_over_its_time_at_too_many_workers_is_an_error():
    scheduler = start("a", task_timeout=10.0, max_retries=2)
    for attempt in range(2):
        fill(scheduler, attempt * 10.0)
        ((worker, number),) = scheduler.timed_out(attempt * 10.0 + 10.0)
        scheduler.worker_left(worker)
        assert scheduler.blame(number, "it died") == (attempt == 1)
        scheduler.worker_joined("a", attempt * 10.0 + 10.0)
    assert deliver(scheduler) == [0]


def test_window_grows_at_once_and_shrinks_with_the_next_delivery():
    scheduler = start("abcd", num_workers=2)
    assert len(fill(scheduler)) == 4
    scheduler.resize(3)
    assert len(fill(scheduler)) == 2
    reply(scheduler, "a", 0)
    scheduler.resize(1)
    deliver(scheduler)
    for worker in "bcd":
        assert fill(scheduler) == []
        reply(scheduler, worker, scheduler.in_flight(worker)[0])
        deliver(scheduler)
    assert fill(scheduler) == []
    reply(scheduler, "a", 4)
    deliver(scheduler)
    assert len(fill(scheduler)) == 1


def test_table_does_not_grow_with_the_number_of_tasks():
    scheduler = start("abc")
    pending = deque(fill(scheduler))
    for step in range(3000):
        worker, number = pending.popleft()
        reply(scheduler, worker, number, now=float(step))
        assert deliver(scheduler) == [number]
        pending.extend(fill(scheduler, now=float(step)))
        if step % 100 == 0:
            scheduler.worker_left(worker)
            scheduler.worker_joined(worker, float(step))
            pending = deque((w, n) for w, n in pending if w != worker)
            pending.extend(fill(scheduler, now=float(step)))
            pending = deque(sorted(pending, key=lambda item: item[1]))
    sizes = [len(value) for value in vars(scheduler).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 6
