"""The reason why a training loop waits: from the records of a pass to one bound and one sentence. Pure.

Times inside ``next`` in which the consumer's own thread is at work (the sampler, our own Python) are measured. While it
sleeps, the part with the lowest *capacity* is the bound if that is below 1.05 times the rate of a consumer that never
sleeps. If every part is fast enough, their connection is the bound: the interpreter lock of the trainer, the window, or
a straggler that all other batches wait for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from rpcdataloader.diagnosis.figures import Figures, SlowNode, Stage, measure, ratio
from rpcdataloader.diagnosis.records import Records, Setup
from rpcdataloader.diagnosis.words import ADVICE, Value, remedy, say, seen

# A loop that waits less has nothing to gain: training measurements vary by more.
_HARMLESS = 0.05

# A capacity must exceed the demand by this factor, or it is the bound: two equal rates make each other wait.
_HEADROOM = 1.05

# The window is the bound beside another slow part only if it allows this much less. A full pipeline has as many batches
# in flight as the window allows, so with prefetch_factor=1 the two are nearly equal.
_WINDOW_MARGIN = 0.8

# Shares of a worker's time above which it waits for storage, or for CPUs.
_STALLED, _RUNQUEUE = 0.5, 0.2

# A slow node is the bound if it loses this share of all capacity.
_LOST_TO_NODE = 0.2

# Even with exactly the loop's demand in batches per second, the loop waits at times, since times vary. It waits for
# less than 5 % of its time with this many more, plus a part that grows with the spread of the times: found in
# simulations, see tests/simulation/test_diagnosis.py.
_MORE, _MORE_BY_SPREAD, _HIGH = 1.1, 0.4, 1.2

# A window that holds just the loop's demand during a batch's way is too small for the same reason.
_LARGER_WINDOW = 1.4

# A loop that does nothing takes any number of batches, and has no sufficient window: at most this many times more.
_LARGEST_WINDOW = 1000

# Decoding holds the interpreter lock. Above this share of the time, a loop in Python also waits for that outside of
# next, which is not measured: with 98 %, loops of 1 to 4 ms took 10 ms, of which 1 % to 36 % was in next.
_CROWDED = 0.9

# Workers that wait for each other's batches, or for a consumer, are partly idle; below this share they are not the
# bound.
_LEAST_USE = 0.6

_OF_WORKERS = ("workers", "collate", "storage")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason why a training loop waits for its batches.

    Attributes:
        wait_share: Share of the loop's time in ``next``, from 0 to 1.
        bound: Cause of the wait; a key of :data:`~rpcdataloader.diagnosis.words.WORDS`.
        text: One sentence with the number and the remedy.
        evidence: Numbers behind the verdict; their names end with their units.
        more_workers: Number of further workers that would end the waiting (at least, likely, at most), or bring it to
            the next bound; None if more workers would not help.
        stages: Seconds per batch in each stage.
        capacities: Batches per second that each part could handle.
        demand: Batches per second that the loop would take; infinite for a loop that does nothing.
    """

    wait_share: float
    bound: str
    text: str
    evidence: dict[str, Value] = field(default_factory=dict)
    more_workers: tuple[int, int, int] | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)
    demand: float = 0.0

    def __str__(self) -> str:
        return self.text


def diagnose(records: Records) -> Diagnosis:
    """Return the reason why the loop of a pass waits."""
    figures = measure(records)
    if figures is None:
        return _diagnose_start(records)
    evidence: dict[str, Value] = {**figures.evidence}
    share = figures.evidence["wait_share"]
    more = None
    total = records.last - records.begun + records.waiting
    is_start = records.first_wait >= _HARMLESS * total > 0
    # A loop that takes 5 ms for a batch spends some 5 % of its time in next, if it never sleeps there. One pause of the
    # whole machine that was shorter than the first wait is less of a cause than that.
    is_little = share * total < records.first_wait and _usual_share(records, figures) < 2 * _HARMLESS
    details: dict[str, Value] = {}
    if figures.evidence["decode_share"] >= _CROWDED:
        bound, details = "trainer", {"part": "decode"}
    elif share < _HARMLESS or (is_start and is_little):
        bound = "start" if is_start else "none"
    else:
        bound, details = _find_bound(figures, records)
    evidence |= details
    if bound in _OF_WORKERS:
        more, evidence["remedy"] = _more_workers(figures, records.setup)
    return Diagnosis(
        wait_share=share,
        bound=bound,
        text=say(bound, {"advice": ADVICE[records.setup.is_persistent], **evidence}),
        evidence=evidence,
        more_workers=more,
        stages=figures.stages,
        capacities=figures.capacities,
        demand=figures.evidence["demand_rate"],
    )


def _usual_share(records: Records, figures: Figures) -> float:
    """The share of the loop's time in ``next``, without the longest wait in which it was awake."""
    batches, rate, share = (figures.evidence[name] for name in ("batches", "delivered_rate", "wait_share"))
    elapsed = ratio(batches, rate)
    awake = [after.wait - after.totals.since(before.totals).blocked for before, after in pairwise(records.span)]
    longest = max(0.0, *awake)
    return ratio(share * elapsed - longest, elapsed - longest)


def _diagnose_start(records: Records) -> Diagnosis:
    """Diagnose a pass with too few batches for more than a word about the first one."""
    totals = records.totals
    total, waited = records.last - records.begun + records.waiting, totals.in_next + records.waiting
    first = records.first_wait if totals.batches else records.waiting
    share = min(1.0, ratio(waited - first, total - first))
    bound = "unclear" if share >= _HARMLESS else "start" if ratio(first, total) >= _HARMLESS else "none"
    evidence: dict[str, Value] = {"wait_share": share, "first_wait_seconds": first, "batches": float(totals.batches)}
    if times := [seconds for recent in records.tasks.values() for seconds in recent]:
        evidence |= {"task_seconds": fmean(times), "num_tasks": float(len(times))}
    further = {"seen": seen(evidence, len(records.tasks)), "advice": ADVICE[records.setup.is_persistent]}
    return Diagnosis(share, bound, say(bound, evidence | further), evidence)


def _find_bound(figures: Figures, records: Records) -> tuple[str, dict[str, Value]]:
    """Name the bound of a waiting loop, with further values for its sentence."""
    evidence, capacities = figures.evidence, figures.capacities
    own, drawn, blocked = (evidence[f"{part}_seconds"] for part in ("own", "draw", "blocked"))
    lock, receiving = evidence["lock_seconds"], evidence["receiving_seconds"]
    awake, usual = max(own, drawn), blocked
    if awake * evidence["delivered_rate"] >= _HARMLESS:
        # One long wait, as for a machine that stood still, is no cause beside another one that goes on all the time.
        usual -= max((wait.seconds for wait in records.waits_of_span), default=0.0) / evidence["batches"]
    if awake > usual:
        if drawn > own:
            return "sampler", {}
        if evidence["copy_seconds"] >= own / 2:
            return "device_copy", {}  # a device that copies in the thread of the loop
        # The thread of the loop is not asleep while another one has the interpreter lock.
        if lock >= max(receiving, own / 2):
            return "trainer", {"part": "lock"}
        if receiving >= own and "trainer" in capacities:
            return "trainer", {"part": "receive", "received_rate": capacities["trainer"]}
        return "trainer", {"part": "own"}
    limit = _HEADROOM * evidence["needed_rate"]
    lowest = min((name for name in capacities if name != "window"), key=capacities.__getitem__, default="")
    slowest, window = capacities.get(lowest, math.inf), capacities.get("window", math.inf)
    if slowest < limit and window >= _WINDOW_MARGIN * slowest:
        if lowest == "workers":
            return _refine_workers(figures, limit)
        is_full = evidence["starved_share"] >= 0.5 and evidence["peer_limited_share"] <= 0.5
        if lowest == "network" and is_full:
            return "network", {"link_bytes": evidence["batch_bytes"] * slowest}
        if lowest in ("network", "trainer"):
            # A link is busy, too, while its bytes wait to be read.
            part = "lock" if lowest == "network" and lock > receiving else "receive"
            return "trainer", {"part": part, "received_rate": slowest}
        return lowest, {}
    # The bytes lay here unread for half of the time waited.
    if lock >= max(receiving, blocked / 2):
        return "trainer", {"part": "lock"}
    if window < limit:
        return "window", _setting(figures, records.setup)
    if evidence["ready_share"] >= 0.5:
        return _refine_straggler(figures, records)
    could = "; ".join(f"{name} could do {rate:,.1f} batches per second" for name, rate in capacities.items())
    return "unclear", {"seen": f": {could}" if could else ""}


def _refine_workers(figures: Figures, limit: float) -> tuple[str, dict[str, Value]]:
    """Name the reason why the workers are too slow."""
    slow, evidence = figures.slow, figures.evidence
    lost = 0.0 if slow is None else 1.0 - figures.capacities["workers"] / slow.capacity
    if slow is not None and (slow.capacity >= limit or lost >= _LOST_TO_NODE):
        return _node(slow)
    # Other programs of the node may delay a few tasks; where CPUs are short, all of them wait. Workers that wait longer
    # for storage than for everything else would gain less from CPUs.
    is_storage = evidence["stalled_share"] > _STALLED
    if not is_storage and evidence["runqueue_share"] - evidence["runqueue_error_share"] >= _RUNQUEUE:
        return "oversubscribed", {}
    if evidence["collate_share"] >= 0.5:
        return "collate", {}
    if is_storage:
        return "storage", {}
    slowest = max(("fetch", "collate", "encode"), key=lambda name: figures.stages[name].mean)
    return "workers", {"stage": {"fetch": "fetch (the dataset)", "encode": "encode (pickling)"}.get(slowest, slowest)}


def _refine_straggler(figures: Figures, records: Records) -> tuple[str, dict[str, Value]]:
    """Name the straggler."""
    nodes = records.setup.workers
    seconds: dict[int, float] = defaultdict(float)
    for wait in records.waits_of_span:
        seconds[wait.worker] += wait.ready
    total, slow = sum(seconds.values()), figures.slow
    if slow is not None and sum(late for one, late in seconds.items() if nodes.get(one) == slow.name) >= total / 2:
        return _node(slow)
    worker = max(seconds, key=seconds.__getitem__, default=-1)
    name = records.setup.names.get(worker, f"worker {worker}")
    return "straggler", {"worker": name, "worst_share": ratio(seconds[worker], total)}


def _node(slow: SlowNode) -> tuple[str, dict[str, Value]]:
    return "node", {"node": slow.name, "slow_factor": slow.factor}


def _setting(figures: Figures, setup: Setup) -> dict[str, Value]:
    """Name the setting that keeps too little in flight, and a sufficient value."""
    evidence, capacities = figures.evidence, figures.capacities
    others = [rate for name, rate in capacities.items() if name != "window"]
    goal = min(evidence["needed_rate"], _LARGEST_WINDOW * capacities["window"], *others)
    in_flight = math.ceil(_LARGER_WINDOW * goal * evidence["latency_seconds"])
    if evidence["allowed"] < setup.window:
        setting = f"max_in_flight_bytes={in_flight * math.ceil(evidence['batch_bytes'])}"
        current = setup.max_in_flight_bytes
    else:
        setting = f"prefetch_factor={math.ceil(in_flight / max(1, len(setup.workers)))}"
        current = setup.prefetch_factor
    return {"in_flight": float(in_flight), "setting": setting, "current": f"{current}"}


def _more_workers(figures: Figures, setup: Setup) -> tuple[tuple[int, int, int] | None, str]:
    """Return how many more workers would end the waiting, or bring it to the next bound; and that in words.

    At least: the number that makes 0.95 of the demand if none of them ever waits, less twice the standard error of the
    task time. Likely: the number that makes more than the demand, with the present share of time at work.
    """
    evidence, num = figures.evidence, len(setup.workers)
    capacity, needed = figures.capacities["workers"], evidence["needed_rate"]
    # More workers come with a larger window, unless bytes limit it.
    others = {name: rate for name, rate in figures.capacities.items() if name not in ("workers", "window")}
    if evidence["allowed"] < setup.window:
        others["window"] = figures.capacities["window"]
    following = min(others, key=others.__getitem__, default=None)
    allowed = math.inf if following is None else others[following]
    goal = min(needed, allowed)
    if math.isinf(goal) or goal < _HEADROOM * capacity < needed:
        return None, remedy(None, following, 1.0, allowed)
    awake = {part: evidence[f"{part}_seconds"] for part in ("own", "draw")}
    rest = sum(awake.values()) * needed
    left = (max(awake, key=awake.__getitem__), rest) if rest >= _HARMLESS else None
    usual = min(1.0, max(_LEAST_USE, evidence["delivered_rate"] / capacity))
    error = ratio(evidence["task_spread"], math.sqrt(evidence["num_tasks"]))
    enough = (_MORE + _MORE_BY_SPREAD * evidence["task_spread"]) * goal / usual
    rates = (1 - _HARMLESS) * (1 - 2 * error) * goal, enough, _HIGH * enough
    low, likely, high = (max(1, math.ceil(rate * num / capacity - num)) for rate in rates)
    more = low, max(low, likely), max(low, high)
    return more, remedy(more, following, needed / allowed, allowed, left)
