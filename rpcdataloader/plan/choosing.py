"""Which worker a task goes to, and whether it is better kept until another one has room. Pure functions.

A task goes where it is expected to be finished first; while nothing is known, that is where the fewest are in flight.
A worker whose running task is overdue comes last, whatever else is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple, TypeVar

from rpcdataloader.plan.pace import WorkerPace

W = TypeVar("W", bound=Hashable)

# A worker is passed over when waiting for a full one is expected to be this many times faster. Without, the slowest
# worker dictates the pace: it holds a task that all others, with the window full, come to wait for.
_PATIENCE = 1.5


class _Rank(NamedTuple):
    """The lowest is the best."""

    is_overdue: bool
    nearness: int
    finish: float
    order: int


def choose(candidates: Collection[WorkerPace[W]], failed_at: WorkerPace[W] | None, now: float) -> WorkerPace[W]:
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


def choose_second(workers: Collection[WorkerPace[W]], first: WorkerPace[W], now: float) -> WorkerPace[W] | None:
    """The worker for a second copy of a task that is late at this one; None if nobody else is on time.

    A full one will do: behind two tasks it still comes sooner than from a worker that hangs.
    """
    candidates = [
        worker for worker in workers if worker is not first and not worker.draining and now < worker.overdue_at()
    ]
    return choose(candidates, first, now) if candidates else None


def keep_until(
    best: WorkerPace[W], workers: Iterable[WorkerPace[W]], failed_at: WorkerPace[W] | None, now: float
) -> float:
    """Until when a task for the best worker that has room is better kept for one of the others, which are full.

    That is until the other one is overdue, as far as can be said now, so a task cannot be kept for ever. It is not
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


def _rank(worker: WorkerPace[W], avoided: WorkerPace[W], now: float) -> _Rank:
    return _Rank(worker.overdue_at() <= now, _nearness(worker, avoided), worker.expect_finish(), worker.order)


def _nearness(worker: WorkerPace[W], avoided: WorkerPace[W] | None) -> int:
    """How much a worker has in common with one that is better avoided."""
    if worker is avoided:
        return 2
    return int(avoided is not None and avoided.host is not None and worker.host == avoided.host)
