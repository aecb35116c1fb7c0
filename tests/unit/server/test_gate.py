"""What a gate answers to questions for the status."""

from __future__ import annotations

import json
import os
import threading

from rpcdataloader.server.events import Link
from rpcdataloader.server.gate import ask_for_stacks


def test_stacks_that_are_written_at_the_same_time_are_all_kept():
    """Sessions share the offset of the file, which the kernel does not lock: two may begin at the same place."""
    gate, node = Link.pair()

    def write_both():
        _event, (file, pipe) = node.recv()
        for pid in 1, 2:
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, json.dumps([pid, "stack"]).encode() + b"\n")
        os.close(file)
        os.close(pipe)

    thread = threading.Thread(target=write_both)
    thread.start()
    assert ask_for_stacks(gate) == {1: "stack", 2: "stack"}
    thread.join()
    gate.close()
    node.close()
