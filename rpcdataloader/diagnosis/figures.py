"""What follows from the records of a pass: means, shares, and what each part of the pipeline could do. Pure.

A *capacity* is the number of batches per second that a part could handle if all others were infinitely fast. It is
computed from the time that the part is at work, never from what happened to overlap a wait: that would change with the
speed of the consumer while the pipeline stays the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rpcdataloader.diagnosis.records import Probe, Records
from rpcdataloader.wire.stages import Stages

# A task that takes this many times the median of its worker is no sign of its speed: the worker was stopped, or hung.
# Of exponentially distributed times, 1 in 1,000 passes it; of lognormal ones with a mean of 1.6 medians, 1 in 100.
_LATE_FACTOR = 10.0

# Nodes are compared when the slowest takes this many times as long as the others; less is another generation of CPUs.
_SLOW_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds per batch."""

    mean: float
    p95: float


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node whose tasks take far longer than those of the other nodes.

    Attributes:
        name: Of the node.
        factor: How many times as long.
        capacity: Batches per second of all workers, if this node were like the others.
    """

    name: str
    factor: float
    capacity: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What follows from the records.

    Attributes:
        batches: Batches in the span.
        elapsed: Seconds in the span, by now.
        waited: Seconds in ``next``, as are the following three.
        blocked: Seconds in which the consumer slept.
        drawn: Seconds in the sampler.
        ready: Seconds of ``blocked`` while a later batch was here.
        size_bytes: Bytes per batch.
        stages: Seconds per batch.
        capacities: Batches per second: ``workers``, ``network``, ``trainer``, ``device_copy`` and ``window``, as far as
            they were measured.
        allowed: Batches that may be undelivered: by the window, or by the bytes.
        limited_by_bytes: Whether it is the bytes.
        task: Seconds that a worker is at work on a batch.
        latency: Seconds from sending a request to its result, without any queue.
        cpu: Share of the task on a CPU, as are the following two.
        runqueue: Share of the task waiting for a CPU.
        stalled: Share of the task waiting for something else.
        lock: Seconds per batch that receivers did not run though bytes were there.
        starved: Share of their time at a reply that receivers waited for its bytes.
        peer_limited: Share of the connections' sending time in which the trainer took no bytes.
        error: Relative standard error of the task time.
        slow: A slow node, if there is one.
    """

    batches: int
    elapsed: float
    waited: float
    blocked: float
    drawn: float
    ready: float
    size_bytes: float
    stages: dict[str, Stage]
    capacities: dict[str, float]
    allowed: float
    limited_by_bytes: bool
    task: float
    latency: float
    cpu: float
    runqueue: float
    stalled: float
    lock: float
    starved: float
    peer_limited: float
    error: float
    slow: SlowNode | None


def measure(records: Records) -> Figures | None:
    """Compute the figures of the span; None if it has no two probes."""
    first, *probes = records.span or (None,)
    if first is None or not probes:
        return None
    begin, end, setup = first.totals, records.totals, records.setup
    batches = end.batches - begin.batches
    known = [(probe, probe.stages) for probe in probes if probe.stages is not None]
    tasks = _by_worker(known)
    usual = [stages.task for kept in tasks.values() for stages in kept]
    task = _mean(usual)
    transit = _mean(probe.answered - probe.sent - stages.task for probe, stages in known if stages.idle > 0)
    size_bytes = (end.size_bytes - begin.size_bytes) / batches
    by_bytes = max(1.0, setup.max_in_flight_bytes / size_bytes) if size_bytes else math.inf
    allowed = min(float(setup.window), by_bytes)
    stages = _stages(probes, known, transit)
    shares = _shares([stages for kept in tasks.values() for stages in kept])
    latency = task + max(0.0, transit)
    receiving = sum(probe.answered - probe.arrived for probe in probes)
    idle_free = sum(probe.receive_cpu + probe.decode_cpu + probe.lock for probe in probes)
    decode, receive = _mean(p.decode_cpu for p in probes), _mean(p.receive_cpu + p.decode_cpu for p in probes)
    sending = sum(stages.sending for _, stages in known)
    capacities = {
        "network": _per_second(batches, end.link - begin.link),
        # Decoding holds the interpreter lock, so all receivers together do one at a time. The kernel's copying does not.
        "trainer": min(_per_second(1, decode), _per_second(max(1, len(setup.workers)), receive)),
        "device_copy": _per_second(1, stages["copy"].mean),
    }
    slow = None
    if known:
        means = {worker: _mean(one.task for one in kept) for worker, kept in tasks.items()}
        nodes = {probe.worker: probe.node for probe, _ in known} | dict(setup.workers)
        current = setup.workers or nodes
        capacities["workers"] = sum(_per_second(1, means.get(worker, task)) for worker in current)
        capacities["window"] = _per_second(allowed, latency)
        slow = _find_slow(means, nodes, current, tasks)
    return Figures(
        batches=batches,
        elapsed=records.last - first.delivered + records.waiting,
        waited=end.waited - begin.waited + records.waiting,
        blocked=end.blocked - begin.blocked + records.waiting,
        drawn=end.drawn - begin.drawn,
        ready=end.ready - begin.ready,
        size_bytes=size_bytes,
        stages=stages,
        capacities={name: value for name, value in capacities.items() if value < math.inf},
        allowed=allowed,
        limited_by_bytes=by_bytes < setup.window,
        task=task,
        latency=latency,
        cpu=shares[0],
        runqueue=shares[1],
        stalled=shares[2],
        lock=_mean(probe.lock for probe in probes),
        starved=1.0 - min(1.0, idle_free / receiving) if receiving else 0.0,
        peer_limited=sum(stages.peer_limited for _, stages in known) / sending if sending else 0.0,
        error=_spread(usual) / math.sqrt(len(usual)) if usual else 0.0,
        slow=slow,
    )


def _by_worker(known: Iterable[tuple[Probe, Stages]]) -> dict[int, list[Stages]]:
    """The tasks of each worker, without those that were late by far."""
    found: dict[int, list[Stages]] = defaultdict(list)
    for probe, stages in known:
        found[probe.worker].append(stages)
    for worker, all_ in found.items():
        limit = _LATE_FACTOR * median(stages.task for stages in all_)
        found[worker] = [stages for stages in all_ if stages.task <= limit]
    return found


def _find_slow(
    means: dict[int, float], nodes: dict[int, str], current: Iterable[int], tasks: dict[int, list[Stages]]
) -> SlowNode | None:
    """Compare the slowest node with the others together."""
    times: dict[str, list[float]] = defaultdict(list)
    for worker, kept in tasks.items():
        times[nodes[worker]] += [stages.task for stages in kept]
    if len(times) < 2:
        return None
    name = max(times, key=lambda node: fmean(times[node]))
    usual = fmean(time for node, of_node in times.items() if node != name for time in of_node)
    factor = fmean(times[name]) / usual if usual else 1.0
    if factor < _SLOW_FACTOR:
        return None
    healed = [usual if nodes[worker] == name else means.get(worker, usual) for worker in current]
    return SlowNode(name, factor, sum(_per_second(1, seconds) for seconds in healed))


def _stages(probes: Sequence[Probe], known: Sequence[tuple[Probe, Stages]], transit: float) -> dict[str, Stage]:
    def queue(probe: Probe, stages: Stages) -> float:
        # A worker reads its requests between two tasks, so only the trainer sees how long one has waited there.
        return 0.0 if stages.idle > 0 else max(0.0, probe.answered - probe.sent - stages.task - transit)

    return {
        "draw": _stage(probe.draw for probe in probes),
        "window": _stage(probe.assigned - probe.added for probe in probes),
        "send": _stage(probe.sent - probe.assigned for probe in probes),
        "queue": _stage(queue(probe, stages) for probe, stages in known),
        "fetch": _stage(stages.fetch for _, stages in known),
        "collate": _stage(stages.collate for _, stages in known),
        "encode": _stage(stages.encode for _, stages in known),
        "reply": _stage(stages.reply for _, stages in known),
        "receive": _stage(probe.received - probe.arrived for probe in probes),
        "decode": _stage(probe.answered - probe.received for probe in probes),
        "reorder": _stage(probe.reorder for probe in probes),
        "copy": _stage(probe.copy for probe in probes),
        "wait": _stage(probe.wait for probe in probes),
    }


def _shares(stages: Sequence[Stages]) -> tuple[float, float, float]:
    """Of the tasks' time: on a CPU, waiting for one, and the rest; all 0 if CPU times were not measured."""
    total, cpu, runqueue = (sum(column) for column in zip(*((s.task, s.cpu, s.runqueue) for s in stages), strict=True)) if (
        stages
    ) else (0.0, 0.0, 0.0)
    if not total or not cpu + runqueue:
        return 0.0, 0.0, 0.0
    runqueue = min(1.0, runqueue / total)
    # Threads of a dataset may use more CPU time than passes.
    cpu = min(1.0 - runqueue, cpu / total)
    return cpu, runqueue, 1.0 - cpu - runqueue


def _stage(seconds: Iterable[float]) -> Stage:
    ordered = sorted(seconds)
    return Stage(fmean(ordered), ordered[(len(ordered) * 95 - 1) // 100]) if ordered else Stage(0.0, 0.0)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def _spread(values: Sequence[float]) -> float:
    """Standard deviation over mean."""
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values)) / mean if mean else 0.0


def _per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf
