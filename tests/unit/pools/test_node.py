"""Signs of life of an actor; what a real node server makes of them is in ``tests/integration/test_pool_node.py``."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

from rpcdataloader.pools import node


def test_server_is_told_that_its_actor_is_there_from_the_beginning_and_again_until_it_is_to_end(monkeypatch):
    monkeypatch.setattr(node, "HEARTBEAT", 0.01)
    reading, writing = os.pipe()
    closing = threading.Event()
    with open(reading, "rb", buffering=0) as theirs, open(writing, "wb", buffering=0) as ours:
        thread = threading.Thread(target=node._beat, args=[SimpleNamespace(stdin=ours), closing])
        thread.start()
        assert theirs.read(1) + theirs.read(1) + theirs.read(1) == b"\n\n\n"
        closing.set()
        thread.join()
        assert ours.closed
        assert set(theirs.read()) <= set(b"\n")
