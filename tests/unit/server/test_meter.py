"""The durations that a worker measures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from rpcdataloader.server.requests import Meter
from rpcdataloader.wire.messages import Stages
from rpcdataloader.wire.transport import Stream


@pytest.fixture
def meter():
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    yield Meter(Stream(ours, "peer"))
    for sock in (ours, theirs, listener):
        sock.close()


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def measure(meter, work, idle=0.0):
    meter.begin(idle)
    work()
    meter.encodes()
    return Stages.unpack(meter.end())


def test_cpu_time_is_told_from_waiting(meter):
    busy = measure(meter, lambda: burn(0.05), idle=0.25)
    meter.left()
    asleep = measure(meter, lambda: time.sleep(0.05))
    assert busy.cpu >= 0.05
    assert asleep.cpu < busy.cpu
    assert (busy.idle, asleep.idle) == (0.25, 0.0)


def test_wait_for_a_cpu_is_seen(meter):
    """Another process has the same one."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    rival = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        rival.stdout.readline()
        stages = measure(meter, lambda: burn(0.1))
    finally:
        os.sched_setaffinity(0, cpus)
        rival.kill()
        rival.communicate()
    assert stages.runqueue > 0


def test_times_of_the_connection_are_those_since_the_measured_reply_before(meter, monkeypatch):
    for times, since in (((3.0, 2.0), (3.0, 2.0)), ((4.0, 2.25), (1.0, 0.25))):
        monkeypatch.setattr(Stream, "sending_times", lambda _stream, times=times: times)
        stages = measure(meter, lambda: None)
        assert (stages.sending, stages.peer_limited) == since


def test_reply_is_timed_until_it_has_left(meter):
    measure(meter, lambda: None)
    time.sleep(0.05)  # the time that is measured
    meter.left()
    assert measure(meter, lambda: None).reply >= 0.05
