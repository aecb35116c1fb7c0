"""``env=``: datasets and workers see variables of the training process, wherever and whenever they are made."""

from __future__ import annotations

import os
import tempfile
import time

import pytest
from torch.utils.data import Dataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async

pytestmark = pytest.mark.usefixtures("clean_client")


def look():
    return os.environ.get("PROFILE")


class Looks(Dataset):
    def __init__(self):
        self.built = look()

    def __getitem__(self, _index):
        return self.built, look()


def seen_by(dataset, **options):
    (batch,) = RPCDataloader(dataset, batch_size=None, sampler=[0], collate_fn=tuple, **options)
    return batch


@pytest.fixture(autouse=True)
def profile(monkeypatch):
    monkeypatch.setenv("PROFILE", "mine")


@pytest.fixture
def server(serve):
    return serve("--num-workers", "2", before="import os; os.environ.pop('PROFILE', None)")


@pytest.mark.parametrize("build", ["node", "worker"])
def test_dataset_and_workers_see_it(server, build):
    dataset = RPCDataset(server.address, Looks, build=build, env=["PRO*"])
    assert seen_by(dataset) == ("mine", "mine")


class Places(Dataset):
    def __getitem__(self, _index):
        return time.tzname[0], tempfile.gettempdir()


def test_python_itself_follows_what_it_has_read_before(server, tmp_path):
    env = {"TZ": "XYZ-9", "TMPDIR": str(tmp_path)}
    assert seen_by(RPCDataset(server.address, Places, env=env)) == ("XYZ", str(tmp_path))


def test_instance_and_workers_of_a_loader_see_it_and_nothing_else_comes(server, monkeypatch):
    monkeypatch.setenv("OTHER", "stays here")
    without = RPCDataloader(Looks(), None, sampler=[0], collate_fn=tuple, workers=server.address)
    assert next(iter(without))[1] is None  # kept, so that the dataset is not sent again
    loader = {"workers": server.address, "env": {"PROFILE": "another"}}
    assert seen_by(Looks(), **loader) == ("mine", "another")  # of a session that was there without it, too
    assert rpc_async(server.address, os.getenv, ("OTHER",)).wait() is None


def test_two_that_want_different_values_are_told_before_anything_is_built(server):
    RPCDataset(server.address, Looks, env={"PROFILE": "first"})
    text = "env: another dataset or loader of this process has sent another value, which differs in PROFILE, and"
    with pytest.raises(ValueError, match=text):
        RPCDataset(server.address, os._exit, 3, env={"PROFILE": "second"})
    with pytest.raises(ValueError, match=text):
        seen_by(Looks(), workers=server.address, env={"PROFILE": "second"})
    assert seen_by(RPCDataset(server.address, Looks, env={"PROFILE": "first"})) == ("first", "first")


def test_values_are_those_when_the_loader_was_made(server, monkeypatch):
    loader = RPCDataloader(Looks(), None, sampler=[0], collate_fn=tuple, workers=server.address, env=["PROFILE"])
    monkeypatch.setenv("PROFILE", "later")
    for _epoch in range(2):
        assert [batch[1] for batch in loader] == ["mine"]


def test_in_this_process_it_is_set_here():
    assert seen_by(RPCDataset("inline", Looks, env={"PROFILE": "inline"})) == ("inline", "inline")
    assert seen_by(Looks(), workers="inline", env={"PROFILE": "again"}) == ("inline", "again")


def test_without_workers_it_is_refused():
    with pytest.raises(ValueError, match="env needs workers"):
        RPCDataloader(Looks(), env=["PROFILE"])
