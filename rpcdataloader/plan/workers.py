"""Speed of the workers, and the choice of one for a task. Pure.

Two measures are kept apart. The *task time* is a worker's own working time, without queueing and travelling: it tells
which worker is faster. The time of answers *as seen from here*, travelling included, tells which are unusual: where a
network is full, all answers take long, and none is a straggler.

All times are those of a whole batch: a part of one counts as if the worker had made the batch at that speed.

A task goes to the worker that is expected to finish it first: workers without measurements come before all others, and
that with the fewest tasks in flight before these. Those that should finish at about the same time take turns, so that
none needs memory for more batches than the others. A worker whose running task is overdue comes last. One that has
failed gets none, while others work, until it would have finished: where files are missing, all fails at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

# Weight of the newest measurement in an average task time. A worker's second answer replaces the first, which says more
# about imports and cold caches than about speed.
_SMOOTHING = 0.25

# Ratio to its worker's average above which a running task is overdue. Wrong alarms are harmless: the worker only gets
# no second task while others may take it. Exponentially distributed times exceed 4 in 2 % of tasks. A measurement
# counts for at most that ratio as well, so that one outlier does not make a slow worker.
_OVERDUE_FACTOR = 4.0

# Least task time in an average: an average of zero could never grow again.
_CLOCK_SECONDS = 1e-6

# A worker's measurements are old after this many of its own task times of idleness. If it was passed over, it is tried
# again then, and its next answer replaces them. The others may have to wait for that task: with 16, a worker that is
# still slow costs less than 6 % of the throughput.
_STALE_FACTOR = 16.0

# Ratio to the median of the recent answers above which an answer is a straggler. A median, because one worker that
# hangs must not move it. Wrong alarms cost the work of one task, at a time when the others mostly have to wait.
_LATE_FACTOR = 5.0

# Least time of a straggler: lost packets, page faults and the trainer's own threads may delay any answer.
_LATE_SECONDS = 1.0

_NUM_RECENT = 64  # answers in the median
_NUM_ENOUGH = 8  # answers from which on it is used
_RENEWAL = 8  # answers between two computations, which keeps it cheap

# A worker is passed over when waiting for a full one is expected to be this many times faster. Otherwise the slowest
# worker dictates the pace: all others, with the window full, come to wait for its task.
PATIENCE = 1.5

FINISH = attrgetter("finish")
_SINCE = attrgetter("since")

# Ratio of expected finishes up to which they are the same: measured task times differ by chance.
_SAME = 1.25


class Pace:
    """The speed of all workers together.

    Args:
        num_tasks: Most undelivered tasks. Half as many answers are enough to recognise a straggler: if one worker of
            two hangs from the start, no more will come.

    Attributes:
        task_seconds: Average task time, above which a worker without an answer is overdue, too; None before the first.
        seen_seconds: Average time of an answer as seen from here, but for the first of each worker, which has to begin;
            None before.
        late_seconds: Time above which an answer is a straggler; infinite while too little is known.
    """

    def __init__(self, num_tasks: int) -> None:
        self.task_seconds: float | None = None
        self.seen_seconds: float | None = None
        self.late_seconds = math.inf
        self._num_enough = max(1, min(_NUM_ENOUGH, num_tasks // 2))
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_answers = 0

    def answered(self, task_seconds: float, seen_seconds: float | None, *, is_first: bool = False) -> None:
        """Note that a task was answered.

        Args:
            task_seconds: Seconds that it took on its worker.
            seen_seconds: Seconds from when its worker could begin until the answer was here; None if unknown.
            is_first: True for the worker's first answer.
        """
        self.task_seconds = _smooth(self.task_seconds, task_seconds)
        if seen_seconds is None:
            return
        if not is_first:
            self.seen_seconds = _smooth(self.seen_seconds, seen_seconds)
        self._recent.append(seen_seconds)
        self._num_answers += 1
        few = self._num_answers < _RENEWAL
        if (few or self._num_answers % _RENEWAL == 0) and self._num_answers >= self._num_enough:
            median = sorted(self._recent)[len(self._recent) // 2]
            self.late_seconds = max(_LATE_SECONDS, _LATE_FACTOR * median)


@dataclass(slots=True, eq=False)
class WorkerPace:
    """The tasks and the speed of one worker."""

    id: int
    host: Hashable  # host of the worker; None if unknown
    common: Pace
    since: float  # time at which the first task in flight began or, without one, the worker fell idle
    # Numbers of its tasks, the first of which runs, and the share of a batch that each is: 1, or less for a part.
    in_flight: dict[float, float] = field(default_factory=dict)
    draining: bool = False
    has_begun: bool = False
    has_failed: bool = False  # in its last task
    rests_until: float = -math.inf  # time at which that would have been finished
    task_seconds: float | None = None  # average of recent answers; None before the first one
    # Seconds until it would answer one more task. An attribute, since it is compared more often than it changes.
    finish: float = _CLOCK_SECONDS
    _num_averaged: int = 0  # answers in the average

    def sent(self, number: float, now: float, share: float = 1.0) -> None:
        """Note that the worker was given a task: this share of a batch."""
        if not self.in_flight:
            if self._num_averaged > 1 and self.stale_at() <= now:
                self._num_averaged = 1
            self.since = now
        self.in_flight[number] = share
        self._note_finish()

    def answered(self, number: float, task_seconds: float | None, now: float, has_failed: bool = False) -> bool:
        """Note that the worker answered a task; ``task_seconds`` is None if that says nothing about its speed.

        Returns:
            True if it was the running task; False for one that was cancelled behind it.
        """
        was_running = next(iter(self.in_flight)) == number
        share = self.in_flight.pop(number)
        self.has_failed = has_failed
        if has_failed:
            # As seen from here: where everything is slow, the others take longer than they work.
            seconds = self.common.seen_seconds or self.common.task_seconds or _LATE_SECONDS
            self.rests_until = self.since + share * seconds
        elif task_seconds is not None:
            task_seconds /= share
            self.task_seconds = _smooth(self.task_seconds if self._num_averaged > 1 else None, task_seconds)
            self._num_averaged += 1
            seen_seconds = (now - self.since) / share if was_running else None
            self.common.answered(task_seconds, seen_seconds, is_first=self._num_averaged == 1)
        if was_running:
            self.since = now
        self._note_finish()
        return was_running

    def _note_finish(self) -> None:
        self.finish = (sum(self.in_flight.values()) + 1) * (self.task_seconds or _CLOCK_SECONDS)

    def overdue_at(self) -> float:
        """Time at which the running task is overdue; infinite without a task or without measurements."""
        expected = self.common.task_seconds if self.task_seconds is None else self.task_seconds
        if expected is None or not self.in_flight:
            return math.inf
        return self.since + _OVERDUE_FACTOR * expected

    def stale_at(self) -> float:
        """Time at which the worker's measurements become too old; infinite while it is at work."""
        return math.inf if self.in_flight else self.since + _STALE_FACTOR * self.finish


def take_turns(best: WorkerPace, workers: Collection[WorkerPace]) -> WorkerPace:
    """Of the idle workers, if the best is one, that which has waited longest of those that are about as fast."""
    if best.in_flight:
        return best
    limit = _SAME * best.finish
    return min([worker for worker in workers if worker.finish <= limit and not worker.in_flight], key=_SINCE)


def choose_backup(workers: Iterable[WorkerPace], first: WorkerPace, now: float) -> WorkerPace | None:
    """The worker for the backup task of a straggler at ``first``, on another host if possible; None if none is on time.

    A full worker will do: behind two tasks, a copy still comes sooner than from a worker that hangs.
    """
    return min(
        (worker for worker in workers if worker is not first and not worker.draining and now < worker.overdue_at()),
        key=lambda one: (first.host is not None and one.host == first.host, one.finish),
        default=None,
    )


def keep_until(best: WorkerPace, full: Collection[WorkerPace], now: float) -> float:
    """Time until which a task is better kept for one of the full workers than given to the best one with room.

    That is the time at which the full worker is overdue, so each task is sent in the end. It is not later than ``now``
    if the best worker with room gets the task.

    Args:
        full: Full workers that have answered before.
    """
    limit, stale_at = math.inf, best.stale_at()
    if now < best.overdue_at():
        if stale_at <= now:
            return now
        limit = best.finish / PATIENCE
    other = min(full, key=FINISH, default=None)
    if other is not None and other.overdue_at() <= now:
        other = min((worker for worker in full if now < worker.overdue_at()), key=FINISH, default=None)
    return now if other is None or other.finish >= limit else min(other.overdue_at(), stale_at)


def _smooth(average: float | None, value: float) -> float:
    value = max(value, _CLOCK_SECONDS)
    if average is None:
        return value
    return average + _SMOOTHING * (min(value, _OVERDUE_FACTOR * average) - average)
