"""Gates that are forked before anybody connects."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from rpcdataloader.server.events import Link
from rpcdataloader.server.gate import MAX_SPARES, QUIET_SECONDS, Gate, SpareGates
from rpcdataloader.server.processes import EXHAUSTED_PAUSE, fork


@pytest.fixture
def forked():
    gates = []
    yield gates
    for gate in gates:
        gate.end()


@pytest.fixture
def fork_gate(forked):
    def run():
        ours, theirs = Link.pair()
        forked.append(Gate(fork(theirs.recv), ours))
        theirs.close()
        return forked[-1]

    return run


@pytest.fixture
def spares(fork_gate):
    return SpareGates(2, fork_gate)


def refill(spares, now):
    for _ in range(MAX_SPARES + 1):
        spares.refill(now)


def test_they_are_forked_once_it_has_been_quiet_for_a_while(spares, forked):
    refill(spares, 1e9)
    assert not forked
    spares.wait(100.0)
    refill(spares, 100.0 + QUIET_SECONDS / 2)
    assert not forked
    refill(spares, 100.0 + QUIET_SECONDS)
    assert {gate.process.pid for gate in forked} == spares.pids
    assert len(forked) == 2


def test_they_are_taken_in_their_order_and_then_forked_at_once(spares, forked):
    spares.wait(0.0)
    refill(spares, 1.0)
    assert [spares.take(2.0) for _ in range(3)] == forked
    assert not spares.pids
    refill(spares, 2.0)
    assert len(forked) == 3
    refill(spares, 3.0)
    assert len(forked) == 5


def test_one_that_was_given_back_is_taken_again(spares, forked):
    gate = spares.take(0.0)
    spares.give_back(gate)
    assert spares.take(0.0) is gate
    assert len(forked) == 1


def test_one_that_was_killed_is_not_taken(spares, forked):
    spares.wait(0.0)
    refill(spares, 1.0)
    os.kill(forked[0].process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, forked[0].process.pid, os.WEXITED | os.WNOWAIT)
    assert spares.take(1.0) is forked[1]


def test_system_without_room_is_asked_again_later():
    asked = []

    def fail():
        asked.append(True)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    spares = SpareGates(2, fail)
    spares.wait(0.0)
    refill(spares, 1.0)
    assert len(asked) == 1
    refill(spares, 1.0 + EXHAUSTED_PAUSE)
    assert len(asked) == 2
    with pytest.raises(BlockingIOError):
        spares.take(1.0)


def test_there_are_not_as_many_as_workers_of_a_large_node(fork_gate, forked):
    spares = SpareGates(129, fork_gate)
    spares.wait(0.0)
    refill(spares, 1.0)
    assert len(forked) == MAX_SPARES
    spares.close()
    assert all(gate.process.ended for gate in forked)
    refill(spares, 1e9)
    assert len(forked) == MAX_SPARES
