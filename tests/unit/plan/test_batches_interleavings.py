"""The task table under any order of events, beside a model that only knows where each number is."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpcdataloader.plan.batches import BatchTable

HOSTS = [None, "x", "y"]


class Interleavings(RuleBasedStateMachine):
    @initialize(
        num_workers=st.integers(1, 4),
        prefetch_factor=st.integers(1, 3),
        in_order=st.booleans(),
        max_in_flight_bytes=st.sampled_from([1, 150, 400, 10**9]),
        max_retries=st.integers(1, 3),
        hedging=st.sampled_from([True, True, False]),
        task_timeout=st.sampled_from([None, 3.0, 50.0]),
        num_tasks=st.sampled_from([60, 60, 12, 1, 0]),
    )
    def begin(
        self,
        num_workers,
        prefetch_factor,
        in_order,
        max_in_flight_bytes,
        max_retries,
        hedging,
        task_timeout,
        num_tasks,
    ):
        self.scheduler: BatchTable[int] = BatchTable(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            in_order=in_order,
            max_in_flight_bytes=max_in_flight_bytes,
            max_retries=max_retries,
            hedging=hedging,
            task_timeout=task_timeout,
        )
        self.window = self.wanted_window = num_workers * prefetch_factor
        self.prefetch_factor, self.in_order, self.max_retries = prefetch_factor, in_order, max_retries
        self.max_in_flight_bytes = max_in_flight_bytes
        self.hedging, self.task_timeout = hedging, task_timeout
        self.num_tasks, self.num_added = num_tasks, 0
        self.ended = False
        self.now = 0.0
        # Where each number is. A copy stays at its worker when another one has answered.
        self.workers: dict[int, list[int]] = {}
        self.waiting: set[int] = set()
        self.pausing: dict[int, float] = {}  # until when
        self.answered: dict[int, int] = {}  # bytes
        self.answers: list[int] = []
        self.delivered: list[int] = []
        self.began: dict[int, float] = {}  # when a worker came to the first of its tasks, unless it was told to be late
        self.draining: set[int] = set()
        self.gone: list[tuple[int, int]] = []  # (worker, number) that may be answered late or twice
        self.deaths: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.num_joined = 0
        self.num_answers = 0
        for worker in range(num_workers):
            self.join(again=False, host=HOSTS[worker % len(HOSTS)])

    # What the model knows

    def is_open(self, number) -> bool:
        """Whether it is neither answered nor delivered."""
        return number not in self.answered and number not in self.delivered

    def holders(self, number) -> list[int]:
        return [worker for worker, numbers in self.workers.items() if number in numbers]

    def hedged(self) -> list[int]:
        return [n for n in range(self.num_added) if self.is_open(n) and len(self.holders(n)) > 1]

    @property
    def undelivered(self) -> int:
        return self.num_added - len(self.delivered)

    def take_back(self, worker, number) -> None:
        """The worker has answered."""
        if self.workers[worker][0] == number:
            self.began.pop(worker, None)
            if len(self.workers[worker]) > 1:
                self.began[worker] = self.now
        self.workers[worker].remove(number)
        self.gone.append((worker, number))

    def draw_copy(self, data) -> tuple[int, int]:
        worker = data.draw(st.sampled_from(sorted(w for w, numbers in self.workers.items() if numbers)))
        # In the order of arrival, but for those that were cancelled.
        return worker, data.draw(st.sampled_from([self.workers[worker][0], *self.workers[worker]]))

    # Workers

    @precondition(lambda self: len(self.workers) < 5)
    @rule(again=st.booleans(), host=st.sampled_from(HOSTS))
    def join(self, again, host):
        gone = [worker for worker in range(self.num_joined) if worker not in self.workers]
        worker = gone[-1] if again and gone else self.num_joined
        self.num_joined = max(self.num_joined, worker + 1)
        self.scheduler.worker_joined(worker, self.now, host)
        self.workers[worker] = []

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data(), blamed=st.booleans())
    def leave(self, data, blamed):
        self.end(data.draw(st.sampled_from(sorted(self.workers))), blamed)

    def end(self, worker, blamed):
        numbers = self.workers[worker]
        running = numbers[0] if numbers and self.is_open(numbers[0]) else None
        assert self.scheduler.running(worker) == running
        del self.workers[worker]
        self.began.pop(worker, None)
        self.draining.discard(worker)
        lost = [number for number in numbers if self.is_open(number) and not self.holders(number)]
        assert self.scheduler.worker_left(worker, self.now) == lost
        self.waiting |= set(lost)
        self.gone += [(worker, number) for number in numbers]
        if blamed and numbers:
            self.blame(numbers[0])

    def blame(self, number):
        is_open = self.is_open(number)
        self.deaths[number] += is_open
        too_many = is_open and self.deaths[number] >= self.max_retries and not self.holders(number)
        assert self.scheduler.blame(number) == too_many
        if too_many:
            self.waiting.remove(number)
            self.answered[number] = 0
            self.answers.append(number)
            self.failed.add(number)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain(self, data):
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.scheduler.worker_draining(worker)
        self.draining.add(worker)

    @rule(num_workers=st.integers(1, 4))
    def resize(self, num_workers):
        self.scheduler.resize(num_workers)
        self.wanted_window = num_workers * self.prefetch_factor
        self.window = max(self.window, self.wanted_window)

    # Tasks, from the sampler to a worker

    @rule(limit=st.integers(1, 20))
    def add(self, limit):
        for _ in range(limit):
            if self.ended or self.undelivered >= self.window:
                break
            if self.num_added == self.num_tasks:
                self.ended = True
                self.scheduler.end_of_input()
                break
            assert self.scheduler.add_task(("payload", self.num_added)) == self.num_added
            self.waiting.add(self.num_added)
            self.num_added += 1

    @rule(limit=st.integers(1, 20))
    def assign(self, limit):
        for _ in range(limit):
            ripe = {number for number, time in self.pausing.items() if time <= self.now}
            assigned = self.scheduler.assign(self.now)
            self.waiting |= ripe
            for number in ripe:
                del self.pausing[number]
            if assigned is None:
                self.nothing_to_do_before(self.scheduler.due(self.now))
                break
            worker, number = assigned
            assert worker not in self.draining
            assert self.scheduler.payload(number) == ("payload", number)
            if number in self.waiting:
                self.check_sent(worker, number)
                self.waiting.remove(number)
            else:
                self.check_hedge(worker, number)
            if not self.workers[worker]:
                self.began[worker] = self.now
            self.workers[worker].append(number)

    def check_sent(self, worker, number):
        assert len(self.workers[worker]) < self.prefetch_factor
        assert self.may_send(number)

    def may_send(self, number):
        # The byte rule, with the scheduler's own estimate.
        in_flight = sum(map(len, self.workers.values()))
        expected = sum(self.answered.values()) + (in_flight + 1) * self.scheduler.batch_size_bytes
        awaited = any(self.is_open(n) for numbers in self.workers.values() for n in numbers) or self.answered
        first = number == len(self.delivered) if self.in_order else not awaited
        return first or expected <= self.max_in_flight_bytes

    def check_hedge(self, worker, number):
        assert self.hedging
        assert self.is_open(number)
        assert not self.deaths[number]
        (first,) = self.holders(number)
        assert first != worker
        records = self.scheduler._workers
        assert self.now >= records[first].since + 1.0
        assert records[worker].overdue_at() > self.now
        assert self.num_answers
        if self.in_order:
            assert number == len(self.delivered)
        else:
            assert not self.answered
        assert len(self.hedged()) < max(1, len(self.workers) // 16)

    def nothing_to_do_before(self, due):
        """After all was sent that may be sent."""
        if self.task_timeout is None:
            assert due is None or due > self.now
        # Whoever waits, waits for something.
        is_idle = not any(self.workers.values()) and not self.answered
        if self.waiting and is_idle and not self.pausing:
            assert not set(self.workers) - self.draining
        if self.pausing:
            assert due is not None
        has_room = any(len(self.workers[w]) < self.prefetch_factor for w in set(self.workers) - self.draining)
        if has_room and self.waiting and self.may_send(min(self.waiting)):
            assert due is not None
        awaited = len(self.delivered)
        may_be_doubled = self.is_open(awaited) and not self.deaths[awaited]
        if self.hedging and self.in_order and not self.hedged() and may_be_doubled:
            for worker in self.holders(awaited):
                late_at = self.scheduler._workers[worker].since + self.scheduler._pace.late_seconds
                assert late_at in (math.inf, due) or late_at <= self.now or (due is not None and due < late_at)

    @rule()
    def drive(self):
        """As the loader does, whenever something has happened."""
        self.deliver(limit=100)
        self.add(limit=100)
        self.assign(limit=100)

    @rule()
    def drive_when_it_is_due(self):
        self.now = max(self.now, self.scheduler.due(self.now) or 0.0)
        self.drive()

    # Answers

    @precondition(lambda self: any(self.workers.values()))
    @rule(
        data=st.data(),
        size_bytes=st.sampled_from([0, 1, 100, 101, 300]),
        seconds=st.sampled_from([None, 0.0, 0.01, 1.0, 30.0]),
        seconds_later=st.sampled_from([0.0, 0.1, 0.5, 10.0]),
    )
    def answer(self, data, size_bytes, seconds, seconds_later):
        self.now += seconds_later
        self.answer_of(*self.draw_copy(data), size_bytes=size_bytes, seconds=seconds)

    def answer_of(self, worker, number, *, size_bytes=1, seconds=1.0):
        counts = self.is_open(number)
        others = [other for other in self.holders(number) if other != worker]
        said = self.scheduler.replied(worker, number, size_bytes=size_bytes, task_seconds=seconds, now=self.now)
        assert said == counts
        self.take_back(worker, number)
        self.num_answers += 1
        if counts:
            assert sorted(self.scheduler.losers(number)) == sorted(others)
            self.answered[number] = size_bytes
            self.answers.append(number)

    @rule(data=st.data(), rounds=st.integers(1, 4), seconds=st.sampled_from([0.1, 2.0]))
    def all_but_one_answer(self, data, rounds, seconds):
        silent = data.draw(st.sampled_from([-1, *sorted(self.workers)]))
        for _ in range(rounds):
            self.drive()
            self.now += seconds
            for worker, numbers in self.workers.items():
                if numbers and worker != silent:
                    self.answer_of(worker, numbers[0], seconds=seconds)
        self.now += 10.0  # so that it is late, if it is known how long answers take
        self.drive()

    @precondition(lambda self: any(self.workers.values()))
    @rule(data=st.data(), delay=st.sampled_from([0.0, 1.0, 100.0]))
    def fail_for_now(self, data, delay):
        worker, number = self.draw_copy(data)
        counts = self.is_open(number)
        assert self.scheduler.retry(worker, number, delay=delay, now=self.now) == counts
        self.take_back(worker, number)
        if counts and not self.holders(number):
            self.pausing[number] = self.now + delay

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), retried=st.booleans())
    def answer_late_or_twice(self, data, retried):
        worker, number = data.draw(st.sampled_from(self.gone))
        if number not in self.workers.get(worker, []):
            estimate = self.scheduler.batch_size_bytes
            if retried:
                assert not self.scheduler.retry(worker, number, delay=1.0, now=self.now)
            else:
                assert not self.scheduler.replied(worker, number, size_bytes=10**6, task_seconds=1.0, now=self.now)
            assert self.scheduler.batch_size_bytes == estimate

    @rule(limit=st.integers(1, 20))
    def deliver(self, limit):
        for _ in range(limit):
            if self.in_order:
                expected = len(self.delivered) if len(self.delivered) in self.answered else None
            else:
                expected = self.answers[len(self.delivered)] if len(self.delivered) < len(self.answers) else None
            assert self.scheduler.has_deliverable == (expected is not None)
            assert self.scheduler.pop_deliverable() == expected
            if expected is None:
                break
            del self.answered[expected]
            self.delivered.append(expected)
            self.window = self.wanted_window

    # Time

    @rule(seconds=st.sampled_from([0.01, 2.0, 60.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(blamed=st.booleans())
    def end_those_over_their_time(self, blamed):
        expected = set()
        if self.task_timeout is not None:
            expected = {w for w, began in self.began.items() if began + self.task_timeout <= self.now}
        named = self.scheduler.timed_out(self.now)
        assert {worker for worker, _ in named} == expected
        assert len(named) == len(expected)
        assert self.scheduler.timed_out(self.now) == []
        for worker, number in named:
            assert number == self.workers[worker][0]
            self.end(worker, blamed=blamed)

    @invariant()
    def workers_that_may_be_given_tasks_are_ranked(self):
        taking = [record for record in self.scheduler._workers.values() if not record.draining]
        for has_room, ranking in (True, self.scheduler._open), (False, self.scheduler._full):
            expected = [one for one in taking if (len(one.in_flight) < self.prefetch_factor) == has_room]
            assert list(ranking) == sorted(expected, key=lambda one: (one.expect_finish(), one.order))

    @invariant()
    def nothing_is_forgotten(self):
        if not hasattr(self, "scheduler"):
            return
        assert {worker: self.scheduler.in_flight(worker) for worker in self.workers} == self.workers
        in_flight = {n for numbers in self.workers.values() for n in numbers if self.is_open(n)}
        places = [*in_flight, *self.waiting, *self.pausing, *self.answered, *self.delivered]
        assert sorted(places) == list(range(self.num_added))
        assert all(len(self.holders(number)) <= 2 for number in in_flight)
        assert self.scheduler.wants_input == (not self.ended and self.undelivered < self.window)
        assert self.scheduler.finished == (self.ended and not self.undelivered)
        assert self.scheduler._budget.num_in_flight == sum(map(len, self.workers.values()))
        assert self.scheduler._budget._answered_bytes == sum(self.answered.values())
        assert self.scheduler._num_hedged == len(self.hedged())

    def teardown(self):
        """Whatever happened, one worker that answers brings the rest to its end, each number once.

        With a task timeout the others never answer again; without, they answer everything.
        """
        if not hasattr(self, "scheduler"):
            return
        self.join(again=False, host="z")
        alive = [max(self.workers)] if self.task_timeout is not None else list(self.workers)
        for _ in range(1000):
            self.end_those_over_their_time(blamed=True)
            self.add(limit=100)
            self.assign(limit=100)
            busy = [worker for worker in alive if self.workers.get(worker)]
            for worker in busy:
                self.answer_of(worker, self.workers[worker][0])
            self.deliver(limit=100)
            self.nothing_is_forgotten()
            if self.scheduler.finished:
                break
            if not busy:
                due = self.scheduler.due(self.now)
                if due is not None:
                    self.now = max(self.now, due)
        assert self.scheduler.finished
        assert sorted(self.delivered) == list(range(self.num_tasks))
        assert not self.in_order or self.delivered == sorted(self.delivered)
        for worker, numbers in list(self.workers.items()):
            for number in list(numbers):
                self.answer_of(worker, number)
        assert self.scheduler._budget.num_in_flight == self.scheduler._budget._answered_bytes == 0
        assert self.scheduler.due(self.now) is None


Interleavings.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
