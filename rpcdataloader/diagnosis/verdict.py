"""The reason why a training loop waits: from the records of a pass to one answer and one sentence. Pure.

There is an answer for each thing that a user can do. Times inside ``next`` in which the consumer's own thread is at
work (the sampler, our own Python) are measured. While it sleeps, the part with the lowest *capacity* is the bound if
that is below 1.05 times the rate of a consumer that never sleeps. If every part is fast enough, their connection is the
bound: the interpreter lock of the trainer, the window, or a worker that all other batches wait for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from rpcdataloader.diagnosis.figures import Figures, Stage, measure, ratio
from rpcdataloader.diagnosis.records import Here, Records, Setup
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
        evidence: Numbers behind the verdict; their names end with their units.
        more_workers: Number of further workers that would end the waiting (at least, likely, at most), or bring it to
            the next bound; None if more workers would not help.
        stages: Seconds per batch in each stage.
        capacities: Batches per second that each part could handle.
        demand: Batches per second that the loop would take without a loader; infinite for a loop that does nothing.
    """

    wait_share: float
    bound: str
    text: str
    part: str = ""
    short: str = ""
    evidence: dict[str, Value] = field(default_factory=dict)
    more_workers: tuple[int, int, int] | None = None
    stages: dict[str, Stage] = field(default_factory=dict)
    capacities: dict[str, float] = field(default_factory=dict)
    demand: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def is_urgent(self) -> bool:
        """Whether the loop waits long enough for a warning, and what it waits for is known."""
        waited = self.wait_share * float(self.evidence["batches"]) * float(self.evidence["step_seconds"])
        is_known = self.bound != "unclear" and float(self.evidence["yours_seconds"]) >= _LEAST_STEP
        return is_known and self.wait_share >= URGENT and waited >= _URGENT_SECONDS

    def metrics(self) -> dict[str, float]:
        """Return the numbers as a flat dict for TensorBoard, Weights & Biases, MLflow; names end with units."""
        numbers = {f"{name}_seconds": stage.mean for name, stage in self.stages.items()}
        numbers |= {name: value for name, value in self.evidence.items() if isinstance(value, float)}
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
        return _diagnose_start(records)
    evidence = figures.evidence
    share, total = evidence["wait_share"], records.last - records.start.begun + records.waiting
    first_wait = records.start.in_iter + records.start.wait
    is_start = first_wait >= HARMLESS * total > 0
    # Seconds of the pass that the first batch was waited for, against those since.
    is_longer = first_wait > share * (total - first_wait)
    if evidence["decode_share"] >= _CROWDED:
        verdict = _Verdict("trainer", "receiving")
    elif is_start and is_longer:
        return _diagnose_start(records, figures)
    elif share < HARMLESS:
        verdict = _Verdict("none")
    else:
        verdict = _find_bound(figures, records)
    return _make(verdict, evidence, figures)


def _make(verdict: _Verdict, evidence: dict[str, float], figures: Figures | None = None) -> Diagnosis:
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
        stages={} if figures is None else figures.stages,
        capacities={} if figures is None else figures.capacities,
        demand=evidence.get("demand_rate", 0.0),
    )


def _diagnose_start(records: Records, figures: Figures | None = None) -> Diagnosis:
    """Diagnose the whole pass: it has few batches, or waited for the first one above all."""
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
        **{f"start_{name}_seconds": seconds for name, seconds in parts.items()},
    }
    if not totals.batches:
        return _make(_Verdict("unclear", next(reversed(parts))), evidence, figures)
    since = min(1.0, ratio(waited - first, total - first))
    if figures is None and since >= HARMLESS:
        times = [seconds for recent in records.tasks.values() for seconds in recent]
        evidence |= {"task_seconds": ratio(sum(times), len(times)), "num_tasks": float(len(times))}
        return _make(_Verdict("unclear"), evidence, figures)
    if ratio(first, total) < HARMLESS:
        return _make(_Verdict("none"), evidence, figures)
    part = max(parts, key=parts.__getitem__)
    stays = "yes" if records.setup.is_persistent and part not in ("dataset", "batch") else ""
    is_local = "yes" if "local" in records.setup.workers.values() else ""
    values: dict[str, Value] = {"part_seconds": min(first, parts[part]), "stays": stays, "is_local": is_local}
    name = "sending" if part == "dataset" and start.is_instance else part
    return _make(_Verdict("start", name, values), evidence, figures)


def diagnose_here(here: Here) -> Diagnosis:
    """Diagnose a pass that loads in the training process."""
    total = here.last - here.begun
    waited = min(here.loading, total)
    evidence = {
        "wait_share": ratio(waited, total),
        "delivered_rate": ratio(here.batches, total),
        "demand_rate": ratio(here.batches, total - waited, math.inf),
        "task_seconds": ratio(here.loading, here.batches),
        "batches": float(here.batches),
    }
    if evidence["wait_share"] < HARMLESS:
        return _make(_Verdict("none"), evidence)
    # The loop gets the rest of the process, so these are all the workers that it needs.
    if total - waited < _LEAST_STEP * here.batches:
        return _make(_Verdict("workers", "here", {"advice": "empty"}), evidence)
    enough = _MORE * evidence["demand_rate"] * evidence["task_seconds"]
    least, likely, most = (max(1, math.ceil(factor * enough)) for factor in (1 / _MORE, 1, _HIGH))
    return _make(_Verdict("workers", "here", more_workers=(least, likely, most)), evidence)


def _find_bound(figures: Figures, records: Records) -> _Verdict:
    """Name the bound of a waiting loop."""
    evidence, capacities = figures.evidence, figures.capacities
    own, drawn, blocked = (evidence[f"{part}_seconds"] for part in ("own", "draw", "blocked"))
    lock, receiving = evidence["lock_seconds"], evidence["receiving_seconds"]
    awake, asleep = max(own, drawn), blocked
    if awake * evidence["delivered_rate"] >= HARMLESS:
        # One long wait, as for a machine that stood still, is no cause beside another one that goes on all the time.
        asleep -= max((wait.seconds for wait in records.waits_of_span), default=0.0) / evidence["batches"]
    if awake > asleep:
        # The thread of the loop is not asleep while another one has the interpreter lock, or the CPU.
        sampler = "source" if records.setup.has_source else "sampler"
        times = {sampler: drawn, "copies": 2 * evidence["copy_seconds"], "lock": 2 * lock, "receiving": receiving}
        part = max(times, key=times.__getitem__)
        return _Verdict("trainer", part if times[part] >= own else "next")
    limit = _HEADROOM * evidence["needed_rate"]
    lowest = min((name for name in capacities if name != "window"), key=capacities.__getitem__, default="")
    slowest, window = capacities.get(lowest, math.inf), capacities.get("window", math.inf)
    if slowest < limit and window >= _WINDOW_MARGIN * slowest:
        if lowest == "workers":
            return _of_workers(figures, records.setup, limit)
        # A link is busy, too, while its bytes wait to be read.
        is_full = evidence["starved_share"] >= 0.5 and evidence["peer_limited_share"] <= 0.5
        if lowest == "network" and is_full:
            return _Verdict("network", values={"link_bytes": evidence["batch_bytes"] * slowest})
        part = "copies" if lowest == "copies" else "lock" if lowest == "network" and lock > receiving else "receiving"
        return _Verdict("trainer", part, {"receiving_seconds": max(receiving, ratio(1.0, slowest))})
    # The bytes lay here unread for half of the time waited.
    if lock >= max(receiving, blocked / 2):
        return _Verdict("trainer", "lock")
    if window < limit:
        return _setting(figures, records.setup)
    if evidence["ready_share"] >= 0.5:
        return _late_worker(figures, records)
    return _Verdict("unclear")


def _of_workers(figures: Figures, setup: Setup, limit: float) -> _Verdict:
    """All workers are too slow, or those of one node are."""
    if (slow := figures.slow) is not None:
        lost = 1.0 - figures.capacities["workers"] / slow.capacity
        if slow.capacity >= limit or lost >= _LOST_TO_NODE:
            return _Verdict("node", "node", {"name": slow.name, "slow_factor": slow.factor})
    return _more_workers(figures, setup)


def _late_worker(figures: Figures, records: Records) -> _Verdict:
    """Name the worker whose batches all others wait for, or its node."""
    nodes = records.setup.workers
    seconds: dict[int, float] = defaultdict(float)
    for wait in records.waits_of_span:
        seconds[wait.worker] += wait.ready
    total, slow = sum(seconds.values()), figures.slow
    if slow is not None and sum(late for one, late in seconds.items() if nodes.get(one) == slow.name) >= total / 2:
        return _Verdict("node", "node", {"name": slow.name, "slow_factor": slow.factor})
    worker = max(seconds, key=seconds.__getitem__, default=-1)
    name = records.setup.names.get(worker, f"worker {worker}")
    return _Verdict("node", "worker", {"name": name, "worst_share": ratio(seconds[worker], total)})


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
    values: dict[str, Value] = {"source": "source" if setup.is_stream else "fetch"}
    if evidence["num_loading"] < num:
        return _Verdict("workers", values={**values, "advice": "shards"})
    # More workers come with a larger window, unless bytes limit it.
    others = {name: rate for name, rate in figures.capacities.items() if name not in ("workers", "window")}
    if evidence["allowed"] < setup.window:
        others["window"] = figures.capacities["window"]
    following = min(others, key=others.__getitem__, default=None)
    allowed = math.inf if following is None else others[following]
    capacity, needed = figures.capacities["workers"], evidence["needed_rate"]
    goal = min(needed, allowed)
    if following is not None:
        values |= {"following": following, "allowed_rate": allowed, "is_limit": "yes" if needed > allowed else ""}
    if goal < _HEADROOM * capacity < needed:
        return _Verdict("workers", values={**values, "advice": "capped"})
    awake = {"next": evidence["own_seconds"], "source" if setup.has_source else "sampler": evidence["draw_seconds"]}
    if math.isinf(goal) or (kept := sum(awake.values())) * evidence["demand_rate"] >= 1:
        # The loop itself takes less time than the loader does in its thread.
        return _Verdict("workers", values={**values, "advice": "empty"})
    if kept * needed >= HARMLESS:
        values |= {"kept_share": kept * needed, "keeps": max(awake, key=awake.__getitem__)}
    usual = min(1.0, max(_LEAST_USE, evidence["delivered_rate"] / capacity))
    error = ratio(evidence["task_spread"], math.sqrt(evidence["num_tasks"]))
    enough = (_MORE + _MORE_BY_SPREAD * evidence["task_spread"]) * goal / usual
    rates = (1 - HARMLESS) * (1 - 2 * error) * goal, enough, _HIGH * enough
    # Workers on other CPUs wait for none.
    each = capacity / num
    if evidence["runqueue_share"] - evidence["runqueue_error_share"] >= _RUNQUEUE:
        values["where"] = " on other CPUs"
        each /= max(_COMPUTES, 1.0 - evidence["runqueue_share"])
    low, likely, high = (max(1, math.ceil((rate - capacity) / each)) for rate in rates)
    if "cpus" in evidence and evidence["cpu_share"] >= _COMPUTES:
        idle = evidence["cpus"] - evidence["busy_cpus"]
        is_short = idle < _IDLE_MARGIN * max(low, likely) * evidence["cpu_share"]
        values["where"] = " on other CPUs" if is_short else ""
    return _Verdict("workers", values=values, more_workers=(low, max(low, likely), max(low, high)))
