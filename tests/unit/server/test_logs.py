from __future__ import annotations

import logging

import pytest

from rpcdataloader.server.events import Refused
from rpcdataloader.server.logs import LimitedLog


def test_each_reason_to_refuse_a_host_has_a_line_however_alike_they_begin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rpcdataloader.server")
    log = LimitedLog()
    clients = [("CPython 3.9", 11), ("CPython 3.10", 12), ("CPython 3.9", 13)]
    for port, (python, pid) in enumerate(clients, 40000):
        why = f"the node server on a runs CPython 3.11, the client on b (pid {pid}) runs {python}"
        log.refused(Refused(f"10.0.0.9:{port}", why, logging.INFO))
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["3.9", "3.10"]
