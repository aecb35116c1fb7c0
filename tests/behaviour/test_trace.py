"""``loader.trace()``: files that viewers open, whatever becomes of the script."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rpcdataloader import RPCDataloader
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")

# Files in the Chrome trace format, and what viewers ask of them

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    """The events of a file."""
    events = json.loads(path.read_text(), parse_float=Decimal)
    check(events)
    return events


def of_kind(events: Sequence[Event], phase: str, name: str = "") -> list[Event]:
    return [event for event in events if event["ph"] == phase and name in ("", event["name"])]


def tracks_of(events: Sequence[Event]) -> dict[tuple[int, int], tuple[str, str]]:
    """The names of process and thread of each track."""
    processes = {event["pid"]: event["args"]["name"] for event in of_kind(events, "M", "process_name")}
    return {
        (event["pid"], event["tid"]): (processes[event["pid"]], event["args"]["name"])
        for event in of_kind(events, "M", "thread_name")
    }


def interval_of(event: Event) -> tuple[Decimal, Decimal]:
    return event["ts"], event["ts"] + event["dur"]


def check(events: Sequence[Event]) -> None:
    """Complete events of a track nest, and arrows begin and end inside of events."""
    tracks = tracks_of(events)
    slices = defaultdict(list)
    for event in of_kind(events, "X"):
        assert event["dur"] > 0
        assert event["ts"] >= 0
        slices[event["pid"], event["tid"]].append(event)
    assert slices.keys() <= tracks.keys()
    for of_track in slices.values():
        check_nesting([interval_of(event) for event in of_track])
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for arrow in arrows.values():
        assert [event["ph"] for event in arrow] == ["s", "t", "f"]
        for event in arrow:
            around = map(interval_of, slices[event["pid"], event["tid"]])
            assert any(begin <= event["ts"] < end for begin, end in around), event


def check_nesting(intervals: list[tuple[Decimal, Decimal]]) -> None:
    ends: list[Decimal] = []
    for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], (begin, end, ends)
        ends.append(end)


@pytest.fixture
def make(shared_server):
    """Loaders with two workers."""

    def make(size=20, **options):
        return RPCDataloader(
            Numbers(size), batch_size=None, workers=shared_server.address, **{"num_workers": 2, **options}
        )

    return make


def numbers_of(events):
    return [int(event["args"]["of"].split()[1].rstrip(",")) for event in of_kind(events, "X", "next")]


def test_every_batch_is_followed_on_the_tracks_of_its_worker_and_of_the_consumer(make, shared_server, tmp_path):
    loader = make()
    with loader.trace(tmp_path / "trace.json"):
        assert len(list(loader)) == 20
    events = load(tmp_path / "trace.json")
    assert numbers_of(events) == list(range(20))
    tracks = tracks_of(events)
    consumers = {track for track, (process, _) in tracks.items() if process == f"trainer (pid {os.getpid()})"}
    assert len(consumers) == 1
    workers = {names for track, names in tracks.items() if track not in consumers}
    assert {process for process, _ in workers} == {shared_server.address}
    assert {name.split(" (")[0] for _, name in workers} <= {"worker 1", "worker 2"}  # one may come too late
    assert {(event["pid"], event["tid"]) for event in of_kind(events, "X", "task")} == tracks.keys() - consumers
    # Each arrow leads from the sampler to the worker to the loop, which is later.
    draws, tasks, deliveries = (of_kind(events, "X", name) for name in ("draw", "task", "next"))
    for draw, task, delivery in zip(draws, tasks, deliveries, strict=True):
        assert draw["ts"] < task["ts"] < interval_of(delivery)[1]
    assert len(of_kind(events, "t")) == 20
    parts = [part.split()[0] for part in deliveries[0]["args"]["of"].split(", ")]
    assert parts == ["batch", "window", "send", "worker", "receive", "decode", "ready"]


def test_passes_inside_of_the_block_are_traced_and_others_are_not(make, tmp_path):
    """An exception may end the block."""
    loader = make(persistent_workers=True)
    list(loader)
    with contextlib.suppress(LookupError), loader.trace(tmp_path / "trace.json"):
        for _ in range(2):
            list(loader)
        raise LookupError
    list(loader)
    assert len(of_kind(load(tmp_path / "trace.json"), "X", "next")) == 40


def warnings_of(caplog):
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [warning for warning in warnings if " without the loader. " not in warning]  # of a busy machine


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_file_that_cannot_be_written_is_one_warning_and_the_pass_goes_on(make, tmp_path, caplog, name):
    loader = make()

    def run():
        with loader.trace(tmp_path / name):
            assert len(list(loader)) == 20
            raise LookupError

    with pytest.raises(LookupError) as raised:
        run()
    assert raised.value.__context__ is None
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"cannot write the trace {tmp_path / name}, and the training goes on without it: [Errno ")


def test_each_rank_writes_a_file_of_its_own(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make(partition=None)
    with loader.trace(tmp_path / "trace.json"):
        list(loader)
    (warning,) = warnings_of(caplog)
    assert re.search(r"all 2 ranks .* as in trace-\{rank\}.json", warning)
    assert not list(tmp_path.iterdir())
    with loader.trace(tmp_path / "trace-{rank}.json"):
        list(loader)
    events = load(tmp_path / "trace-1.json")
    assert any(process.startswith("[rank 1 of 2] trainer") for process, _ in tracks_of(events).values())
