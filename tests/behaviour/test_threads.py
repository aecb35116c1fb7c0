"""The threads of a training process."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from rpcdataloader import RPCDataloader
from tests.support.crew import wait_for_crew
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


def test_training_process_has_one_thread_per_worker_and_a_few_more(wide_servers):
    loader = RPCDataloader(Numbers(200), batch_size=1, workers=wide_servers[0].address, persistent_workers=True)
    iterator = iter(loader)
    wait_for_crew(iterator, 8)
    assert len(list(iterator)) == 200
    threads = Counter(thread.name.split()[0] for thread in threading.enumerate() if thread.name.startswith("rpcdl"))
    assert threads.pop("rpcdl-recv") == 9  # the session's, too
    assert threads.pop("rpcdl-send") == 1
    assert threads.total() <= 4
