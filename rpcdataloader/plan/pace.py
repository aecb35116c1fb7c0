"""How fast the workers are: what each is expected to take, which ones are overdue, and when an answer is late by far.

Two measures are kept apart. The *task time* is what a worker says it has worked, without the time that a task was
queued or travelling: it says which worker is the faster one. How long answers took *as seen from here*, travelling
included, says what is unusual: where a network is full, all answers take long, and none of them is late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)

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

    def answered(self, task_seconds: float) -> None:
        """A task took so long on its worker."""
        self.task_seconds = _smooth(self.task_seconds, task_seconds)

    def seen(self, seconds: float) -> None:
        """An answer was here so long after its worker could begin with the task."""
        self._recent.append(seconds)
        self._num_answers += 1
        few = self._num_answers < _RENEWAL
        if (few or self._num_answers % _RENEWAL == 0) and self._num_answers >= self._num_enough:
            median = sorted(self._recent)[len(self._recent) // 2]
            self.late_seconds = max(_LATE_SECONDS, _LATE_FACTOR * median)


@dataclass(slots=True, eq=False)
class WorkerPace(Generic[W]):
    """What one worker is at, and how fast it is."""

    id: W
    host: Hashable  # None if it is not known
    order: int  # of joining, which breaks ties
    common: Pace
    since: float  # when the first task in flight began or, without one, when the worker fell idle
    in_flight: dict[int, None] = field(default_factory=dict)  # an ordered set of task numbers; the first one runs
    draining: bool = False
    _task_seconds: float | None = None  # average of recent answers
    _num_averaged: int = 0  # how many answers are in it

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
            self._task_seconds = _smooth(self._task_seconds if self._num_averaged > 1 else None, task_seconds)
            self._num_averaged += 1
            self.common.answered(task_seconds)
            if was_running:
                self.common.seen(now - self.since)
        if was_running:
            self.since = now
        return was_running

    @property
    def is_measured(self) -> bool:
        """Whether it has said how long a task took; otherwise it is expected to be like the others."""
        return self._task_seconds is not None

    def expect_finish(self) -> float:
        """Seconds until the worker would answer one more task; in units of a task while nothing is known."""
        expected = self._expect_seconds()
        return (len(self.in_flight) + 1) * (1.0 if expected is None else expected)

    def overdue_at(self) -> float:
        """When the running task is overdue; infinite if there is none, or nothing is known."""
        expected = self._expect_seconds()
        if expected is None or not self.in_flight:
            return math.inf
        return self.since + _OVERDUE_FACTOR * expected

    def stale_at(self) -> float:
        """When what is known of the worker is too old to be believed; infinite while it is at work."""
        return math.inf if self.in_flight else self.since + _STALE_FACTOR * self.expect_finish()

    def _expect_seconds(self) -> float | None:
        return self.common.task_seconds if self._task_seconds is None else self._task_seconds


def _smooth(average: float | None, value: float) -> float:
    value = max(value, _CLOCK_SECONDS)
    if average is None:
        return value
    return average + _SMOOTHING * (min(value, _OVERDUE_FACTOR * average) - average)
