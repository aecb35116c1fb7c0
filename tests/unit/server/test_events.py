"""What the processes of a node tell each other."""

from __future__ import annotations

import pytest

from rpcdataloader.server.events import Decided, Drain, Printed, SessionBegun, WantsRoom, decode, encode
from rpcdataloader.server.logs import Origin

ORIGIN = Origin("gpu01:2304", None, "4711")


@pytest.mark.parametrize(
    "event",
    [
        Drain(),
        SessionBegun("00ff", "client é", ORIGIN),
        WantsRoom(3, 4711, "10.0.0.7:5", Origin("gpu01:2304", 2, "")),
        Decided(1, None, 17),
        Printed("10 %\x00 é", "worker 3"),
        Decided(2, "all connections are in use", 0),
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
        (b'{"event": "Decided", "worker": 1, "reason": null}', "row is missing"),
        (b'{"event": "Decided", "worker": true, "reason": null, "row": 0}', "worker is of another type"),
        (b'{"event": "SessionBegun", "id": "", "name": "", "origin": {}}', "client is missing"),
    ],
)
def test_what_is_no_event_is_refused(data, problem):
    with pytest.raises(ValueError, match=problem):
        decode(data)
