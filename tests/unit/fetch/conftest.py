from __future__ import annotations

import pytest
import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rpcdataloader.fetch import remote, seeding


@pytest.fixture
def _process_restored(monkeypatch):
    """A worker's process is not meant to be used for anything else; this one is."""
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensor_fn)
    monkeypatch.setattr(remote, "_loader", None)
    with seeding.generators_restored():
        yield
    assert seeding._current_seed is None
