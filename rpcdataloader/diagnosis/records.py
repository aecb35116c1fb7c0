"""Records of a pass while it runs: sums over every batch, and the timed way of some. Pure.

The cheapest batches take 100 microseconds each, and recording may cost 1 % of that. So every batch only adds to a few
sums (:class:`Totals`). At first one batch each 20 ms, and later one each 250 ms, is a *probe*, whose way is timed from
the sampler to the consumer; slower batches are all probes. Each probe keeps the sums at its delivery, so differences
between two probes are exact for all batches in between.

Times are seconds of the trainer's monotonic clock, and are arguments. Workers only send durations
(:class:`~rpcdataloader.wire.messages.Stages`).
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcdataloader.wire.messages import Stages

# Span of a diagnosis: this time or this number of batches, whichever is more.
SPAN_SECONDS = 60.0
SPAN_BATCHES = 200

# Seconds between two probes: a short pass needs many probes, a long one few.
PROBE_INTERVAL, MAX_PROBE_INTERVAL = 0.02, 0.25

# The interval is this share of the pass so far.
_PROBE_SHARE = 1 / 25

# Enough for the span of a diagnosis, even with a trace of fast batches.
_NUM_PROBES = int(SPAN_SECONDS / PROBE_INTERVAL)

# Number of task times kept per worker. Their mean is known to an eighth of their spread.
_NUM_TASKS = 64

# Shorter waits are only summed: a change of threads takes 10 to 100 microseconds.
NOTED_WAIT = 1e-3

# Seconds of waiting after which a pass with few batches is diagnosed.
_LONG_WAIT = 10.0

# A reply received within this time came in one piece, which says nothing about the link.
_WHOLE = 1e-5

# Intervals of the link are kept apart until no further reply can lie between them.
_NUM_INTERVALS = 64


class Totals(NamedTuple):
    """Sums since the beginning of the pass."""

    batches: int = 0
    waited: float = 0.0  # seconds in ``next``
    blocked: float = 0.0  # seconds of ``waited`` that the consumer slept until its batch came
    link: float = 0.0  # seconds in which at least one reply was being received: the union over all connections

    def since(self, before: Totals) -> Totals:
        """The sums since others."""
        return Totals(*map(operator.sub, self, before))


@dataclass(slots=True)
class Probe:
    """A batch whose way is timed, by each thread that handles it; constant after the delivery.

    A task that is sent twice keeps the times of the copy that was answered.
    """

    number: int = -1
    draw: float = 0.0  # seconds in the sampler
    added: float = 0.0  # time at which it was added to the table
    assigned: float = 0.0  # time at which the engine gave it to a worker
    sent: float = 0.0  # time at which the send call had returned
    arrived: float = 0.0  # time of the first bytes of the reply
    received: float = 0.0  # time of the last bytes
    size_bytes: int = 0  # bytes of the batch
    answered: float = 0.0  # time at which the decoded batch was among the results
    # CPU seconds of the receiver thread from ``arrived`` to ``received``: mostly the kernel's copying.
    receive_cpu: float = 0.0
    decode_cpu: float = 0.0  # CPU seconds of the receiver thread from ``received`` to ``answered``: mostly Python
    # Seconds that the receiver thread did not run although the bytes were here: wall time less CPU time of decoding,
    # and of receive calls that found all they asked for.
    lock: float = 0.0
    copy: float = 0.0  # seconds of the copy on the device
    stalled: float = 0.0  # seconds that the device stalled for the copy, after ``next``
    wait: float = 0.0  # seconds that the consumer was in ``next`` for it
    stages: Stages | None = None  # durations that the worker sent; None without them
    worker: int = -1  # number of the worker that answered
    delivered: float = 0.0  # time at which ``next`` returned
    totals: Totals = field(default_factory=Totals)  # sums at that time
    # Seconds since the previous probe in which the consumer slept and later batches were here, by the late worker.
    late: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """The present workers and limits of a pass."""

    # Node of each worker that takes tasks, by the engine's number; empty if the training process loads itself.
    workers: Mapping[int, str]
    window: int  # batches that may be undelivered
    prefetch_factor: int  # batches of the window per worker
    max_in_flight_bytes: int  # bytes that may be on their way or wait here
    names: Mapping[int, str] = field(default_factory=dict)  # name of each worker, for messages
    machines: Mapping[int, str] = field(default_factory=dict)  # machine of each worker; several nodes may share one
    is_persistent: bool = False  # True if the workers stay for the next epoch
    is_stream: bool = False  # True for an iterable-style dataset, of which some workers may get no samples
    draws_from: str = "sampler"  # or "source", of a stream that others iterate over


@dataclass(slots=True)
class Start:
    """The way of a pass to its first batch: times of its steps, 0 for those to come.

    The first worker that takes a step counts.
    """

    begun: float  # time at which ``iter(loader)`` was called
    in_iter: float = 0.0  # seconds that it took
    wait: float = 0.0  # seconds in ``next`` until the first batch
    ready: float = 0.0  # time at which a worker was there
    opened: float = 0.0  # time at which it had the dataset, and had called ``worker_init_fn``
    init: float = 0.0  # seconds of the latter
    first: float = 0.0  # time of the first delivery
    num_workers: int = 1  # that have made the first batch together
    # Seconds spent so far on pickling the dataset, sending it, and building it on the nodes.
    dataset: Callable[[], float] = float
    is_instance: bool = False  # True if the dataset was pickled; False if a class or function builds it

    def parts(self, now: float) -> dict[str, float]:
        """Seconds of each part until ``now``, or until the first batch; the part under way comes last."""
        parts, dataset = {}, self.dataset()
        parts["dataset"] = dataset
        parts["pool"] = (self.ready or now) - self.begun - dataset
        if self.ready:
            parts["build"] = (self.opened or now) - self.ready - self.init
        if self.opened:
            parts["init"] = self.init
            parts["batch"] = (self.first or now) - self.opened
        return {name: max(0.0, seconds) for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True)
class Records:
    """A snapshot of a pass."""

    setup: Setup
    start: Start
    totals: Totals
    probes: tuple[Probe, ...]  # probes in the order of delivery
    # Seconds of the last tasks of each worker, including tasks without probe: a slow worker gets few tasks.
    tasks: dict[int, tuple[float, ...]]
    last: float  # time of the last delivery
    waiting: float = 0.0  # seconds that the consumer has been waiting for the next batch so far

    @property
    def span(self) -> tuple[Probe, ...]:
        """The relevant probes, without those of the first window; the first of them begins the span."""
        known = [probe for probe in self.probes if probe.totals.batches > self.setup.window]
        since, batches = self.last - SPAN_SECONDS, self.totals.batches - SPAN_BATCHES
        return tuple(probe for probe in known if probe.delivered >= since or probe.totals.batches >= batches)


class Recorder:
    """Records one pass after the other, at half a microsecond per batch without probe.

    Consumer and receiver threads have sums of their own, without a lock. Lists grow only with a probe, at most once per
    :data:`PROBE_INTERVAL`, or with a long wait: :meth:`delivered`. For a batch without either, :meth:`took` only adds.

    Args:
        lock: Lock that is held while lists change or are copied; reentrant, as signal handlers may ask for a diagnosis.
        now: Time at which the first pass begins.
        before: Records of the previous pass.
        trace: Function called with each delivered probe, and the workers.

    Attributes:
        setup: Latest workers and limits; replaced when they may have changed.
        start: The way to the first batch; other threads note its steps.
        trace: The argument; while it is set, and :attr:`next_probe` is 0, every batch is a probe.
        tasks: Seconds of the last tasks of each worker, by its number; its receiver thread appends to them.
        batches: Number of delivered batches.
        waited: Seconds in ``next``, without those in which the device was at work.
        blocked: Seconds of ``waited`` that the consumer slept.
        last: Time of the last delivery.
        next_probe: Time from which the next drawn batch becomes a probe.
        is_told: True once the reason for this pass's wait is logged; set before, nothing is logged.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        now: float,
        before: Records | None = None,
        trace: Callable[[Probe, Setup], None] | None = None,
    ) -> None:
        self.setup = Setup({}, 0, 0, 0)
        self.trace = trace
        self._lock = lock
        self._before = before
        self._reset(now)

    def begin(self, now: float) -> None:
        """Begin another pass with the same workers; the previous records stay until this one has delivered enough."""
        with self._lock:
            if self.batches:
                self._before = self.records()
            self._reset(now)
            self.start.ready = now

    def _reset(self, now: float) -> None:
        self.start = Start(now)
        self.next_probe = now
        self.tasks: defaultdict[int, deque[float]] = defaultdict(functools.partial(deque, maxlen=_NUM_TASKS))
        self.last = now
        self.batches = 0
        self.waited = self.blocked = self._link = 0.0
        self._intervals: list[tuple[float, float]] = []  # disjoint, in order, in which replies were received
        self._probes: deque[Probe] = deque(maxlen=_NUM_PROBES)
        self._late: dict[int, float] = {}
        self.is_told = False

    def took(self, now: float, began: float, blocked: float = 0.0) -> None:
        """Record that ``next``, called at ``began``, returns a batch that is no probe, after no long sleep."""
        self.batches += 1
        self.waited += now - began
        self.blocked += blocked
        self.last = now

    def probe(self, now: float, draw: float, number: int) -> Probe:
        """Return the record for a drawn batch, from :attr:`next_probe` on."""
        if self.trace is None:
            share = (now - self.start.begun) * _PROBE_SHARE
            self.next_probe = now + min(max(PROBE_INTERVAL, share), MAX_PROBE_INTERVAL)
        return Probe(number, draw, now)

    def delivered(
        self,
        now: float,
        waited: float,
        blocked: float = 0.0,
        *,
        ready: float = 0.0,
        worker: int = -1,
        probe: Probe | None = None,
    ) -> None:
        """Record that ``next`` returns a batch; in the consumer's thread.

        Args:
            now: Time of the return.
            waited: Seconds in ``next``; 0 if the device was at work all the time.
            blocked: Seconds of ``waited`` that the consumer slept.
            ready: Seconds of ``blocked`` and of sleeps before, in which a later batch was already here.
            worker: Number of the worker that answered.
            probe: The batch, if it is timed.
        """
        with self._lock:
            if not self.batches:
                self.start.wait, self.start.first = waited, now
                seconds = self.start.dataset()
                self.start.dataset = lambda: seconds  # other passes may build it again
            self.batches += 1
            self.waited += waited
            self.blocked += blocked
            if ready:
                self._late[worker] = self._late.get(worker, 0.0) + ready
            self.last = now
            if probe is not None:
                probe.delivered, probe.wait, probe.worker, probe.totals = now, waited, worker, self._totals()
                probe.late, self._late = self._late, {}
                self._probes.append(probe)
        if probe is not None and (trace := self.trace) is not None:
            trace(probe, self.setup)

    def received(self, arrived: float, received: float) -> None:
        """Record a reply that came in several pieces; never called by two threads at once.

        Args:
            arrived: Time of the first bytes.
            received: Time of the last bytes.
        """
        if received - arrived < _WHOLE:
            return
        # Replies come nearly in the order of their ends: intervals after the beginning of this one are part of it.
        self._link += received - arrived
        intervals = self._intervals
        while intervals and intervals[-1][1] >= arrived:
            begin, end = intervals.pop()
            self._link -= min(end, received) - max(begin, arrived)
            arrived, received = min(begin, arrived), max(end, received)
        intervals.append((arrived, received))
        if len(intervals) > _NUM_INTERVALS:
            del intervals[0]

    def snapshot(self, waiting: float = 0.0) -> Records:
        """Return the records of this pass or, while it has delivered too little, of the previous one.

        Args:
            waiting: Seconds that the consumer has been waiting so far.
        """
        records = self.records(waiting)
        is_new = len(records.span) < 2 and waiting < _LONG_WAIT
        return self._before if is_new and self._before is not None else records

    def records(self, waiting: float = 0.0) -> Records:
        """Return the records of this pass alone."""
        with self._lock:
            return Records(
                setup=self.setup,
                start=self.start,
                totals=self._totals(),
                probes=tuple(self._probes),
                # Each of these copies is atomic, as receiver threads append meanwhile.
                tasks={worker: tuple(recent.copy()) for worker, recent in self.tasks.copy().items()},
                last=self.last,
                waiting=waiting,
            )

    def _totals(self) -> Totals:
        return Totals(self.batches, self.waited, self.blocked, self._link)
