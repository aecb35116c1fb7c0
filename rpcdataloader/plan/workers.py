"""How fast the workers are, and which of them gets a task. Pure.

Two measures are kept apart. The *task time* is what a worker says it has worked, without the time that a task was
queued or travelling: it says which worker is the faster one. How long answers took *as seen from here*, travelling
included, says what is unusual: where a network is full, all answers take long, and none of them is late.

A task goes where it is expected to be finished first; while nothing is known, that is where the fewest are in flight.
A worker whose running task is overdue comes last, whatever else is known of it.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

# Weight of the newest measurement in an average task time. The second answer of a worker replaces the first, which says
# more about imports and cold caches than about speed.
_SMOOTHING = 0.25

# A running task is overdue by far when it takes this many times its worker's average. Wrong alarms are harmless: the
# worker only gets no second task while others may take it. Exponentially distributed times pass 4 in 2 % of tasks. A
# measurement counts for at most that much as well, so that one outlier does not make a slow worker.
_OVERDUE_FACTOR = 4.0

# Shorter times count as this: an average of zero could never grow again.
_CLOCK_SECONDS = 1e-6

# What is known of a worker is old when it was idle for this many of its own task times. It is tried again then, if it
# was passed over, and its next answer replaces what was known. While it is at the task the others may have to wait for
# it: with 16, one that is still slow costs less than 6 % of the throughput.
_STALE_FACTOR = 16.0

# An answer is late by far when it takes this many times the median of the recent ones. A median, because one worker
# that hangs must not move it. Wrong alarms cost the work of one task, at a time when the others mostly have to wait.
_LATE_FACTOR = 5.0

# An answer that takes less is never late by far: lost packets, page faults and the trainer's own threads may delay any.
_LATE_SECONDS = 1.0

_NUM_RECENT = 64  # answers that the median is taken of
_NUM_ENOUGH = 8  # answers after which it is believed
_RENEWAL = 8  # answers after which it is computed again, so that it costs little when answers come fast

# A worker is passed over when waiting for a full one is expected to be this many times faster. Without, the slowest
# worker dictates the pace: it holds a task that all others, with the window full, come to wait for.
_PATIENCE = 1.5


class Pace:
    """The speed of all workers together.

    Args:
        num_tasks: Undelivered tasks at most. Half as many answers are enough to call another one late: if one worker of
            two hangs from the start, there are no more.

    Attributes:
        task_seconds: Average task time, expected of workers without an answer so far; None before the first answer.
        late_seconds: An answer that takes longer is late by far; infinite while too little is known.
    """

    def __init__(self, num_tasks: int) -> None:
        self.task_seconds: float | None = None
        self.late_seconds = math.inf
        self._num_enough = max(1, min(_NUM_ENOUGH, num_tasks // 2))
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_answers = 0

    def answered(self, task_seconds: float, seen_seconds: float | None) -> None:
        """A task was answered.

        Args:
            task_seconds: Time that it took on its worker.
            seen_seconds: From when its worker could begin with it until the answer was here; None if that is not known.
        """
        self.task_seconds = _smooth(self.task_seconds, task_seconds)
        if seen_seconds is None:
            return
        self._recent.append(seen_seconds)
        self._num_answers += 1
        few = self._num_answers < _RENEWAL
        if (few or self._num_answers % _RENEWAL == 0) and self._num_answers >= self._num_enough:
            median = sorted(self._recent)[len(self._recent) // 2]
            self.late_seconds = max(_LATE_SECONDS, _LATE_FACTOR * median)


@dataclass(slots=True, eq=False)
class WorkerPace:
    """What one worker is at, and how fast it is.

    Attributes:
        host: Where it is; None if that is not known.
        order: Of joining, which breaks ties.
        since: When the first task in flight began or, without one, when the worker fell idle.
        in_flight: Task numbers, an ordered set; the first one runs.
        task_seconds: Average of recent answers; None before the first one. It is expected to be like the others then.
    """

    id: int
    host: Hashable
    order: int
    common: Pace
    since: float
    in_flight: dict[int, None] = field(default_factory=dict)
    draining: bool = False
    task_seconds: float | None = None
    _num_averaged: int = 0  # answers in the average
    _ranked: list[_Entry] | None = None  # the list that it is in, and under what
    _entry: _Entry | None = None

    def sent(self, number: int, now: float) -> None:
        """The worker was given a task."""
        if not self.in_flight:
            if self.stale_at() <= now:
                self._num_averaged = min(self._num_averaged, 1)
            self.since = now
        self.in_flight[number] = None

    def answered(self, number: int, task_seconds: float | None, now: float) -> bool:
        """The worker answered a task; ``task_seconds`` is None if that says nothing about its speed.

        Returns:
            Whether it was the one that the worker was at, and not one that was cancelled behind it.
        """
        was_running = next(iter(self.in_flight)) == number
        del self.in_flight[number]
        if task_seconds is not None:
            self.task_seconds = _smooth(self.task_seconds if self._num_averaged > 1 else None, task_seconds)
            self._num_averaged += 1
            self.common.answered(task_seconds, now - self.since if was_running else None)
        if was_running:
            self.since = now
        return was_running

    def expect_finish(self) -> float:
        """Seconds until the worker would answer one more task; in units of a task while nothing is known."""
        expected = self.common.task_seconds if self.task_seconds is None else self.task_seconds
        return (len(self.in_flight) + 1) * (1.0 if expected is None else expected)

    def overdue_at(self) -> float:
        """When the running task is overdue; infinite if there is none, or nothing is known."""
        expected = self.common.task_seconds if self.task_seconds is None else self.task_seconds
        if expected is None or not self.in_flight:
            return math.inf
        return self.since + _OVERDUE_FACTOR * expected

    def stale_at(self) -> float:
        """When what is known of the worker is too old to be believed; infinite while it is at work."""
        return math.inf if self.in_flight else self.since + _STALE_FACTOR * self.expect_finish()

    def leave_ranking(self) -> None:
        """Take the worker out of the ranking that it is in, if any."""
        if self._ranked is not None and self._entry is not None:
            del self._ranked[bisect_left(self._ranked, self._entry)]
            self._ranked = self._entry = None


# What it is ordered by, the order of joining, which is unique, and the worker.
_Entry = tuple[float, int, WorkerPace]
_WORKER = itemgetter(2)


class Ranking:
    """A set of workers, iterated over with the soonest first; ties in the order of joining. A worker is in one only.

    Kept in order, so that a look for the soonest is a look at few workers, however many there are. A worker's place
    changes only with what it is given and answers: the owner puts it again then. What is expected of workers that have
    never answered changes with each answer of the others; but that is the same for all of them, so they keep their
    order among themselves, and are merged with the others by the iterator.
    """

    def __init__(self) -> None:
        self._measured: list[_Entry] = []  # sorted, by seconds
        self._unmeasured: list[_Entry] = []  # sorted, by tasks

    def put(self, worker: WorkerPace) -> None:
        """Add a worker, out of any other ranking, or put it where it belongs now."""
        if worker._ranked is not None and worker._entry is not None:
            del worker._ranked[bisect_left(worker._ranked, worker._entry)]
        if worker.task_seconds is not None:
            worker._ranked, worker._entry = self._measured, (worker.expect_finish(), worker.order, worker)
        else:
            worker._ranked, worker._entry = self._unmeasured, (float(len(worker.in_flight)), worker.order, worker)
        insort(worker._ranked, worker._entry)

    def __bool__(self) -> bool:
        return bool(self._measured or self._unmeasured)

    def __iter__(self) -> Iterator[WorkerPace]:
        if not self._unmeasured:
            return map(_WORKER, self._measured)
        if not self._measured:
            return map(_WORKER, self._unmeasured)
        both = map(_WORKER, self._measured), map(_WORKER, self._unmeasured)
        return heapq.merge(*both, key=lambda worker: (worker.expect_finish(), worker.order))


class _Rank(NamedTuple):
    """The lowest is the best."""

    is_overdue: bool
    nearness: int
    finish: float
    order: int


def choose(candidates: Iterable[WorkerPace], failed_at: WorkerPace | None, now: float) -> WorkerPace:
    """The best of the workers that have room, for a task that has failed at this worker, or at none.

    Args:
        candidates: At least one; the one expected to be finished soonest first, if the task has not failed: this is
            asked for each task, and must not look at all of hundreds of workers.
    """
    if failed_at is None:
        for worker in candidates:
            if now < worker.overdue_at():
                return worker
        return next(iter(candidates))
    return min(candidates, key=lambda worker: _rank(worker, failed_at, now))


def choose_second(workers: Collection[WorkerPace], first: WorkerPace, now: float) -> WorkerPace | None:
    """The worker for a second copy of a task that is late at this one; None if no other worker is on time.

    A full one will do: behind two tasks it still comes sooner than from a worker that hangs.
    """
    candidates = [
        worker for worker in workers if worker is not first and not worker.draining and now < worker.overdue_at()
    ]
    return choose(candidates, first, now) if candidates else None


def keep_until(best: WorkerPace, workers: Iterable[WorkerPace], failed_at: WorkerPace | None, now: float) -> float:
    """Until when a task for the best worker that has room is better kept for one of the others, which are full.

    That is until the other one is overdue, as far as can be said now, so each task is sent in the end. It is not
    later than ``now`` if the worker may have it.

    Args:
        workers: The others; the one expected to be finished soonest first, if the task has not failed.
    """
    nearness = _nearness(best, failed_at)
    stale_at = best.stale_at()
    if best.overdue_at() <= now:
        limit = math.inf
    elif stale_at <= now:
        limit, stale_at = 0.0, math.inf
    else:
        limit = best.expect_finish() / _PATIENCE
    for other in workers:
        is_better = other.expect_finish() < limit
        if failed_at is None and not is_better:
            break
        if failed_at is not None:
            other_nearness = _nearness(other, failed_at)
            is_better = other_nearness < nearness or (is_better and other_nearness == nearness)
        if is_better and not other.draining and now < (overdue_at := other.overdue_at()) < math.inf:
            return min(overdue_at, stale_at)
    return now


def _rank(worker: WorkerPace, avoided: WorkerPace, now: float) -> _Rank:
    return _Rank(worker.overdue_at() <= now, _nearness(worker, avoided), worker.expect_finish(), worker.order)


def _nearness(worker: WorkerPace, avoided: WorkerPace | None) -> int:
    """How much a worker has in common with one that is better avoided."""
    if worker is avoided:
        return 2
    return int(avoided is not None and avoided.host is not None and worker.host == avoided.host)


def _smooth(average: float | None, value: float) -> float:
    value = max(value, _CLOCK_SECONDS)
    if average is None:
        return value
    return average + _SMOOTHING * (min(value, _OVERDUE_FACTOR * average) - average)
