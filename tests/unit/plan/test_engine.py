"""What an engine says in words. What it decides is tried by tests/simulation."""

from __future__ import annotations

import math

import pytest

from rpcdataloader.errors import ConnectError, ConnectionLostError
from rpcdataloader.plan.actions import Close, End, Load, Open, PlanOptions, ReportWait, Say, Seek
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import Engine


def start(homes, **options) -> Engine[str]:
    """An engine whose nodes are up, with workers opened, and numbered, in the order of their places."""
    engine = Engine(PlanOptions(num_workers=len(homes), **options), homes, ())
    for node in homes:
        engine.crew.node_up(node, 1)
    return engine


def test_the_summary_tells_tasks_workers_nodes_and_the_next_deadline():
    engine = start(["a", "b"], is_iterable=True, connect_timeout=10.0)
    while engine.table.wants_input:
        engine.table.add_task("task")
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.worker_at_work(1, 0.0)
    engine.act(1.0)
    engine.answered(1, 0, size_bytes=1, task_seconds=1.0, now=1.0)
    engine.tick(10.0)
    engine.act(10.0)
    assert engine.summary(12.0) == (
        "tasks: 1 answered, 2 waiting, 1 at workers; workers: 1 at work, 1 late, 1 requested; nodes: 1 up, 1 mute "
        "(worker 2 requested on b 12 s ago, worker 3 requested on a 2 s ago, b mute); next decision in 8.0 s"
    )
    engine.consumer_waits(12.0)
    assert engine.long_wait(20.0) == ""
    assert engine.long_wait(30.0) == f"Waiting for 18 s. {engine.summary(30.0)}. "


def test_wait_is_told_again_and_again_and_the_next_one_later():
    engine = start(["a", "b"], is_iterable=True)
    while engine.table.wants_input:
        engine.table.add_task("task")
    engine.act(0.0)
    for worker in 1, 2:
        engine.worker_ready(worker, 0.0)
        engine.worker_at_work(worker, 0.0)
    engine.act(0.0)

    def wait(begin, end):
        """The reports of a wait: when, of which worker, and whether with a stack."""
        engine.consumer_waits(begin)
        told = []
        for second in range(begin, end):
            engine.tick(second)
            reports = [action for action in engine.act(second) if isinstance(action, ReportWait)]
            told += [(second - begin, report.worker, report.has_stack) for report in reports]
        return told

    assert wait(0, 26) == [(3, 1, False), (13, 1, True), (23, 1, False)]
    for number in range(2):
        engine.answered(number + 1, number, size_bytes=1, now=26.0)
        assert engine.deliver().number == number
    assert wait(26, 72) == []
    assert wait(26, 73) == [(46, 1, False)]


def test_time_of_a_task_begins_after_the_worker_has():
    engine = start(["a"], is_iterable=True, task_timeout=1.0)
    engine.table.add_task("task")
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.act(0.0)
    engine.tick(5.0)
    assert End(1, 0) not in engine.act(5.0)
    engine.worker_at_work(1, 6.0)
    engine.tick(6.9)
    assert End(1, 0) not in engine.act(6.9)
    engine.tick(7.0)
    assert End(1, 0) in engine.act(7.0)


@pytest.mark.parametrize("is_left", [False, True])
def test_time_of_a_later_epoch_begins_after_what_comes_before_it_unless_a_worker_may_hang_in_the_last(is_left):
    engine = start(["a"], task_timeout=1.0)
    engine.table.add_task("task")
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.worker_at_work(1, 0.0)
    engine.act(0.0)
    if not is_left:
        engine.answered(1, 0, size_bytes=1)
    engine.begin_epoch(0.5)
    engine.table.add_task("task")
    engine.act(0.5)
    engine.tick(5.0)
    assert (End(1, 0) in engine.act(5.0)) == is_left
    if not is_left:
        engine.worker_at_work(1, 6.0)
        engine.tick(6.9)
        assert End(1, 0) not in engine.act(6.9)
        engine.tick(7.0)
        assert End(1, 0) in engine.act(7.0)


def test_each_worker_gets_a_first_task_before_any_gets_a_second():
    engine = start(["a", "b", "b"])
    for number in range(6):
        engine.table.add_task(f"task {number}")
    engine.act(0.0)

    def loads(now):
        return [(action.worker, action.number) for action in engine.act(now) if isinstance(action, Load)]

    engine.worker_ready(1, 0.0)
    assert loads(0.0) == [(1, 0)]
    engine.worker_ready(2, 1.0)
    assert loads(1.0) == [(2, 1)]
    engine.answered(2, 1, size_bytes=1, task_seconds=1.0, now=2.0)
    assert loads(2.0) == [(2, 2), (2, 3)], "it has had one, and others may never come"
    engine.worker_ready(3, 3.0)
    assert (3, 4) in loads(3.0)


def test_a_node_that_another_server_answers_for_is_told_once_for_each_reason():
    engine = start(["a", "b"])
    engine.act(0.0)
    engine.worker_lost(2, Loss(ConnectError("nobody there"), node_is_up=False, came=False))
    engine.act(0.0)
    for reason in ("no route", "a stranger", "a stranger", "another stranger"):
        engine.crew.node_failed("b", ConnectError(reason), is_foreign="stranger" in reason)
    told = [action.text for action in engine.act(1.0) if isinstance(action, Say)]
    assert told == ["b is retried: a stranger", "b is retried: another stranger"]
    engine.crew.node_failed("b", ConnectError("no route"))
    engine.crew.node_failed("b", ConnectError("a stranger"), is_foreign=True)
    (again,) = [action for action in engine.act(2.0) if isinstance(action, Say)]
    assert again == Say(told[0], cause=told[0])  # of which the user hears once per minute


def test_a_node_that_joins_is_sought_until_another_server_answers_for_it():
    engine = start(["a"])
    engine.crew.add_nodes(["b"])
    engine.act(0.0)
    engine.crew.node_failed("b", ConnectError("no route"))
    assert [action.node for action in engine.act(1.0) if isinstance(action, Seek)] == ["b"]
    engine.crew.node_failed("b", ConnectError("a stranger"), is_foreign=True)
    assert engine.act(2.0) == [Say("b is no longer used: a stranger")]


KILLED = Loss(ConnectionLostError("it was killed"), node_is_up=True)


def told_by(engine, now):
    return [action.text for action in engine.act(now) if isinstance(action, Say)]


def test_workers_that_die_before_any_has_begun_are_not_waited_for_and_no_line_says_so():
    engine = start(["a"], max_retries=2)
    engine.table.add_task("task")
    told = []
    for number in range(1, 4):
        told += told_by(engine, 0.0)
        engine.worker_ready(number, 0.0)
        engine.worker_lost(number, KILLED)
    told += told_by(engine, 0.0)
    assert told == [
        "it was killed; another worker starts there",
        "it was killed; another worker starts there",
        "it was killed; no other worker starts in its place: 3 have died before any answer",
    ]
    engine.tick(0.0)
    assert engine.failure is KILLED.error


def test_workers_that_die_when_others_have_begun_are_asked_for_with_pauses_until_the_timeout():
    engine = start(["a"], max_retries=2, reconnect_timeout=10.0)
    engine.table.add_task("task")
    now, number, times = 0.0, 0, []
    while engine.failure is None:
        actions = engine.act(now)
        for action in actions:
            if isinstance(action, Open):
                number, _ = action.worker, times.append(now)
                engine.worker_ready(number, now)
                if number == 1:
                    engine.worker_at_work(number, now)
                engine.worker_lost(number, KILLED)
        if not engine.crew.is_changed:
            now = engine.due(now)
            engine.tick(now)
    assert times == [0.0, 0.0, 0.0, 1.0, 3.0, 7.0]
    assert now == 10.0
    assert engine.failure is KILLED.error


EXITED = Loss(ConnectionLostError("it exited with status 1"), node_is_up=True, by_itself=True)


def test_workers_that_exit_are_not_waited_for_though_others_have_begun():
    engine = start(["a", "a"], max_retries=1)
    engine.table.add_task("task")
    engine.act(0.0)
    for number in 1, 2:
        engine.worker_ready(number, 0.0)
        engine.worker_at_work(number, 0.0)
    engine.worker_lost(1, KILLED)
    engine.worker_lost(2, KILLED)
    told = told_by(engine, 0.0)
    for number in 3, 4:
        engine.worker_ready(number, 0.0)
        engine.worker_lost(number, EXITED)
    told += told_by(engine, 0.0)
    engine.tick(0.0)
    assert told == [
        "it was killed; another worker starts there",
        "it was killed; another worker starts there",
        "it exited with status 1; no other worker starts in its place: 3 have died before any answer",
        "it exited with status 1; no other worker starts in its place: 4 have died before any answer",
    ]
    assert engine.failure is EXITED.error


def test_a_lack_of_room_is_one_cause_whatever_else_its_text_says():
    engine = start(["a", "a, b"])
    engine.act(0.0)
    for number, name in (1, "a"), (2, "a, b"):
        error = ConnectError(f"{name} is busy: {number} of 2 connections are in use")
        engine.worker_lost(number, Loss(error, node_is_up=True, came=False, refusal=f"{name} is busy"))
    assert [action.cause for action in engine.act(0.0) if isinstance(action, Say)] == ["a is busy", "a, b is busy"]


def go_on_beside(loss, until):
    """A pass with a worker at work beside one that is lost before it begins, again and again: lines, and when."""
    engine = start(["a", "a"])
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.worker_at_work(1, 0.0)
    now, told, times, opened = 0.0, [], [], [2]
    while now < until and len(times) < 20:
        for number in opened:
            times.append(now)
            engine.worker_ready(number, now)
            engine.worker_lost(number, loss)
        engine.table.add_task("task")
        actions = engine.act(now)
        for action in actions:
            if isinstance(action, Load):
                engine.answered(1, action.number, size_bytes=1, task_seconds=0.1, now=now)
        told += [action.text for action in actions if isinstance(action, Say)]
        opened = [action.worker for action in actions if isinstance(action, Open)]
        if not opened:
            now = min(until, engine.due(now))
            engine.tick(now)
            opened = [action.worker for action in engine.act(now) if isinstance(action, Open)]
    assert engine.failure is None
    return told, times


def test_a_worker_that_is_killed_before_it_begins_is_replaced_with_pauses_while_another_is_at_work():
    told, times = go_on_beside(KILLED, 100.0)
    assert times == [0.0, 0.0, 0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert told[1:4] == [
        "it was killed; another worker starts there",
        "going on with 1 of 2 workers: it was killed",
        "going on with 1 of 2 workers: it was killed",
    ]


def test_a_worker_that_exits_before_it_begins_is_replaced_a_few_times_while_another_is_at_work():
    told, times = go_on_beside(EXITED, 100.0)
    assert times == [0.0, 0.0, 0.0]
    assert told == ["it exited with status 1; another worker starts there"] * 2 + [
        "a is no longer used: it exited with status 1"
    ]


def test_workers_that_have_not_begun_do_not_go_on_while_others_die():
    engine = start(["a", "a"], max_retries=1)
    engine.table.add_task("task")
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.worker_at_work(1, 0.0)
    told = []
    for number in 1, 2, 3, 4:
        engine.worker_ready(number, 0.0)
        engine.worker_lost(number, KILLED)
        told += told_by(engine, 0.0)
    assert told == [
        "it was killed; another worker starts there",
        "it was killed; another worker starts there",
        "waiting for 1 of 2 workers: it was killed",
        "waiting up to 300 s (reconnect_timeout): it was killed",
    ]


def test_a_worker_that_begins_where_others_have_died_goes_on():
    engine = start(["a"], max_retries=1, reconnect_timeout=10.0)
    engine.table.add_task("task")
    engine.act(0.0)
    engine.worker_ready(1, 0.0)
    engine.worker_at_work(1, 0.0)
    for number in 1, 2:
        engine.worker_lost(number, KILLED)
        engine.act(0.0)
    assert engine.crew.stuck_until == 10.0
    engine.tick(1.0)
    assert Open(3, 0, "a") in engine.act(1.0)
    engine.worker_ready(3, 2.0)
    engine.act(2.0)
    assert engine.crew.stuck_until == 10.0, "it may die as the others did"
    engine.worker_at_work(3, 3.0)
    engine.act(3.0)
    assert engine.crew.stuck_until == math.inf


def test_a_node_is_not_down_because_a_worker_was_no_longer_wanted():
    engine = start(["a", "a"], reconnect_timeout=0.0)
    engine.act(0.0)
    engine.worker_ready(1, 0.1)
    engine.crew.use(1)
    assert engine.act(0.2) == [Close(2)]
    engine.crew.open_failed(2, ConnectionLostError("it is gone"))
    engine.crew.use(2)
    assert [action.node for action in engine.act(0.3) if isinstance(action, (Open, Seek))] == ["a"]
    assert "1 up" in engine.summary(0.3)
