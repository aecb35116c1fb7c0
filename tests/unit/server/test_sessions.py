"""What a node server decides for its sessions."""

from __future__ import annotations

import os
from types import SimpleNamespace

from rpcdataloader.server.counters import GATE, CounterTable
from rpcdataloader.server.events import Decided, WantsRoom
from rpcdataloader.server.logs import Origin
from rpcdataloader.server.sessions import Sessions
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE


def test_worker_for_which_the_counters_have_no_row_is_refused():
    counters = CounterTable(num_rows=2)
    context = ServerContext(ServerSettings(), INSECURE, 2, counters=counters)
    decisions = []
    row = counters.open(GATE, os.getpid(), 0)
    connection, link = SimpleNamespace(row=row), SimpleNamespace(post=decisions.append)
    session = SimpleNamespace(id="00", client="client gpu01:2304", connection=connection, workers={}, link=link)
    wanted = WantsRoom(1, 300, "10.0.0.7:5", Origin("gpu01:2304", None, ""))
    sessions = Sessions(context, None, None)
    sessions._decide(session, wanted)
    assert decisions == [Decided(1, "at most 1 processes can serve connections", 0)]
    assert (session.workers, counters.look()[0].refused) == ({}, 0)
