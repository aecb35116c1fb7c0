"""Which batches are made in parts, and how large these are. That no part is lost is tried by tests/simulation."""

from __future__ import annotations

from typing import Any

import pytest

from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.splitting import LEAST_SECONDS, RAMP, choose_size, choose_workers
from rpcdataloader.plan.table import Table


def split(payload, first, num_samples):
    """Payloads are the ranges of the samples."""
    return payload[first : first + num_samples]


def make_table(num_workers, *, batch_seconds: float | None = 1.0, can_split=True, **options) -> Table:
    plan = PlanOptions(num_workers, **options)
    table = Table(plan, batch_seconds=batch_seconds, split=split if can_split else None)
    for worker in range(num_workers):
        table.worker_joined(worker)
        table.worker_began(worker, 0.0)
    return table


def add(table, num_samples=64, is_last=False):
    return table.add_task(range(num_samples), num_samples, is_last)


def fill(table, num_samples=64):
    while table.wants_input:
        add(table, num_samples)


def sizes(loads) -> list[int]:
    return [len(load.payload) for load in loads]


def run(table, num_batches, num_samples=64, seconds=1.0, is_slow_loop=False) -> list[float]:
    """Workers answer in turn; returns the batches that were made in parts."""
    in_parts: set[float] = set()
    in_flight: list[Any] = []
    num_added = 0
    for turn in range(100_000):
        while table.wants_input and num_added < num_batches:
            add(table, num_samples, num_added + 1 == num_batches)
            num_added += 1
        in_flight += table.assign(turn)
        if not in_flight:
            return sorted(in_parts)
        load = in_flight.pop(0)
        share = len(load.payload) / num_samples
        task = table.replied(load.worker, load.number, size_bytes=10, task_seconds=seconds * share, now=turn + 1.0)
        assert task is not None
        if task.whole is not None:
            in_parts.add(task.whole.number)
            if task.whole.has_all_parts:
                assert [each for part in task.whole.parts for each in part.payload] == list(range(num_samples))
                table.joined(task.whole.number, 10, None)
        if not (is_slow_loop and in_flight):
            table.pop_deliverable()
    raise AssertionError("the pass does not end")


def test_first_batch_is_dealt_out_to_all_workers():
    table = make_table(8)
    add(table)
    loads = table.assign(0.0)
    assert sizes(loads) == [8] * 8
    assert {load.worker for load in loads} == set(range(8))
    assert [load.payload.start for load in loads] == list(range(0, 64, 8))


def test_steady_state_has_no_parts():
    in_parts = run(make_table(8), 200)
    assert in_parts[:5] == [0, 1, 2, 3, 4]
    assert all(number < RAMP * 8 or number == 199 for number in in_parts)
    in_parts = run(make_table(8), 200, is_slow_loop=True)
    assert 0 in in_parts
    assert all(number < 8 for number in in_parts)


def test_last_batch_is_dealt_out_as_well():
    assert run(make_table(8), 33)[-1] == 32
    assert run(make_table(2), 33) == [0, 32]


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(1, {}), (8, {"batch_seconds": 1e-5}), (8, {"can_split": False}), (4, {"is_iterable": True})],
)
def test_parts_that_are_worth_no_message_are_not_made(num_workers, options):
    table = make_table(num_workers, **options)
    add(table)
    assert sizes(table.assign(0.0)) in ([64], [])


def test_parts_are_as_large_as_is_worth_a_message():
    assert choose_size(64, 8, 64 * LEAST_SECONDS) == 8
    assert choose_size(64, 8, 4 * LEAST_SECONDS) == 16
    assert choose_size(64, 8, LEAST_SECONDS) == 64
    assert choose_size(10_000, 16, 100.0) == 625
    assert choose_size(64, 64, 1.28) == 2  # or 64 workers would ask for 3,200 parts per second
    assert choose_size(64, 256, 1.28) == 7
    assert choose_size(3, 8, 1.0) == 1
    assert [choose_workers(8, ahead) for ahead in (0, 3, 4, 7, 8, 100)] == [8, 8, 4, 4, 1, 1]


def test_batches_of_one_sample_and_of_ten_thousand():
    for num_samples, expected in (1, [1, 1, 1, 1]), (10_000, [2500] * 4), (5, [2, 2, 1]):
        table = make_table(4, prefetch_factor=1)
        fill(table, num_samples)
        assert sizes(table.assign(0.0))[: len(expected)] == expected
    assert run(make_table(4), 12, num_samples=7)


def test_first_pass_begins_with_parts_and_the_first_answer_tells_whether_they_are_worth_it():
    for seconds, following in (1e-6, [48, 64]), (1.0, [16]):
        table = make_table(1, batch_seconds=None)
        table.resize(4)
        fill(table)
        (load,) = table.assign(0.0)  # the others have not come yet
        assert len(load.payload) == 16
        table.replied(0, load.number, size_bytes=1, task_seconds=seconds, now=1.0)
        assert sizes(table.assign(1.0)) == following


def test_limit_on_bytes_counts_the_parts_and_their_batch():
    table = make_table(4, max_in_flight_bytes=35)
    table.batch_size_bytes = 10.0
    fill(table)
    assert sizes(table.assign(0.0)) == [16, 16, 16, 16, 64]
    table = make_table(4, max_in_flight_bytes=15)
    table.batch_size_bytes = 10.0
    fill(table)
    assert sizes(table.assign(0.0)) == [64]


def test_each_part_has_the_time_of_a_batch():
    table = make_table(4, task_timeout=5.0)
    add(table)
    loads = table.assign(0.0)
    assert table.timed_out(4.9) == []
    assert table.timed_out(5.0) == [(load.worker, load.number) for load in loads]


def test_batch_of_a_part_that_kills_is_made_as_a_whole():
    table = make_table(4)
    add(table)
    loads = table.assign(0.0)
    victim = loads[1].worker
    part = table.running(victim)
    assert part is not None
    table.worker_left(victim)
    assert table.blame(part, "killed") is None
    assert len(table.superfluous) == 3
    assert sizes(table.assign(1.0)) == [64]
    assert table.replied(loads[0].worker, loads[0].number, size_bytes=1, now=1.0) is None


def test_no_batch_is_made_in_parts_once_parts_did_not_fit():
    engine = Engine(PlanOptions(4), ["a"] * 4, split=split)
    engine.crew.node_up("a", 1)
    engine.act(0.0)
    for worker in range(1, 5):
        engine.worker_ready(worker, 0.0)
        engine.worker_at_work(worker, 0.0)
    add(engine.table)
    assert len(engine.act(0.0)) == 4
    engine.unfit()
    assert sizes(load for load in engine.act(0.0) if hasattr(load, "payload")) == [64]
    engine.begin_epoch(1.0)
    add(engine.table)
    assert sizes(load for load in engine.act(1.0) if hasattr(load, "payload")) == [64]
