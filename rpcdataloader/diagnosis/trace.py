"""Batches in the Chrome trace format, for Perfetto and browsers. Pure.

The consumer has a track, and each worker has one below the process of its node. The work of a thread is a complete
event; complete events of a track nest. Arrows lead from the sampler to the worker, and from there to the delivery,
which says how long each part took.

Workers send durations without times of day. So their tasks are drawn as early as possible: from the time of sending, or
from the end of the previous task. The error is less than the time of the messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from rpcdataloader.diagnosis.records import Probe, Setup

Event = dict[str, Any]
Track = tuple[int, int]  # process and thread


class Trace:
    """The batches that a loop is delivered.

    Args:
        begun: Time at which the trace begins, on the trainer's clock; batches drawn before are left out.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._batches: list[tuple[Probe, str, str]] = []  # with the node and the name of the worker

    def add(self, probe: Probe, setup: Setup) -> None:
        """Add a delivered batch."""
        if probe.stages is not None and probe.added - probe.draw >= self._begun:
            name = setup.names.get(probe.worker, f"worker {probe.worker}")
            self._batches.append((probe, setup.workers.get(probe.worker, "lost nodes"), name))

    def events(self, trainer: str) -> Iterator[Event]:
        """The names of all tracks, and the events of all batches; ``trainer`` is the name of this process."""
        processes, threads = {trainer: 1}, {(trainer, "consumer"): 1}
        for _probe, node, name in self._batches:
            processes.setdefault(node, 1 + len(processes))
            threads.setdefault((node, name), 1 + len(threads))
        for process, number in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": process}}
        for (process, thread), number in threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": number, "args": {"name": thread}}
        ends: defaultdict[Track, int] = defaultdict(int)  # of each worker's last task
        for number, (probe, node, name) in enumerate(self._batches):
            yield from self._events_of(probe, (processes[node], threads[node, name]), number, ends)

    def _at(self, seconds: float) -> int:
        # Whole nanoseconds, so that nested floats still nest when rounded.
        return max(0, round((seconds - self._begun) * 1e9))

    def _events_of(self, probe: Probe, far: Track, number: int, ends: dict[Track, int]) -> Iterator[Event]:
        near, stages = (1, 1), probe.stages
        assert stages is not None
        drawn, delivered = self._at(probe.added - probe.draw), self._at(probe.delivered)
        title = f"batch {probe.number}"
        yield _complete("draw", near, drawn, max(self._at(probe.added), drawn + 1), title)
        # A wait hidden by the device counts as zero; an arrow needs an event to end at.
        waited = self._at(probe.delivered - probe.wait)
        until = max(delivered, waited + 1)
        yield _complete("next", near, waited, until, f"{title}{_way(probe)}")
        latest = min(max(drawn, self._at(probe.arrived)), delivered)  # of the task's ends
        length = round(stages.task * 1e9)
        task = begin = max(ends[far], self._at(probe.assigned), min(self._at(probe.sent), latest - length))
        end = ends[far] = max(begin + 1, min(begin + length, latest))
        shares = f"{title}, {stages.cpu * 1e3:.3f} ms on a CPU, {stages.runqueue * 1e3:.3f} ms waiting for one"
        yield _complete("task", far, begin, end, shares)
        for part, seconds in (("fetch", stages.fetch), ("collate", stages.collate), ("encode", stages.encode)):
            after = min(begin + round(seconds * 1e9), end)
            if after > begin:
                yield _complete(part, far, begin, after, title)
            begin = after
        # Arrows end at the enclosing event, instead of at the next one.
        for phase, track, time in ("s", near, drawn), ("t", far, task), ("f", near, until - 1):
            yield _event(phase, "way", track, time, cat="way", id=number, bp="e")


def _way(probe: Probe) -> str:
    """Say how long a batch was on each part of its way."""
    times = probe.added, probe.assigned, probe.sent, probe.arrived, probe.received, probe.answered, probe.delivered
    parts = zip(("window", "send", "worker", "receive", "decode", "ready"), pairwise(times), strict=True)
    return "".join(f", {part} {max(0.0, end - begin) * 1e3:.3f} ms" for part, (begin, end) in parts)


def _event(phase: str, name: str, track: Track, time: int, **more: object) -> Event:
    return {"ph": phase, "name": name, "pid": track[0], "tid": track[1], "ts": time / 1000, **more}


def _complete(name: str, track: Track, begin: int, end: int, text: str) -> Event:
    return _event("X", name, track, begin, dur=(end - begin) / 1000, args={"of": text})
