"""Workers by when each is expected to finish one more task. Pure.

Kept in order, so that whoever looks for the soonest looks at few workers, however many there are. A worker's place
changes only with what it is given and answers: the owner puts it again then. What is expected of workers that have
never answered changes with each answer of the others; but that is the same for all of them, so they keep their order
among themselves, and are merged with the others when somebody looks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator
from operator import itemgetter
from typing import TypeVar

from rpcdataloader.plan.pace import WorkerPace

W = TypeVar("W", bound=Hashable)

# What it is ordered by, the order of joining, which nobody shares, and the worker.
_Entry = tuple[float, int, WorkerPace[W]]
_WORKER = itemgetter(2)


class Ranking(Collection[WorkerPace[W]]):
    """A set of workers, iterated over with the soonest first; ties in the order of joining."""

    def __init__(self) -> None:
        self._measured: list[_Entry[W]] = []  # sorted, by seconds
        self._unmeasured: list[_Entry[W]] = []  # sorted, by tasks
        self._entries: dict[int, tuple[list[_Entry[W]], _Entry[W]]] = {}  # where each is, by its order of joining

    def put(self, worker: WorkerPace[W]) -> None:
        """Add a worker, or put it where it belongs now."""
        order = worker.order
        self.discard(worker)
        if worker.is_measured:
            place, entry = self._measured, (worker.expect_finish(), order, worker)
        else:
            place, entry = self._unmeasured, (float(len(worker.in_flight)), order, worker)
        insort(place, entry)
        self._entries[order] = place, entry

    def discard(self, worker: WorkerPace[W]) -> None:
        """Remove a worker, if it is there."""
        found = self._entries.pop(worker.order, None)
        if found is not None:
            place, entry = found
            del place[bisect_left(place, entry)]

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, WorkerPace) and worker.order in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[WorkerPace[W]]:
        if not self._unmeasured:
            return map(_WORKER, self._measured)
        if not self._measured:
            return map(_WORKER, self._unmeasured)
        both = map(_WORKER, self._measured), map(_WORKER, self._unmeasured)
        return heapq.merge(*both, key=lambda worker: (worker.expect_finish(), worker.order))
