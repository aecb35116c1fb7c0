"""What is noted of the batches whose way is timed, and of the pass that they belong to.

Times are those of ``time.monotonic``, CPU times those of the thread that receives the reply.
"""

from __future__ import annotations

import time

from rpcdataloader.diagnosis.records import Probe
from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire import stages
from rpcdataloader.wire.frames import Flag, Message
from rpcdataloader.wire.stages import Stages


def note_reply(probe: Probe | None, reply: Message) -> None:
    """A reply has come that is measured, or should be; what it tells is taken off its payload.

    Raises:
        RemoteProtocolError: The worker has measured what it was not asked to measure, or says something else.
    """
    if not reply.flags & Flag.MEASURED:
        return  # an exception
    if probe is None:
        raise RemoteProtocolError("the worker has measured a batch without being asked to")
    start = len(reply.payload) - stages.SIZE_BYTES
    probe.stages = Stages.unpack(reply.payload[max(0, start) :])
    reply.payload = reply.payload[:start]
    probe.received = probe.arrived = time.monotonic()
    cpu = time.thread_time()
    if (arrival := reply.arrival) is not None:
        probe.arrived, probe.receive_cpu = arrival.at, cpu - arrival.cpu
        if arrival.was_here:
            probe.lock = max(0.0, probe.received - probe.arrived - probe.receive_cpu)
    probe.decode_cpu = -cpu  # until it is decoded


def note_answer(probe: Probe, timings: tuple[float, float], size_bytes: int, now: float) -> None:
    """The batch of a measured reply is decoded, in the thread that has received it."""
    probe.size_bytes = size_bytes
    if probe.stages is None:
        return
    probe.answered = now
    probe.decode_cpu += time.thread_time()
    probe.lock += max(0.0, now - probe.received - probe.decode_cpu)
    probe.stages = probe.stages.with_timings(timings)
