"""The reason why a training loop waits: from the records of a pass to one answer and one sentence. Pure.

There is an answer for each thing that a user can do. Times inside ``next`` in which the consumer's own thread is at
work (the sampler, our own Python) are measured. While it sleeps, the part with the lowest *capacity* is the bound if
that is below 1.05 times the rate of a consumer that never sleeps. If every part is fast enough, their connection is the
bound: the interpreter lock of the trainer, the window, or a worker that all other batches wait for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rpcdataloader.diagnosis.figures import Figures, SlowNode, measure, ratio
from rpcdataloader.diagnosis.records import Records, Setup
from rpcdataloader.diagnosis.words import Value, in_short, say

# A loop that waits less has nothing to gain: training measurements vary by more.
HARMLESS = 0.05

# From this share on, a user is warned, unless a second is all that would be gained.
URGENT, _URGENT_SECONDS = 0.2, 1.0

# A capacity must exceed the demand by this factor, or it is the bound: two equal rates make each other wait.
_HEADROOM = 1.05

# The window is the bound beside another slow part only if it allows this much less. A full pipeline has as many batches
# in flight as the window allows, so with prefetch_factor=1 the two are nearly equal.
_WINDOW_MARGIN = 0.8

# Share of a worker's time above which it lacks CPUs, where their number is not known.
_RUNQUEUE = 0.2

# A worker that computes less needs no CPU of its own. Other programs use some CPU time of idle machines.
_COMPUTES, _IDLE_MARGIN = 0.1, 0.8

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

# Seconds per batch below which a loop does nothing.
_LEAST_STEP = 5e-4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason why a training loop waits for its batches.

    Attributes:
        wait_share: Share of the loop's time in ``next``, from 0 to 1; if ``bound`` is ``start``, that in the whole
            pass, with ``iter(loader)``.
        bound: Cause of the wait: ``none``, ``start``, ``workers``, ``node``, ``network``, ``trainer``, ``setting`` or
            ``unclear``.
        text: The sentence with the numbers and the remedy.
        part: What takes longest in the trainer (``sampler`` or ``source``, ``receiving``, ``lock``, ``copies`` or
            ``next``) or at the start; the name of the setting; ``node`` or ``worker``. Empty for other bounds.
        short: The same in at most 30 characters, for progress bars.
        evidence: Numbers behind the verdict, such as the capacity of each part; their names end with their units.
        more_workers: Number of further workers that would end the waiting (at least, likely, at most), or bring it to
            the next bound; None if more workers would not help.
    """

    wait_share: float
    bound: str
    text: str
    part: str = ""
    short: str = ""
    evidence: dict[str, Value] = field(default_factory=dict)
    more_workers: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def is_urgent(self) -> bool:
        """Whether the loop waits long enough for a warning, and what it waits for is known."""
        if self.bound == "unclear" or float(self.evidence["yours_seconds"]) < _LEAST_STEP:
            return False
        waited = self.wait_share * float(self.evidence["batches"]) * float(self.evidence["step_seconds"])
        return self.wait_share >= URGENT and waited >= _URGENT_SECONDS

    def metrics(self) -> dict[str, float]:
        """Return the numbers as a flat dict for TensorBoard, Weights & Biases, MLflow; names end with units."""
        numbers = {name: value for name, value in self.evidence.items() if isinstance(value, float)}
        numbers |= {"wait_share": self.wait_share, "more_workers": float((self.more_workers or (0, 0, 0))[1])}
        return {name: value for name, value in numbers.items() if value < math.inf}


@dataclass(slots=True)
class _Verdict:
    """What a diagnosis is made of."""

    bound: str
    part: str = ""
    values: dict[str, Value] = field(default_factory=dict)  # further ones for the sentence
    more_workers: tuple[int, int, int] | None = None


def diagnose(records: Records) -> Diagnosis:
    """Return the reason why the loop of a pass waits."""
    figures = measure(records)
    if figures is None:
        return _diagnose_whole(records)
    evidence = figures.evidence
    share, total = evidence["wait_share"], records.last - records.start.begun + records.waiting
    first_wait = evidence["first_wait_seconds"]
    # Seconds of the pass that the first batch was waited for, against those since.
    is_start = first_wait >= HARMLESS * total > 0 and first_wait > share * (total - first_wait)
    if evidence["decode_share"] >= _CROWDED:
        return _make(_Verdict("trainer", "receiving"), evidence)
    if is_start:
        return _diagnose_whole(records, figures)
    return _make(_Verdict("none") if share < HARMLESS else _find_bound(figures, records.setup), evidence)


def _make(verdict: _Verdict, evidence: dict[str, float]) -> Diagnosis:
    share, more = evidence["wait_share"], verdict.more_workers
    step = ratio(1.0, evidence["delivered_rate"])
    steps = {"step_seconds": step, "waiting_seconds": share * step, "yours_seconds": (1.0 - share) * step}
    values: dict[str, Value] = {**evidence, **steps, **verdict.values}
    return Diagnosis(
        wait_share=share,
        bound=verdict.bound,
        text=say(verdict.bound, verdict.part, values, more),
        part=verdict.part,
        short=in_short(share, verdict.part or verdict.bound, more),
        evidence=values,
        more_workers=more,
    )


def _diagnose_whole(records: Records, figures: Figures | None = None) -> Diagnosis:
    """Diagnose a pass from its beginning: it has few batches, waited for the first one above all, or has no workers."""
    totals, start = records.totals, records.start
    now = records.last + records.waiting
    total, first = now - start.begun, start.in_iter + start.wait + (0.0 if totals.batches else records.waiting)
    waited = min(total, totals.waited + start.in_iter + records.waiting)
    parts = start.parts(now)
    evidence = {} if figures is None else dict(figures.evidence)
    evidence |= {
        "wait_share": min(1.0, ratio(waited, total)),
        "delivered_rate": ratio(totals.batches, total),
        "demand_rate": ratio(totals.batches, total - waited, math.inf),
        "batches": float(totals.batches),
        "first_wait_seconds": first,
        "first_workers": float(start.num_workers),
        **{f"start_{name}_seconds": seconds for name, seconds in parts.items()},
    }
    part = max(parts, key=parts.__getitem__)
    if not totals.batches:
        verdict = _Verdict("unclear", next(reversed(parts)))
    elif not records.setup.workers:
        verdict = _without_workers(evidence)
    elif figures is None and waited - first >= max(HARMLESS * (total - first), first / 2):
        verdict = _Verdict("unclear")
    elif ratio(first, total) < HARMLESS:
        verdict = _Verdict("none")
    else:
        stays = "yes" if records.setup.is_persistent and part not in ("dataset", "batch") else ""
        values: dict[str, Value] = {"part_seconds": min(first, parts[part]), "stays": stays}
        verdict = _Verdict("start", "sending" if part == "dataset" and start.is_instance else part, values)
    return _make(verdict, evidence)


def _without_workers(evidence: dict[str, float]) -> _Verdict:
    """Judge a pass that loads in the training process: say how many workers would do that beside the loop."""
    evidence["task_seconds"] = ratio(evidence["wait_share"], evidence["delivered_rate"])
    if evidence["wait_share"] < HARMLESS:
        return _Verdict("none")
    if evidence["demand_rate"] * _LEAST_STEP > 1:
        return _Verdict("workers", "here", {"advice": "empty"})
    enough = _MORE * evidence["demand_rate"] * evidence["task_seconds"]
    least, likely, most = (max(1, math.ceil(factor * enough)) for factor in (1 / _MORE, 1, _HIGH))
    return _Verdict("workers", "here", more_workers=(least, likely, most))


def _find_bound(figures: Figures, setup: Setup) -> _Verdict:
    """Name the bound of a waiting loop."""
    evidence, capacities = figures.evidence, figures.capacities
    own, drawn, blocked = (evidence[f"{part}_seconds"] for part in ("own", "draw", "blocked"))
    lock, receiving = evidence["lock_seconds"], evidence["receiving_seconds"]
    awake, asleep = max(own, drawn), blocked
    if awake * evidence["delivered_rate"] >= HARMLESS:
        # One long wait, as for a machine that stood still, is no cause beside another one that goes on all the time.
        asleep -= evidence["longest_seconds"] / evidence["batches"]
    if awake > asleep:
        # The thread of the loop is not asleep while another one has the interpreter lock, or the CPU.
        copying = evidence["copy_seconds"]
        times = {setup.draws_from: drawn, "copies": 2 * copying, "lock": 2 * lock, "receiving": receiving}
        part = max(times, key=times.__getitem__)
        return _Verdict("trainer", part if times[part] >= own else "next")
    limit = _HEADROOM * evidence["needed_rate"]
    lowest = min((name for name in capacities if name != "window"), key=capacities.__getitem__, default="")
    slowest, window = capacities.get(lowest, math.inf), capacities.get("window", math.inf)
    if slowest < limit and window >= _WINDOW_MARGIN * slowest:
        if lowest == "workers":
            slow = figures.slow
            is_lost = slow is not None and slowest < (1 - _LOST_TO_NODE) * slow.capacity
            return _slow_node(slow) if slow is not None and is_lost else _more_workers(figures, setup)
        # A link is busy, too, while its bytes wait to be read.
        if lowest == "network" and evidence["starved_share"] >= 0.5:
            return _Verdict("network", values={"link_bytes": evidence["batch_bytes"] * slowest})
        part = "copies" if lowest == "copies" else "lock" if lowest == "network" and lock > receiving else "receiving"
        return _Verdict("trainer", part, {"receiving_seconds": max(receiving, ratio(1.0, slowest))})
    # The bytes lay here unread for half of the time waited.
    if lock >= max(receiving, blocked / 2):
        return _Verdict("trainer", "lock")
    if window < limit:
        return _setting(figures, setup)
    return _late_worker(figures, setup) if evidence["late_share"] >= 0.5 else _Verdict("unclear")


def _slow_node(slow: SlowNode) -> _Verdict:
    return _Verdict("node", "node", {"name": slow.name, "slow_factor": slow.factor})


def _late_worker(figures: Figures, setup: Setup) -> _Verdict:
    """Name the worker whose batches all others wait for, or its node."""
    late, slow = figures.late, figures.slow
    total = sum(late.values())
    if slow is not None and sum(late[worker] for worker in late if setup.workers.get(worker) == slow.name) >= total / 2:
        return _slow_node(slow)
    worker = max(late, key=late.__getitem__)
    name = setup.names.get(worker, f"worker {worker}")
    return _Verdict("node", "worker", {"name": name, "worst_share": late[worker] / total})


def _setting(figures: Figures, setup: Setup) -> _Verdict:
    """Name the setting that keeps too little in flight, and a sufficient value."""
    evidence, capacities = figures.evidence, figures.capacities
    others = [rate for name, rate in capacities.items() if name != "window"]
    goal = min(evidence["needed_rate"], _LARGEST_WINDOW * capacities["window"], *others)
    in_flight = math.ceil(_LARGER_WINDOW * goal * evidence["latency_seconds"])
    if evidence["allowed"] < setup.window:
        name, current = "max_in_flight_bytes", setup.max_in_flight_bytes
        value = in_flight * math.ceil(evidence["batch_bytes"])
    else:
        name, current = "prefetch_factor", setup.prefetch_factor
        value = math.ceil(in_flight / max(1, len(setup.workers)))
    values: dict[str, Value] = {"in_flight": float(in_flight), "setting": f"{name}={value}", "current": f"{current}"}
    return _Verdict("setting", name, values)


def _more_workers(figures: Figures, setup: Setup) -> _Verdict:
    """Say how many more workers would end the waiting, or bring it to the next bound.

    At least: the number that makes 0.95 of the demand if none of them ever waits, less twice the standard error of the
    task time. Likely: the number that makes more than the demand, with the present share of time at work.
    """
    evidence, num = figures.evidence, len(setup.workers)
    capacity, needed = figures.capacities["workers"], evidence["needed_rate"]
    values: dict[str, Value] = {"source": "source" if setup.is_stream else "fetch"}
    # More workers come with a larger window, unless bytes limit it.
    has_room = evidence["allowed"] >= setup.window
    others = {name: rate for name, rate in figures.capacities.items() if name != "workers"}
    following = min((name for name in others if name != "window" or not has_room), key=others.__getitem__, default="")
    allowed = others.get(following, math.inf)
    goal = min(needed, allowed)
    kept = evidence["own_seconds"] + evidence["draw_seconds"]
    if needed > allowed:
        values |= {"following": following, "allowed_rate": allowed}
    if evidence["num_loading"] < num:
        return _Verdict("workers", values=values | {"advice": "shards"})
    if goal < _HEADROOM * capacity < needed:
        return _Verdict("workers", values=values | {"advice": "capped"})
    # The loop itself takes less time than the loader does in its thread.
    if math.isinf(goal) or kept * evidence["demand_rate"] >= 1:
        return _Verdict("workers", values=values | {"advice": "empty"})
    if needed <= allowed and kept * needed >= HARMLESS:
        keeps = "next" if evidence["own_seconds"] > evidence["draw_seconds"] else setup.draws_from
        values |= {"kept_share": kept * needed, "keeps": keeps}
    usual = min(1.0, max(_LEAST_USE, evidence["delivered_rate"] / capacity))
    error = ratio(evidence["task_spread"], math.sqrt(evidence["num_tasks"]))
    enough = (_MORE + _MORE_BY_SPREAD * evidence["task_spread"]) * goal / usual
    rates = (1 - HARMLESS) * (1 - 2 * error) * goal, enough, _HIGH * enough
    each, waiting = capacity / num, evidence["runqueue_share"]
    is_short = waiting >= _RUNQUEUE
    if "cpus" in evidence:
        cpus_each = evidence["cpu_share"] + waiting  # that a worker would keep busy
        is_short = evidence["cpus"] - evidence["busy_cpus"] < _IDLE_MARGIN * cpus_each * (enough / each - num)
        is_short = is_short and cpus_each >= _COMPUTES
        values["where"] = "" if cpus_each >= _COMPUTES else " on the same CPUs"
    if is_short:
        values["where"] = " on other CPUs"
        each /= max(_COMPUTES, 1.0 - waiting)  # those wait for none
    low, likely, high = (max(1, math.ceil((rate - capacity) / each)) for rate in rates)
    return _Verdict("workers", values=values, more_workers=(low, max(low, likely), max(low, high)))
