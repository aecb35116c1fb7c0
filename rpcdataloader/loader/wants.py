"""How many workers a loader wants: what :mod:`rpcdataloader.plan.demand` decides from, measured at times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, pstdev

from rpcdataloader.diagnosis.figures import measure
from rpcdataloader.diagnosis.records import Recorder, Records
from rpcdataloader.plan.demand import LEAST_BATCHES, LEAST_SECONDS, Demand, Seen

# The spread of fewer tasks is not known.
_FEW = 8


class Auto(int):
    """``num_workers="auto"``, as the attribute of a loader: libraries compare that with numbers."""

    def __repr__(self) -> str:
        return "auto"


class Wants:
    """The number of workers that a loader wants, from pass to pass.

    Args:
        num_workers: Number of workers that the user has chosen; with ``Auto()``, the loader uses what it wants.
        least: Least number to want.
    """

    def __init__(self, num_workers: int, least: int) -> None:
        self._is_auto = isinstance(num_workers, Auto)
        self._chosen = int(num_workers)  # reports are JSON, which has no numbers of NumPy
        self._demand = Demand(int(least))
        self._since, self._batches = -math.inf, 0  # of the last decision

    @property
    def most(self) -> int | None:
        """Number of workers to use at most; None for all."""
        return self._demand.wanted if self._is_auto else None

    def wanted(self, present: int, more: int) -> int:
        """Number of workers that are wanted; before a decision, the present ones, and more as the diagnosis advises."""
        wanted = self._demand.wanted or present + more
        return min(wanted, self._chosen or wanted)

    def decide(self, now: float, recorder: Recorder, places: Callable[[], Mapping[int, int]]) -> bool:
        """Decide again, if enough is known since the last time; returns whether it was.

        Args:
            places: Function that returns the place of each worker that takes tasks, by its number.
        """
        if self._since < recorder.start.begun:
            self._since, self._batches = recorder.start.begun, 0
        if now - self._since < LEAST_SECONDS or recorder.batches - self._batches < LEAST_BATCHES:
            return False
        if (seen := look(recorder.records(), places(), self._since)) is None:
            return False
        self._since, self._batches = now, recorder.batches
        self._demand.decide(now, seen)
        return True


def look(records: Records, places: Mapping[int, int], since: float) -> Seen | None:
    """Return what was measured since a time; None if that is too little."""
    figures = measure(replace(records, probes=tuple(probe for probe in records.probes if probe.delivered >= since)))
    if figures is None:
        return None
    evidence, means = figures.evidence, figures.task_seconds
    rates = {place: 1 / means[number] for number, place in places.items() if means.get(number)}
    if not rates:
        return None
    # The spread of each worker: those of another node may be slower.
    known = [recent for recent in records.tasks.values() if len(recent) >= _FEW and any(recent)]
    others = [rate for name, rate in figures.capacities.items() if name not in ("workers", "window")]
    return Seen(
        needed=evidence["needed_rate"],
        allowed=min(others, default=math.inf),
        waited=evidence["blocked_seconds"] * evidence["delivered_rate"],
        spread=fmean([pstdev(recent) / fmean(recent) for recent in known]) if known else 0.0,
        rates=rates,
    )
