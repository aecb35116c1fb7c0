"""The threads of a training process."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from rpcdataloader import RPCDataloader
from tests.support.datasets import Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


def test_training_process_has_one_thread_per_worker_and_a_few_more():
    loader = RPCDataloader(Numbers(200), batch_size=1, workers="local:40", persistent_workers=True)
    for _ in loader:
        pass
    threads = Counter(thread.name.split()[0] for thread in threading.enumerate() if thread.name.startswith("rpcdl"))
    assert threads.pop("rpcdl-recv") == 41  # the session's, too
    assert threads.pop("rpcdl-send") == 1
    assert threads.total() <= 4
