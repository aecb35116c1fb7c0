"""Figures from the records of a pass: means, shares, and the capacity of each part of the pipeline. Pure.

The *capacity* of a part is the number of batches per second that it could handle if all others were infinitely fast. It
follows from the time that the part is at work. Overlaps with waits do not count: they would change with the speed of
the consumer while the pipeline stays the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median_low, pstdev

from rpcdataloader.diagnosis.records import Probe, Records, Setup
from rpcdataloader.wire.messages import Stages

# A task that takes this many times its worker's median says nothing about speed if there are one or two of them: a
# worker was stopped, or hung. More of them are the way of the dataset, and count.
_LATE_FACTOR, _FEW_LATE = 10.0, 2

# The mean of fewer tasks says little about a worker, so its node's counts: the rate of three tasks whose times vary is
# easily off by half, and a worker that was once late gets no more for a while.
_FEW_TASKS = 8

# Ratio of the slowest node's time to the others' that makes it slow; less is another generation of CPUs.
_SLOW_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node whose tasks take far longer than those of other nodes."""

    name: str
    factor: float
    usual: float  # seconds of a task on other nodes
    capacity: float  # batches per second of all workers, if this node were as fast as the others


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that follow from the records."""

    # Numbers by their names, which end with their units: ``_seconds`` and ``_bytes`` per batch, ``_rate`` in batches
    # per second, ``_share`` from 0 to 1.
    evidence: dict[str, float]
    # Batches per second of ``workers``, ``network``, ``receiving``, ``copies`` and ``window``, as far as measured.
    capacities: dict[str, float]
    slow: SlowNode | None
    late: dict[int, float]  # seconds that the loop slept for a batch of each worker while later ones were here
    task_seconds: dict[int, float]  # mean of each worker, or of its node where it has too few tasks


def measure(records: Records) -> Figures | None:
    """Compute the figures of the span; None with fewer than two probes."""
    span = records.span
    if len(span) < 2:
        return None
    first, probes, setup = span[0], span[1:], records.setup
    totals = records.totals.since(first.totals)
    batches = totals.batches
    # The present wait counts, too.
    elapsed = records.last - first.delivered + records.waiting
    # A device that stalls for a copy makes the loop wait, though not in next.
    more = records.waiting + batches * _mean([probe.stalled for probe in probes])
    waited = min(totals.waited + more, elapsed)
    blocked = min(totals.blocked + more, waited)
    late: dict[int, float] = defaultdict(float)
    for worker, seconds in [each for probe in probes for each in probe.late.items()]:
        late[worker] += seconds
    size_bytes = _mean([probe.size_bytes for probe in probes])
    allowed = min(setup.window, max(1, ratio(setup.max_in_flight_bytes, size_bytes, setup.window) // 1))
    known = [(probe, probe.stages) for probe in probes if probe.stages is not None]
    # Only measured replies have a time for pickling.
    encode = _mean(_usual([stages.encode for _, stages in known]))
    # A worker's first task says more about imports and cold caches than about speed.
    recents = {worker: recent[1:] or recent for worker, recent in records.tasks.items()}
    few_late = sum(len(recent) - len(_usual(recent)) for recent in recents.values()) <= _FEW_LATE
    tasks = {
        worker: [seconds + encode for seconds in (_usual(recent) if few_late else recent)]
        for worker, recent in recents.items()
    }
    times = [seconds for worker in setup.workers for seconds in tasks.get(worker, ())]
    task = _mean(times)
    # Where a dataset has fewer streams than workers, the others get no samples.
    loading = {worker: node for worker, node in setup.workers.items() if not setup.is_stream or tasks.get(worker)}
    # Overhead outside of the worker, of requests that found the worker idle.
    transit = _mean(_usual([p.answered - p.sent - s.task for p, s in known if s.idle > 0]))
    decode, receiving = _mean([p.decode_cpu for p in probes]), _mean([p.receive_cpu + p.decode_cpu for p in probes])
    # A backlog that is used up took longer to decode than to deliver.
    decoded_in = max(elapsed, probes[-1].answered - first.answered)
    drawn, copy = _mean([p.draw for p in probes]), _mean([p.copy for p in probes if p.copy])  # the last is not over
    lock, present = _mean([p.lock for p in probes]), _mean([p.answered - p.arrived for p in probes])
    link = ratio(batches, totals.link, math.inf)
    # Decoding holds the interpreter lock, so receivers take turns; the kernel's copying needs no lock.
    rebuilt = min(ratio(1, decode, math.inf), ratio(max(1, len(setup.workers)), receiving, math.inf))
    capacities = {"receiving": rebuilt, "copies": ratio(1, copy, math.inf), "network": link}
    if all(node == "local" or node.startswith("unix:") for node in setup.workers.values()):
        # Both ends of a Unix socket copy its bytes, on CPUs of this machine.
        capacities["receiving"] = min(rebuilt, capacities.pop("network"))
    slow, latency, means = None, 0.0, dict[int, float]()
    if times:
        means = _means(tasks, loading, task)
        slow = _find_slow(means, loading, tasks)
        # A slow node does not justify more batches in flight.
        latency = transit + (task if slow is None else slow.usual)
        capacities["workers"] = sum(ratio(1, seconds, math.inf) for seconds in means.values())
        # The way of a few batches may have been unusually long; no pass is faster than its window (Little's law).
        capacities["window"] = max(ratio(allowed, latency, math.inf), ratio(batches, elapsed))
    evidence = {
        "batches": float(batches),
        "wait_share": ratio(waited, elapsed),
        "delivered_rate": ratio(batches, elapsed),
        "demand_rate": ratio(batches, elapsed - waited, math.inf),
        # The sampler and our own Python run in the consumer's thread, one after the other with the loop: its time if it
        # never slept.
        "needed_rate": ratio(batches, elapsed - blocked, math.inf),
        "blocked_seconds": blocked / batches,
        "draw_seconds": drawn,
        "own_seconds": max(0.0, (waited - blocked) / batches - drawn),
        # The longest wait for a probe, and for the batches since the one before.
        "longest_seconds": max(after.totals.blocked - before.totals.blocked for before, after in pairwise(span)),
        "late_share": min(1.0, ratio(sum(late.values()), blocked)),
        "first_wait_seconds": records.start.in_iter + records.start.wait,
        "task_seconds": task,
        "task_spread": ratio(pstdev(times), task) if times else 0.0,
        "num_tasks": float(len(times)),
        "num_workers": float(len(setup.workers)),
        "num_loading": float(len(loading)),
        "latency_seconds": latency,
        "allowed": float(allowed),
        "batch_bytes": size_bytes,
        "receiving_seconds": receiving,
        "decode_share": min(1.0, ratio(batches * decode, decoded_in)),
        "lock_seconds": lock,
        "starved_share": 1.0 - min(1.0, ratio(receiving + lock, present, 1.0)),
        "copy_seconds": copy,
        "fetch_seconds": _mean([s.fetch for _, s in known]),
        "collate_seconds": _mean([s.collate for _, s in known]),
        **_shares([s for _, s in known if s.task <= max([_LATE_FACTOR * task, *times])]),
        **_cpus(known, setup),
    }
    capacities = {name: rate for name, rate in capacities.items() if rate < math.inf}
    evidence |= {f"{name}_rate": rate for name, rate in capacities.items()}
    return Figures(evidence, capacities, slow, late, means)


def _usual(durations: Sequence[float]) -> list[float]:
    """Drop durations that are far above the median."""
    limit = _LATE_FACTOR * median_low(durations) if durations else 0.0
    return [max(0.0, seconds) for seconds in durations if seconds <= limit]


def _means(tasks: Mapping[int, Sequence[float]], nodes: Mapping[int, str], task: float) -> dict[int, float]:
    """Return the seconds of a task for each worker: by its own tasks, or those of its node, or ``task``."""
    of_nodes = _by_node(nodes, tasks)
    own = {worker: tasks[worker] if len(tasks.get(worker, ())) >= _FEW_TASKS else () for worker in nodes}
    return {worker: _mean(own[worker] or of_nodes[node]) or task for worker, node in nodes.items()}


def _by_node(nodes: Mapping[int, str], times: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    of_nodes: dict[str, list[float]] = defaultdict(list)
    for worker, node in nodes.items():
        of_nodes[node] += times.get(worker, ())
    return of_nodes


def _find_slow(
    means: Mapping[int, float], nodes: Mapping[int, str], tasks: Mapping[int, Sequence[float]]
) -> SlowNode | None:
    """Compare the slowest node with all others together."""
    of_nodes = _by_node(nodes, {worker: (seconds,) for worker, seconds in means.items()})
    name = max(of_nodes, key=lambda node: fmean(of_nodes[node]))
    slow = of_nodes.pop(name)
    others = [seconds for of_node in of_nodes.values() for seconds in of_node]
    usual = _mean(others)
    # A few long tasks of a dataset whose times vary much make no slow node.
    own = _by_node(nodes, tasks)[name]
    error = ratio(pstdev(own), math.sqrt(len(own))) if own else 0.0
    if (factor := ratio(fmean(slow), usual)) < _SLOW_FACTOR or fmean(slow) - 3 * error < usual:
        return None
    healed = others + [usual] * len(slow)
    return SlowNode(name, factor, usual, sum(ratio(1, seconds, math.inf) for seconds in healed))


def _shares(usual: Sequence[Stages]) -> dict[str, float]:
    """Shares of the tasks' time: on a CPU, in all and by stage; waiting for one; off a CPU."""
    total = sum(s.task for s in usual)

    def share(seconds: Iterable[float]) -> float:
        return min(1.0, ratio(sum(seconds), total))

    runqueue = share(s.runqueue for s in usual)
    # Threads and child processes of a dataset may use more CPU time than passes.
    cpu = min(1.0 - runqueue, share(s.cpu for s in usual))
    fetch = min(cpu, share(s.fetch_cpu for s in usual))
    # To pickle a batch is all work.
    encode = min(cpu - fetch, share(s.encode for s in usual))
    return {
        "cpu_share": cpu,
        "fetch_cpu_share": fetch,
        "collate_cpu_share": cpu - fetch - encode,
        "encode_cpu_share": encode,
        "runqueue_share": runqueue,
        "off_cpu_share": max(0.0, 1.0 - cpu - runqueue) if total else 0.0,
    }


def _cpus(known: Sequence[tuple[Probe, Stages]], setup: Setup) -> dict[str, float]:
    """CPUs of the workers' machines, and those of them that were busy, with anything; empty if unknown."""
    seen: dict[str, list[Stages]] = defaultdict(list)
    for probe, stages in known:
        if stages.cpus and (node := setup.workers.get(probe.worker)) is not None:
            seen[setup.machines.get(probe.worker, node)].append(stages)
    names = ("cpus", "busy_cpus") if seen else ()
    return {name: sum(fmean([getattr(s, name) for s in every]) for every in seen.values()) for name in names}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def ratio(part: float, whole: float, otherwise: float = 0.0) -> float:
    """Return a quotient; ``otherwise`` for a division by zero, or by less than any clock can tell from it."""
    return part / whole if whole > 1e-12 else otherwise
