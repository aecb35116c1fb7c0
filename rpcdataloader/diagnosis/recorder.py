"""Takes the notes of a pass while it runs, at less than a microsecond per batch that is no probe. Pure."""

from __future__ import annotations

from collections import defaultdict, deque

from rpcdataloader.diagnosis.records import SPAN_SECONDS, Probe, Records, Setup, Totals, Wait

# At most 50 probes per second: with 10 microseconds each, 0.05 % of a CPU.
PROBE_INTERVAL = 0.02

# Enough for the span of a diagnosis.
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

    The consumer's thread calls :meth:`probe` and :meth:`delivered`, without a lock. Everything else is called with the
    pass's condition, by any thread; what the consumer changes meanwhile is copied in single operations.

    Attributes:
        setup: Workers and limits; replaced when they change.
    """

    def __init__(self, setup: Setup, now: float) -> None:
        self.setup = setup
        self._before: Records | None = None
        self._reset(now)

    def begin(self, now: float) -> None:
        """Another pass begins; what is known of the last one is kept until this one has delivered enough."""
        if self._batches:
            self._before = self._take(0.0)
        self._reset(now)

    def _reset(self, now: float) -> None:
        self._tasks: defaultdict[int, deque[float]] = defaultdict(_recent)
        self._start, self._skip, self._last = now, self.setup.window, now
        self._next_probe = now
        self._first_wait = 0.0
        self._batches = self._size_bytes = 0
        self._waited = self._blocked = self._drawn = self._ready = self._link = 0.0
        self._intervals: list[tuple[float, float]] = []  # disjoint, in order, in which replies were received
        self._probes: deque[Probe] = deque(maxlen=_NUM_PROBES)
        self._waits: deque[Wait] = deque(maxlen=_NUM_WAITS)

    def probe(self, now: float) -> Probe | None:
        """The notes for the batch that is drawn now; None if it is not timed."""
        if now < self._next_probe:
            return None
        self._next_probe = now + PROBE_INTERVAL
        return Probe()

    def answered(self, worker: int, task: float, size_bytes: int, arrived: float, received: float) -> None:
        """A reply has come.

        Args:
            worker: Number of the worker that answered.
            task: Seconds that the worker was at work on it.
            size_bytes: Bytes of the reply.
            arrived: Time of the first bytes.
            received: Time of the last bytes; the same if one receive call found all of them.
        """
        self._tasks[worker].append(task)
        self._size_bytes += size_bytes
        if received - arrived < _WHOLE:
            return
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

    def delivered(
        self,
        now: float,
        waited: float,
        blocked: float = 0.0,
        ready: float = 0.0,
        drawn: float = 0.0,
        worker: int = -1,
        node: str = "",
        probe: Probe | None = None,
    ) -> None:
        """``next`` returns a batch.

        Args:
            now: Time.
            waited: Seconds in ``next``, 0 if the device has been at work all the while.
            blocked: Seconds of these that the consumer slept.
            ready: Seconds of these in which a later batch was already here.
            drawn: Seconds of ``waited`` in the sampler.
            worker: Number of the worker that answered.
            node: Name of its node.
            probe: The notes of the batch, if it was timed.
        """
        self._batches += 1
        self._waited += waited
        self._blocked += blocked
        self._ready += ready
        self._drawn += drawn
        if self._batches == 1:
            self._first_wait = waited
        if blocked >= _NOTED_WAIT:
            self._waits.append(Wait(now, blocked, ready, worker, node))
        if probe is not None:
            probe.reorder = max(0.0, self._last - probe.answered)
            probe.wait, probe.delivered, probe.totals = waited, now, self._totals()
            self._probes.append(probe)
        self._last = now

    def snapshot(self, waiting: float = 0.0) -> Records:
        """What is known of this pass or, while it has delivered too little, of the one before.

        Args:
            waiting: Seconds that the consumer has been waiting by now.
        """
        records = self._take(waiting)
        is_new = len(records.span) < 2 and waiting < _LONG_WAIT
        return self._before if is_new and self._before is not None else records

    def _take(self, waiting: float) -> Records:
        return Records(
            setup=self.setup,
            begun=self._start,
            first_wait=self._first_wait,
            skip=self._skip,
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
