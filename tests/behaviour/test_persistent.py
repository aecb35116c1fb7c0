"""Persistent workers: of several loaders on a node server that has not room for all, and from epoch to epoch."""

from __future__ import annotations

import threading

import pytest

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.diagnosis.records import Recorder
from rpcdataloader.errors import ConnectError
from rpcdataloader.loader.executor import Executor
from tests.support.datasets import Augmented, FieldStream, Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


def test_error_of_a_full_server_names_the_loaders_of_this_process(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "1")
    server = serve("--num-workers", "1", "--max-connections", "2")
    options = {"num_workers": 1, "workers": server.address, "persistent_workers": True}
    under_way = [iter(RPCDataloader(Numbers(30), **options)) for _ in range(2)]
    for iterator in under_way:
        next(iterator)
    what = (
        r"busy: all 2 connections are in use \(--max-connections\); this process holds 2 for a loader of Numbers \(2 "
    )
    with pytest.raises(ConnectError, match=what):
        list(RPCDataloader(Augmented(), reconnect_timeout=0, **options))
    assert all(len(list(iterator)) == 29 for iterator in under_way)


def test_worker_that_is_opened_as_an_epoch_begins_has_the_streams_of_its_epoch(shared_server, monkeypatch):
    """Another thread that replaces a dead one reads both while the consumer writes them."""
    dataset = RPCDataset(shared_server.address, FieldStream, 4)
    loader = RPCDataloader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert len(list(iterator)) == 4
    opened, begin, opening = [], Recorder.begin, Executor.opening

    def begin_beside_an_opening(recorder, now):
        thread = threading.Thread(target=iterator.driver._opening, args=(0,))
        thread.start()
        thread.join(1.0)  # if it does not wait for the lock
        begin(recorder, now)

    def note_opening(executor, begun, place, stream):
        opened.append((begun.progress.streams[place], stream))
        return opening(executor, begun, place, stream)

    monkeypatch.setattr(Recorder, "begin", begin_beside_an_opening)
    monkeypatch.setattr(Executor, "opening", note_opening)
    assert len(list(loader)) == 4
    ((of_its_epoch, given),) = opened
    assert given == of_its_epoch
