"""Batches in the Chrome trace format, for Perfetto and browsers. Pure.

A trace is a JSON array of events, one per line; its closing bracket may be missing. The consumer has a track, and each
worker has one below the process of its node. The work of a thread is a complete event; complete events of a track nest.
The life of a batch, from the sampler to its delivery, is an asynchronous event of its own. Arrows lead from the sampler
to the worker, and from there to the delivery.

Workers send durations without times of day. So their tasks are drawn as early as possible: from the time of sending, or
from the end of the previous task. The error is less than the time of the messages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from rpcdataloader.diagnosis.records import Probe, Setup

# Number of the trainer among the processes of the trace; nodes follow.
_TRAINER = 1

Track = tuple[int, int]  # process and thread


class Tracks:
    """Creates the events of batches.

    Args:
        origin: Time at which the trace begins, on the trainer's clock; batches drawn before are left out.

    Attributes:
        names: Events with the names of all tracks so far.
    """

    def __init__(self, trainer: str, origin: float) -> None:
        self._origin = origin
        self._nodes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], Track] = {}
        self._ends: defaultdict[Track, int] = defaultdict(int)  # end of a worker's last task
        self.names = [_name(_TRAINER, 0, "process", trainer)]
        self._num_batches = 0

    def events_of(self, probe: Probe, setup: Setup, worker: int, consumer: str) -> list[str]:
        """Return the events of a delivered batch, and names of new tracks."""
        if probe.stages is None or probe.added - probe.draw < self._origin:
            return []
        num_names = len(self.names)
        node = setup.workers.get(worker, "lost nodes")
        process = self._nodes.get(node)
        if process is None:
            process = self._nodes[node] = _TRAINER + 1 + len(self._nodes)
            self.names.append(_name(process, 0, "process", node))
        near = self._track(_TRAINER, consumer)
        far = self._track(process, setup.names.get(worker, f"worker {worker}"))
        self._num_batches += 1
        return [*self.names[num_names:], *self._events_of(probe, near, far, self._num_batches)]

    def _track(self, process: int, name: str) -> Track:
        track = self._tracks.get((process, name))
        if track is None:
            track = self._tracks[process, name] = process, 1 + len(self._tracks)
            self.names.append(_name(*track, "thread", name))
        return track

    def _at(self, seconds: float) -> int:
        # Whole nanoseconds, so that nested floats still nest when rounded.
        return max(0, round((seconds - self._origin) * 1e9))

    def _events_of(self, probe: Probe, near: Track, far: Track, number: int) -> Iterator[str]:
        stages = probe.stages
        assert stages is not None
        drawn, delivered = self._at(probe.added - probe.draw), self._at(probe.delivered)
        title = f"batch {probe.number}"
        yield _complete("draw", near, drawn, max(self._at(probe.added), drawn + 1), title)
        # A wait hidden by the device counts as zero; an arrow needs an event to end at.
        waited = self._at(probe.delivered - probe.wait)
        yield _complete("next", near, waited, max(delivered, waited + 1), title)
        # The life of the batch, part after part; a local number keeps it with the tracks of its process.
        life = f'"cat":"batch","id2":{{"local":"{number}"}}'
        yield _event("b", "batch", near, drawn, f'{life},"args":{{"of":"{title}"}}')
        begin = latest = drawn
        for part, time in (
            ("draw", probe.added),
            ("window", probe.assigned),
            ("send", probe.sent),
            ("worker", probe.arrived),
            ("receive", probe.received),
            ("decode", probe.answered),
            ("ready", probe.delivered),
        ):
            # An answer may come before the send call has returned.
            end = min(max(begin, self._at(time)), delivered)
            if end > begin:
                yield _event("b", part, near, begin, life)
                yield _event("e", part, near, end, life)
            if part == "worker":
                latest = end
            begin = end
        yield _event("e", "batch", near, delivered, life)
        # The task of the worker.
        length = round(stages.task * 1e9)
        task = begin = max(self._ends[far], self._at(probe.assigned), min(self._at(probe.sent), latest - length))
        end = max(begin + 1, min(begin + length, latest))
        self._ends[far] = end
        shares = f"{title}, {stages.cpu * 1e3:.3f} ms on a CPU, {stages.runqueue * 1e3:.3f} ms waiting for one"
        yield _complete("task", far, begin, end, shares)
        for part, seconds in (("fetch", stages.fetch), ("collate", stages.collate), ("encode", stages.encode)):
            until = min(begin + round(seconds * 1e9), end)
            if until > begin:
                yield _complete(part, far, begin, until, title)
            begin = until
        # Arrows end at the enclosing event, instead of at the next one.
        for phase, track, time in ("s", near, drawn), ("t", far, task), ("f", near, max(delivered, waited + 1) - 1):
            yield _event(phase, "way", track, time, f'"cat":"way","id":{number},"bp":"e"')


def _name(process: int, thread: int, kind: str, name: str) -> str:
    return f'{{"ph":"M","name":"{kind}_name","pid":{process},"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'


def _event(phase: str, name: str, track: Track, time: int, more: str) -> str:
    """An event at a time in nanoseconds; formatted by hand, as the loop's thread makes 20 of them per batch."""
    return f'{{"ph":"{phase}","name":"{name}","pid":{track[0]},"tid":{track[1]},"ts":{time / 1000:.3f},{more}}}'


def _complete(name: str, track: Track, begin: int, end: int, text: str) -> str:
    return _event("X", name, track, begin, f'"dur":{(end - begin) / 1000:.3f},"args":{{"of":"{text}"}}')
