"""Records of a pass: sums over every batch, and the timed way of some. Pure.

The cheapest batches take 100 microseconds each, and recording may cost 1 % of that. So every batch only adds to a few
sums (:class:`Totals`). At first one batch each 20 ms, and later one each 250 ms, is a *probe*, whose way is timed from
the sampler to the consumer; slower batches are all probes. Each probe keeps the sums at its delivery, so differences
between two probes are exact for all batches in between.

Times are seconds of the trainer's monotonic clock, and are arguments. Workers only send durations
(:class:`~rpcdataloader.wire.messages.Stages`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcdataloader.wire.messages import Stages

# Span of a diagnosis: this time or this number of batches, whichever is more.
SPAN_SECONDS = 60.0
SPAN_BATCHES = 200


class Totals(NamedTuple):
    """Sums since the beginning of the pass.

    Attributes:
        waited: Seconds in ``next`` until its last decision.
        blocked: Seconds of ``waited`` that the consumer slept until its batch came.
        ready: Seconds of ``blocked`` while a later batch was already here.
        link: Seconds in which at least one reply was being received: the union over all connections.
        noted: Number of the calls of ``next`` that were timed to their end.
        sending: Seconds in these after the last decision, in which requests were sent.
    """

    batches: int = 0
    waited: float = 0.0
    blocked: float = 0.0
    ready: float = 0.0
    link: float = 0.0
    noted: int = 0
    sending: float = 0.0

    def since(self, before: Totals) -> Totals:
        """The sums since others."""
        return Totals(*map(operator.sub, self, before))

    @property
    def in_next(self) -> float:
        """Seconds in ``next``. What most calls took to send requests is estimated from the others."""
        return self.waited + (self.sending / self.noted * self.batches if self.noted else 0.0)


class Wait(NamedTuple):
    """A sleep of the consumer until a batch came.

    Attributes:
        at: Time of its end.
        seconds: Its length.
        ready: Seconds of it while a later batch was already here.
    """

    at: float
    seconds: float
    ready: float
    worker: int


@dataclass(slots=True)
class Probe:
    """A batch whose way is timed, by each thread that handles it; constant after the delivery.

    A task that is sent twice keeps the times of the copy that was answered.

    Attributes:
        draw: Seconds in the sampler.
        added: Time at which it was added to the table.
        assigned: Time at which the engine gave it to a worker.
        sent: Time at which the send call had returned.
        arrived: Time of the first bytes of the reply.
        received: Time of the last bytes.
        size_bytes: Bytes of the batch.
        answered: Time at which the decoded batch was among the results.
        receive_cpu: CPU seconds of the receiver thread from ``arrived`` to ``received``: mostly the kernel's copying.
        decode_cpu: CPU seconds of the receiver thread from ``received`` to ``answered``: mostly Python.
        lock: Seconds that the receiver thread did not run although the bytes were here: wall time less CPU time of
            decoding, and of receive calls that found all they asked for.
        copy: Seconds of the copy on the device.
        stalled: Seconds that the device stalled for the copy, after ``next``.
        reorder: Seconds that it waited here for the delivery of the batch before it.
        wait: Seconds that the consumer was in ``next`` for it.
        stages: Durations that the worker sent; None without them.
        delivered: Time at which ``next`` returned.
        totals: Sums at that time.
    """

    number: int = -1
    draw: float = 0.0
    added: float = 0.0
    assigned: float = 0.0
    sent: float = 0.0
    arrived: float = 0.0
    received: float = 0.0
    size_bytes: int = 0
    answered: float = 0.0
    receive_cpu: float = 0.0
    decode_cpu: float = 0.0
    lock: float = 0.0
    copy: float = 0.0
    stalled: float = 0.0
    reorder: float = 0.0
    wait: float = 0.0
    stages: Stages | None = None
    delivered: float = 0.0
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, slots=True)
class Setup:
    """The present workers and limits of a pass.

    Attributes:
        workers: Node of each worker that takes tasks, by the engine's number.
        window: Batches that may be undelivered.
        prefetch_factor: Batches of the window per worker.
        max_in_flight_bytes: Bytes that may be on their way or wait here.
        names: Name of each worker, for messages.
        is_persistent: True if the workers stay for the next epoch.
    """

    workers: Mapping[int, str]
    window: int
    prefetch_factor: int
    max_in_flight_bytes: int
    names: Mapping[int, str] = field(default_factory=dict)
    is_persistent: bool = False


@dataclass(frozen=True, slots=True)
class Records:
    """A snapshot of a pass.

    Attributes:
        begun: Time at which the pass began.
        first_wait: Seconds until the first batch.
        probes: Probes in the order of delivery.
        waits: Waits in the order of delivery.
        tasks: Seconds of the last tasks of each worker, including tasks without probe: a slow worker gets few tasks.
        last: Time of the last delivery.
        waiting: Seconds that the consumer has been waiting for the next batch so far.
    """

    setup: Setup
    begun: float
    first_wait: float
    totals: Totals
    probes: tuple[Probe, ...]
    waits: tuple[Wait, ...]
    tasks: dict[int, tuple[float, ...]]
    last: float
    waiting: float = 0.0

    @property
    def span(self) -> tuple[Probe, ...]:
        """The relevant probes, without those of the first window; the first of them begins the span."""
        known = [probe for probe in self.probes if probe.totals.batches > self.setup.window]
        since, batches = self.last - SPAN_SECONDS, self.totals.batches - SPAN_BATCHES
        return tuple(probe for probe in known if probe.delivered >= since or probe.totals.batches >= batches)

    @property
    def waits_of_span(self) -> tuple[Wait, ...]:
        """The waits since the beginning of the span, which is not empty."""
        begin = self.span[0].delivered
        return tuple(wait for wait in self.waits if wait.at > begin)
