"""Reports of training loops, with an alarm that the test rings."""

from __future__ import annotations

import gc
import logging

import pytest

from rpcdataloader.client.client import PERIOD, Client, Reporter
from rpcdataloader.wire.status import Report
from tests.unit.wire.test_status import LOOP


class FakeAlarm:
    def __init__(self):
        self.waiting = []

    def call_after(self, seconds, function):
        assert seconds == PERIOD
        self.waiting.append(function)

    def ring(self):
        (function,) = self.waiting
        self.waiting.clear()
        function()


class FakeLoop:
    def __init__(self, status=LOOP):
        self.status = status

    def report(self):
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


class FakeNode:
    def __init__(self):
        self.told = []
        self.sessions = [self]

    def report(self, payload):
        self.told.append(Report.decode(payload).loops)


@pytest.fixture
def alarm():
    return FakeAlarm()


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
def reporter(alarm, node):
    return Reporter(alarm, lambda: [node])


def test_every_node_is_told_every_few_seconds_as_long_as_there_is_a_loop(alarm):
    nodes = [FakeNode(), FakeNode()]
    reporter = Reporter(alarm, lambda: nodes)
    loops = [FakeLoop(), FakeLoop()]
    for loop in loops:
        reporter.add(loop.report)
    del loop
    alarm.ring()
    loops.pop()
    gc.collect()
    alarm.ring()
    loops.clear()
    gc.collect()
    alarm.ring()
    assert [node.told for node in nodes] == [[[LOOP, LOOP], [LOOP], []]] * 2
    assert not alarm.waiting
    reporter.add((another := FakeLoop()).report)
    alarm.ring()
    assert nodes[0].told[-1] == [LOOP]
    assert another is not None


def test_loop_that_pauses_is_told_once_as_gone(alarm, node, reporter):
    reporter.add((loop := FakeLoop()).report)
    for loop.status in LOOP, None, None, LOOP:
        alarm.ring()
    assert node.told == [[LOOP], [], [LOOP]]


def test_nothing_is_done_where_nobody_can_ask(alarm):
    reporter = Reporter(alarm, list)
    reporter.add(FakeLoop().report)
    assert not alarm.waiting


def test_failure_is_logged_once_and_counted_and_the_next_report_comes(alarm, node, reporter, caplog):
    reporter.add((loop := FakeLoop(ZeroDivisionError("a bug"))).report)
    for _ in range(3):
        alarm.ring()
    assert [record.levelno for record in caplog.records if record.levelno > logging.DEBUG] == [logging.WARNING]
    assert reporter.num_failures == 3
    loop.status = LOOP
    alarm.ring()
    assert node.told == [[LOOP]]


def test_number_of_failures_is_told_at_the_end(caplog):
    client = Client()
    client.reporter.num_failures = 3
    client.close()
    assert caplog.messages == ["3 reports of how the training loops do have failed"]
