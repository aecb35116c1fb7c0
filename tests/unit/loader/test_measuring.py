"""What is taken off a measured reply."""

from __future__ import annotations

import time

import pytest

from rpcdataloader.diagnosis.records import Probe
from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.loader.seat import note_answer, note_reply
from rpcdataloader.wire.frames import Arrival, Flag, Message, MessageType
from rpcdataloader.wire.messages import Stages

STAGES = Stages(idle=0.5, cpu=0.25)


def reply(payload=b"pickle", stages=STAGES.pack(), arrival=None):  # noqa: B008  bytes
    return Message(MessageType.REPLY, Flag.MEASURED, 1, memoryview(payload + stages), arrival=arrival)


def test_stages_are_taken_off_the_payload():
    probe, message = Probe(), reply()
    note_reply(probe, message)
    assert bytes(message.payload) == b"pickle"
    assert probe.arrived == probe.received > 0
    note_answer(probe, (1.0, 2.0), 6, probe.received + 0.5)
    assert probe.size_bytes == 6
    assert probe.stages == STAGES._replace(fetch=1.0, collate=2.0)
    # It was somewhere else for nearly all of that time, in which this thread has not run.
    assert probe.lock + probe.decode_cpu == pytest.approx(0.5)
    assert probe.decode_cpu >= 0


@pytest.mark.parametrize("was_here", [False, True])
def test_waiting_for_bytes_is_no_wait_for_the_interpreter_lock(was_here):
    now, cpu = time.monotonic(), time.thread_time()
    probe, message = Probe(), reply(arrival=Arrival(now - 0.5, cpu, was_here))
    note_reply(probe, message)
    assert probe.arrived == now - 0.5
    waited = probe.received - probe.arrived
    assert probe.lock == (pytest.approx(waited - probe.receive_cpu) if was_here else 0)


def test_exception_has_no_stages():
    probe, message = Probe(), Message(MessageType.ERROR, 0, 1, b"an exception")
    note_reply(probe, message)
    note_answer(probe, (1.0, 2.0), 0, 1.0)
    assert probe == Probe()
    assert message.payload == b"an exception"


@pytest.mark.parametrize("message", [reply(b"", b""), reply(b"", STAGES.pack()[1:])], ids=["empty", "short"])
def test_reply_that_is_too_short_is_refused(message):
    with pytest.raises(RemoteProtocolError, match="instead of 40"):
        note_reply(Probe(), message)


def test_worker_that_measures_without_being_asked_is_refused():
    with pytest.raises(RemoteProtocolError, match="without a request for it"):
        note_reply(None, reply())
