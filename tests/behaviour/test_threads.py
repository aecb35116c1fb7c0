"""The threads of a training process."""

from __future__ import annotations

import sys
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


IN_A_THREAD = """
import threading
import numpy as np
from rpcdataloader import RPCDataloader

def train():
    threading.main_thread().join()
    print([batch.shape for batch in RPCDataloader(np.zeros((2, 1 << 17)), num_workers=1)])

threading.Thread(target=train).start()
"""


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no thread by then")
def test_a_thread_goes_on_to_train_once_the_main_thread_has_ended(zygote):
    ended = zygote.start(IN_A_THREAD).wait()
    assert (ended.status, ended.output.count("131072")) == (0, 2), ended.errors
