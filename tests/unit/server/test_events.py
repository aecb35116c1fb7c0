"""What the processes of a node tell each other."""

from __future__ import annotations

import pytest

from rpcdataloader.server.events import (
    Drain,
    Origin,
    Printed,
    SessionBegun,
    WorkerBegun,
    WorkerConnection,
    decode,
    encode,
)

ORIGIN = Origin("gpu01:2304", None, "4711")


@pytest.mark.parametrize(
    "event",
    [
        Drain(),
        SessionBegun("00ff", "client é", ORIGIN),
        WorkerBegun(3, 4711),
        WorkerConnection(1, 17, "10.0.0.7:5", None),
        Printed("10 %\x00 é", "worker 3"),
        WorkerConnection(2, 0, "10.0.0.7:6", "all connections are in use"),
    ],
)
def test_events_arrive_as_they_were(event):
    assert decode(encode(event)) == event


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"{}", "unknown event None"),
        (b'{"event": "Event"}', "unknown event 'Event'"),
        (b'{"event": "WorkerBegun", "worker": 1}', "pid is missing"),
        (b'{"event": "WorkerBegun", "worker": true, "pid": 1}', "worker is of another type"),
        (b'{"event": "SessionBegun", "id": "", "name": "", "origin": {}}', "client is missing"),
    ],
)
def test_what_is_no_event_is_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        decode(data)
