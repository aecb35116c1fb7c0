"""From counters and what the kernel says to what is told."""

from __future__ import annotations

import os
import socket

import pytest

from rpcdataloader.server import statistics
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import ERRORS, TASKS
from rpcdataloader.server.events import WantsStacks
from rpcdataloader.server.link import Link
from rpcdataloader.server.statistics import ProcessUse, StacksAsked, ask_for_stacks, describe, see_process, see_unread
from rpcdataloader.wire.credentials import INSECURE
from tests.conftest import wait_until

SECOND = 10**9


@pytest.fixture
def context():
    return ServerContext("node01", num_workers=2, parallel=1, timeout=0, max_tasks=0, credentials=INSECURE)


def test_work_of_clients_and_node_is_that_of_their_workers_and_of_those_that_have_ended(context):
    table = context.counters
    table.begin(100, 0, 2, 8)
    session = table.open_session(200, SECOND, "gpu01:2304", 3, "4711")
    rows = [table.open_worker(session, number, 300 + number, 2 * SECOND) for number in (1, 2)]
    other = table.open_session(201, SECOND, "gpu02:1", None, "")
    for row in rows:
        table.row(row).answered(TASKS, 0)
    table.row(table.open_worker(other, 1, 400, SECOND)).answered(ERRORS, 0)
    table.row(rows[0]).failed("LookupError: a damaged file")
    table.close_worker(rows[0])
    row = table.row(rows[1])
    row.traffic[1] = 50
    row.runs(4 * SECOND, 1, 3)
    row.connected(77)
    use = ProcessUse("R", 1.5, 4096)
    node = describe(table.look(), 6 * SECOND, context, lambda pid: {302: use}.get(pid, ProcessUse()), {77: 9}, None)
    assert (node.host, node.pid, node.uptime_seconds, node.num_workers, node.max_connections) == (
        "node01",
        100,
        6,
        2,
        8,
    )
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
    assert (worker.unread_bytes, second.workers[0].unread_bytes) == (9, None)
    assert (worker.process_state, worker.cpu_seconds, worker.memory_bytes) == ("R", 1.5, 4096)
    assert worker.stack is None
    # The clock of the copy may be a little ahead of the one who looks.
    assert describe(table.look(), 3 * SECOND, context, see_process, {}, None).clients[0].workers[0].state_seconds == 0


def test_stack_that_has_not_come_is_explained(context):
    table = context.counters
    session = table.open_session(200, 0, "gpu01:2304", None, "")
    for number in (1, 2):
        table.open_worker(session, number, 300 + number, 0)
    node = describe(table.look(), 0, context, see_process, {}, {301: "it sleeps"})
    assert [worker.stack for worker in node.workers] == [
        "it sleeps",
        "no stack: its session did not answer within 2 s, perhaps as it is busy building",
    ]


def test_kernel_is_asked_about_a_process():
    use = see_process(os.getpid())
    assert use.state in "RS"
    assert use.cpu_seconds > 0
    assert use.memory_bytes > 10**6
    assert see_process(2**22 + 1) == ProcessUse()


def test_kernel_is_asked_what_was_not_received():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        inode = os.fstat(theirs.fileno()).st_ino
        assert see_unread()[inode] == 0
        ours.sendall(b"x" * 100)
        wait_until(lambda: see_unread()[inode] == 100)


class FakeNode:
    """Keeps the descriptor that goes to the sessions."""

    def send(self, event, descriptors):
        assert event == WantsStacks()
        self.link = Link(socket.socket(fileno=os.dup(descriptors[0])))


def test_stacks_of_all_sessions_are_gathered_until_the_last_has_closed(monkeypatch):
    monkeypatch.setattr(statistics, "STACK_TIMEOUT", 60)
    text = "日" * 5000 + "\n" + '"\\' * 2000

    class Answering(FakeNode):
        def send(self, event, descriptors):
            super().send(event, descriptors)
            asked = StacksAsked(self.link, {1, 2})
            assert asked.waits_for(2)
            asked.tell(1, 301, text)
            assert not asked.waits_for(1)
            assert not asked.is_over
            asked.tell(2, 302, "it has ended")
            assert asked.is_over
            asked.close()

    assert ask_for_stacks(Answering()) == {301: text, 302: "it has ended"}


def test_session_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(statistics, "STACK_TIMEOUT", 0.05)
    node = FakeNode()
    assert ask_for_stacks(node) == {}
    node.link.close()


def test_session_does_not_wait_for_somebody_who_does_not_read():
    ours, theirs = Link.pair()
    asked = StacksAsked(theirs, {1})
    text = "x" * 2_000_000
    asked.tell(1, 301, text)
    assert asked.has_unsent
    assert not asked.is_over
    received = ""
    while len(received) < len(text):
        received += ours.recv()[0].text
        asked.flush()
    assert asked.is_over
    asked.close()
    assert ours.recv() is None
    ours.close()


def test_session_does_not_keep_what_nobody_can_read_any_more():
    ours, theirs = Link.pair()
    ours.close()
    asked = StacksAsked(theirs, {1})
    asked.tell(1, 301, "x" * 2_000_000)
    assert asked.is_over
    asked.close()
