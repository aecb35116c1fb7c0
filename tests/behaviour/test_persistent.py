"""Persistent workers of several loaders on a node server that has not room for all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectError
from tests.conftest import TIMEOUT_SCALE
from tests.support.comparison import assert_same
from tests.support.datasets import Augmented, Numbers

pytestmark = pytest.mark.usefixtures("clean_client")


def passes(server, length):
    """The first batches of two rounds over three loaders."""
    torch.manual_seed(4)
    datasets = [RPCDataset(server.address, Augmented) for _ in range(3)]
    loaders = [RPCDataloader(dataset, 5, shuffle=True, num_workers=1, persistent_workers=True) for dataset in datasets]
    return [batch for _round in range(2) for loader in loaders for batch in itertools.islice(loader, length)]


@pytest.mark.parametrize("length", [None, 2], ids=["at its end", "left in the middle"])
def test_workers_of_a_pass_make_room_for_other_loaders_which_give_the_same_batches(serve, caplog, length):
    full = passes(serve("--num-workers", "1", "--max-connections", "2"), length)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    wide = passes(serve("--num-workers", "1"), length)
    assert_same(full, wide)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(400))


def test_stream_of_a_pass_with_a_transform_makes_room_too(serve, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", str(10 * TIMEOUT_SCALE))
    server = serve("--num-workers", "2", "--max-connections", "2")
    options = {"num_workers": 1, "workers": server.address}
    left = RPCDataloader(Stream(), transform=abs, persistent_workers=True, **options)
    next(iter(left))
    others = [iter(RPCDataloader(Numbers(30), **options)) for _ in range(2)]
    assert [int(next(other)) for other in others] == [0, 0]


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
