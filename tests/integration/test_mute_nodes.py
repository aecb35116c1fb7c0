"""Nodes that accept everything and answer nothing: a pass goes on elsewhere, and says what it waits for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset
from tests.conftest import wait_until
from tests.integration.datasets import FieldStream, Numbers, Processes, note, notes, wait_for

pytestmark = pytest.mark.usefixtures("impatient")


class NeverBuilt(Numbers):
    """Its constructor waits for a FIFO."""

    def __init__(self, log, fifo):
        super().__init__()
        note(log, os.getpid())
        wait_for(fifo)


@contextlib.contextmanager
def busy(address, tmp_path, fifo):
    """Keep this process's session at ``address`` busy with a constructor that hangs."""
    log = str(tmp_path / "constructors")
    thread = threading.Thread(target=RPCDataset, args=(address, NeverBuilt, log, fifo))
    thread.start()
    try:
        wait_until(lambda: notes(log), what="the constructor")
        yield
    finally:
        open(fifo, "w").close()
        thread.join()


def samples_of(loader, then=lambda _batch: None):
    samples = []
    for batch in loader:
        samples.append(batch[0].tolist())
        then(batch)
    return samples


def test_stream_whose_worker_is_lost_while_its_session_hangs_goes_on_elsewhere(serve, tmp_path, fifo):
    first, second = [serve("--num-workers", "2") for _ in range(2)]

    def loader():
        return RPCDataloader(FieldStream(), batch_size=3, num_workers=2, workers=[first.address, second.address])

    torch.manual_seed(1)
    undisturbed = samples_of(loader())
    with contextlib.ExitStack() as stack:
        killed = []

        def kill(batch):
            pid = int(batch[1][-1])
            if not killed and pid in first.processes():
                stack.enter_context(busy(first.address, tmp_path, fifo))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        torch.manual_seed(1)
        assert samples_of(loader(), kill) == undisturbed
        assert killed


class BuiltLater(Processes):
    """One of the nodes that are asked waits for the FIFO."""

    def __init__(self, marker, fifo):
        super().__init__()
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            wait_for(fifo)


def sessions_of(dataset):
    """The sessions that have delivered batches in a pass."""
    return {session for _index, _pid, sessions in RPCDataloader(dataset) for session in sessions.tolist()}


def test_passes_begin_without_a_node_that_does_not_answer_and_it_joins_later(serve, tmp_path, fifo, caplog):
    addresses = [serve("--num-workers", "1").address for _ in range(2)]
    dataset = RPCDataset(addresses, BuiltLater, str(tmp_path / "marker"), fifo)
    try:
        assert "until it answers: it prepares dataset BuiltLater" in caplog.text
        assert [len(sessions_of(dataset)) for _epoch in range(2)] == [1, 1]
    finally:
        open(fifo, "w").close()
    wait_until(lambda: len(sessions_of(dataset)) == 2)
