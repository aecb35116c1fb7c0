"""Reads files in the Chrome trace format, and checks what viewers ask of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

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
