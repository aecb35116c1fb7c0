"""The rows in which the processes of a node server count."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.server.counters import CALLS, ERRORS, TASKS, WORK, CounterTable, Row

SECOND = 10**9


def gone(_pid):
    return True


def make_table(**options):
    table = CounterTable(**{"num_rows": 8, "is_gone": gone, **options})
    table.begin(pid=100, now=SECOND, num_workers=2, max_connections=8)
    return table


def counts(*rows):
    return tuple(sum(getattr(row, name) for row in rows) for name in WORK)


def total(view):
    return counts(view.node, *view.sessions, *view.workers)[0]


def ended(view):
    return sum(seen.ended_workers for seen in [view.node, *view.sessions])


def test_new_table_tells_of_the_node_server_alone():
    view = make_table().look()
    node = view.node
    assert (node.pid, node.started, node.num_workers, node.max_connections) == (100, SECOND, 2, 8)
    assert (view.sessions, view.workers, node.refused, node.draining) == ([], [], 0, 0)
    assert counts(view.node) == (0, 0, 0, 0, 0)


def test_no_cap_is_below_zero():
    table = CounterTable(num_rows=2)
    table.begin(pid=1, now=0, num_workers=2, max_connections=None)
    assert table.look().node.max_connections == -1


def test_session_and_worker_are_seen_with_what_they_do():
    table = make_table()
    session = table.open_session(200, 2 * SECOND, "gpu01:2304", 3, "4711")
    worker = table.open_worker(session, 7, 300, 3 * SECOND)
    row = table.row(worker)
    row.runs(4 * SECOND, 1, 3)
    row.traffic[0] += 10
    row.traffic[1] += 20
    view = table.look()
    (seen,) = view.sessions
    assert (seen.pid, seen.client, seen.rank, seen.job, seen.started) == (200, "gpu01:2304", 3, "4711", 2 * SECOND)
    (seen,) = view.workers
    assert (seen.pid, seen.number, seen.session, seen.started) == (300, 7, session, 3 * SECOND)
    assert (seen.running, seen.unanswered, seen.since, seen.draining) == (1, 3, 4 * SECOND, False)
    assert counts(seen) == (0, 0, 0, 10, 20)
    row.answered(TASKS, 2)
    row.drain()
    (seen,) = table.look().workers
    assert (seen.running, seen.unanswered, seen.since, seen.draining) == (1, 2, 4 * SECOND, True)
    assert counts(seen) == (1, 0, 0, 10, 20)
    row.rests(5 * SECOND)
    (seen,) = table.look().workers
    assert (seen.running, seen.unanswered, seen.since) == (0, 0, 5 * SECOND)


def test_each_kind_of_answer_has_its_counter():
    table = make_table()
    row = table.row(table.open_worker(table.open_session(2, 0, "a:1", None, ""), 1, 3, 0))
    for what in (TASKS, CALLS, CALLS, ERRORS, ERRORS, ERRORS, None):
        row.answered(what, 0)
    assert counts(table.look().workers[0]) == (1, 2, 3, 0, 0)


def test_no_rank_is_below_zero():
    table = make_table()
    table.open_session(2, 0, "a:1", None, "")
    table.open_session(3, 0, "a:2", 0, "")
    assert [seen.rank for seen in table.look().sessions] == [-1, 0]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("gpu01:2304", "gpu01:2304"),
        ("é日:7", "é日:7"),
        ("x" * 400 + ":2304", "x" * 251 + ":2304"),
        ("日" * 400 + ":23", "日" * 84 + ":23"),
        ("\ud800:7", "?:7"),
        ("x:" + "9" * 400, ":" + "9" * 255),
    ],
)
def test_names_that_are_too_long_are_cut_and_keep_their_number(name, read):
    table = make_table()
    table.open_session(2, 0, name, None, "j" * 100)
    other = table.open_session(3, 0, "other:1", 1, "")
    seen, after = table.look().sessions
    assert (seen.client, seen.job) == (read, "j" * 64)
    assert (after.place, after.client, after.rank) == (other, "other:1", 1)


def test_work_of_ended_workers_stays_with_their_session_and_then_with_the_node():
    table = make_table()
    session = table.open_session(2, 0, "a:1", None, "")
    first, second = (table.open_worker(session, number, 10 + number, 0) for number in (1, 2))
    table.row(first).answered(TASKS, 0)
    table.row(second).answered(ERRORS, 0)
    table.close_worker(first)
    view = table.look()
    assert (counts(view.sessions[0]), view.sessions[0].ended_workers) == ((1, 0, 0, 0, 0), 1)
    assert [seen.number for seen in view.workers] == [2]
    table.close_session(session)
    view = table.look()
    assert (view.sessions, view.workers) == ([], [])
    assert (counts(view.node), view.node.ended_workers) == ((1, 0, 1, 0, 0), 2)


def test_session_leaves_the_workers_of_others_alone():
    table = make_table()
    ours, theirs = (table.open_session(pid, 0, "a:1", None, "") for pid in (2, 3))
    table.open_worker(ours, 1, 4, 0)
    table.open_worker(theirs, 1, 5, 0)
    table.close_session(ours)
    assert [seen.pid for seen in table.look().workers] == [5]


def test_rows_are_used_again_and_begin_at_zero():
    table = make_table(num_rows=3)
    session = table.open_session(2, 0, "a:1", 5, "job")
    for number in range(1, 20):
        place = table.open_worker(session, number, 100 + number, 0)
        row = table.row(place)
        row.runs(1, 1, 9)
        row.answered(TASKS, 9)
        row.drain()
        assert table.look().workers[0].tasks == 1
        table.close_worker(place)
    assert table.look().sessions[0].tasks == 19
    table.close_session(session)
    table.open_session(3, 0, "b:1", None, "")
    (seen,) = table.look().sessions
    assert (seen.client, seen.job, seen.rank, seen.tasks) == ("b:1", "", -1, 0)


def test_row_of_a_process_that_lives_on_is_not_given_to_another():
    """A worker of a session that was killed may count for a moment longer."""
    alive = {10}
    table = make_table(num_rows=4, is_gone=lambda pid: pid not in alive)
    session = table.open_session(2, 0, "a:1", None, "")
    worker = table.open_worker(session, 1, 10, 0)
    table.close_session(session)
    places = [table.open_session(pid, 0, "b:1", None, "") for pid in (3, 4, 5)]
    assert worker not in places
    assert places[2] is None
    alive.clear()
    assert table.open_session(6, 0, "b:1", None, "") == worker


def test_live_process_is_not_gone():
    table = make_table(num_rows=2, is_gone=CounterTable.__init__.__defaults__[-1])
    table.close_session(table.open_session(os.getpid(), 0, "a:1", None, ""))
    assert table.open_session(2**22 + 1, 0, "b:1", None, "") is None
    assert table.open_session(os.getpid(), 0, "b:1", None, "") == 1


def test_full_table_gives_none_and_a_private_row_works():
    table = make_table(num_rows=2)
    session = table.open_session(2, 0, "a:1", None, "")
    assert table.open_worker(session, 1, 3, 0) is None
    assert table.open_session(4, 0, "a:2", None, "") is None
    assert table.open_worker(None, 1, 5, 0) is None
    for row in table.row(None), Row.private():
        row.runs(5)
        row.answered(TASKS, 0)
        row.rests(6)
        row.drain()
        row.traffic[1] += 7
    table.close_worker(None)
    table.close_session(None)
    assert counts(table.look().node) == (0, 0, 0, 0, 0)


def test_refusals_and_drain_are_seen():
    table = make_table()
    table.refused()
    table.refused()
    table.drain()
    view = table.look()
    assert (view.node.refused, view.node.draining) == (2, 1)


def test_copy_in_the_middle_of_a_change_is_thrown_away():
    """A worker's row is folded into its session's between two looks at the generation: counted twice, or not at all."""
    table = make_table()
    session = table.open_session(2, 0, "a:1", None, "")
    worker = table.open_worker(session, 1, 3, 0)
    table.row(worker).answered(TASKS, 0)
    real, copies = table._rows, []

    class Disturbed:
        """While the first copy is made, the worker ends."""

        def __getitem__(self, key):
            data = real[key].copy()
            if not copies:
                table._rows = real
                table.close_worker(worker)
                table._rows = self
                # What a slow reader would have: the row as it was, and the totals as they are.
                data[session] = real[session]
            copies.append(data)
            return data

    table._rows = Disturbed()
    view = table.look()
    assert len(copies) == 2
    assert total(view) == 1
    assert (view.workers, ended(view)) == ([], 1)


def test_last_error_of_a_session_is_that_of_its_worker_that_failed_last():
    table = make_table()
    session = table.open_session(2, 0, "a:1", None, "")
    first, second = (table.open_worker(session, number, 10 + number, 0) for number in (1, 2))
    table.row(first).failed("first")
    table.row(second).failed("日" * 100)
    assert [(seen.error, seen.failed > 0) for seen in table.look().workers] == [("first", True), ("日" * 64, True)]
    table.close_worker(second)
    table.close_worker(first)
    assert [seen.error for seen in table.look().sessions] == ["日" * 64]
    table.row(table.open_worker(session, 3, 20, 0)).failed("later")
    table.close_session(session)
    view = table.look()
    assert (view.node.error, view.sessions) == ("later", [])
    table.open_session(3, 0, "a:1", None, "")
    assert [seen.error for seen in table.look().sessions] == [""]


def test_writes_of_a_fork_are_seen():
    table = make_table()
    worker = table.open_worker(table.open_session(2, 0, "a:1", None, ""), 1, 3, 0)
    pid = os.fork()
    if pid == 0:
        table.row(worker).answered(TASKS, 0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert table.look().workers[0].tasks == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=60))
def test_counters_never_go_backwards_and_lose_nothing(steps):
    table = make_table(num_rows=6)
    sessions, workers, done, num_opened, pid = [], [], 0, 0, 1000
    for step, which in steps:
        before = table.look()
        pid += 1
        if step == 0:
            if (place := table.open_session(pid, 0, f"a:{pid}", None, "")) is not None:
                sessions.append(place)
        elif step == 1 and sessions:
            session = sessions[which % len(sessions)]
            if (place := table.open_worker(session, 1, pid, 0)) is not None:
                workers.append((session, place))
                num_opened += 1
        elif step == 2 and workers:
            table.row(workers[which % len(workers)][1]).answered(TASKS, 0)
            done += 1
        elif step == 3 and workers:
            table.close_worker(workers.pop(which % len(workers))[1])
        elif step == 4 and sessions:
            session = sessions.pop(which % len(sessions))
            workers = [worker for worker in workers if worker[0] != session]
            table.close_session(session)
        view = table.look()
        assert total(view) == done >= total(before)
        assert ended(view) + len(view.workers) == num_opened
        assert len(view.sessions) == len(sessions)
        assert sorted(seen.place for seen in view.workers) == sorted(place for _session, place in workers)
