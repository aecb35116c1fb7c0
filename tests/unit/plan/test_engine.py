"""Decisions that join the tables with the crew. Most of what can happen is tried by tests/simulation."""

from __future__ import annotations

import pytest

from rpcdataloader.errors import ConnectionLostError
from rpcdataloader.plan.actions import Action, Open, PlanOptions, ReportWait, Say
from rpcdataloader.plan.crew import Loss
from rpcdataloader.plan.engine import REPORT_AFTER, REPORT_AGAIN, Engine

DIED = ConnectionLostError("it died")


def start(homes, others=(), **options) -> Engine[str]:
    """An engine whose nodes are up, with workers opened, and numbered, in the order of their places."""
    engine = Engine(PlanOptions(num_workers=len(homes), **options), homes, others)
    for node in dict.fromkeys(homes):
        engine.crew.node_up(node, 1)
    return engine


def begin(engine: Engine[str], *workers: int) -> None:
    """Workers are there, and at work."""
    for worker in workers:
        engine.worker_ready(worker, 0.0)
        engine.worker_at_work(worker)


def fill(engine: Engine[str]) -> None:
    """Fill the window."""
    while engine.table.wants_input:
        engine.table.add_task("task")


def died() -> Loss:
    return Loss(DIED, node_is_up=True)


def of(kind: type, actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_pass_ends_where_the_workers_of_a_stream_die_before_they_answer():
    engine = start(["a"], is_iterable=True, max_retries=2)
    for worker in (1, 2, 3):
        assert of(Open, engine.act(0.0)) == [Open(worker, 0, "a", False)]
        engine.worker_ready(worker, 0.0)
        engine.worker_lost(worker, died())
    assert of(Open, engine.act(0.0)) == []
    assert engine.due(0.0) == 0.0
    engine.tick(0.0)
    assert engine.failure is DIED


def test_the_time_without_workers_begins_anew_when_a_worker_was_there_though_the_consumer_has_not_looked():
    engine = start(["a"], reconnect_timeout=10.0)
    engine.act(0.0)
    engine.worker_lost(1, Loss(DIED, node_is_up=False))
    engine.act(0.0)
    assert engine.due(0.0) == 10.0
    engine.crew.node_up("a", 2)
    engine.act(9.0)
    engine.worker_lost(2, Loss(DIED, node_is_up=False))
    engine.act(9.5)
    assert engine.due(9.5) == 19.5


@pytest.mark.parametrize("is_iterable", [False, True])
def test_a_node_that_is_about_to_join_is_waited_for_when_all_others_are_removed(is_iterable):
    engine = start(["a"], is_iterable=is_iterable, reconnect_timeout=10.0)
    engine.act(0.0)
    engine.crew.add_nodes(["b"])
    engine.remove_nodes(["a"])
    engine.worker_lost(1, died())
    engine.act(0.0)
    assert engine.due(0.0) == 10.0


def test_a_message_names_its_node_once():
    engine = start(["a"])
    engine.crew.add_nodes(["b"])
    engine.crew.node_hopeless("b", ConnectionLostError("b: the node server refused this connection"))
    (said,) = of(Say, engine.act(0.0))
    assert said.text == "b is no longer used: the node server refused this connection"


def test_a_long_wait_is_reported_and_reported_again():
    engine = start(["a"])
    engine.act(0.0)
    engine.consumer_waits(0.0)
    fill(engine)
    assert engine.due(1.0) == REPORT_AFTER
    engine.tick(REPORT_AFTER)
    (told,) = of(ReportWait, engine.act(REPORT_AFTER))
    assert told[:3] == (None, "task", REPORT_AFTER)
    begin(engine, 1)
    engine.act(70.0)
    engine.consumer_waits(70.0)
    later = REPORT_AFTER + REPORT_AGAIN
    assert engine.due(later - 1) == later
    engine.tick(later)
    (told,) = of(ReportWait, engine.act(later))
    assert told[:3] == (1, "task", later)
    assert told.summary.endswith("; next decision in 300.0 s")
    engine.answered(1, 0, size_bytes=1, task_seconds=1.0, now=later)
    assert engine.deliver() is not None
    assert engine.due(later) > later + REPORT_AGAIN  # a second copy, perhaps


def test_the_summary_tells_tasks_workers_nodes_and_the_next_deadline():
    engine = start(["a", "b"], is_iterable=True, connect_timeout=10.0)
    fill(engine)
    engine.act(0.0)
    begin(engine, 1)
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


def test_room_that_a_retired_worker_leaves_is_promised_on_its_own_node_only():
    """Two other nodes without room were asked in turns, for ever, each as one that had promised it."""
    engine = Engine(PlanOptions(num_workers=1, is_iterable=True), ["home"], ["other"])
    engine.crew.node_up("home", 1)
    engine.crew.node_up("other", 1)
    assert engine.act(0.0) == [Open(1, 0, "home", is_promised=False)]
    engine.worker_ready(1, 0.0)
    engine.worker_lost(1, Loss(ConnectionLostError("it has retired"), node_is_up=True, has_retired=True))
    engine.remove_nodes(["home"])
    assert engine.act(1.0) == [Open(2, 0, "other", is_promised=False)]
