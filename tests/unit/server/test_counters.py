"""The rows in which the processes of a node server count."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.server.counters import GATE, NODE, ROW, SESSION, WORKER, CounterTable
from rpcdataloader.wire.status import MAX_REPORT_BYTES

SECOND = 10**9


def gone(_pid):
    return True


def make_table(**options):
    return CounterTable(**{"num_rows": 8, "is_gone": gone, **options})


def open_session(table, pid=2, client="a:1", rank=-1, job=""):
    place = table.open(GATE, pid, 0)
    table.describe(place, kind=SESSION, client=client, rank=rank, job=job)
    return place


def open_worker(table, session, number=1, pid=10):
    place = table.open(WORKER, pid, 0, session=session, number=number)
    return place, table.row(place)


def rows_of(table, kind):
    return [row for row in table.look() if row.kind == kind]


def counts(*rows):
    received, sent = map(sum, zip(*(row.traffic for row in rows), strict=True))
    return (*(sum(getattr(row, name) for row in rows) for name in ("tasks", "calls", "errors")), received, sent)


def num_tasks(rows):
    return sum(row.tasks for row in rows)


def num_ended(rows):
    return sum(row.ended_workers for row in rows)


def test_new_table_tells_of_the_node_server_alone():
    (node,) = make_table().look()
    assert (node.kind, node.pid, node.started > 0, node.refused, node.draining) == (NODE, os.getpid(), True, 0, 0)
    assert counts(node) == (0, 0, 0, 0, 0)


def test_numbers_are_words_that_a_store_cannot_tear():
    for name, (kind, offset, *_title) in ROW.fields.items():
        assert offset % 8 == 0, name
        assert kind.base == "i8" or kind.kind == "S", name


def test_session_and_worker_are_seen_with_what_they_do():
    table = make_table()
    session = table.open(GATE, 200, 2 * SECOND)
    table.describe(session, kind=SESSION, client="gpu01:2304", rank=3, job="4711")
    worker = table.open(WORKER, 300, 3 * SECOND, session=session, number=7)
    row = table.row(worker)
    row.since[0], row.running[0], row.unanswered[0] = 4 * SECOND, 1, 3
    row.traffic[0] += 10
    row.traffic[1] += 20
    _node, seen, _worker = table.look()
    assert (seen.pid, seen.client, seen.rank, seen.job, seen.started) == (200, "gpu01:2304", 3, "4711", 2 * SECOND)
    assert counts(seen) == (0, 0, 0, 0, 0)
    (seen,) = rows_of(table, WORKER)
    assert (seen.pid, seen.number, seen.session, seen.started) == (300, 7, session, 3 * SECOND)
    assert (seen.running, seen.unanswered, seen.since, seen.draining) == (1, 3, 4 * SECOND, 0)
    assert counts(seen) == (0, 0, 0, 10, 20)
    row.tasks[0] += 1
    row.calls[0] += 2
    row.errors[0] += 3
    assert counts(*rows_of(table, WORKER)) == (1, 2, 3, 10, 20)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("gpu01:2304", "gpu01:2304"),
        ("é日:7", "é日:7"),
        ("x" * 253 + ":4194304", "x" * 253 + ":4194304"),
        ("x" * 400, "x" * 264),
        ("x日" * 400, "x日" * 66),
        ("xx日" * 400, "xx日" * 52 + "xx"),
        ("\ud800:7", "?:7"),
    ],
)
def test_names_that_are_too_long_are_cut(name, read):
    table = make_table()
    open_session(table, client=name, job="j" * 100)
    open_session(table, pid=3, client="other:1", rank=1)
    seen, after = rows_of(table, SESSION)
    assert (seen.client, seen.job) == (read, "j" * 64)
    assert (after.client, after.rank) == ("other:1", 1)


def test_work_of_ended_workers_stays_with_their_session_and_then_with_the_node():
    table = make_table()
    session = open_session(table)
    (first, one), (_second, other) = (open_worker(table, session, number, 10 + number) for number in (1, 2))
    one.tasks[0] += 1
    one.traffic[1] += 7
    other.errors[0] += 1
    table.close(first)
    (seen,) = rows_of(table, SESSION)
    assert (counts(seen), seen.ended_workers) == ((1, 0, 0, 0, 7), 1)
    assert [row.number for row in rows_of(table, WORKER)] == [2]
    table.close(session)
    (node,) = table.look()
    assert (counts(node), node.ended_workers) == ((1, 0, 1, 0, 7), 2)


def test_gate_that_ends_leaves_nothing():
    table = make_table()
    gate = table.open(GATE, 5, 0)
    table.close(gate)
    (node,) = table.look()
    assert (counts(node), node.ended_workers) == ((0, 0, 0, 0, 0), 0)


def test_session_leaves_the_workers_of_others_alone():
    table = make_table()
    ours, theirs = (open_session(table, pid) for pid in (2, 3))
    open_worker(table, ours, pid=4)
    open_worker(table, theirs, pid=5)
    table.close(ours)
    assert [row.pid for row in rows_of(table, WORKER)] == [5]


def test_rows_are_used_again_and_begin_at_zero():
    table = make_table(num_rows=3)
    session = open_session(table, rank=5, job="job")
    for number in range(1, 20):
        place, row = open_worker(table, session, number, 100 + number)
        for view in row.since, row.running, row.unanswered, row.draining, row.tasks:
            view[0] = 1
        assert num_tasks(rows_of(table, WORKER)) == 1
        table.close(place)
    (seen,) = rows_of(table, SESSION)
    assert seen.tasks == 19
    table.close(session)
    open_session(table, pid=3, client="b:1")
    (seen,) = rows_of(table, SESSION)
    assert (seen.client, seen.job, seen.rank, seen.tasks) == ("b:1", "", -1, 0)


def test_row_of_a_process_that_lives_on_is_not_given_to_another():
    """A worker of a session that was killed may count for a moment longer."""
    alive = {10}
    table = make_table(num_rows=4, is_gone=lambda pid: pid not in alive)
    session = open_session(table)
    worker, _row = open_worker(table, session)
    table.close(session)
    assert worker not in [open_session(table, pid) for pid in (3, 4)]
    with pytest.raises(OSError, match="at most 3 processes"):
        open_session(table, pid=5)
    alive.clear()
    assert open_session(table, pid=6) == worker


def test_live_process_is_not_gone():
    table = make_table(num_rows=2, is_gone=CounterTable.__init__.__defaults__[-1])
    table.close(open_session(table, os.getpid()))
    with pytest.raises(OSError, match="at most 1 processes"):
        open_session(table, pid=2**22 + 1)
    assert open_session(table, os.getpid()) == 1


def test_full_table_takes_no_worker():
    table = make_table(num_rows=2)
    session = open_session(table)
    with pytest.raises(OSError, match="at most 1 processes can serve"):
        open_worker(table, session)
    assert len(table.look()) == 2


def test_refusals_and_drain_are_seen():
    table = make_table()
    table.refused()
    table.refused()
    table.row(0).draining[0] = 1
    (node,) = table.look()
    assert (node.refused, node.draining) == (2, 1)


def test_copy_in_the_middle_of_a_change_is_thrown_away():
    """A worker's row moves to its session's between two looks at the generation: counted twice, or not at all."""
    table = make_table()
    session = open_session(table)
    worker, row = open_worker(table, session)
    row.tasks[0] += 1
    real, copies = table._rows, []

    class Disturbed:
        """While the first copy is made, the worker ends."""

        def __getitem__(self, key):
            data = real[key].copy()
            if not copies:
                table._rows = real
                table.close(worker)
                table._rows = self
                # What a slow reader would have: the row as it was, and the totals as they are.
                data[session] = real[session]
            copies.append(data)
            return data

    table._rows = Disturbed()
    rows = table.look()
    assert len(copies) == 2
    assert (num_tasks(rows), num_ended(rows), len(rows)) == (1, 1, 2)


def test_last_error_of_a_session_is_that_of_its_worker_that_failed_last():
    table = make_table()
    session = open_session(table)
    (first, one), (second, other) = (open_worker(table, session, number, 10 + number) for number in (1, 2))
    one.error[0], one.failed[0] = b"first", 1
    other.error[0], other.failed[0] = ("日" * 100).encode(), 2
    assert [(row.error, row.failed > 0) for row in rows_of(table, WORKER)] == [("first", True), ("日" * 64, True)]
    table.close(second)
    table.close(first)
    assert [row.error for row in rows_of(table, SESSION)] == ["日" * 64]
    _place, row = open_worker(table, session, 3, 20)
    row.error[0], row.failed[0] = b"later", 3
    table.close(session)
    (node,) = table.look()
    assert node.error == "later"
    open_session(table, pid=3)
    assert [row.error for row in rows_of(table, SESSION)] == [""]


def test_writes_of_a_fork_are_seen():
    table = make_table()
    worker, _row = open_worker(table, open_session(table))
    pid = os.fork()
    if pid == 0:
        row = table.row(worker)
        row.tasks[0] += 1
        row.traffic[0] += 2**40
        os._exit(0)
    os.waitpid(pid, 0)
    assert counts(*rows_of(table, WORKER)) == (1, 0, 0, 2**40, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=60))
def test_counters_never_go_backwards_and_lose_nothing(steps):
    table = make_table(num_rows=6)
    sessions, workers, done, num_opened, pid = [], [], 0, 0, 1000
    for step, which in steps:
        before = table.look()
        pid += 1
        if step == 0 and len(before) < 6:
            sessions.append(open_session(table, pid, f"a:{pid}"))
        elif step == 1 and sessions and len(before) < 6:
            session = sessions[which % len(sessions)]
            workers.append((session, open_worker(table, session, 1, pid)[0]))
            num_opened += 1
        elif step == 2 and workers:
            table.row(workers[which % len(workers)][1]).tasks[0] += 1
            done += 1
        elif step == 3 and workers:
            table.close(workers.pop(which % len(workers))[1])
        elif step == 4 and sessions:
            session = sessions.pop(which % len(sessions))
            workers = [worker for worker in workers if worker[0] != session]
            table.close(session)
        rows = table.look()
        assert num_tasks(rows) == done >= num_tasks(before)
        assert num_ended(rows) + len(workers) == num_opened
        assert [row.place for row in rows if row.kind == SESSION] == sorted(sessions)
        assert [row.place for row in rows if row.kind == WORKER] == sorted(place for _session, place in workers)


def test_last_report_of_a_client_is_kept_until_its_session_ends():
    table = make_table()
    first, second = open_session(table), open_session(table, pid=3)
    for payload in b"a longer one", b"short":
        table.report(first, payload, 5)
        assert [row.report for row in rows_of(table, SESSION)] == [payload, b""]
    table.report(first, bytes(MAX_REPORT_BYTES + 1), 6)
    assert rows_of(table, SESSION)[0].report == b"short"
    table.report(second, bytes(range(256)) * (MAX_REPORT_BYTES // 256), 7)
    assert [row.reported for row in rows_of(table, SESSION)] == [5, 7]
    assert [len(row.report) for row in rows_of(table, SESSION)] == [5, MAX_REPORT_BYTES]
    table.close(first)
    assert open_session(table, pid=4) == first
    assert rows_of(table, SESSION)[0].report == b""


class WatchedReports:
    """Memory of reports, whose users are disturbed."""

    def __init__(self, reports, disturb):
        self.reports, self.disturb = reports, disturb

    def __getitem__(self, key):
        found = self.reports[key]
        self.disturb()
        return found

    def __setitem__(self, key, value):
        self.disturb()
        self.reports[key] = value


def test_readers_get_the_report_before_while_one_is_being_written():
    table = make_table()
    place = open_session(table)
    table.report(place, b"old", 5)
    real, seen = table._reports, []

    def read():
        table._reports = real
        seen.extend(row.report for row in rows_of(table, SESSION))

    table._reports = WatchedReports(real, read)
    table.report(place, b"new", 6)
    assert seen == [b"old"]
    assert rows_of(table, SESSION)[0].report == b"new"


def test_report_that_another_one_replaces_while_it_is_read_is_read_again():
    table = make_table()
    place = open_session(table)
    table.report(place, b"old", 5)
    real = table._reports

    def write():
        table._reports = real
        table.report(place, b"new", 6)

    table._reports = WatchedReports(real, write)
    (row,) = rows_of(table, SESSION)
    assert (row.reported, row.report) == (6, b"new")
