"""The sentence of each bound, and passes of which little is known."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from rpcdataloader.diagnosis.verdict import diagnose
from rpcdataloader.diagnosis.words import WORDS
from rpcdataloader.wire.messages import Stages
from tests.unit.diagnosis.recorded import TASK, make_recorder, record, records

# The loop takes 400 batches per second, and the workers make 200.
SLOW_WORKERS = {"consumer": 0.0025, "blocked": 0.0025}
LATE = Stages(fetch=0.2, cpu=0.2)
ALONE = Stages(idle=0.06, fetch=0.02, cpu=0.02, fetch_cpu=0.02)
FIVE = dict.fromkeys(range(5), "node07")
TWO_NODES = {0: "node07", 1: "node07", 2: "node08", 3: "node08"}

# The bound and its part come first, then what is special.
PASSES = {
    "none": {},
    "start dataset": {"first_wait": 3.2, "start": {"dataset": 3.0, "ready": 3.1, "opened": 3.1}},
    "start sending": {"first_wait": 3.2, "start": {"dataset": 3.0, "ready": 3.1, "opened": 3.1, "is_instance": True}},
    "start pool": {"first_wait": 3.2, "start": {"ready": 3.0, "opened": 3.1}, "workers": {0: "local"}},
    "start pool, of a node server": {"first_wait": 3.2, "start": {"ready": 3.0, "opened": 3.1}},
    "start pool, of workers that stay": {
        "first_wait": 3.2, "is_persistent": True, "start": {"ready": 3.0, "opened": 3.1}
    },
    "start build": {"first_wait": 3.2, "start": {"ready": 0.1, "opened": 3.1}},
    "start init": {"first_wait": 3.2, "start": {"ready": 0.1, "opened": 3.1, "init": 2.9}},
    "start batch": {"first_wait": 3.2, "is_persistent": True, "start": {"ready": 0.1, "opened": 0.2}},
    "start batch, in parts": {"first_wait": 3.2, "start": {"ready": 0.1, "opened": 0.2, "num_workers": 4}},
    "workers": SLOW_WORKERS,
    "workers, of which some get no samples": {**SLOW_WORKERS, "is_stream": True, "workers": FIVE, "idle": {4}},
    "workers, up to the link": {**SLOW_WORKERS, "receive": 0.0032, "receive_cpu": 0.0001},
    "workers, then next itself": {"consumer": 0.002, "own": 0.0005, "blocked": 0.0025},
    "workers, as fast as the link": {**SLOW_WORKERS, "receive": 0.0049, "receive_cpu": 0.0001},
    "workers, that hardly get a CPU": {
        **SLOW_WORKERS,
        "stages": TASK._replace(cpu=0.001, fetch_cpu=0.001, runqueue=0.019, cpus=4.0, busy_cpus=3.5),
    },
    "workers, that sleep on full nodes": {
        **SLOW_WORKERS, "stages": TASK._replace(cpu=0.001, fetch_cpu=0.001, cpus=4.0, busy_cpus=4.0)
    },
    "node node": {"consumer": 0.006, "blocked": 0.004, "workers": TWO_NODES, "slow": {2: LATE, 3: LATE}},
    "node worker": {"consumer": 0.01, "blocked": 0.01, "ready": 0.009},
    "network": {
        "consumer": 0.015, "blocked": 0.02, "receive": 0.034, "receive_cpu": 0.002, "size_bytes": 4_000_000
    },
    "trainer next": {"consumer": 0.001, "own": 0.002, "blocked": 0.0002, "size_bytes": 1000},
    "trainer receiving, outside of next": {"consumer": 0.0196, "own": 0.0004, "decode_cpu": 0.019, "size_bytes": 1000},
    "trainer receiving": {"consumer": 0.02, "blocked": 0.02, "receive": 0.04, "receive_cpu": 0.036, "size_bytes": 1000},
    "trainer receiving, large batches": {"consumer": 0.02, "blocked": 0.02, "receive": 0.04, "receive_cpu": 0.036},
    "trainer lock": {"consumer": 0.02, "blocked": 0.01, "lock": 0.012, "receive_cpu": 0.001},
    "trainer copies": {"consumer": 0.01, "blocked": 0.01, "copy": 0.02},
    "trainer sampler": {"consumer": 0.02, "drawn": 0.01},
    "trainer source": {"consumer": 0.02, "drawn": 0.01, "draws_from": "source"},
    "setting prefetch_factor": {
        "consumer": 0.01, "blocked": 0.01, "prefetch_factor": 1, "latency": 0.06, "stages": ALONE
    },
    "setting max_in_flight_bytes": {
        "consumer": 0.01, "blocked": 0.006, "max_in_flight_bytes": 2_000_000, "latency": 0.012, "stages": ALONE
    },
    "unclear": {"consumer": 0.01, "blocked": 0.01},
}  # fmt: skip

# What follows the numbers of a step: the advice with its numbers.
SENTENCES = {
    "workers, up to the link": (
        "4 workers: 100 % on a CPU (95 fetch, 5 collate), 0 % not on a CPU, 0 % waiting for a CPU. Add 3 workers (2"
        " to 5), for 313 it/s, which is all that the link allows."
    ),
    "workers, that sleep on full nodes": (
        "4 workers: 5 % on a CPU (5 fetch), 95 % not on a CPU, 0 % waiting for a CPU; CPUs of their nodes 4 of 4 busy."
        " Add 5 workers on the same CPUs (4 to 7)."
    ),
    "start batch, in parts": (
        "3.2 s passed before the first batch, 3.02 s of it on loading the first batch, by 4 workers together: it weighs"
        " less in a longer pass, or with samples that load faster."
    ),
    "setting prefetch_factor": (
        "Each batch takes 80 ms, 4 may be in flight, and 12 are needed: set prefetch_factor=3 (now 1)."
    ),
}

# What a progress bar has room for.
SHORT = {
    "none": "waits 0 %",
    "start init": "waits 62 %: init",
    "workers": "waits 50 %: 5 more workers",
    "workers, as fast as the link": "waits 50 %: workers",
    "trainer sampler": "waits 33 %: sampler",
    "setting max_in_flight_bytes": "waits 38 %: bytes in flight",
}


@pytest.mark.parametrize("name", PASSES)
def test_sentence_of_each_bound(name):
    diagnosis = diagnose(records(**PASSES[name]))
    assert f"{diagnosis.bound} {diagnosis.part}".strip() == name.split(",")[0]
    _step, text = re.fullmatch(r"(step .* without the loader)\. (.*)", diagnosis.text).groups()
    assert text == SENTENCES.get(name, text)
    assert "{" not in text
    assert "\n" not in text
    assert text.endswith(".")
    assert 0 < len(diagnosis.short) <= 30
    assert diagnosis.short == SHORT.get(name, diagnosis.short)


def test_every_sentence_has_a_pass():
    passes = {name.split(",")[0] for name in PASSES} | {name.split()[0] for name in PASSES}
    waits = {"unclear pool", "unclear build", "unclear batch"}
    assert passes >= WORDS.keys() - waits - {"workers here"}


def test_page_has_a_section_for_each_bound():
    page = (Path(__file__).parents[3] / "docs" / "waiting.md").read_text()
    bounds = dict.fromkeys(name.split()[0] for name in WORDS)
    assert re.findall(r"^### `(\w+)`\n\n.", page, re.MULTILINE) == list(bounds)


@pytest.mark.parametrize(("seconds", "is_urgent"), [(0.5, False), (4.0, True)])
def test_a_second_is_worth_a_warning(seconds, is_urgent):
    """Of a pass that waits for half of its time."""
    num_batches = int(seconds / 0.0025)
    assert diagnose(records(**SLOW_WORKERS, num_batches=num_batches)).is_urgent is is_urgent


def test_numbers_of_a_diagnosis():
    diagnosis = diagnose(records(**SLOW_WORKERS))
    start = "step 5 ms = 2.5 ms yours + 2.5 ms waiting (50 %): 200 it/s, 400 without the loader. 4 workers: "
    assert diagnosis.text.startswith(start)
    rates = {name: diagnosis.evidence[f"{name}_rate"] for name in ("demand", "workers", "window", "delivered")}
    assert rates == pytest.approx({"demand": 400, "workers": 200, "window": 400, "delivered": 200})
    assert diagnosis.more_workers == (4, 5, 7)
    assert diagnosis.evidence["fetch_seconds"] == pytest.approx(0.019)
    assert diagnosis.evidence["collate_seconds"] == pytest.approx(0.001)
    metrics = diagnosis.metrics()
    assert (metrics["wait_share"], metrics["more_workers"]) == (pytest.approx(0.5), 5)
    assert metrics["step_seconds"] == pytest.approx(0.005)
    # The name of each ends with its unit.
    units = {"share", "seconds", "rate", "bytes", "workers", "tasks", "loading", "cpus"}
    assert {name.rpartition("_")[2] for name in metrics} - units == {"batches", "allowed", "spread"}
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", ["local", "unix:/run/pool"])
def test_unix_socket_is_no_network(name):
    options = PASSES["network"] | {"workers": dict.fromkeys(range(4), name)}
    assert diagnose(records(**options)).bound != "network"


# Passes of which little is known


@pytest.mark.parametrize(
    ("start", "what"),
    [
        ({}, "a worker, or the dataset that is being built"),
        ({"ready": 5.1}, "the imports and the dataset of the first worker, or worker_init_fn"),
        ({"ready": 5.1, "opened": 5.2}, "the first batch, which is being loaded"),
    ],
)
def test_pass_that_has_delivered_nothing_says_what_it_waits_for(start, what):
    recorder = record(make_recorder(now=5.0), num_batches=0, start=start)
    diagnosis = diagnose(recorder.snapshot(waiting=0.5))
    assert diagnosis.bound == "unclear"
    assert diagnosis.text == f"No batch after 500 ms: waiting for {what}."


@pytest.mark.parametrize("num_batches", range(2, 12))
def test_pass_of_few_batches_claims_nothing(num_batches):
    diagnosis = diagnose(record(num_batches=num_batches, consumer=0.01, blocked=0.1).snapshot())
    assert diagnosis.bound == "unclear"
    if num_batches <= 9:
        assert diagnosis.text.endswith(f" of {num_batches} batches does not say why. A pass of more batches may.")


def test_loop_that_does_nothing_takes_any_number_of_batches():
    diagnosis = diagnose(records(consumer=0.0, blocked=0.005))
    assert diagnosis.evidence["demand_rate"] == math.inf
    assert diagnosis.bound == "workers"
    assert diagnosis.more_workers is None
    assert diagnosis.text.endswith("give it a training step.")
