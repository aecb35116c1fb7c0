"""What is noted of a pass while it runs: sums of every batch, and the whole way of some. Pure.

The cheapest batches take 50 microseconds each, and noting them may cost 1 % of that. So every batch adds to a few sums
(:class:`Totals`), and one batch each 20 ms is a *probe*, whose way is timed from the sampler to the consumer. Batches
that take longer than that are all probes. Each probe keeps the sums at its delivery, so that the differences between
two probes are exact for all batches in between.

Times are seconds of the trainer's monotonic clock, and are passed in. Workers send durations only
(:class:`~rpcdataloader.wire.stages.Stages`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcdataloader.wire.stages import Stages

# At most 50 probes per second: with 10 microseconds each, 0.05 % of a CPU.
PROBE_INTERVAL = 0.02

# A diagnosis covers this time or this number of batches, whichever is more. The ring of probes holds both.
SPAN_SECONDS = 60.0
SPAN_BATCHES = 200
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


class Totals(NamedTuple):
    """Sums since the pass began.

    Attributes:
        batches: Number of batches that were delivered.
        waited: Seconds in ``next``.
        blocked: Seconds of these that the consumer slept until its batch came.
        drawn: Seconds of these in the sampler.
        ready: Seconds of ``blocked`` while a later batch was already here.
        link: Seconds in which at least one reply was being received: the union over all connections.
        size_bytes: Bytes that were received.
    """

    batches: int = 0
    waited: float = 0.0
    blocked: float = 0.0
    drawn: float = 0.0
    ready: float = 0.0
    link: float = 0.0
    size_bytes: int = 0


class Wait(NamedTuple):
    """The consumer slept until a batch came.

    Attributes:
        at: Time of its end.
        seconds: Its length.
        ready: Seconds of it while a later batch was already here.
        worker: Number of the worker that sent the batch.
        node: Name of its node.
    """

    at: float
    seconds: float
    ready: float
    worker: int
    node: str


@dataclass(slots=True)
class Probe:
    """A batch whose way is timed. Whichever thread has it notes what it sees; nothing changes after the delivery.

    A task that is sent twice keeps what belongs to the copy that was answered.

    Attributes:
        draw: Seconds in the sampler.
        added: Time at which it was in the table.
        assigned: Time at which the engine gave it to a worker.
        sent: Time at which the send call had returned.
        arrived: Time of the first bytes of the reply.
        received: Time of the last bytes.
        answered: Time at which the decoded batch was among the results.
        receive_cpu: CPU seconds of the receiver thread from ``arrived`` to ``received``: mostly the kernel's copying.
        decode_cpu: CPU seconds of the receiver thread from ``received`` to ``answered``: mostly Python.
        lock: Seconds that the receiver thread did not run though the bytes were there: wall time less CPU time of
            decoding, and of those receive calls that found all they asked for.
        copy: Seconds that the copy to the device took there.
        reorder: Seconds that it was here, and the batch before it not delivered.
        wait: Seconds that the consumer was in ``next`` for it.
        worker: Number of the worker that answered.
        node: Name of its node.
        size_bytes: Bytes of the reply.
        stages: The worker's durations; None if it has sent none.
        delivered: Time at which ``next`` returned.
        totals: Sums at that moment.
    """

    draw: float = 0.0
    added: float = 0.0
    assigned: float = 0.0
    sent: float = 0.0
    arrived: float = 0.0
    received: float = 0.0
    answered: float = 0.0
    receive_cpu: float = 0.0
    decode_cpu: float = 0.0
    lock: float = 0.0
    copy: float = 0.0
    reorder: float = 0.0
    wait: float = 0.0
    worker: int = -1
    node: str = ""
    size_bytes: int = 0
    stages: Stages | None = None
    delivered: float = 0.0
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, slots=True)
class Setup:
    """The pass as it is at this moment.

    Attributes:
        workers: Node of each worker that takes tasks, by number.
        window: Batches that may be undelivered.
        prefetch_factor: Batches per worker of these.
        max_in_flight_bytes: Bytes that may be on their way or wait here.
    """

    workers: Mapping[int, str]
    window: int
    prefetch_factor: int
    max_in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class Records:
    """What is known of a pass at a moment.

    Attributes:
        setup: Workers and limits.
        begun: Time at which the pass began.
        first_wait: Seconds until its first batch.
        skip: Batches at its beginning that do not count: the first window.
        totals: Sums of the whole pass.
        probes: In the order of delivery.
        waits: In the order of delivery.
        tasks: Seconds of the last tasks of each worker, probes or not: one that is slow is hardly given any.
        last: Time of the last delivery.
        waiting: Seconds that the consumer has been waiting for the next one by now.
    """

    setup: Setup
    begun: float
    first_wait: float
    skip: int
    totals: Totals
    probes: tuple[Probe, ...]
    waits: tuple[Wait, ...]
    tasks: dict[int, tuple[float, ...]]
    last: float
    waiting: float = 0.0

    @property
    def span(self) -> tuple[Probe, ...]:
        """The probes that count; the first of them is where the span begins."""
        known = [probe for probe in self.probes if probe.totals.batches > self.skip]
        since, batches = self.last - SPAN_SECONDS, self.totals.batches - SPAN_BATCHES
        return tuple(probe for probe in known if probe.delivered >= since or probe.totals.batches >= batches)


class Recorder:
    """Takes notes of one pass after the other. Every method is called with the pass's condition.

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
