"""The sentence of each bound, and passes of which little is known."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from rpcdataloader.diagnosis.verdict import Diagnosis, diagnose
from rpcdataloader.diagnosis.words import REASONS, WORDS
from rpcdataloader.wire.messages import Stages
from tests.unit.diagnosis.recorded import TASK, make_recorder, make_setup, record, records

# The loop takes 400 batches per second, and the workers make 200.
SLOW_WORKERS = {"consumer": 0.0025, "blocked": 0.0025}
LATE = Stages(fetch=0.2, cpu=0.2)
FAST = Stages(fetch=0.0099, cpu=0.0099)
ALONE = Stages(idle=0.06, fetch=0.02, cpu=0.02)

SENTENCES = {
    "none": ({}, "The loop waits 0 % of its time for batches, which leaves nothing to gain."),
    "start": (
        {"first_wait": 3.2},
        "The loop waited 3.2 s for its first batch, and 0 % of its time since: persistent_workers=True keeps the "
        "workers from one epoch to the next.",
    ),
    "start, with workers that stay": (
        {"first_wait": 3.2, "is_persistent": True},
        "The loop waited 3.2 s for its first batch, and 0 % of its time since: the workers stay from one epoch to the "
        "next already, so build the dataset or load its first batch faster.",
    ),
    "workers": (
        SLOW_WORKERS,
        "The loop waits 50 % of its time for workers, which spend it in fetch (the dataset): 5 more workers (4 to 7) "
        "would end that.",
    ),
    "workers, then the link": (
        {**SLOW_WORKERS, "receive": 0.0019, "receive_cpu": 0.0001},
        "The loop waits 50 % of its time for workers, which spend it in fetch (the dataset): 5 more workers (4 to 7) "
        "would end that; the link would then be 76 % full.",
    ),
    "workers, up to the link": (
        {**SLOW_WORKERS, "receive": 0.0032, "receive_cpu": 0.0001},
        "The loop waits 50 % of its time for workers, which spend it in fetch (the dataset): 3 more workers (2 to 5) "
        "would bring it to 313 batches per second, where the link is the next bound.",
    ),
    "workers, then next itself": (
        {"consumer": 0.002, "own": 0.0005, "blocked": 0.0025},
        "The loop waits 60 % of its time for workers, which spend it in fetch (the dataset): 5 more workers (4 to 7) "
        "would leave 20 %, which next itself takes.",
    ),
    "workers, then the sampler and the link": (
        {"consumer": 0.002, "drawn": 0.0005, "blocked": 0.0025, "receive": 0.0019, "receive_cpu": 0.0001},
        "The loop waits 60 % of its time for workers, which spend it in fetch (the dataset): 5 more workers (4 to 7) "
        "would leave 20 %, which the sampler takes; the link would then be 76 % full.",
    ),
    "workers, as fast as the link": (
        {**SLOW_WORKERS, "receive": 0.0049, "receive_cpu": 0.0001},
        "The loop waits 50 % of its time for workers, which spend it in fetch (the dataset): more workers would not "
        "help, as the link allows 204 batches per second.",
    ),
    "workers, encoding": (
        {**SLOW_WORKERS, "stages": Stages(fetch=0.005, encode=0.015, cpu=0.02)},
        "The loop waits 50 % of its time for workers, which spend it in encode (pickling): 5 more workers (4 to 7) "
        "would end that.",
    ),
    "collate": (
        {**SLOW_WORKERS, "stages": Stages(fetch=0.004, collate=0.016, cpu=0.02)},
        "The loop waits 50 % of its time for workers, which spend 80 % of theirs in collate_fn: make it cheaper, or "
        "5 more workers (4 to 7) would end that.",
    ),
    "storage": (
        {**SLOW_WORKERS, "stages": Stages(fetch=0.019, collate=0.001, cpu=0.004)},
        "The loop waits 50 % of its time for workers, which wait 80 % of theirs for storage: if that can give more, "
        "5 more workers (4 to 7) would end that.",
    ),
    "oversubscribed": (
        {**SLOW_WORKERS, "stages": Stages(fetch=0.019, collate=0.001, cpu=0.012, runqueue=0.008)},
        "The loop waits 50 % of its time for workers, which wait 40 % of theirs for a CPU: give them more CPUs or "
        "nodes, as more workers on the same CPUs would not help.",
    ),
    "node": (
        {
            "consumer": 0.006,
            "blocked": 0.004,
            "workers": {0: "node07", 1: "node07", 2: "node08", 3: "node08"},
            "slow": {2: LATE, 3: LATE},
        },
        "The loop waits 40 % of its time for node node08, whose workers take 10.0 times as long as the others: look at "
        "its load and storage, or leave it out.",
    ),
    "network": (
        {"consumer": 0.015, "blocked": 0.02, "receive": 0.034, "receive_cpu": 0.002, "size_bytes": 4_000_000},
        "The loop waits 57 % of its time for the network, which carries 29 batches per second (118 MB/s) of 67: send "
        "less than 4 MB per batch (uint8 in place of float32, crops, compressed data), or use a faster link.",
    ),
    "trainer, own": (
        {"consumer": 0.001, "own": 0.002, "blocked": 0.0002},
        "The loop waits 69 % of its time for its own process, which spends 2 ms per batch in next without sleeping: "
        "use larger batches.",
    ),
    "trainer, decode": (
        {"consumer": 0.0196, "own": 0.0004, "decode_cpu": 0.019},
        "The loop waits 2 % of its time for its own process, and outside of next, too, as rebuilding batches takes "
        "95 % of the interpreter's time: use larger batches, fewer tensors and less that must be unpickled.",
    ),
    "trainer, receive": (
        {"consumer": 0.02, "blocked": 0.02, "receive": 0.04, "receive_cpu": 0.036},
        "The loop waits 50 % of its time for its own process, which receives 25 batches per second of 50: use larger "
        "batches, fewer tensors and less that must be unpickled.",
    ),
    "trainer, lock": (
        {"consumer": 0.02, "blocked": 0.01, "lock": 0.012, "receive_cpu": 0.001},
        "The loop waits 33 % of its time for its own process, where bytes of each batch lay unread for 12 ms while "
        "other code held the interpreter lock: move work in Python out of the loop and its threads.",
    ),
    "device_copy": (
        {"consumer": 0.01, "blocked": 0.01, "copy": 0.02},
        "The loop waits 50 % of its time for copies to the device, which take 20 ms per batch of 1 MB: send smaller "
        "types (uint8 in place of float32), and convert them on the device.",
    ),
    "sampler": (
        {"consumer": 0.02, "drawn": 0.01},
        "The loop waits 33 % of its time for the sampler, which takes 10 ms per batch: make it cheaper, or draw the "
        "indices in advance.",
    ),
    "window": (
        {"consumer": 0.01, "blocked": 0.01, "prefetch_factor": 1, "latency": 0.06, "stages": ALONE},
        "The loop waits 50 % of its time for batches that were asked for too late: each takes 80 ms, 4 may be in "
        "flight, and 12 are needed: set prefetch_factor=3 (now 1).",
    ),
    "window, of bytes": (
        {
            "consumer": 0.01,
            "blocked": 0.006,
            "max_in_flight_bytes": 2_000_000,
            "latency": 0.012,
            "stages": ALONE,
        },
        "The loop waits 38 % of its time for batches that were asked for too late: each takes 32 ms, 2 may be in "
        "flight, and 5 are needed: set max_in_flight_bytes=5000000 (now 2000000).",
    ),
    "straggler": (
        {"consumer": 0.01, "blocked": 0.01, "ready": 0.009},
        "The loop waits 50 % of its time for single batches while later ones are here, 25 % of it for "
        "worker 1: look at that worker, or hide it with a larger prefetch_factor or in_order=False.",
    ),
    "unclear": (
        {"consumer": 0.01, "blocked": 0.01},
        "The loop waits 50 % of its time, and what is known of 91 batches does not say why: workers could do 200.0 "
        "batches per second; window could do 400.0 batches per second.",
    ),
    "unclear, without a word of workers": (
        {"consumer": 0.01, "blocked": 0.01, "stages": None},
        "The loop waits 50 % of its time, and what is known of 91 batches does not say why.",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence_of_each_bound(name):
    options, text = SENTENCES[name]
    diagnosis = diagnose(records(**options))
    assert diagnosis.bound == name.split(",")[0]
    assert diagnosis.text == text


def test_every_bound_and_reason_has_a_sentence():
    assert {name.split(",")[0] for name in SENTENCES} == WORDS.keys()
    assert {name.split(", ")[1] for name in SENTENCES if name.startswith("trainer")} == REASONS.keys()


@pytest.mark.parametrize("name", SENTENCES)
def test_words_of_each_bound_are_one_sentence_of_plain_text(name):
    text = diagnose(records(**SENTENCES[name][0])).text
    assert text.count(". ") == 0
    assert text.endswith(".")
    assert "{" not in text
    assert "\n" not in text


def test_page_has_a_section_for_each_bound():
    page = (Path(__file__).parents[3] / "docs" / "waiting.md").read_text()
    assert re.findall(r"^### `(\w+)`\n\n.", page, re.MULTILINE) == list(WORDS)


def test_diagnosis_cannot_be_changed():
    diagnosis = diagnose(records())
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.bound = "workers"


def test_numbers_of_a_diagnosis():
    diagnosis = diagnose(records(**SLOW_WORKERS))
    assert diagnosis.wait_share == pytest.approx(0.5)
    assert diagnosis.demand == pytest.approx(400)
    assert diagnosis.capacities == pytest.approx({"workers": 200, "window": 400})
    assert diagnosis.more_workers == (4, 5, 7)
    assert diagnosis.stages["fetch"].mean == pytest.approx(0.019)
    assert diagnosis.stages["collate"].p95 == pytest.approx(0.001)
    assert diagnosis.evidence["delivered_rate"] == pytest.approx(200)


def test_p95_is_that_of_the_batches():
    recorder = record(num_batches=100, stages=Stages(fetch=0.01, cpu=0.01))
    record(recorder, num_batches=20, stages=Stages(fetch=0.05, cpu=0.05))
    fetch = diagnose(recorder.snapshot()).stages["fetch"]
    assert fetch.p95 == pytest.approx(0.05)
    assert 0.01 < fetch.mean < 0.02


@pytest.mark.parametrize(("first_wait", "bound"), [(1.0, "start"), (0.01, "trainer")])
def test_first_batch_counts_more_than_a_little_of_our_own_time(first_wait, bound):
    diagnosis = diagnose(records(consumer=0.005, own=0.0003, first_wait=first_wait))
    assert 0.05 < diagnosis.wait_share < 0.06
    assert diagnosis.bound == bound


@pytest.mark.parametrize(
    ("pause", "bound"), [({"own": 0.3}, "start"), ({"own": 2.0}, "trainer"), ({"blocked": 0.3}, "unclear")]
)
def test_first_batch_counts_more_than_one_shorter_pause_of_the_machine(pause, bound):
    """But not more than a batch that is late."""
    recorder = record(num_batches=50, first_wait=1.0)
    record(recorder, num_batches=1, **pause)
    diagnosis = diagnose(record(recorder, num_batches=19).snapshot())
    assert diagnosis.wait_share > 0.1
    assert diagnosis.bound == bound


@pytest.mark.parametrize(("own", "bound"), [(0.002, "trainer"), (0.0001, "straggler")])
def test_one_long_wait_is_no_cause_beside_one_that_goes_on(own, bound):
    recorder = record(num_batches=50, consumer=0.008, own=own)
    record(recorder, num_batches=1, consumer=0.008, own=own, blocked=0.3, ready=0.3)
    assert diagnose(recorder.snapshot()).bound == bound


# A loop that wants its interpreter lock back is awake, as one that runs our own Python is.
@pytest.mark.parametrize(
    ("times", "part"),
    [
        ({"decode_cpu": 0.0001}, "own"),
        ({"decode_cpu": 0.004}, "receive"),
        ({"decode_cpu": 0.001, "lock": 0.006}, "lock"),
    ],
)
def test_wait_of_a_loop_that_is_awake(times, part):
    diagnosis = diagnose(records(consumer=0.002, own=0.003, **times))
    assert (diagnosis.bound, diagnosis.evidence["part"]) == ("trainer", part)


def test_batches_that_were_rebuilt_before_the_span_keep_no_loop_from_its_interpreter():
    made = records(consumer=0.02, decode_cpu=0.019)
    assert diagnose(made).bound == "trainer"
    last = made.probes[-1].answered
    twice_as_long = [dataclasses.replace(one, answered=last - 2 * (last - one.answered)) for one in made.probes]
    assert diagnose(dataclasses.replace(made, probes=tuple(twice_as_long))).bound == "none"


@pytest.mark.parametrize(("num_late", "bound"), [(1, "workers"), (20, "oversubscribed")])
def test_one_long_wait_for_a_cpu_is_no_lack_of_cpus(num_late, bound):
    usual, late = Stages(fetch=0.02, cpu=0.02), Stages(fetch=0.17, cpu=0.02, runqueue=0.15)
    recorder = record(**SLOW_WORKERS | {"num_batches": 25, "stages": usual})
    record(recorder, num_batches=num_late, blocked=0.02, consumer=0.001, stages=late)
    diagnosis = diagnose(recorder.snapshot())
    assert diagnosis.evidence["runqueue_share"] > 0.2
    assert diagnosis.bound == bound


@pytest.mark.parametrize(
    ("cpu", "runqueue", "bound"),
    [(0.003, 0.005, "storage"), (0.006, 0.005, "oversubscribed"), (0.001, 0.008, "storage")],
)
def test_workers_that_mostly_sleep_would_gain_more_from_storage_than_from_cpus(cpu, runqueue, bound):
    diagnosis = diagnose(records(**SLOW_WORKERS, stages=Stages(fetch=0.02, cpu=cpu, runqueue=runqueue)))
    assert diagnosis.evidence["runqueue_share"] > 0.2
    assert diagnosis.bound == bound


def test_window_of_a_loop_that_takes_any_number_of_batches_is_that_of_the_workers():
    diagnosis = diagnose(
        records(
            consumer=0.002, blocked=0.004, copy=0.001, latency=0.05, stages=Stages(idle=0.01, fetch=0.004, cpu=0.004),
            prefetch_factor=1, stalled=0.0021,
        )
    )  # fmt: skip
    assert diagnosis.evidence["needed_rate"] == math.inf
    assert diagnosis.bound == "window"
    # The workers make 1,000 batches per second, each 54 ms after its request; 1.4 as many make up for what varies.
    assert diagnosis.evidence["in_flight"] == math.ceil(1.4 * 1000 * 0.054)
    assert "set prefetch_factor=19 (now 1)" in diagnosis.text


def test_window_of_a_loop_and_workers_that_take_no_time_is_some_number():
    diagnosis = diagnose(records(consumer=0.0, blocked=0.05, latency=0.05, prefetch_factor=1, stages=Stages(idle=0.05)))
    assert diagnosis.bound == "window"
    assert diagnosis.evidence["in_flight"] == pytest.approx(1.4 * 1000 * 4, abs=1)


# Passes of which little is known


def test_pass_that_has_delivered_nothing():
    diagnosis = diagnose(make_recorder(now=5.0).snapshot(waiting=0.5))
    assert diagnosis.bound == "start"
    assert diagnosis.text == "The loop has waited 500 ms for its first batch, which is still on its way."
    assert diagnosis.stages == {}


def test_pass_that_has_just_begun():
    diagnosis = diagnose(make_recorder(now=5.0).snapshot())
    assert (diagnosis.bound, diagnosis.wait_share) == ("none", 0.0)


def test_pass_of_one_batch_has_waited_for_its_start():
    diagnosis = diagnose(record(num_batches=1, first_wait=1.0, consumer=0.5).snapshot())
    assert diagnosis.bound == "start"


@pytest.mark.parametrize("num_batches", range(2, 12))
def test_pass_of_few_batches_claims_nothing(num_batches):
    diagnosis = diagnose(record(num_batches=num_batches, consumer=0.01, blocked=0.1).snapshot())
    assert diagnosis.bound == "unclear"
    if num_batches <= 9:
        known = f"{num_batches} tasks of {min(num_batches, 4)} workers took 20 ms on average"
        assert diagnosis.text.endswith(f" of {num_batches} batches does not say why: {known}.")


def test_pass_of_few_batches_from_a_worker_that_has_told_no_times():
    recorder = record(num_batches=3, consumer=0.01, blocked=0.1)
    recorder.tasks.clear()
    assert diagnose(recorder.snapshot()).text.endswith("what is known of 3 batches does not say why.")


def test_batch_that_does_not_come_counts_before_it_comes():
    recorder = record(num_batches=100)
    assert diagnose(recorder.snapshot()).wait_share == 0
    diagnosis = diagnose(recorder.snapshot(waiting=100.0))
    assert diagnosis.wait_share > 0.95


def test_all_zero_times_are_no_error():
    diagnosis = diagnose(records(consumer=0.0, latency=0.0, size_bytes=0, stages=Stages()))
    assert (diagnosis.bound, diagnosis.wait_share, diagnosis.capacities) == ("none", 0.0, {})


def test_loop_that_does_nothing_takes_any_number_of_batches():
    diagnosis = diagnose(records(consumer=0.0, blocked=0.005))
    assert diagnosis.demand == math.inf
    assert diagnosis.bound == "workers"
    assert diagnosis.more_workers is None
    assert diagnosis.text.endswith("use more workers.")


def test_loop_that_does_nothing_is_told_of_the_next_bound():
    diagnosis = diagnose(records(consumer=0.0, blocked=0.005, decode_cpu=0.0005))
    assert diagnosis.more_workers is not None
    assert "2,000 batches per second, where the trainer's process is the next bound" in diagnosis.text


def test_workers_that_have_gone_count_no_more():
    both = dict.fromkeys(range(8), "node07")
    recorder = record(num_batches=100, workers=both, **SLOW_WORKERS)
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(400)
    recorder.setup = make_setup()
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(200)


def test_workers_that_have_just_come_count_like_the_others():
    recorder = record(num_batches=100, **SLOW_WORKERS)
    recorder.setup = make_setup(dict.fromkeys(range(6), "node07"))
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(300)


def test_a_pass_without_workers_does_not_fail():
    recorder = record(num_batches=100, **SLOW_WORKERS)
    recorder.setup = make_setup({}, window=8)
    assert isinstance(diagnose(recorder.snapshot(waiting=10.0)), Diagnosis)


def test_first_tasks_of_workers_do_not_count():
    recorder = record(num_batches=4, first_wait=2.0, stages=Stages(fetch=0.1, cpu=0.1), **SLOW_WORKERS)
    record(recorder, num_batches=100, **SLOW_WORKERS)
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(200)


def test_worker_of_few_tasks_is_as_fast_as_its_node():
    """Once late, a worker gets no tasks for a while; its only others took a tenth of the usual time."""
    recorder = record(num_batches=100, **SLOW_WORKERS, workers=dict.fromkeys(range(5), "node07"))
    recorder.tasks[4].clear()
    recorder.tasks[4].extend([0.01, 0.2, 0.002])
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(250, rel=0.01)


def test_worker_of_few_tasks_on_a_slow_node_is_slow():
    recorder = record(
        num_batches=100, **SLOW_WORKERS, workers={0: "a", 1: "a", 2: "b", 3: "b"}, slow={2: LATE, 3: LATE}
    )
    recorder.tasks[3].clear()
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(2 / 0.02 + 2 / 0.2)


def test_worker_that_was_stopped_is_not_slow():
    recorder = record(num_batches=40, **SLOW_WORKERS)
    record(recorder, num_batches=1, stages=Stages(fetch=2.0, cpu=0.02), **SLOW_WORKERS)
    record(recorder, num_batches=59, **SLOW_WORKERS)
    assert diagnose(recorder.snapshot()).capacities["workers"] == pytest.approx(200)


def test_threads_that_use_more_cpu_time_than_passes_are_no_storage():
    diagnosis = diagnose(records(**SLOW_WORKERS, stages=Stages(fetch=0.02, cpu=0.08, runqueue=0.002)))
    assert diagnosis.bound == "workers"
    shares = [diagnosis.evidence[f"{name}_share"] for name in ("cpu", "runqueue", "stalled")]
    assert shares == pytest.approx([0.9, 0.1, 0.0])


def test_workers_without_cpu_times_are_no_storage():
    assert diagnose(records(**SLOW_WORKERS, stages=Stages(fetch=0.02))).bound == "workers"


def test_link_that_the_trainer_does_not_read_is_no_full_link():
    network = SENTENCES["network"][0]
    unread = Stages(fetch=0.02, cpu=0.02, sending=0.03, peer_limited=0.02)
    assert diagnose(records(**network, stages=Stages(fetch=0.02, cpu=0.02, sending=0.03))).bound == "network"
    assert diagnose(records(**network, stages=unread)).bound == "trainer"


def test_what_limits_a_connection_is_a_share_of_its_busy_time():
    limited = Stages(fetch=0.02, cpu=0.02, sending=0.04, peer_limited=0.01)
    evidence = diagnose(records(**SENTENCES["network"][0], stages=limited)).evidence
    assert evidence["peer_limited_share"] == pytest.approx(0.25)


def test_window_is_the_bound_beside_workers_only_if_it_allows_far_less():
    """With prefetch_factor=1, workers that are the bound rest between two tasks."""
    options = {"consumer": 0.0025, "blocked": 0.0075, "prefetch_factor": 1, "stages": ALONE}
    assert diagnose(records(**options, latency=0.02)).bound == "window"
    assert diagnose(records(**options, latency=0.004)).bound == "workers"


def test_few_batches_with_a_long_way_make_no_window_that_is_smaller_than_what_was_delivered():
    """Requests rarely find a worker idle that is the bound, so its overhead is known from few."""
    recorder = record(num_batches=50, consumer=0.002, blocked=0.008, workers={0: "node07"}, stages=FAST)
    record(recorder, num_batches=1, consumer=0.002, blocked=0.008, latency=0.05, stages=FAST._replace(idle=0.001))
    diagnosis = diagnose(recorder.snapshot())
    assert diagnosis.evidence["latency_seconds"] > 0.05
    assert diagnosis.capacities["window"] == diagnosis.evidence["delivered_rate"] == pytest.approx(100)
    assert diagnosis.bound == "workers"


TWO_NODES = {0: "node07", 1: "node07", 2: "node08", 3: "node08"}
SLOW_NODE = {"workers": TWO_NODES, "slow": {2: LATE, 3: LATE}}


def test_node_that_costs_a_fifth_is_the_bound_even_if_it_is_not_the_only_one():
    diagnosis = diagnose(records(**SLOW_NODE, consumer=0.002, blocked=0.01))
    assert diagnosis.evidence["needed_rate"] == pytest.approx(500)
    assert diagnosis.bound == "node"


def test_node_that_costs_less_is_the_bound_if_the_others_would_be_enough():
    workers = {**dict.fromkeys(range(7), "node07"), 7: "node08"}
    slow = {"workers": workers, "slow": {7: Stages(fetch=0.05, cpu=0.05)}}
    assert diagnose(records(**slow, consumer=1 / 375, blocked=0.001)).bound == "node"
    assert diagnose(records(**slow, consumer=1 / 500, blocked=0.001)).bound == "workers"


@pytest.mark.parametrize(("late", "bound"), [(2, "node"), (0, "straggler")])
def test_slow_node_is_the_bound_if_the_late_batches_are_its_own(late, bound):
    recorder = record(**SLOW_NODE, consumer=0.02, num_batches=40)
    for _ in range(15):
        for worker in TWO_NODES:
            blocked = 0.05 if worker == late else 0.0
            task = LATE if worker > 1 else TASK
            record(recorder, num_batches=1, worker=worker, stages=task, consumer=0.02, blocked=blocked, ready=blocked)
    assert diagnose(recorder.snapshot()).bound == bound


def test_more_workers_are_needed_if_they_work_less_of_the_time():
    few, many = (diagnose(records(consumer=0.0025, blocked=blocked)).more_workers for blocked in (0.0025, 0.005))
    assert few is not None
    assert many is not None
    assert few[0] == many[0]
    assert few[1] < many[1]
    assert few[2] < many[2]


def test_device_that_stands_still_for_copies_is_a_wait_though_next_returns_at_once():
    diagnosis = diagnose(records(consumer=0.03, copy=0.03, stalled=0.02))
    assert diagnosis.bound == "device_copy"
    assert diagnosis.wait_share == pytest.approx(2 / 3, abs=0.01)
    assert diagnosis.demand == pytest.approx(100, rel=0.02)
    hidden = diagnose(records(consumer=0.03, copy=0.03))
    assert hidden.bound == "none"


def test_copies_in_the_thread_of_the_loop_are_no_work_of_its_own():
    assert diagnose(records(consumer=0.01, own=0.03, copy=0.028)).bound == "device_copy"
    assert diagnose(records(consumer=0.01, own=0.03, copy=0.002)).bound == "trainer"
