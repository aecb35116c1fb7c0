"""From counters and what the kernel says to what status shows."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from rpcdataloader.host.resources import ProcessUse
from rpcdataloader.server import status as module
from rpcdataloader.server.clients import Client, WorkerRecord
from rpcdataloader.server.events import Link, Origin, WantsStatus
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.server.status import ask_node, describe_node
from rpcdataloader.wire.credentials import INSECURE
from rpcdataloader.wire.status import NodeStatus, Report
from tests.unit.wire.test_status import LOOP

SECOND = 10**9


class FakeClients(list):
    """Those of a node server, which has served others before."""

    def __init__(self):
        super().__init__()
        self.work, self.num_ended = Counter(tasks=100), 5


@pytest.fixture
def clients():
    return FakeClients()


@pytest.fixture
def context():
    return ServerContext(ServerSettings(), INSECURE, num_workers=2, node="node01")


@pytest.fixture
def describe(clients, context, monkeypatch):
    def describe(now=6 * SECOND):
        monkeypatch.setattr(module.time, "monotonic_ns", lambda: now)
        status = describe_node(clients, context, SECOND, 3)
        assert NodeStatus.decode(status.encode()) == status
        return status

    return describe


@pytest.fixture
def come(clients, context):
    """Let a client come."""

    def come(name, rank=None, job="", started=SECOND):
        client = Client(
            process=SimpleNamespace(pid=200 + len(clients)),
            link=None,
            sock=None,
            id=name,
            name=name,
            origin=Origin(name, rank, job),
            folder="",
            row=context.counters.row(context.counters.open()),
            started=started,
        )
        clients.append(client)
        return client

    return come


@pytest.fixture
def work_for(context):
    """Let a worker begin; gives its row."""

    def work_for(client, number, begun=2 * SECOND):
        place = context.counters.open()
        row = context.counters.row(place)
        client.workers[number] = WorkerRecord(place, row, "10.0.0.7:5", 0.0, pid=300 + number, begun=begun)
        return row

    return work_for


def test_work_of_clients_and_node_is_that_of_their_workers_and_of_those_that_have_ended(describe, come, work_for):
    first, second = come("gpu01:2304", 3, "4711"), come("gpu02:1")
    rows = [work_for(first, number) for number in (1, 2)]
    for row in rows:
        row.tasks[0] += 1
    work_for(second, 1).errors[0] += 1
    rows[0].error, rows[0].failed[0] = "LookupError: a damaged file", 6 * SECOND
    first.forget(1)
    rows[1].traffic[1] = 50
    rows[1].since[0], rows[1].running[0], rows[1].unanswered[0] = 4 * SECOND, 1, 3
    node = describe()
    assert (node.host, node.pid, node.num_workers, node.max_connections) == ("node01", os.getpid(), 2, 8)
    assert (node.uptime_seconds, node.refused_connections) == (5, 3)
    assert (node.tasks, node.errors, node.sent_bytes, node.ended_workers) == (102, 1, 50, 6)
    assert 0 < node.memory_available_bytes <= node.memory_total_bytes
    assert node.cpus >= 1
    assert node.load_average >= 0
    one, two = node.clients
    assert (one.host, one.pid, one.rank, one.job, one.session_pid) == ("gpu01", 2304, 3, "4711", 200)
    assert (one.tasks, one.errors, one.sent_bytes, one.age_seconds) == (2, 0, 50, 5)
    assert (one.last_error, one.last_error_seconds) == ("LookupError: a damaged file", 0)
    assert (two.last_error, two.last_error_seconds) == (None, None)
    assert (two.host, two.rank, two.tasks, two.errors) == ("gpu02", None, 0, 1)
    (worker,) = one.workers
    assert (worker.number, worker.pid, worker.tasks, worker.age_seconds) == (2, 302, 1, 4)
    assert (worker.state, worker.state_seconds, worker.queued) == ("running", 2, 2)
    # A worker may write while its row is read.
    assert describe(3 * SECOND).clients[0].workers[0].state_seconds == 0


def test_last_error_of_a_client_is_that_of_its_worker_that_failed_last(describe, come, work_for):
    client = come("gpu01:2304")
    for number, failed in (1, 2 * SECOND), (2, 5 * SECOND), (3, 4 * SECOND):
        row = work_for(client, number)
        row.error, row.failed[0] = f"error {number}", failed
    client.forget(2)
    client.forget(1)
    (one,) = describe().clients
    assert (one.last_error, one.last_error_seconds) == ("error 2", 1.0)


def test_worker_that_has_not_authenticated_its_client_is_not_shown(describe, come, work_for):
    client = come("gpu01:2304")
    work_for(client, 1)
    client.workers[1].pid = 0
    assert client.forget(1) is None
    work_for(client, 2)
    client.workers[2].pid = 0
    node = describe()
    assert (node.workers, node.ended_workers) == ([], 5)


def test_clients_and_workers_are_in_the_order_in_which_they_came(describe, come, work_for):
    come("a:3", started=3)
    early = come("a:2", started=2)
    for number in 2, 1, 3:
        work_for(early, number)
    node = describe()
    assert [client.pid for client in node.clients] == [2, 3]
    assert [worker.number for worker in node.workers] == [1, 2, 3]


def test_loops_are_told_as_their_client_has_reported_them_and_not_for_long(describe, come):
    client = come("gpu01:2304")

    def loops(seconds):
        (one,) = describe(seconds * SECOND).clients
        return one.loops, one.loops_seconds

    assert loops(1) == ([], None)
    client.report, client.reported = Report.of([LOOP]).decode(), 2 * SECOND
    assert loops(5) == ([LOOP], 3.0)
    assert loops(32) == ([LOOP], 30.0)
    assert loops(33) == ([], None)
    for nonsense in "[", "{}", '{"loops": [{}]}', "[" * 8000:
        client.report = nonsense
        assert loops(3) == ([], None)


# --- the gate


def line_of(pid, text):
    return json.dumps([pid, text]).encode() + b"\n"


class FakeNode:
    """Writes the status and some stacks, before the gate waits for the last of them."""

    def __init__(self, status, *lines):
        self.lines = [status.encode() + b"\n", *lines]
        self.kept = []

    def send(self, event, descriptors):
        assert isinstance(event, WantsStatus)
        self.kept = [os.dup(descriptor) for descriptor in descriptors]
        for line in self.lines:
            os.write(descriptors[0], line)

    def close(self):
        while self.kept:
            os.close(self.kept.pop())


class Answering(FakeNode):
    """Whose sessions have all written."""

    def send(self, event, descriptors):
        super().send(event, descriptors)
        self.close()


@pytest.fixture
def two_workers(describe, come, work_for, monkeypatch):
    client = come("gpu01:2304")
    for number in 1, 2:
        work_for(client, number)
    status = describe()
    monkeypatch.undo()
    return status


def test_gate_adds_what_the_kernel_says(two_workers, monkeypatch):
    uses = {302: ProcessUse("R", 1.5, 4096)}
    monkeypatch.setattr(module, "process_use", lambda pid: uses.get(pid, ProcessUse()))
    gone, worker = ask_node(Answering(two_workers), stacks=False).workers
    assert (gone.process_state, gone.stack) == ("", None)
    assert (worker.process_state, worker.cpu_seconds, worker.memory_bytes, worker.stack) == ("R", 1.5, 4096, None)


def test_stacks_of_all_sessions_are_gathered_until_the_last_has_closed(two_workers, monkeypatch):
    monkeypatch.setattr(module, "STACK_TIMEOUT", 60)
    text = "日" * 5000 + "\n" + '"\\' * 2000
    node = Answering(two_workers, line_of(301, text), line_of(302, "it has ended"))
    assert [worker.stack for worker in ask_node(node, stacks=True).workers] == [text, "it has ended"]


def test_session_that_does_not_answer_is_not_waited_for_long(two_workers, monkeypatch):
    monkeypatch.setattr(module, "STACK_TIMEOUT", 0.05)
    with contextlib.closing(FakeNode(two_workers, line_of(301, "in time"), line_of(302, "late")[:10])) as node:
        assert [worker.stack for worker in ask_node(node, stacks=True).workers] == [
            "in time",
            "no stack: its session did not answer within 2 s (perhaps it is building a dataset)",
        ]


def test_stacks_that_are_written_at_the_same_time_are_all_kept(two_workers):
    """Sessions share the offset of the file, which the kernel does not lock: two may begin at the same place."""
    gate, node = Link.pair()

    def write_both():
        _event, (file, pipe) = node.recv()
        for line in two_workers.encode() + b"\n", line_of(301, "one"), line_of(302, "two"):
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, line)
        os.close(file)
        os.close(pipe)

    thread = threading.Thread(target=write_both)
    thread.start()
    assert [worker.stack for worker in ask_node(gate, stacks=True).workers] == ["one", "two"]
    thread.join()
    gate.close()
    node.close()
