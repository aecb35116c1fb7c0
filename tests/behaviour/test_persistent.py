"""Persistent workers of several loaders, on a node server that has not room for all."""

from __future__ import annotations

import pytest

from rpcdataloader import RPCDataloader
from rpcdataloader.errors import ConnectError
from tests.support.datasets import Augmented, Numbers

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
