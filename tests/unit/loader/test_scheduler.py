from __future__ import annotations

import math
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.loader.scheduler import Scheduler


def start(workers="ab", **options) -> Scheduler[str]:
    scheduler: Scheduler[str] = Scheduler(**{"num_workers": len(workers) or 1, **options})
    for worker in workers:
        scheduler.worker_joined(worker, 0.0)
    return scheduler


def fill(scheduler, now=0.0, num_tasks=math.inf) -> list[tuple[str, int]]:
    """The driver's loop over an input that never ends; what was sent where."""
    sent: list[tuple[str, int]] = []
    while len(sent) < num_tasks and (worker := scheduler.choose_worker(now)) is not None:
        number = scheduler.next_requeued()
        if number is None:
            number = scheduler.add_task(f"indices {len(sent)}")
        scheduler.dispatch(number, worker, now)
        sent.append((worker, number))
    return sent


def reply(scheduler, worker, number, *, size_bytes=1, task_seconds=1.0, now=0.0) -> bool:
    return scheduler.replied(worker, number, size_bytes=size_bytes, task_seconds=task_seconds, now=now)


def deliver(scheduler) -> list[int]:
    numbers = []
    while (number := scheduler.pop_deliverable()) is not None:
        numbers.append(number)
    return numbers


def teach(scheduler, **task_seconds) -> None:
    """Make each worker known as one with this task time; leaves nothing in flight."""
    for _ in range(3):
        for worker, seconds in task_seconds.items():
            number = scheduler.add_task(None)
            scheduler.dispatch(number, worker, 0.0)
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
    assert scheduler.wants_input
    assert scheduler.in_flight("a") == [0, 1, 2]


def test_no_worker_no_task():
    scheduler = start("", num_workers=1)
    assert scheduler.choose_worker(0.0) is None


def test_tasks_added_ahead_of_time_are_sent_in_order():
    scheduler = start("ab", num_workers=3, prefetch_factor=1)
    for payload in "xyz":
        scheduler.add_task(payload)
    assert fill(scheduler) == [("a", 0), ("b", 1)]
    assert (scheduler.next_requeued(), scheduler.payload(2)) == (2, "z")


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
    assert not scheduler.finished
    scheduler.end_of_input()
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
    assert scheduler.choose_worker(0.0) is None


def test_payload_is_kept_until_delivered():
    scheduler = start("a")
    number = scheduler.add_task([3, 1, 2])
    scheduler.dispatch(number, "a", 0.0)
    reply(scheduler, "a", number)
    assert scheduler.payload(number) == [3, 1, 2]
    deliver(scheduler)
    with pytest.raises(LocalProtocolError, match="task 0 was never added or is delivered"):
        scheduler.payload(number)


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
    assert scheduler.worker_left("a", 1.0) == [0, 2]
    assert not reply(scheduler, "a", 0)
    assert scheduler.next_requeued() == 0
    scheduler.worker_joined("c", 1.0)
    assert fill(scheduler, 1.0) == [("c", 0), ("c", 2)]
    assert not reply(scheduler, "a", 2)
    assert reply(scheduler, "c", 2)


def test_answered_tasks_survive_their_worker():
    scheduler = start("ab")
    fill(scheduler)
    reply(scheduler, "a", 0)
    assert scheduler.worker_left("a", 0.0) == [2]
    assert deliver(scheduler) == [0]


def test_requeued_tasks_are_sent_although_the_window_is_full():
    scheduler = start("ab", prefetch_factor=1)
    fill(scheduler)
    reply(scheduler, "b", 1)
    scheduler.worker_left("a", 0.0)
    assert not scheduler.wants_input
    assert fill(scheduler) == [("b", 0)]


def test_worker_that_left_may_join_again():
    scheduler = start("a")
    fill(scheduler)
    scheduler.worker_left("a", 0.0)
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
    assert scheduler.worker_left("a", 0.0) == [2]


# Who gets the next task


def test_task_goes_where_it_is_expected_to_be_finished_first():
    scheduler = start("abc", num_workers=6, prefetch_factor=4)
    teach(scheduler, a=3.0, b=1.0, c=1.4)
    # Expected: b 1, c 1.4, b 2, c 2.8, a 3, b 3, b 4
    assert "".join(worker for worker, _ in fill(scheduler, num_tasks=7)) == "bcbcabb"


def test_new_worker_is_expected_to_be_like_the_others():
    scheduler = start("a", num_workers=4, prefetch_factor=3)
    teach(scheduler, a=1.0)
    scheduler.worker_joined("b", 0.0)
    assert "".join(worker for worker, _ in fill(scheduler)) == "ababab"


def test_first_answer_of_a_worker_does_not_make_it_slow():
    scheduler = start("ab", num_workers=4, prefetch_factor=2)
    teach(scheduler, a=1.0)
    for seconds in (60.0, 1.0):
        number = scheduler.add_task(None)
        scheduler.dispatch(number, "b", 0.0)
        reply(scheduler, "b", number, task_seconds=seconds)
        deliver(scheduler)
    assert "".join(worker for worker, _ in fill(scheduler)) == "abab"


def test_single_outlier_does_not_make_a_worker_slow():
    scheduler = start("ab")
    teach(scheduler, a=1.0, b=1.0)
    number = scheduler.add_task(None)
    scheduler.dispatch(number, "b", 0.0)
    reply(scheduler, "b", number, task_seconds=1000.0)
    deliver(scheduler)
    assert sorted(worker for worker, _ in fill(scheduler)) == ["a", "a", "b", "b"]


def test_time_of_zero_is_not_kept_for_ever():
    scheduler = start("a")
    teach(scheduler, a=0.0)
    for _ in range(60):
        teach(scheduler, a=1.0)
    assert len(fill(scheduler, num_tasks=1)) == 1
    assert scheduler.choose_worker(now=1.0) == "a"
    assert not scheduler._is_overdue(scheduler._workers["a"], 3.9)
    assert scheduler._is_overdue(scheduler._workers["a"], 4.1)


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
    assert 100 < now < 300
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
    assert fill(scheduler, now=4.5) == [("b", 8), ("b", 9), ("b", 10)]  # and a, which has fewer, none


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
    scheduler.worker_left("a", 0.0)
    assert fill(scheduler) == [("b", 0)]  # and not 2, which also waits
    assert scheduler.next_requeued() == 2


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


# Illegal calls


@pytest.mark.parametrize("name", ["num_workers", "prefetch_factor", "max_in_flight_bytes"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        Scheduler(**{"num_workers": 1, name: 0})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.worker_joined("a", 0.0), "'a' has joined already"),
        (lambda s: s.worker_left("x", 0.0), "'x' has not joined, or has left"),
        (lambda s: s.worker_draining("x"), "'x' has not joined"),
        (lambda s: s.in_flight("x"), "'x' has not joined"),
        (lambda s: s.payload(4), "task 4 was never added"),
        (lambda s: s.dispatch(3, "x", 0.0), "'x' may not be given a task"),
        (lambda s: s.dispatch(3, "a", 0.0), "'a' may not be given a task"),  # it is full
        (lambda s: s.dispatch(1, "b", 0.0), "task 1 is not the next one to send, which is 3"),
        (lambda s: reply(s, "a", 4), "task 4 was never added"),
        (lambda s: reply(s, "a", -1), "task -1 was never added"),
        (lambda s: reply(s, "a", 0, size_bytes=-1), "task 0 cannot have -1 bytes"),
        (lambda s: reply(s, "a", 0, task_seconds=math.nan), "and nan seconds"),
        (lambda s: s.add_task(None), "4 tasks are not delivered yet"),
        (lambda s: (s.end_of_input(), s.add_task(None)), "the input has ended"),
    ],
)
def test_illegal_calls_are_refused_and_change_nothing(call, message):
    scheduler = start("ab")
    fill(scheduler, num_tasks=3)
    scheduler.add_task(None)
    with pytest.raises(LocalProtocolError, match=message):
        call(scheduler)
    assert fill(scheduler) == [("b", 3)]
    assert (scheduler.in_flight("a"), scheduler.in_flight("b")) == ([0, 2], [1, 3])


def test_table_does_not_grow_with_the_number_of_tasks():
    scheduler = start("abc")
    pending = deque(fill(scheduler))
    for step in range(3000):
        worker, number = pending.popleft()
        reply(scheduler, worker, number, now=float(step))
        assert deliver(scheduler) == [number]
        pending.extend(fill(scheduler, now=float(step)))
        if step % 100 == 0:
            scheduler.worker_left(worker, float(step))
            scheduler.worker_joined(worker, float(step))
            pending = deque((w, n) for w, n in pending if w != worker)
            pending.extend(fill(scheduler, now=float(step)))
            pending = deque(sorted(pending, key=lambda item: item[1]))
    sizes = [len(value) for value in vars(scheduler).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 6


class Interleavings(RuleBasedStateMachine):
    """Any order of events, against a model that only knows where each number is."""

    @initialize(
        num_workers=st.integers(1, 3),
        prefetch_factor=st.integers(1, 3),
        in_order=st.booleans(),
        max_in_flight_bytes=st.sampled_from([1, 150, 400, 10**9]),
        num_tasks=st.integers(0, 60),
        ahead=st.booleans(),
    )
    def begin(self, num_workers, prefetch_factor, in_order, max_in_flight_bytes, num_tasks, ahead):
        self.scheduler: Scheduler[int] = Scheduler(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            in_order=in_order,
            max_in_flight_bytes=max_in_flight_bytes,
        )
        self.window = num_workers * prefetch_factor
        self.prefetch_factor, self.in_order = prefetch_factor, in_order
        self.max_in_flight_bytes = max_in_flight_bytes
        self.num_tasks, self.num_added, self.ahead = num_tasks, 0, ahead
        self.ended = False
        self.workers: dict[int, list[int]] = {}
        self.draining: set[int] = set()
        self.waiting: set[int] = set()
        self.answered: dict[int, int] = {}
        self.answers: list[int] = []
        self.delivered: list[int] = []
        self.gone: list[tuple[int, int]] = []  # (worker, number) that may be answered late or twice
        self.num_joined = 0
        self.now = 0.0

    def take_input(self):
        if self.num_added == self.num_tasks:
            self.ended = True
            self.scheduler.end_of_input()
            return None
        number = self.scheduler.add_task(("payload", self.num_added))
        assert number == self.num_added
        self.num_added += 1
        self.waiting.add(number)
        return number

    @property
    def undelivered(self) -> int:
        return self.num_added - len(self.delivered)

    @precondition(lambda self: len(self.workers) < 5)
    @rule(again=st.booleans())
    def join(self, again):
        gone = [worker for worker in range(self.num_joined) if worker not in self.workers]
        worker = gone[-1] if again and gone else self.num_joined
        self.num_joined = max(self.num_joined, worker + 1)
        self.scheduler.worker_joined(worker, self.now)
        self.workers[worker] = []

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data):
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        numbers = self.workers.pop(worker)
        self.draining.discard(worker)
        assert self.scheduler.worker_left(worker, self.now) == numbers
        self.waiting |= set(numbers)
        self.gone += [(worker, number) for number in numbers]

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain(self, data):
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.scheduler.worker_draining(worker)
        self.draining.add(worker)

    @rule(limit=st.integers(1, 20))
    def dispatch(self, limit):
        while self.ahead and self.scheduler.wants_input:
            self.take_input()
        for _ in range(limit):
            worker = self.scheduler.choose_worker(self.now)
            if worker is None:
                break
            assert worker not in self.draining
            number = self.scheduler.next_requeued()
            assert number == min(self.waiting, default=None)
            if number is None:
                number = self.take_input()
                if number is None:
                    break
            # The byte rule, with the scheduler's own estimate.
            in_flight = sum(map(len, self.workers.values()))
            expected = sum(self.answered.values()) + (in_flight + 1) * self.scheduler.batch_size_bytes
            first = number == len(self.delivered) if self.in_order else not in_flight and not self.answered
            assert first or expected <= self.max_in_flight_bytes
            self.scheduler.dispatch(number, worker, self.now)
            assert self.scheduler.payload(number) == ("payload", number)
            self.waiting.remove(number)
            self.workers[worker].append(number)

    @precondition(lambda self: any(self.workers.values()))
    @rule(
        data=st.data(),
        size_bytes=st.sampled_from([0, 1, 100, 101, 300]),
        seconds=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
        seconds_later=st.sampled_from([0.0, 0.1, 10.0, 1000.0]),
    )
    def answer(self, data, size_bytes, seconds, seconds_later):
        worker = data.draw(st.sampled_from(sorted(w for w, numbers in self.workers.items() if numbers)))
        number = data.draw(st.sampled_from(self.workers[worker]))
        self.now += seconds_later
        assert self.scheduler.replied(worker, number, size_bytes=size_bytes, task_seconds=seconds, now=self.now)
        self.workers[worker].remove(number)
        self.answered[number] = size_bytes
        self.answers.append(number)
        self.gone.append((worker, number))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def answer_late_or_twice(self, data):
        worker, number = data.draw(st.sampled_from(self.gone))
        if number not in self.workers.get(worker, []):
            estimate = self.scheduler.batch_size_bytes
            assert not self.scheduler.replied(worker, number, size_bytes=10**6, task_seconds=1.0, now=self.now)
            assert self.scheduler.batch_size_bytes == estimate

    @rule(limit=st.integers(1, 20))
    def deliver(self, limit):
        for _ in range(limit):
            number = self.scheduler.pop_deliverable()
            if self.in_order:
                expected = len(self.delivered) if len(self.delivered) in self.answered else None
            else:
                expected = self.answers[len(self.delivered)] if len(self.delivered) < len(self.answers) else None
            assert number == expected
            if number is None:
                break
            del self.answered[number]
            self.delivered.append(number)

    @rule(seconds=st.sampled_from([0.01, 5.0, 10000.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def nothing_is_forgotten(self):
        if not hasattr(self, "scheduler"):
            return
        assert {worker: self.scheduler.in_flight(worker) for worker in self.workers} == self.workers
        in_flight = [number for numbers in self.workers.values() for number in numbers]
        places = [*in_flight, *self.waiting, *self.answered, *self.delivered]
        assert sorted(places) == list(range(self.num_added))
        assert self.undelivered <= self.window
        assert all(len(numbers) <= self.prefetch_factor for numbers in self.workers.values())
        assert self.scheduler.next_requeued() == min(self.waiting, default=None)
        assert self.scheduler.wants_input == (not self.ended and self.undelivered < self.window)
        assert self.scheduler.finished == (self.ended and not self.undelivered)
        # Whoever waits, waits for something.
        if set(self.workers) - self.draining and not self.scheduler.finished and not in_flight and not self.answered:
            assert self.scheduler.choose_worker(self.now) is not None

    def teardown(self):
        """Whatever happened, a worker that stays brings the rest to its end, each number once."""
        if not hasattr(self, "scheduler"):
            return
        self.join(again=False)
        for _ in range(1000):
            if self.scheduler.finished:
                break
            self.dispatch(limit=100)
            for worker, numbers in self.workers.items():
                for number in list(numbers[:1]):
                    assert reply(self.scheduler, worker, number, now=self.now)
                    numbers.remove(number)
                    self.answered[number] = 1
                    self.answers.append(number)
            self.deliver(limit=100)
            self.nothing_is_forgotten()
        assert self.scheduler.finished
        assert sorted(self.delivered) == list(range(self.num_tasks))
        assert not self.in_order or self.delivered == sorted(self.delivered)


Interleavings.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestInterleavings = Interleavings.TestCase
