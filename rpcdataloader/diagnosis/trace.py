"""Batches in the Chrome trace format, for Perfetto and browsers. Pure.

A trace is a JSON array of events, one per line; its closing bracket may be missing. The consumer has a track, and each
worker has one below the process of its node. The work of a thread is a complete event; complete events of a track nest.
Arrows lead from the sampler to the worker, and from there to the delivery, which says how long each part took.

Workers send durations without times of day. So their tasks are drawn as early as possible: from the time of sending, or
from the end of the previous task. The error is less than the time of the messages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from rpcdataloader.diagnosis.records import Probe, Setup

Track = tuple[int, int]  # process and thread


class Tracks:
    """Creates the events of batches.

    Args:
        origin: Time at which the trace begins, on the trainer's clock; batches drawn before are left out.

    Attributes:
        names: Events with the names of tracks, which are to be written before others.
    """

    def __init__(self, trainer: str, origin: float) -> None:
        self._origin = origin
        self._numbers: dict[tuple[int, str], int] = {}  # of processes, and of threads by process and name
        self._ends: defaultdict[Track, int] = defaultdict(int)  # end of a worker's last task
        self._num_batches = 0
        self.names: list[str] = []
        self._trainer = self._number(0, trainer)

    def events_of(self, probe: Probe, setup: Setup, worker: int, consumer: str) -> Iterator[str]:
        """Return the events of a delivered batch, and names of new tracks."""
        stages = probe.stages
        if stages is None or probe.added - probe.draw < self._origin:
            return
        process = self._number(0, setup.workers.get(worker, "lost nodes"))
        near = self._trainer, self._number(self._trainer, consumer)
        far = process, self._number(process, setup.names.get(worker, f"worker {worker}"))
        yield from self.names
        self.names.clear()
        self._num_batches += 1
        drawn, delivered = self._at(probe.added - probe.draw), self._at(probe.delivered)
        title = f"batch {probe.number}"
        yield _complete("draw", near, drawn, max(self._at(probe.added), drawn + 1), title)
        # A wait hidden by the device counts as zero; an arrow needs an event to end at.
        waited = self._at(probe.delivered - probe.wait)
        until = max(delivered, waited + 1)
        yield _complete("next", near, waited, until, f"{title}{_way(probe)}")
        latest = min(max(drawn, self._at(probe.arrived)), delivered)  # of the task's ends
        # The task of the worker.
        length = round(stages.task * 1e9)
        task = begin = max(self._ends[far], self._at(probe.assigned), min(self._at(probe.sent), latest - length))
        end = max(begin + 1, min(begin + length, latest))
        self._ends[far] = end
        shares = f"{title}, {stages.cpu * 1e3:.3f} ms on a CPU, {stages.runqueue * 1e3:.3f} ms waiting for one"
        yield _complete("task", far, begin, end, shares)
        for part, seconds in (("fetch", stages.fetch), ("collate", stages.collate), ("encode", stages.encode)):
            after = min(begin + round(seconds * 1e9), end)
            if after > begin:
                yield _complete(part, far, begin, after, title)
            begin = after
        # Arrows end at the enclosing event, instead of at the next one.
        for phase, track, time in ("s", near, drawn), ("t", far, task), ("f", near, until - 1):
            yield _event(phase, "way", track, time, f'"cat":"way","id":{self._num_batches},"bp":"e"')

    def _at(self, seconds: float) -> int:
        # Whole nanoseconds, so that nested floats still nest when rounded.
        return max(0, round((seconds - self._origin) * 1e9))

    def _number(self, process: int, name: str) -> int:
        """Return the number of a thread of a process, or of a process (of 0); a new one gets a name."""
        number = self._numbers.get((process, name))
        if number is None:
            number = self._numbers[process, name] = 1 + len(self._numbers)
            kind, track = ("thread", (process, number)) if process else ("process", (number, 0))
            names = f'"ph":"M","name":"{kind}_name","pid":{track[0]},"tid":{track[1]}'
            self.names.append(f'{{{names},"args":{{"name":{json.dumps(name)}}}}}')
        return number


def _way(probe: Probe) -> str:
    """Say how long a batch was on each part of its way."""
    times = probe.added, probe.assigned, probe.sent, probe.arrived, probe.received, probe.answered, probe.delivered
    parts = zip(("window", "send", "worker", "receive", "decode", "ready"), pairwise(times), strict=True)
    return "".join(f", {part} {max(0.0, end - begin) * 1e3:.3f} ms" for part, (begin, end) in parts)


def _event(phase: str, name: str, track: Track, time: int, more: str) -> str:
    """An event at a time in nanoseconds; formatted by hand, as the loop's thread makes 20 of them per batch."""
    return f'{{"ph":"{phase}","name":"{name}","pid":{track[0]},"tid":{track[1]},"ts":{time / 1000:.3f},{more}}}'


def _complete(name: str, track: Track, begin: int, end: int, text: str) -> str:
    return _event("X", name, track, begin, f'"dur":{(end - begin) / 1000:.3f},"args":{{"of":"{text}"}}')
