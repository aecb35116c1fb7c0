"""From counters and what the kernel says to what is told."""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest

from rpcdataloader.host.resources import ProcessUse
from rpcdataloader.server import gate
from rpcdataloader.server.counters import GATE, SESSION, WORKER, CounterTable
from rpcdataloader.server.events import WantsStacks
from rpcdataloader.server.gate import ask_for_stacks, describe_node
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE
from rpcdataloader.wire.status import NodeStatus, Report
from tests.unit.wire.test_status import LOOP

SECOND = 10**9


@pytest.fixture
def context():
    return ServerContext(
        ServerSettings(),
        INSECURE,
        num_workers=2,
        node="node01",
        counters=CounterTable(is_gone=lambda _pid: True),
    )


def open_session(table, pid, client, rank=-1, job="", now=SECOND):
    place = table.open(GATE, pid, now)
    table.describe(place, kind=SESSION, client=client, rank=rank, job=job)
    return place


def open_worker(table, session, number, pid, now):
    return table.open(WORKER, pid, now, session=session, number=number)


def test_work_of_clients_and_node_is_that_of_their_workers_and_of_those_that_have_ended(context, monkeypatch):
    table = context.counters
    session = open_session(table, 200, "gpu01:2304", 3, "4711")
    places = [open_worker(table, session, number, 300 + number, 2 * SECOND) for number in (1, 2)]
    other = open_session(table, 201, "gpu02:1")
    for place in places:
        table.row(place).tasks[0] += 1
    row = table.row(open_worker(table, other, 1, 400, SECOND))
    row.errors[0] += 1
    row = table.row(places[0])
    row.error[0], row.failed[0] = b"LookupError: a damaged file", 6 * SECOND
    table.close(places[0])
    row = table.row(places[1])
    row.traffic[1] = 50
    row.since[0], row.running[0], row.unanswered[0] = 4 * SECOND, 1, 3
    uses = {302: ProcessUse("R", 1.5, 4096)}
    monkeypatch.setattr(gate, "process_use", lambda pid: uses.get(pid, ProcessUse()))
    node = describe_node(table.look(), 6 * SECOND, context, None)
    assert (node.host, node.pid, node.num_workers, node.max_connections) == ("node01", os.getpid(), 2, 8)
    assert describe_node(table.look(), time.monotonic_ns(), context, None).uptime_seconds > 0
    assert (node.tasks, node.errors, node.sent_bytes, node.ended_workers) == (2, 1, 50, 1)
    assert 0 < node.memory_available_bytes <= node.memory_total_bytes
    assert node.cpus >= 1
    first, second = node.clients
    assert (first.host, first.pid, first.rank, first.job, first.session_pid) == ("gpu01", 2304, 3, "4711", 200)
    assert (first.tasks, first.errors, first.sent_bytes, first.age_seconds) == (2, 0, 50, 5)
    assert (first.last_error, first.last_error_seconds) == ("LookupError: a damaged file", 0)
    assert (second.last_error, second.last_error_seconds) == (None, None)
    assert node.load_average >= 0
    assert (second.host, second.rank, second.tasks, second.errors) == ("gpu02", None, 0, 1)
    (worker,) = first.workers
    assert (worker.number, worker.pid, worker.tasks, worker.age_seconds) == (2, 302, 1, 4)
    assert (worker.state, worker.state_seconds, worker.queued) == ("running", 2, 2)
    assert (worker.process_state, worker.cpu_seconds, worker.memory_bytes) == ("R", 1.5, 4096)
    assert worker.stack is None
    # The clock of the copy may be a little ahead of the one who looks.
    assert describe_node(table.look(), 3 * SECOND, context, None).clients[0].workers[0].state_seconds == 0
    # All of it is plain, numpy's own numbers would not be.
    assert NodeStatus.decode(node.encode()) == node


def test_clients_and_workers_are_in_the_order_in_which_they_came(context):
    table = context.counters
    first = open_session(table, 200, "a:1", now=1)
    early = open_session(table, 201, "a:2", now=2)
    table.close(first)
    late = open_session(table, 202, "a:3", now=3)  # in the row of the first one
    for number, session in (2, early), (1, early), (3, late):
        open_worker(table, session, number, 300, 4)
    node = describe_node(table.look(), 9, context, None)
    assert late < early
    assert [client.pid for client in node.clients] == [2, 3]
    assert [worker.number for worker in node.workers] == [1, 2, 3]


def test_loops_are_told_as_their_client_has_reported_them_and_not_for_long(context):
    table = context.counters
    session = open_session(table, 200, "gpu01:2304")

    def loops(now):
        (client,) = describe_node(table.look(), now, context, None).clients
        return client.loops, client.loops_seconds

    assert loops(SECOND) == ([], None)
    table.report(session, Report.of([LOOP]), 2 * SECOND)
    assert loops(5 * SECOND) == ([LOOP], 3.0)
    assert loops(32 * SECOND) == ([LOOP], 30.0)
    assert loops(33 * SECOND) == ([], None)
    for nonsense in b"[", b"{}", b'{"loops": [{}]}', b"[" * 8000, b"\xff":
        table.report(session, nonsense, 2 * SECOND)
        assert loops(3 * SECOND) == ([], None)


def test_stack_that_has_not_come_is_explained(context):
    table = context.counters
    session = open_session(table, 200, "gpu01:2304")
    for number in (1, 2):
        open_worker(table, session, number, 300 + number, 0)
    node = describe_node(table.look(), 0, context, {301: "it sleeps"})
    assert [worker.stack for worker in node.workers] == [
        "it sleeps",
        "no stack: its session did not answer within 2 s (perhaps it is building a dataset)",
    ]


def line_of(pid, text):
    return json.dumps([pid, text]).encode() + b"\n"


class FakeNode:
    """Lets some sessions write, as their descriptors arrive, before the gate waits for the last of them."""

    def __init__(self, *lines):
        self.lines = lines
        self.kept = []

    def send(self, event, descriptors):
        assert event == WantsStacks()
        self.kept = [os.dup(descriptor) for descriptor in descriptors]
        for line in self.lines:
            os.write(descriptors[0], line)

    def close(self):
        while self.kept:
            os.close(self.kept.pop())


def test_stacks_of_all_sessions_are_gathered_until_the_last_has_closed(monkeypatch):
    monkeypatch.setattr(gate, "STACK_TIMEOUT", 60)
    text = "日" * 5000 + "\n" + '"\\' * 2000

    class Answering(FakeNode):
        def send(self, event, descriptors):
            super().send(event, descriptors)
            self.close()

    node = Answering(line_of(301, text), line_of(302, "it has ended"))
    assert ask_for_stacks(node) == {301: text, 302: "it has ended"}


def test_session_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(gate, "STACK_TIMEOUT", 0.05)
    with contextlib.closing(FakeNode(line_of(301, "in time"), line_of(302, "late")[:10])) as node:
        assert ask_for_stacks(node) == {301: "in time"}
