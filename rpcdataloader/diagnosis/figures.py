"""What follows from the records of a pass: means, shares, and what each part of the pipeline could do. Pure.

A *capacity* is the number of batches per second that a part could handle if all others were infinitely fast. It is
computed from the time that the part is at work, never from what happened to overlap a wait: that would change with the
speed of the consumer while the pipeline stays the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low, pstdev

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
        usual: Seconds of a task on the others.
        capacity: Batches per second of all workers, if this node were like the others.
    """

    name: str
    factor: float
    usual: float
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
        collate: Share of the task in the collate function.
        cpu: Share of the task on a CPU.
        runqueue: Share of the task waiting for a CPU.
        stalled: Share of the task waiting for something else.
        receiving: CPU seconds of a receiver per batch.
        lock: Seconds per batch that receivers did not run though bytes were there.
        starved: Share of their time at a reply that receivers waited for its bytes.
        peer_limited: Share of the connections' sending time in which the trainer took no bytes.
        spread: Standard deviation of task times over their mean.
        error: Standard error of that mean, over it.
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
    collate: float
    cpu: float
    runqueue: float
    stalled: float
    receiving: float
    lock: float
    starved: float
    peer_limited: float
    spread: float
    error: float
    slow: SlowNode | None


def measure(records: Records) -> Figures | None:
    """Compute the figures of the span; None if it has no two probes."""
    span = records.span
    if len(span) < 2:
        return None
    first, probes, setup = span[0], span[1:], records.setup
    begin, end = first.totals, records.totals
    batches = end.batches - begin.batches
    size_bytes = (end.size_bytes - begin.size_bytes) / batches
    by_bytes = max(1.0, setup.max_in_flight_bytes / size_bytes) if size_bytes else math.inf
    known = [(probe, probe.stages) for probe in probes if probe.stages is not None]
    # The first task of a worker says more about imports and cold caches.
    tasks = {worker: _usual(recent[1:] or recent) for worker, recent in records.tasks.items()}
    times = [seconds for worker in setup.workers for seconds in tasks.get(worker, ())]
    task = _mean(times)
    spread = pstdev(times) / task if task else 0.0
    limit = _LATE_FACTOR * task
    usual = [stages for _, stages in known if stages.task <= limit]
    # What is not the worker's own, of requests that did not wait for another one's end there.
    transit = _mean(_usual([p.answered - p.sent - s.task for p, s in known if s.idle > 0]))
    stages = _stages(probes, known, transit)
    collate, cpu, runqueue, stalled = _shares(usual)
    decode, receiving = _mean([p.decode_cpu for p in probes]), _mean([p.receive_cpu + p.decode_cpu for p in probes])
    lock, present = _mean([p.lock for p in probes]), _mean([p.answered - p.arrived for p in probes])
    sending = sum(s.sending for _, s in known)
    capacities = {
        "network": _per_second(batches, end.link - begin.link),
        # Decoding holds the interpreter lock, so receivers take turns; the kernel's copying does not.
        "trainer": min(_per_second(1, decode), _per_second(max(1, len(setup.workers)), receiving)),
        "device_copy": _per_second(1, stages["copy"].mean),
    }
    slow, latency = None, 0.0
    if times:
        means = {worker: _mean(tasks.get(worker, ())) or task for worker in setup.workers}
        capacities["workers"] = sum(_per_second(1, seconds) for seconds in means.values())
        slow = _find_slow(means, setup.workers)
        # What a slow node takes is no reason to keep more in flight.
        latency = transit + (task if slow is None else slow.usual)
        capacities["window"] = _per_second(min(setup.window, by_bytes), latency)
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
        allowed=min(setup.window, by_bytes),
        limited_by_bytes=by_bytes < setup.window,
        task=task,
        latency=latency,
        collate=collate,
        cpu=cpu,
        runqueue=runqueue,
        stalled=stalled,
        receiving=receiving,
        lock=lock,
        starved=1.0 - min(1.0, (receiving + lock) / present) if present > 0 else 0.0,
        peer_limited=sum(s.peer_limited for _, s in known) / sending if sending else 0.0,
        spread=spread,
        error=spread / math.sqrt(len(times) or 1),
        slow=slow,
    )


def _usual(durations: Sequence[float]) -> list[float]:
    """Durations without those that are longer by far."""
    limit = _LATE_FACTOR * median_low(durations) if durations else 0.0
    return [max(0.0, seconds) for seconds in durations if seconds <= limit]


def _find_slow(means: Mapping[int, float], nodes: Mapping[int, str]) -> SlowNode | None:
    """Compare the slowest node with all others together."""
    times: dict[str, list[float]] = defaultdict(list)
    for worker, seconds in means.items():
        times[nodes[worker]].append(seconds)
    if len(times) < 2:
        return None
    name = max(times, key=lambda node: fmean(times[node]))
    usual = fmean([seconds for worker, seconds in means.items() if nodes[worker] != name])
    factor = fmean(times[name]) / usual if usual else 1.0
    if factor < _SLOW_FACTOR:
        return None
    healed = [usual if nodes[worker] == name else seconds for worker, seconds in means.items()]
    return SlowNode(name, factor, usual, sum(_per_second(1, seconds) for seconds in healed))


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


def _shares(usual: Sequence[Stages]) -> tuple[float, float, float, float]:
    """Of the tasks' time: in collate; on a CPU, waiting for one, and the rest, all 0 if CPU times were not measured."""
    total = sum(s.task for s in usual)
    if not total:
        return 0.0, 0.0, 0.0, 0.0
    collate, cpu, runqueue = (sum(getattr(s, name) for s in usual) / total for name in ("collate", "cpu", "runqueue"))
    if not cpu + runqueue:
        return collate, 0.0, 0.0, 0.0
    runqueue = min(1.0, runqueue)
    # Threads of a dataset may use more CPU time than passes.
    cpu = min(1.0 - runqueue, cpu)
    return collate, cpu, runqueue, 1.0 - cpu - runqueue


def _stage(seconds: Iterable[float]) -> Stage:
    ordered = sorted(seconds)
    return Stage(fmean(ordered), ordered[(len(ordered) * 95 - 1) // 100]) if ordered else Stage(0.0, 0.0)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf
