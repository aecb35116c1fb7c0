from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.plan.streams import StreamTable


def start(workers="ab", **options) -> StreamTable[str]:
    """A table whose streams have these workers, in this order."""
    table: StreamTable[str] = StreamTable(**{"num_streams": len(workers), **options})
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
    while (number := table.pop_deliverable()) is not None:
        numbers.append(number)
    return numbers


def test_tasks_are_dealt_to_the_streams_in_turn_up_to_the_window():
    table = start("abc", prefetch_factor=2)
    assert fill(table) == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert [table.stream_of(number) for number in range(6)] == [0, 1, 2, 0, 1, 2]
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
    assert table.ended("a", 0)
    assert not table.needs(0)
    assert not table.wants_input  # two tasks of one stream
    for number in 1, 3:
        table.replied("b", number, size_bytes=1)
    assert deliver(table) == [1, 3]
    assert fill(table) == [("b", 4), ("b", 5)]
    # What the worker says of tasks that it was sent before is no news.
    assert not table.ended("a", 2)
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
    table: StreamTable[str] = StreamTable(num_streams=2, prefetch_factor=1)
    table.worker_joined("b", place=1)
    assert fill(table) == [("b", 1)]
    table.worker_joined("a", place=0)
    assert fill(table) == [("a", 0)]


def test_tasks_of_a_worker_that_left_go_to_its_successor_in_order():
    table = start("ab", prefetch_factor=2)
    fill(table)
    table.replied("a", 0, size_bytes=1)
    assert table.worker_left("a", 0.0) == [2]
    assert fill(table) == []
    assert not table.replied("a", 2, size_bytes=1)
    table.worker_joined("c", place=0)
    assert fill(table) == [("c", 2)]


def test_task_that_ends_too_many_workers_counts_as_answered_and_ends_its_stream():
    table = start("ab", prefetch_factor=2, max_retries=2)
    fill(table)
    for attempt, worker in enumerate("ac"):
        table.worker_left(worker, 0.0)
        assert table.blame(0) == (attempt == 1)
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
    assert table.due(0.0) is None
    fill(table)
    assert table.due(0.0) == 10.0
    assert table.running("a") == 0
    table.replied("a", 0, size_bytes=1, now=9.0)
    assert table.timed_out(9.9) == []
    assert table.timed_out(10.0) == [("b", 1)]
    assert table.timed_out(10.0) == []  # said once
    assert table.due(10.0) == 19.0
    assert table.timed_out(19.0) == [("a", 2)]
    assert table.due(19.0) is None


def test_stream_that_has_ended_or_lost_its_worker_is_never_over_its_time():
    table = start("abc", prefetch_factor=1, task_timeout=10.0)
    fill(table)
    table.ended("a", 0)
    table.worker_left("b", 1.0)
    table.replied("c", 2, size_bytes=1, now=1.0)
    assert table.due(1.0) is None
    assert table.timed_out(1000.0) == []
    assert table.running("a") is None


def test_task_over_its_time_at_too_many_workers_ends_its_stream():
    table = start("a", prefetch_factor=1, task_timeout=10.0, max_retries=2)
    for attempt in range(2):
        table.add_task(None) if table.wants_input else None
        assert table.assign(attempt * 10.0) is not None
        ((worker, number),) = table.timed_out(attempt * 10.0 + 10.0)
        table.worker_left(worker, attempt * 10.0 + 10.0)
        assert table.blame(number) == (attempt == 1)
        table.worker_joined("a", place=0)
    assert deliver(table) == [0]
    assert table.finished


@pytest.mark.parametrize("name", ["num_streams", "prefetch_factor"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=name):
        StreamTable(**{"num_streams": 1, name: 0})


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.worker_joined("a", place=5),
        lambda table: table.worker_joined("c", place=0),
        lambda table: table.worker_left("c", 0.0),
        lambda table: table.in_flight("c"),
        lambda table: table.add_task(None),
    ],
)
def test_illegal_calls_are_refused_and_change_nothing(call):
    table = start("ab", prefetch_factor=1)
    fill(table)
    with pytest.raises(LocalProtocolError):
        call(table)
    assert (table.in_flight("a"), table.in_flight("b")) == ([0], [1])


class Interleavings(RuleBasedStateMachine):
    """Workers that come, answer and go in any order, beside a model that knows what each stream holds."""

    @initialize(
        lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
        prefetch_factor=st.integers(1, 3),
        in_order=st.booleans(),
        turn=st.integers(0, 4),
        max_in_flight_bytes=st.sampled_from([1, 8, 2**30]),
        task_timeout=st.sampled_from([None, 10.0]),
    )
    def begin(self, lengths, prefetch_factor, in_order, turn, max_in_flight_bytes, task_timeout):
        self.now, self.task_timeout = 0.0, task_timeout
        self.began: dict[int, float] = {}  # when a worker came to the first of its tasks
        self.lengths = lengths
        self.in_order = in_order
        self.window = prefetch_factor * len(lengths)
        self.table: StreamTable[int] = StreamTable(
            num_streams=len(lengths),
            prefetch_factor=prefetch_factor,
            in_order=in_order,
            turn=turn,
            max_in_flight_bytes=max_in_flight_bytes,
            max_retries=10**6,
            task_timeout=task_timeout,
        )
        streams = [[(stream, place) for place in range(length)] for stream, length in enumerate(lengths)]
        turn %= len(lengths)
        rows = itertools.zip_longest(*streams[turn:], *streams[:turn])
        self.expected = [batch for row in rows for batch in row if batch is not None]
        self.owners: dict[int, int] = {}  # worker by stream
        self.num_workers = 0
        self.places = [0] * len(lengths)  # of the next batch of each stream
        self.answers: dict[int, tuple[int, int]] = {}  # by task
        self.in_order_of_answers: list[tuple[int, int]] = []
        self.delivered: list[tuple[int, int]] = []

    @rule(data=st.data())
    def join(self, data):
        free = sorted(set(range(len(self.lengths))) - set(self.owners))
        if free:
            self.bring(data.draw(st.sampled_from(free)))

    def bring(self, stream):
        self.num_workers += 1
        self.owners[stream] = self.num_workers
        self.table.worker_joined(self.num_workers, place=stream)

    @rule()
    def fill(self):
        while self.table.wants_input:
            self.table.add_task(None)
        while (assigned := self.table.assign(self.now)) is not None:
            worker, number = assigned
            self.began.setdefault(worker, self.now)
            stream = self.table.stream_of(number)
            assert self.owners[stream] == worker
            assert self.table.in_flight(worker)[-1] == number  # oldest first

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), size_bytes=st.integers(0, 10))
    def answer(self, data, size_bytes):
        stream = data.draw(st.sampled_from(sorted(self.owners)))
        self.answer_of(stream, size_bytes)

    def answer_of(self, stream, size_bytes=1):
        worker = self.owners[stream]
        in_flight = self.table.in_flight(worker)
        if not in_flight:
            return
        number = in_flight[0]
        if self.places[stream] == self.lengths[stream]:
            assert self.table.ended(worker, number)
            del self.began[worker]
            assert not any(self.table.ended(worker, other) for other in in_flight)
        else:
            assert self.table.replied(worker, number, size_bytes=size_bytes, now=self.now)
            del self.began[worker]
            if len(in_flight) > 1:
                self.began[worker] = self.now
            assert not self.table.replied(worker, number, size_bytes=size_bytes)
            self.answers[number] = (stream, self.places[stream])
            self.in_order_of_answers.append(self.answers[number])
            self.places[stream] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), blamed=st.booleans())
    def leave(self, data, blamed):
        self.end(data.draw(st.sampled_from(sorted(self.owners))), blamed)

    @rule(seconds=st.sampled_from([0.1, 5.0, 10.0]), blamed=st.booleans())
    def wait(self, seconds, blamed):
        self.now += seconds
        expected = set()
        if self.task_timeout is not None:
            expected = {worker for worker, began in self.began.items() if began + self.task_timeout <= self.now}
        expired = self.table.timed_out(self.now)
        assert {worker for worker, _ in expired} == expected
        due = self.table.due(self.now)
        assert due is None or due > self.now
        for worker, number in expired:
            assert number == self.table.in_flight(worker)[0] == self.table.running(worker)
            self.end(next(stream for stream, owner in self.owners.items() if owner == worker), blamed)

    def end(self, stream, blamed):
        worker = self.owners.pop(stream)
        self.began.pop(worker, None)
        in_flight = self.table.in_flight(worker)
        lost = self.table.worker_left(worker, 0.0)
        assert lost == in_flight
        if lost and blamed:
            assert not self.table.blame(lost[0])
        assert not any(self.table.replied(worker, number, size_bytes=1) for number in lost)

    @rule()
    def deliver(self):
        has_deliverable = self.table.has_deliverable
        number = self.table.pop_deliverable()
        assert has_deliverable == (number is not None)
        if number is not None:
            self.delivered.append(self.answers.pop(number))

    @invariant()
    def order_is_that_of_the_model(self):
        expected = self.expected if self.in_order else self.in_order_of_answers
        assert self.delivered == expected[: len(self.delivered)]

    @invariant()
    def window_is_kept(self):
        in_flight = sum(len(self.table.in_flight(worker)) for worker in self.owners.values())
        assert in_flight + len(self.answers) <= self.window

    def teardown(self):
        if not hasattr(self, "table"):
            return
        for stream in range(len(self.lengths)):
            if stream not in self.owners:
                self.bring(stream)
        # Each round delivers a batch or ends a stream, or it is stuck.
        for _ in range(len(self.expected) + len(self.lengths) + 1):
            self.fill()
            for stream in self.owners:
                self.answer_of(stream)
            while self.table.has_deliverable:
                self.deliver()
        assert self.table.finished
        assert not self.answers
        assert sorted(self.delivered) == sorted(self.expected)
        assert self.table.due(self.now) is None
        assert self.table._budget.num_in_flight == self.table._budget._answered_bytes == 0
        self.order_is_that_of_the_model()


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
