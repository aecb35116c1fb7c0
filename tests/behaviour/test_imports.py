"""Modules that the pickles of a loader name are imported once on a node, and not by every worker in every pass."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rpcdataloader import RPCDataloader, RPCDataset

MODULE = """
import os
from pathlib import Path

import torch

with open(Path(__file__).with_suffix(".imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")
if Path(__file__).with_suffix(".picky").exists() and Path("/proc/self/comm").read_text() == "rpcdl-session\\n":
    raise SystemExit("not here")

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

def collate(samples):
    return samples

def start(number):
    pass
"""


@pytest.mark.usefixtures("clean_client")
@pytest.mark.parametrize("is_picky", [False, True])
def test_later_passes_import_nothing_that_the_session_can_import(shared_server, tmp_path, monkeypatch, is_picky):
    monkeypatch.syspath_prepend(tmp_path)
    modules = []
    for role in "dataset", "start", "collate":
        (tmp_path / f"{role}_of_mine_{is_picky}.py").write_text(MODULE)
        modules.append(importlib.import_module(f"{role}_of_mine_{is_picky}"))
    if is_picky:
        (tmp_path / "collate_of_mine_True.picky").touch()
    dataset = RPCDataset(shared_server.address, modules[0].Numbers, build="worker")
    options = {"worker_init_fn": modules[1].start, "collate_fn": modules[2].collate}
    loader = RPCDataloader(dataset, batch_size=2, num_workers=2, **options)
    counts = []
    for _epoch in range(3):
        assert list(loader) == [[0, 1], [2, 3]]
        counts.append([len(Path(module.__file__).with_suffix(".imports").read_text()) for module in modules])
    assert counts[1][:2] == counts[2][:2]
    if is_picky:
        assert counts[1][2] < counts[2][2]  # in each worker, as it fails in the session
    else:
        assert counts[1] == counts[2]
