"""A loop that waits long for a batch says for which, and where that is."""

from __future__ import annotations

import re

import pytest

from rpcdataloader import RPCDataloader
from tests.support.clocks import shorten
from tests.support.datasets import wait_for

pytestmark = pytest.mark.usefixtures("clean_client")


class Hanging:
    def __init__(self, fifo):
        self.fifo = fifo

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            wait_for(self.fifo)
        return index


def test_a_long_wait_is_told_with_the_stack_of_the_worker_and_nothing_ends(shared_server, fifo, monkeypatch, caplog):
    shorten(monkeypatch, "long wait")
    batches = iter(RPCDataloader(Hanging(fifo), batch_size=None, workers=shared_server.address, num_workers=2))
    assert [next(batches) for _ in range(3)] == [0, 1, 2]

    def let_go(record):
        if "has waited" in record.getMessage():
            open(fifo, "w").close()
        return True

    caplog.handler.addFilter(let_go)
    try:
        assert list(batches) == [3, 4, 5, 6, 7]
    finally:
        caplog.handler.removeFilter(let_go)
    (told,) = [message for message in caplog.messages if "has waited" in message]
    assert re.match(r"the loop has waited 1 s for batch 3 \(indices 3\), which is at worker \d+ \(pid \d+\) on ", told)
    assert re.search(r" \(tasks: \d at workers.*; workers: 2 at work; nodes: 1 up; next decision in [\d.]+ s\)\n", told)
    assert re.search(r'datasets\.py", line \d+ in wait_for\n', told)
