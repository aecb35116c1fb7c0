"""What follows from why a loop waits: a sentence in the log, a report to node servers, and a number of workers."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from rpcdataloader.client.sharing import Partition
from rpcdataloader.diagnosis.records import Recorder, Records
from rpcdataloader.plan.demand import LEAST_BATCHES, LEAST_SECONDS, Demand, Seen
from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.status import MAX_NUMBER, MAX_WORKERS, LoopStatus

if TYPE_CHECKING:
    from rpcdataloader.diagnosis.verdict import Diagnosis

logger = logging.getLogger("rpcdataloader.loader")

# Of its own, so that users who silence it still hear of deaths.
diagnosis_logger = logging.getLogger("rpcdataloader.diagnosis")

_failures = itertools.count()  # of diagnoses that were to be logged


def diagnose(records: Records) -> Diagnosis:
    """The reason why the loop waits; what finds it is imported when it is first asked for."""
    from rpcdataloader.diagnosis.verdict import diagnose

    return diagnose(records)


def tell(
    recorder: Recorder,
    find: Callable[[], Diagnosis | None],
    dataset: str,
    partition: Partition,
    ask_ranks: Callable[[Callable[[LoopStatus | None], None]], bool] = lambda _then: False,
) -> None:
    """Log, on rank 0 and once, the diagnosis of a pass that waited; an error of ``find`` ends no training.

    All ranks of a training wait for the slowest one: the sentence is that of the rank that waits most, which
    ``ask_ranks`` passes on; it returns False if nothing is known of other ranks.
    """
    if partition.rank or recorder.is_told:
        return
    recorder.is_told = True
    try:
        if (diagnosis := find()) is not None:
            say = functools.partial(_say, f"{partition.label}{dataset}, {recorder.batches:,} batches: ", diagnosis)
            if partition.world_size == 1 or not ask_ranks(say):
                say(None)
    except Exception:
        level = logging.DEBUG if next(_failures) else logging.WARNING
        logger.log(level, "cannot say why the loop has waited; training goes on", exc_info=True)


def _say(prefix: str, own: Diagnosis, slowest: LoopStatus | None) -> None:
    from rpcdataloader.diagnosis.verdict import HARMLESS, URGENT

    is_urgent, text = own.is_urgent, own.text if own.bound != "none" else ""
    if slowest is not None and slowest.wait_share >= own.wait_share + HARMLESS and slowest.bound != "unclear":
        is_urgent, text = slowest.wait_share >= URGENT, printable(slowest.text)
        prefix += f"rank {slowest.rank} waits most ({100 * slowest.wait_share:.0f} %): "
    if text:
        diagnosis_logger.log(logging.WARNING if is_urgent else logging.INFO, "%s%s", prefix, text)


def to_status(diagnosis: Diagnosis, dataset: str, rank: int | None, wait: str, wanted: int) -> LoopStatus:
    """Turn a diagnosis into a report; ``dataset`` is the name of a class, ``wait`` says what a long wait is for."""
    more = diagnosis.more_workers
    # Rounding may make a number larger.
    known = {name: number for name, number in diagnosis.metrics().items() if number < MAX_NUMBER / 2}
    numbers = {name: float(f"{number:.4g}") for name, number in known.items()}
    return LoopStatus(
        dataset=dataset[:80],
        rank=rank,
        wait_share=numbers["wait_share"],
        bound=diagnosis.bound,
        text=f"{wait}{diagnosis.text}"[:500],
        demand_per_second=numbers.get("demand_rate"),
        delivered_per_second=numbers.get("delivered_rate", 0.0),
        more_workers=None if more is None else min(more[1], MAX_WORKERS),
        wanted_workers=min(wanted, MAX_WORKERS),
        numbers=numbers,
    )


# The spread of fewer tasks is not known.
_FEW = 8


class Auto(int):
    """``num_workers="auto"``, as the attribute of a loader: libraries compare that with numbers."""

    def __repr__(self) -> str:
        return "auto"


class WantedWorkers:
    """The number of workers that a loader wants, from pass to pass.

    Args:
        num_workers: Number of workers that the user has chosen; with ``Auto()``, the loader uses what it wants.
        least: Least number to want.

    Attributes:
        may_split: False once parts of a batch of this loader did not fit together.
    """

    def __init__(self, num_workers: int, least: int) -> None:
        self.num_workers = num_workers
        self.may_split = True
        self._least = int(least)
        self._demand: Demand | None = None  # until the first decision
        self._since = -math.inf  # time of the last decision
        self._batches = 0  # delivered until then

    @property
    def most(self) -> int | None:
        """Number of workers to use at most; None for all."""
        return self._demand.wanted if isinstance(self.num_workers, Auto) and self._demand is not None else None

    def number(self, present: int, more: int) -> int:
        """Number of workers that are wanted; before a decision, the present ones, and more as the diagnosis advises."""
        wanted = present + more if self._demand is None else self._demand.wanted or present + more
        return min(wanted, int(self.num_workers) or wanted)  # reports are JSON, which has no numbers of NumPy

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
        self._demand = self._demand or Demand(self._least)
        self._demand.decide(now, seen)
        return True


def look(records: Records, places: Mapping[int, int], since: float) -> Seen | None:
    """Return what was measured since a time; None if that is too little."""
    from rpcdataloader.diagnosis.figures import measure

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
