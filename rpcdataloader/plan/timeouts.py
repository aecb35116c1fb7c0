"""Which workers are at a task for longer than a task may take.

What counts is the task at the head of a worker's queue, from the moment it came there: a task that waits behind
another one is not running. Pure; the tables of tasks tell it what begins and ends.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Timeouts(Generic[W]):
    """One clock per worker. An event costs the same for any number of workers.

    Args:
        task_timeout: Seconds that a task may run.

    Raises:
        ValueError: It is not positive.
    """

    def __init__(self, task_timeout: float) -> None:
        if not task_timeout > 0:
            raise ValueError(f"task_timeout must be positive, not {task_timeout}")
        self._task_timeout = task_timeout
        # When the limit ends for each worker that is at work: the limit is the same for all, so whoever began first
        # is over it first, and the order of the dictionary is that of the deadlines.
        self._deadlines: dict[W, float] = {}

    def begin(self, worker: W, now: float) -> None:
        """A task has come to the head of the worker's queue."""
        self._deadlines.pop(worker, None)
        self._deadlines[worker] = now + self._task_timeout

    def end(self, worker: W) -> None:
        """The worker has no task any more, or has left."""
        self._deadlines.pop(worker, None)

    @property
    def due(self) -> float | None:
        """When the next worker is over its time, if its task goes on; None for never."""
        return next(iter(self._deadlines.values()), None)

    def expire(self, now: float) -> list[W]:
        """The workers that are over their time. Each is named once, until it begins another task."""
        expired: list[W] = []
        for worker, deadline in self._deadlines.items():
            if now < deadline:
                break
            expired.append(worker)
        for worker in expired:
            del self._deadlines[worker]
        return expired
