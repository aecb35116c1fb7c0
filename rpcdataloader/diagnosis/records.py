"""What is known of a pass: sums over every batch, and the whole way of some. Pure.

The cheapest batches take 50 microseconds each, and noting them may cost 1 % of that. So every batch adds to a few sums
(:class:`Totals`), and one batch each 20 ms is a *probe*, whose way is timed from the sampler to the consumer. Batches
that take longer than that are all probes. Each probe keeps the sums at its delivery, so that the differences between
two probes are exact for all batches in between.

Times are seconds of the trainer's monotonic clock, and are passed in. Workers send durations only
(:class:`~rpcdataloader.wire.stages.Stages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rpcdataloader.wire.stages import Stages

# A diagnosis covers this time or this number of batches, whichever is more.
SPAN_SECONDS = 60.0
SPAN_BATCHES = 200


class Totals(NamedTuple):
    """Sums since the pass began.

    Attributes:
        waited: Seconds in ``next``.
        blocked: Seconds of these that the consumer slept until its batch came.
        ready: Seconds of ``blocked`` while a later batch was already here.
        link: Seconds in which at least one reply was being received: the union over all connections.
    """

    batches: int = 0
    waited: float = 0.0
    blocked: float = 0.0
    ready: float = 0.0
    link: float = 0.0


class Wait(NamedTuple):
    """The consumer slept until a batch came.

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
    """A batch whose way is timed. Whichever thread has it notes what it sees; nothing changes after the delivery.

    A task that is sent twice keeps what belongs to the copy that was answered.

    Attributes:
        draw: Seconds in the sampler.
        added: Time at which it was in the table.
        assigned: Time at which the engine gave it to a worker.
        sent: Time at which the send call had returned.
        arrived: Time of the first bytes of the reply.
        received: Time of the last bytes.
        size_bytes: Bytes of the batch.
        answered: Time at which the decoded batch was among the results.
        receive_cpu: CPU seconds of the receiver thread from ``arrived`` to ``received``: mostly the kernel's copying.
        decode_cpu: CPU seconds of the receiver thread from ``received`` to ``answered``: mostly Python.
        lock: Seconds that the receiver thread did not run though the bytes were there: wall time less CPU time of
            decoding, and of those receive calls that found all they asked for.
        copy: Seconds that the copy to the device took there.
        stalled: Seconds that the device stood still for the copy, after ``next``.
        reorder: Seconds that it was here, and the batch before it not delivered.
        wait: Seconds that the consumer was in ``next`` for it.
        stages: The worker's durations; None if it has sent none.
        delivered: Time at which ``next`` returned.
        totals: Sums at that moment.
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
    """The pass as it is at this moment.

    Attributes:
        workers: Node of each worker that takes tasks, by the engine's number.
        window: Batches that may be undelivered.
        prefetch_factor: Batches per worker of these.
        max_in_flight_bytes: Bytes that may be on their way or wait here.
        names: Name of each worker, for messages.
    """

    workers: Mapping[int, str]
    window: int
    prefetch_factor: int
    max_in_flight_bytes: int
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Records:
    """What is known of a pass at a moment.

    Attributes:
        begun: Time at which the pass began.
        first_wait: Seconds until its first batch.
        probes: In the order of delivery.
        waits: In the order of delivery.
        tasks: Seconds of the last tasks of each worker, probes or not: one that is slow is hardly given any.
        last: Time of the last delivery.
        waiting: Seconds that the consumer has been waiting for the next one by now.
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
        """The probes that count, without those of the first window; the first of them is where the span begins."""
        known = [probe for probe in self.probes if probe.totals.batches > self.setup.window]
        since, batches = self.last - SPAN_SECONDS, self.totals.batches - SPAN_BATCHES
        return tuple(probe for probe in known if probe.delivered >= since or probe.totals.batches >= batches)
