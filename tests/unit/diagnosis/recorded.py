"""Records of a pass in which every batch is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from rpcdataloader.diagnosis.records import Recorder, Records, Setup
from rpcdataloader.wire.messages import Stages

FOUR = dict.fromkeys(range(4), "node07")
TASK = Stages(fetch=0.019, collate=0.001, cpu=0.02, fetch_cpu=0.019)


def make_setup(workers=FOUR, prefetch_factor=2, max_in_flight_bytes=2**30, **options) -> Setup:
    return Setup(workers, len(workers) * prefetch_factor, prefetch_factor, max_in_flight_bytes, **options)


def make_recorder(now=0.0, **setup) -> Recorder:
    recorder = Recorder(contextlib.nullcontext(), now)
    recorder.setup = make_setup(**setup)
    return recorder


def record(
    recorder: Recorder | None = None,
    *,
    now=None,
    worker=None,
    num_batches=100,
    consumer=0.02,
    blocked=0.0,
    drawn=0.0,
    own=0.0,
    ready=0.0,
    copy=0.0,
    stalled=0.0,
    lock=0.0,
    receive=0.0,
    receive_cpu=0.0,
    decode_cpu=0.0,
    first_wait=0.0,
    latency=0.001,
    size_bytes=1_000_000,
    stages: Stages | None = TASK,
    slow: dict[int, Stages] | None = None,
    idle: Collection[int] = (),
    start: dict[str, Any] | None = None,
    **setup,
) -> Recorder:
    """Deliver batches of one worker, or of all in turn but ``idle`` ones, which are all waited for as long."""
    recorder = recorder or make_recorder(**setup)
    for name, value in (start or {}).items():
        setattr(recorder.start, name, (lambda seconds=value: seconds) if name == "dataset" else value)
    now = recorder.snapshot().last if now is None else now
    workers = [number for number in recorder.setup.workers if number not in idle] if worker is None else [worker]
    for number in range(num_batches):
        worker = workers[number % len(workers)]
        of_worker = (slow or {}).get(worker, stages)
        task = 0.0 if of_worker is None else of_worker.fetch + of_worker.collate
        first = first_wait if number == 0 else 0.0
        waited = first + blocked + drawn + own
        now += waited + consumer
        probe = recorder.probe(now, drawn, number) if now >= recorder.next_probe else None
        if probe is not None:
            probe.copy, probe.stalled, probe.lock = copy, stalled, lock
            probe.added = probe.assigned = probe.sent = now - task - latency
            probe.answered = now
            probe.received = now - decode_cpu - lock
            probe.arrived = probe.received - receive
            probe.receive_cpu, probe.decode_cpu = receive_cpu, decode_cpu
            probe.stages = of_worker
        recorder.tasks[worker].append(task)
        recorder.received(now - receive, now)
        if probe is not None:
            probe.size_bytes = size_bytes
        late = ready if first + blocked else 0.0
        recorder.delivered(now, waited, first + blocked, ready=late, worker=worker, probe=probe)
    return recorder


def records(**options) -> Records:
    return record(**options).snapshot()
