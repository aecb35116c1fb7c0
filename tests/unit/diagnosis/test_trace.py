"""The Chrome trace format, of passes in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from rpcdataloader.diagnosis.records import Probe, Setup
from rpcdataloader.diagnosis.trace import Tracks
from rpcdataloader.wire.messages import Stages
from tests.simulation.pipeline import Pipeline, Scenario
from tests.simulation.test_diagnosis import CAUSES
from tests.traces import check, interval_of, of_kind, tracks_of

PROBE = Probe(
    7, draw=0.001, added=1.0, assigned=1.001, sent=1.002, arrived=1.05, received=1.06, answered=1.07, wait=0.03,
    stages=Stages(fetch=0.02, collate=0.01, encode=0.002, cpu=0.03), delivered=1.08,
)  # fmt: skip
SETUP = Setup({3: "node07:6543"}, 4, 2, 2**30, {3: 'worker 3 (pid 88) on "node07":6543'})


def parse(lines: list[str]) -> list[dict[str, Any]]:
    events = json.loads(f"[{','.join(lines)}]", parse_float=Decimal)
    check(events)
    return events


def trace(scenario: Scenario) -> list[dict[str, Any]]:
    pipeline = Pipeline(scenario, seed=1)
    tracks, lines = Tracks("trainer", 0.0), []
    pipeline.recorder.trace = lambda probe, setup, worker: lines.extend(
        tracks.events_of(probe, setup, worker, "consumer")
    )
    pipeline.run()
    return parse([*tracks.names[:1], *lines])


@pytest.mark.parametrize("name", CAUSES)
def test_events_of_every_pass_nest_and_every_batch_is_followed(name):
    scenario = replace(CAUSES[name], num_batches=200)
    events = trace(scenario)
    assert len(of_kind(events, "X", "next")) == len(of_kind(events, "b", "batch")) == 200
    assert len(of_kind(events, "X", "task")) == 200
    assert len(tracks_of(events)) <= 1 + sum(scenario.nodes)


def test_parts_of_a_batch_are_those_of_its_stages():
    tracks = Tracks("trainer", 0.5)
    events = parse([*tracks.names[:1], *tracks.events_of(PROBE, SETUP, 3, "consumer")])
    assert tracks_of(events) == {
        (1, 1): ("trainer", "consumer"), (2, 2): ("node07:6543", 'worker 3 (pid 88) on "node07":6543'),
    }  # fmt: skip
    shown = {event["name"]: tuple(map(float, interval_of(event))) for event in of_kind(events, "X")}
    assert shown == {
        "draw": (499000, 500000),
        "next": (550000, 580000),
        "task": (502000, 534000),
        "fetch": (502000, 522000),
        "collate": (522000, 532000),
        "encode": (532000, 534000),
    }
    begins = {event["name"]: float(event["ts"]) for event in of_kind(events, "b")}
    assert begins == {
        "batch": 499000, "draw": 499000, "window": 500000, "send": 501000, "worker": 502000, "receive": 550000,
        "decode": 560000, "ready": 570000,
    }  # fmt: skip


def test_tasks_of_a_worker_follow_each_other():
    tracks = Tracks("trainer", 0.5)
    second = replace(PROBE, number=8, arrived=1.07, received=1.07)
    events = parse([*tracks.names, *tracks.events_of(PROBE, SETUP, 3, "c"), *tracks.events_of(second, SETUP, 3, "c")])
    first, second = map(interval_of, of_kind(events, "X", "task"))
    assert first[1] == second[0]


def test_names_are_told_once_and_all_of_them_again_for_another_file():
    tracks = Tracks('trainer "a"', 0.5)
    first, second = (tracks.events_of(PROBE, SETUP, 3, "consumer") for _ in range(2))
    assert len([line for line in first if '"ph":"M"' in line]) == 3
    assert not [line for line in second if '"ph":"M"' in line]
    parse([*tracks.names, *second])
    assert len(tracks.names) == 4


@pytest.mark.parametrize(
    "probe", [replace(PROBE, stages=None), replace(PROBE, added=0.4)], ids=["not measured", "drawn before"]
)
def test_batch_of_which_too_little_is_known_is_left_out(probe):
    assert Tracks("trainer", 0.5).events_of(probe, SETUP, 3, "consumer") == []


def test_worker_and_node_that_were_lost_have_a_track():
    tracks = Tracks("trainer", 0.5)
    events = parse([*tracks.names, *tracks.events_of(PROBE, Setup({}, 4, 2, 2**30), 3, "consumer")])
    assert ("lost nodes", "worker 3") in tracks_of(events).values()


def test_times_that_contradict_each_other_make_no_broken_trace():
    # An answer before the send call returned, a worker whose clock is too fast, and a wait that began with the pass.
    probe = replace(PROBE, sent=1.055, stages=Stages(fetch=5.0, collate=1.0), wait=0.7, answered=1.09)
    tracks = Tracks("trainer", 0.5)
    lines = [line for _ in range(3) for line in tracks.events_of(probe, SETUP, 3, "consumer")]
    parse([*tracks.names[:1], *lines])
