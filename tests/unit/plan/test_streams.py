from __future__ import annotations

import math

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.table import Table


def make(num_streams, *, turn=0, batch_size_bytes=0, **options) -> Table:
    return Table(PlanOptions(num_streams, is_iterable=True, **options), batch_size_bytes, turn)


def start(workers="ab", **options) -> Table:
    """A table whose streams have these workers, in this order."""
    table = make(**{"num_streams": len(workers), **options})
    for stream, worker in enumerate(workers):
        table.worker_joined(worker, place=stream)
    return table


def fill(table) -> list[tuple[str, int]]:
    """The driver's loop over an input that never ends; what was sent where."""
    while table.wants_input:
        table.add_task(None)
    sent = []
    while (assigned := table.assign(0.0)) is not None:
        sent.append(assigned)
    return sent


def deliver(table) -> list[int]:
    numbers = []
    while (task := table.pop_deliverable()) is not None:
        numbers.append(task.number)
    return numbers


def test_tasks_are_dealt_to_the_streams_in_turn_up_to_the_window():
    table = start("abc", prefetch_factor=2)
    assert fill(table) == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert [table.tasks[number].stream for number in range(6)] == [0, 1, 2, 0, 1, 2]
    assert not table.wants_input
    assert table.in_flight("b") == [1, 4]


def test_a_pass_that_goes_on_begins_with_the_stream_whose_turn_it_is():
    assert [worker for worker, _ in fill(start("abc", turn=2, prefetch_factor=1))] == ["c", "a", "b"]
    assert [worker for worker, _ in fill(start("abc", turn=3, prefetch_factor=1))] == ["a", "b", "c"]


def test_batches_are_delivered_in_turn_whoever_answers_first():
    table = start("ab", prefetch_factor=1)
    fill(table)
    table.replied("b", 1, size_bytes=1)
    assert not table.has_deliverable
    assert deliver(table) == []
    table.replied("a", 0, size_bytes=1)
    assert deliver(table) == [0, 1]


def test_in_any_order_a_slow_stream_does_not_hold_up_the_batches_of_the_others():
    """Each has its own share of the window, as in torch's loader."""
    table = start("ab", prefetch_factor=2, in_order=False)
    delivered = []
    for _ in range(10):
        for worker, number in fill(table):
            if worker == "b":
                assert table.replied(worker, number, size_bytes=1)
        delivered += deliver(table)
    assert table.in_flight("a") == [0, 2]
    assert len(delivered) >= 10


def test_in_any_order_answers_are_delivered_as_they_come():
    table = start("ab", prefetch_factor=1, in_order=False)
    fill(table)
    table.replied("b", 1, size_bytes=1)
    assert deliver(table) == [1]
    table.replied("a", 0, size_bytes=1)
    assert deliver(table) == [0]


def test_stream_that_has_ended_leaves_its_place_to_the_others():
    table = start("ab", prefetch_factor=2)
    fill(table)
    assert table.needs(0)
    table.ended("a", 0)
    assert not table.needs(0)
    assert not table.wants_input  # two tasks of one stream
    for number in 1, 3:
        table.replied("b", number, size_bytes=1)
    assert deliver(table) == [1, 3]
    assert fill(table) == [("b", 4), ("b", 5)]
    # What the worker says of tasks that it was sent before is no news.
    table.ended("a", 2)
    assert not table.replied("a", 2, size_bytes=1)
    table.ended("b", 4)
    assert table.finished


def test_batches_before_the_end_of_a_stream_are_delivered():
    table = start("ab", prefetch_factor=2)
    fill(table)
    table.replied("a", 0, size_bytes=1)
    table.ended("a", 2)
    table.ended("b", 1)
    assert not table.finished
    assert deliver(table) == [0]
    assert table.finished


def test_stream_waits_for_its_worker_and_no_other_serves_it():
    table = make(2, prefetch_factor=1)
    table.worker_joined("b", place=1)
    assert fill(table) == [("b", 1)]
    table.worker_joined("a", place=0)
    assert fill(table) == [("a", 0)]


def test_tasks_of_a_worker_that_left_go_to_its_successor_in_order():
    table = start("ab", prefetch_factor=2)
    fill(table)
    table.replied("a", 0, size_bytes=1)
    table.worker_left("a")
    assert fill(table) == []
    assert not table.replied("a", 2, size_bytes=1)
    table.worker_joined("c", place=0)
    assert fill(table) == [("c", 2)]


def test_task_that_ends_too_many_workers_counts_as_answered_and_ends_its_stream():
    table = start("ab", prefetch_factor=2, max_retries=2)
    fill(table)
    for attempt, worker in enumerate("ac"):
        table.worker_left(worker)
        assert table.blame(0, "it died") == (attempt == 1)
        if attempt == 0:
            table.worker_joined("c", place=0)
            fill(table)
    assert deliver(table) == [0]
    assert not table.needs(0)
    assert table.in_flight("b") == [1, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_limit_of_bytes_lets_one_task_through_at_a_time(in_order):
    table = start("ab", prefetch_factor=2, in_order=in_order, max_in_flight_bytes=10, batch_size_bytes=100.0)
    for expected in ("a", 0), ("b", 1), ("a", 2):
        assert fill(table) == [expected]
        table.replied(*expected, size_bytes=100)
        assert fill(table) == []
        assert deliver(table) == [expected[1]]


def test_bytes_of_tasks_that_were_dropped_are_free_again():
    table = start("ab", prefetch_factor=1, max_in_flight_bytes=20, batch_size_bytes=10.0)
    assert len(fill(table)) == 2
    table.ended("b", 1)
    table.replied("a", 0, size_bytes=10)
    deliver(table)
    assert fill(table) == [("a", 2)]
    assert table.batch_size_bytes == 10.0


def test_task_timeout_counts_from_when_a_task_came_to_the_head_of_the_queue():
    table = start("ab", prefetch_factor=2, task_timeout=10.0)
    assert table.due(0.0) == math.inf
    fill(table)
    assert table.due(0.0) == 10.0
    assert table.running("a") == 0
    table.replied("a", 0, size_bytes=1, now=9.0)
    assert table.timed_out(9.9) == []
    assert table.timed_out(10.0) == [("b", 1)]
    assert table.timed_out(10.0) == []  # said once
    assert table.due(10.0) == 19.0
    assert table.timed_out(19.0) == [("a", 2)]
    assert table.due(19.0) == math.inf


def test_stream_that_has_ended_or_lost_its_worker_is_never_over_its_time():
    table = start("abc", prefetch_factor=1, task_timeout=10.0)
    fill(table)
    table.ended("a", 0)
    table.worker_left("b")
    table.replied("c", 2, size_bytes=1, now=1.0)
    assert table.due(1.0) == math.inf
    assert table.timed_out(1000.0) == []
    assert table.running("a") is None


def test_task_over_its_time_at_too_many_workers_ends_its_stream():
    table = start("a", prefetch_factor=1, task_timeout=10.0, max_retries=2)
    for attempt in range(2):
        table.add_task(None) if table.wants_input else None
        assert table.assign(attempt * 10.0) is not None
        ((worker, number),) = table.timed_out(attempt * 10.0 + 10.0)
        table.worker_left(worker)
        assert table.blame(number, "it died") == (attempt == 1)
        table.worker_joined("a", place=0)
    assert deliver(table) == [0]
    assert table.finished
