"""Why the training loop waits: from the records of a pass to one bound, and one sentence. Pure.

Times inside ``next`` in which the consumer's own thread is at work (the sampler, our own Python) need no inference:
they are measured. While it sleeps, the part with the lowest *capacity* is the bound if that is below 1.05 of what the
consumer would take. If every part is fast enough, it is their connection: the interpreter lock of the trainer, the
window, or one batch that all others wait for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from rpcdataloader.diagnosis.figures import Figures, Stage, measure
from rpcdataloader.diagnosis.records import Records
from rpcdataloader.diagnosis.words import Value, reason, remedy, say

# A loop that waits less has nothing to gain: measurements of a training vary by more.
_HARMLESS = 0.05

# A capacity must exceed the demand by this, or it is the bound: two rates that are equal make each other wait.
_HEADROOM = 1.05

# The window is the bound beside another part that is too slow only where it allows this much less. A full pipeline has
# as many batches in flight as the window allows, so with prefetch_factor=1 the two are nearly equal.
_WINDOW_MARGIN = 0.8

# Shares of a worker's time from which on it waits for storage, or for CPUs.
_STALLED, _RUNQUEUE = 0.5, 0.2

# A slow node is the bound if this share of all capacity is lost there.
_LOST_TO_NODE = 0.2

# With exactly as many batches per second as the loop takes, it waits now and then, since times vary. It waits for less
# than 5 % of its time with this many more, of which a part goes with the spread of the times: found in simulations, see
# tests/simulation/test_diagnosis.py.
_MORE, _MORE_BY_SPREAD, _HIGH = 1.1, 0.25, 1.2

# A window that holds just what the loop takes while a batch is on its way is too small for the same reason.
_LARGER_WINDOW = 1.4

# Workers that wait for each other's batches, or for a consumer, are at work less than always; below this they are not
# the bound.
_LEAST_USE = 0.6

_OF_WORKERS = ("workers", "collate", "storage")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a training loop waits for its batches.

    Attributes:
        wait_share: Share of the loop's time in ``next``, from 0 to 1.
        bound: What it waits for; a key of :data:`~rpcdataloader.diagnosis.words.WORDS`.
        text: One sentence with the number and the remedy.
        evidence: The numbers that led there; their names end with their units.
        more_workers: How many more would end the waiting (at least, likely, at most), or bring it to the next bound;
            None if workers are not the bound, or more of them would not help.
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


def diagnose(records: Records) -> Diagnosis:
    """Say why the loop of a pass waits."""
    figures = measure(records)
    if figures is None:
        return _diagnose_start(records)
    share = _ratio(figures.waited, figures.elapsed)
    demand = _ratio(figures.batches, figures.elapsed - figures.waited, math.inf)
    # The sampler and our own Python run in the consumer's thread, one after the other with the loop: what it would take
    # if it never slept.
    needed = _ratio(figures.batches, figures.elapsed - figures.blocked, math.inf)
    evidence = _evidence(figures, share, demand) | {"first_wait_seconds": records.first_wait}
    more = None
    if share < _HARMLESS:
        total = records.last - records.begun + records.waiting
        bound = "start" if records.first_wait >= _HARMLESS * total > 0 else "none"
    else:
        bound, details = _find_bound(figures, records, needed)
        evidence |= details
        if bound == "trainer":
            evidence["reason"] = reason(str(evidence["part"]), evidence)
        if bound in _OF_WORKERS:
            more, evidence["remedy"] = _more_workers(figures, len(records.setup.workers), needed)
    return Diagnosis(
        wait_share=share,
        bound=bound,
        text=say(bound, evidence),
        evidence=evidence,
        more_workers=more,
        stages=figures.stages,
        capacities=figures.capacities,
        demand=demand,
    )


def _diagnose_start(records: Records) -> Diagnosis:
    """Too few batches have come for more than a word about the first one."""
    total = records.last - records.begun + records.waiting
    waited = records.totals.waited + records.waiting
    first = records.first_wait if records.totals.batches else records.waiting
    share = _ratio(waited - first, total - first)
    evidence: dict[str, Value] = {
        "wait_share": share,
        "first_wait_seconds": first,
        "batches": float(records.totals.batches),
        "seen": "",
    }
    bound = "start" if share < _HARMLESS <= _ratio(first, total) else "none" if share < _HARMLESS else "unclear"
    return Diagnosis(share, bound, say(bound, evidence), evidence)


def _find_bound(figures: Figures, records: Records, needed: float) -> tuple[str, dict[str, Value]]:
    """Name the bound of a loop that waits, and what is to be said of it."""
    own = max(0.0, figures.waited - figures.blocked - figures.drawn)
    largest = max(figures.drawn, figures.blocked, own)
    if largest == figures.drawn:
        return "sampler", {}
    if largest == own:
        return "trainer", {"part": "own", "own_seconds": own / figures.batches}
    limit = _HEADROOM * needed
    parts = {name: value for name, value in figures.capacities.items() if name != "window"}
    lowest = min(parts, key=parts.__getitem__, default="")
    slowest = parts.get(lowest, math.inf)
    window = figures.capacities.get("window", math.inf)
    if slowest < limit and window >= _WINDOW_MARGIN * slowest:
        if lowest == "workers":
            return _refine_workers(figures, limit)
        if lowest == "network" and (figures.starved < 0.5 or figures.peer_limited > 0.5):
            # The link was busy because its bytes were not taken.
            part = "lock" if figures.lock > figures.receiving else "receive"
            return "trainer", {"part": part, "received_rate": slowest}
        return lowest, {"part": "receive", "received_rate": slowest} if lowest == "trainer" else {}
    # Bytes that lay here unread for half of the time waited.
    if figures.lock >= max(figures.receiving, figures.blocked / figures.batches / 2):
        return "trainer", {"part": "lock"}
    if window < limit:
        return "window", _setting(figures, records, needed)
    if figures.ready >= figures.blocked / 2:
        return _refine_straggler(figures, records)
    seen = "; ".join(f"{name} could do {rate:,.1f} batches per second" for name, rate in figures.capacities.items())
    return "unclear", {"seen": f": {seen}" if seen else ""}


def _refine_workers(figures: Figures, limit: float) -> tuple[str, dict[str, Value]]:
    """What it is about the workers that makes them too slow."""
    slow, capacity = figures.slow, figures.capacities["workers"]
    if slow is not None and (slow.capacity >= limit or capacity <= (1 - _LOST_TO_NODE) * slow.capacity):
        return _node(figures)
    if figures.runqueue >= _RUNQUEUE:
        return "oversubscribed", {}
    if figures.collate >= 0.5:
        return "collate", {}
    return ("storage", {}) if figures.stalled > _STALLED else ("workers", {})


def _refine_straggler(figures: Figures, records: Records) -> tuple[str, dict[str, Value]]:
    """Who is late."""
    begin = records.span[0].delivered
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for wait in records.waits:
        if wait.at > begin:
            seconds[wait.worker, wait.node] += wait.ready
    total = sum(seconds.values())
    slow = figures.slow
    if slow is not None and sum(late for (_, node), late in seconds.items() if node == slow.name) >= total / 2:
        return _node(figures)
    worker, node = max(seconds, key=seconds.__getitem__, default=(-1, "its node"))
    return "straggler", {"worker": f"{worker}", "node": node, "worst_share": _ratio(seconds[worker, node], total)}


def _node(figures: Figures) -> tuple[str, dict[str, Value]]:
    assert figures.slow is not None
    return "node", {"node": figures.slow.name, "slow_factor": figures.slow.factor}


def _setting(figures: Figures, records: Records, needed: float) -> dict[str, Value]:
    """The setting that keeps too little in flight, and the value that is enough."""
    setup = records.setup
    in_flight = _LARGER_WINDOW * needed * figures.latency
    if figures.limited_by_bytes:
        size = math.ceil(in_flight * figures.size_bytes)
        setting, current = f"max_in_flight_bytes={size}", f"{setup.max_in_flight_bytes}"
    else:
        factor = math.ceil(in_flight / max(1, len(setup.workers)))
        setting, current = f"prefetch_factor={factor}", f"{setup.prefetch_factor}"
    return {"in_flight": in_flight, "setting": setting, "current": current}


def _more_workers(figures: Figures, num: int, needed: float) -> tuple[tuple[int, int, int] | None, str]:
    """How many more workers would end the waiting, or bring it to the next bound; and that in words.

    At least: as many as make 0.95 of what the loop takes if none of them ever waits, less twice the standard error of
    the task time. Likely: as many as make a little more than it takes, working as much of the time as they do now.
    """
    # More workers come with a larger window, unless that is one of bytes.
    others = {
        name: rate
        for name, rate in figures.capacities.items()
        if name != "workers" and (name != "window" or figures.limited_by_bytes)
    }
    following = min(others, key=others.__getitem__, default=None)
    allowed = math.inf if following is None else others[following]
    goal, capacity = min(needed, allowed), figures.capacities["workers"]
    if math.isinf(goal) or goal < _HEADROOM * capacity < needed:
        return None, remedy(None, following, 1.0, allowed)
    each = capacity / max(1, num)
    usual = min(1.0, max(_LEAST_USE, figures.batches / figures.elapsed / capacity))
    enough = (_MORE + _MORE_BY_SPREAD * figures.spread) * goal / usual
    rates = (1 - _HARMLESS) * (1 - 2 * figures.error) * goal, enough, _HIGH * enough
    low, likely, high = (max(1, math.ceil(one / each - num)) for one in rates)
    more = low, max(low, likely), max(low, high)
    return more, remedy(more, following, needed / allowed, allowed)


def _evidence(figures: Figures, share: float, demand: float) -> dict[str, Value]:
    stages = figures.stages
    rates = {f"{name}_rate": rate for name, rate in figures.capacities.items()}
    slowest = max(("fetch", "collate", "encode"), key=lambda name: stages[name].mean)
    return {
        "wait_share": share,
        "batches": float(figures.batches),
        "delivered_rate": figures.batches / figures.elapsed,
        "demand_rate": demand,
        **rates,
        "blocked_share": _ratio(figures.blocked, figures.waited),
        "draw_seconds": figures.drawn / figures.batches,
        "ready_share": _ratio(figures.ready, figures.blocked),
        "task_seconds": figures.task,
        "stage": {"fetch": "fetch (the dataset)", "encode": "encode (pickling)"}.get(slowest, slowest),
        "collate_share": figures.collate,
        "cpu_share": figures.cpu,
        "runqueue_share": figures.runqueue,
        "stalled_share": figures.stalled,
        "batch_bytes": figures.size_bytes,
        "link_bytes": figures.size_bytes * figures.capacities.get("network", 0.0),
        "peer_limited_share": figures.peer_limited,
        "starved_share": figures.starved,
        "receiving_seconds": figures.receiving,
        "lock_seconds": figures.lock,
        "copy_seconds": stages["copy"].mean,
        "latency_seconds": figures.latency,
        "allowed": figures.allowed,
    }


def _ratio(part: float, whole: float, otherwise: float = 0.0) -> float:
    return part / whole if whole > 0 else otherwise
