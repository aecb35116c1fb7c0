"""What is kept of a pass."""

from __future__ import annotations

import random

import pytest

from rpcdataloader.diagnosis.records import MAX_PROBE_INTERVAL, PROBE_INTERVAL, Totals
from tests.unit.diagnosis.recorded import make_recorder, record


def test_slow_batches_are_all_probes_and_fast_ones_are_not():
    assert len(record(num_batches=50, consumer=0.3).snapshot().probes) == 50
    fast = record(num_batches=500, consumer=0.001).snapshot()
    assert len(fast.probes) == pytest.approx(0.5 / PROBE_INTERVAL, abs=3)
    assert fast.totals.batches == 500


def test_long_pass_has_fewer_probes_per_second():
    records = record(num_batches=20_000, consumer=0.001).snapshot()
    assert len([probe for probe in records.probes if probe.delivered > 10.0]) == pytest.approx(
        10.0 / MAX_PROBE_INTERVAL, abs=3
    )


def test_sums_between_two_probes_are_those_of_all_batches():
    records = record(num_batches=1000, consumer=0.001, blocked=0.001, drawn=0.0005, ready=0.0002).snapshot()
    first, last = records.probes[3].totals, records.probes[-1].totals
    batches = last.batches - first.batches
    assert batches > 900
    assert last.waited - first.waited == pytest.approx(0.0015 * batches)
    assert last.blocked - first.blocked == pytest.approx(0.001 * batches)
    assert last.ready - first.ready == pytest.approx(0.0002 * batches)


def test_notes_of_a_long_pass_do_not_grow():
    few = record(num_batches=5000, consumer=0.3, blocked=0.01)
    many = record(few, num_batches=5000, consumer=0.3, blocked=0.01).snapshot()
    assert len(many.probes) == 3000
    assert len(many.waits) == 1000
    assert {len(tasks) for tasks in many.tasks.values()} == {64}


def test_span_is_60_seconds_or_200_batches_whichever_is_more():
    slow = record(num_batches=1000, consumer=1.0).snapshot()
    assert len(slow.span) == 201
    fast = record(num_batches=5000, consumer=0.025).snapshot()
    assert fast.last - fast.span[0].delivered == pytest.approx(60.0, abs=0.1)


def test_span_leaves_the_first_window_out():
    records = record(num_batches=30, prefetch_factor=3).snapshot()
    assert records.span[0].totals.batches == 4 * 3 + 1


def test_last_pass_is_told_of_until_the_next_one_has_delivered_enough():
    recorder = record(num_batches=50, consumer=0.03)
    recorder.begin(100.0)
    assert recorder.snapshot().totals.batches == 50
    record(recorder, now=100.0, num_batches=9, consumer=0.03)
    assert recorder.snapshot().totals.batches == 50
    assert recorder.snapshot(waiting=10.0).totals.batches == 9
    record(recorder, now=101.0, num_batches=1)
    assert recorder.snapshot().totals.batches == 10
    assert recorder.snapshot().start.begun == 100.0


def test_pass_that_has_delivered_nothing_is_not_told_of():
    recorder = record(num_batches=50)
    recorder.begin(100.0)
    recorder.begin(101.0)
    assert recorder.snapshot().totals.batches == 50


def test_time_since_the_batch_before_is_that_of_reordering():
    recorder = make_recorder()
    recorder.delivered(5.0, 1.0)
    probe = recorder.probe(1.0, 0.0, 7)
    probe.answered = 3.5
    recorder.delivered(6.0, 0.0, probe=probe)
    assert probe.reorder == 1.5
    assert probe.delivered == 6.0
    assert probe.totals == Totals(batches=2, waited=1.0)


def test_end_of_a_call_is_estimated_from_the_noted_ones():
    recorder = make_recorder()
    for now in 1.0, 2.0:
        recorder.delivered(now, 0.5, 0.25)
    recorder.delivered(3.0, 0.5, 0.25, sending=0.125)
    probe = recorder.probe(3.0, 0.0, 7)
    recorder.delivered(4.0, 0.5, 0.25, sending=0.125, probe=probe)
    assert (probe.delivered, probe.wait) == (4.125, 0.625)
    assert recorder.snapshot().totals.in_next == 4 * 0.625


def test_wait_for_the_first_batch_is_known_of_one_that_is_no_probe():
    recorder = make_recorder()
    recorder.delivered(4.0, 4.0, 4.0)
    recorder.delivered(5.0, 1.0, 1.0)
    assert recorder.snapshot().first_wait == 4.0


def union(intervals) -> float:
    total, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_link_is_busy_while_any_reply_is_received(seed):
    rng = random.Random(seed)
    intervals = []
    for _ in range(200):
        begin = rng.uniform(0, 20)
        intervals.append((begin, begin + rng.expovariate(2.0)))
    recorder = make_recorder()
    for begin, end in sorted(intervals, key=lambda interval: interval[1]):
        recorder.received(begin, end)
    assert recorder.snapshot().totals.link == pytest.approx(union(intervals))


def test_reply_in_one_piece_says_nothing_about_the_link():
    recorder = make_recorder()
    recorder.received(1.0, 1.0)
    assert recorder.snapshot().totals == Totals()
