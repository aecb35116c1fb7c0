"""Takes the notes of a pass while it runs, at less than a microsecond per batch that is no probe. Pure.

The two threads that a batch passes append a tuple each, which is one operation. The tuples are added up when a probe is
delivered, at most once per :data:`PROBE_INTERVAL`, or for :meth:`Recorder.snapshot`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from rpcdataloader.diagnosis.records import SPAN_SECONDS, Probe, Records, Setup, Totals, Wait

# Seconds between two probes: a short pass needs many, and a long one does without. 50 probes per second take 2
# to 4 % of the rate of the cheapest batches, and 10 take a fifth of that.
PROBE_INTERVAL, MAX_PROBE_INTERVAL = 0.02, 0.1

# The interval is this share of the pass until now.
_PROBE_SHARE = 1 / 50

# Enough for the span of a diagnosis, with a trace of fast batches, too.
_NUM_PROBES = int(SPAN_SECONDS / PROBE_INTERVAL)

# Tasks of a worker whose times are kept. Their mean is known to an eighth of their spread.
_NUM_TASKS = 64

# Shorter waits are only added up: a change of threads takes 10 to 100 microseconds.
_NOTED_WAIT = 1e-3
_NUM_WAITS = 1000

# A pass that has waited this long is told of, though it has delivered little.
_LONG_WAIT = 10.0

# A reply that was received within this time came in one piece, which says nothing about the link.
_WHOLE = 1e-5

# Intervals of the link that are kept apart until no reply can lie between them any more.
_NUM_INTERVALS = 64


class Recorder:
    """Takes notes of one pass after the other.

    Args:
        lock: Guards everything but the two queues.
        now: Time at which the first pass begins.
        before: What is known of the pass before.
        trace: Told of each probe that is delivered, with the workers and the number of the one that has answered.

    Attributes:
        setup: Workers and limits as they were last; replaced when they may have changed.
        trace: As given; while there is one, every batch is a probe.
        answers: Replies with batches, in the order of their ends: from the receiver threads, with the pass's condition.
            Number of the worker, its seconds at work, bytes, and times of the first and last ones; the two times are
            the same if one receive call found all.
        deliveries: From the consumer's thread, what ``next`` has returned: time; seconds in ``next``, 0 if the device
            was at work all the while; of these, asleep, asleep while a later batch was here, in the sampler; worker.
        next_probe: Time from which on the next batch that is drawn is to be a probe.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        now: float,
        before: Records | None = None,
        trace: Callable[[Probe, Setup, int], None] | None = None,
    ) -> None:
        self.setup = Setup({}, 0, 0, 0)
        self.trace = trace
        self._lock = lock
        self._before = before
        self._reset(now)

    def begin(self, now: float) -> None:
        """Another pass begins; what is known of the last one is kept until this one has delivered enough."""
        with self._lock:
            self._add_up()
            if self._batches:
                self._before = self._take(0.0)
            self._reset(now)

    def _reset(self, now: float) -> None:
        self.answers: deque[tuple[int, float, int, float, float]] = deque()
        self.deliveries: deque[tuple[float, float, float, float, float, int]] = deque()
        self.next_probe = now
        self._tasks: defaultdict[int, deque[float]] = defaultdict(_recent)
        self._start = self._last = now
        self._first_wait = 0.0
        self._batches = self._size_bytes = 0
        self._waited = self._blocked = self._drawn = self._ready = self._link = 0.0
        self._intervals: list[tuple[float, float]] = []  # disjoint, in order, in which replies were received
        self._probes: deque[Probe] = deque(maxlen=_NUM_PROBES)
        self._waits: deque[Wait] = deque(maxlen=_NUM_WAITS)

    def follow(self, trace: Callable[[Probe, Setup, int], None] | None) -> None:
        """Tell ``trace`` of every batch that is drawn from now on; None for no trace."""
        self.trace = trace
        self.next_probe = 0.0

    def probe(self, now: float, draw: float, number: int) -> Probe:
        """The notes for a batch that was drawn, from :attr:`next_probe` on."""
        if self.trace is None:
            share = (now - self._start) * _PROBE_SHARE
            self.next_probe = now + min(max(PROBE_INTERVAL, share), MAX_PROBE_INTERVAL)
        return Probe(number, draw, now)

    def probed(self, probe: Probe, delivered: tuple[float, float, float, float, float, int]) -> None:
        """A probe is delivered; instead of appending the delivery."""
        with self._lock:
            self._add_up()
            probe.reorder = max(0.0, self._last - probe.answered)
            self.deliveries.append(delivered)
            self._add_up()
            probe.delivered, probe.wait = delivered[:2]
            probe.totals = self._totals()
            self._probes.append(probe)
        if (trace := self.trace) is not None:
            trace(probe, self.setup, delivered[5])

    def _add_up(self) -> None:
        # What is appended meanwhile waits for the next time. Sums are local, for speed.
        size_bytes, tasks, take = self._size_bytes, self._tasks, self.answers.popleft
        for _ in range(len(self.answers)):
            worker, task, size, arrived, received = take()
            tasks[worker].append(task)
            size_bytes += size
            if received - arrived >= _WHOLE:
                self._add_to_link(arrived, received)
        self._size_bytes = size_bytes
        total_waited, total_blocked, total_ready, total_drawn = self._waited, self._blocked, self._ready, self._drawn
        for _ in range(len(self.deliveries)):
            at, waited, blocked, ready, drawn, worker = self.deliveries.popleft()
            if not self._batches:
                self._first_wait = waited
            self._batches += 1
            total_waited += waited
            total_blocked += blocked
            total_ready += ready
            total_drawn += drawn
            self._last = at
            if blocked >= _NOTED_WAIT:
                self._waits.append(Wait(at, blocked, ready, worker))
        self._waited, self._blocked, self._ready, self._drawn = total_waited, total_blocked, total_ready, total_drawn

    def _add_to_link(self, arrived: float, received: float) -> None:
        # Replies come in the order of their ends, nearly: whatever lies behind the beginning of this one is part of it.
        self._link += received - arrived
        intervals = self._intervals
        while intervals and intervals[-1][1] >= arrived:
            begin, end = intervals.pop()
            self._link -= min(end, received) - max(begin, arrived)
            arrived, received = min(begin, arrived), max(end, received)
        intervals.append((arrived, received))
        if len(intervals) > _NUM_INTERVALS:
            del intervals[0]

    def add_up(self) -> None:
        """Add up what was noted; to be called where no probe may follow, as after an exception in place of a batch."""
        with self._lock:
            self._add_up()

    def snapshot(self, waiting: float = 0.0) -> Records:
        """What is known of this pass or, while it has delivered too little, of the one before.

        Args:
            waiting: Seconds that the consumer has been waiting by now.
        """
        with self._lock:
            self._add_up()
            records = self._take(waiting)
        is_new = len(records.span) < 2 and waiting < _LONG_WAIT
        return self._before if is_new and self._before is not None else records

    def _take(self, waiting: float) -> Records:
        return Records(
            setup=self.setup,
            begun=self._start,
            first_wait=self._first_wait,
            totals=self._totals(),
            probes=tuple(self._probes),
            waits=tuple(self._waits),
            tasks={worker: tuple(recent) for worker, recent in self._tasks.items()},
            last=self._last,
            waiting=waiting,
        )

    def _totals(self) -> Totals:
        return Totals(
            self._batches, self._waited, self._blocked, self._drawn, self._ready, self._link, self._size_bytes
        )


def _recent() -> deque[float]:
    return deque(maxlen=_NUM_TASKS)
