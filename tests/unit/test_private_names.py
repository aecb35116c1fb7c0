"""Names of Python and torch that are private there, and that the package sets: a version without them would go unseen.

Those that it only reads are errors where they are missing.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map


def test_lock_of_an_event_and_of_a_future_has_the_name_under_which_it_is_replaced():
    assert isinstance(vars(threading.Event())["_cond"], threading.Condition)
    assert isinstance(vars(Future())["_condition"], threading.Condition)


def test_lock_of_a_condition_is_taken_by_names_that_it_looks_up_itself():
    assert threading.Condition()._is_owned() is False


def test_worker_info_is_what_its_module_has(monkeypatch):
    info = object()
    monkeypatch.setattr(worker, "_worker_info", info)
    assert get_worker_info() is info


def test_default_collate_calls_what_its_table_has_for_tensors(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_options: len(batch))
    assert default_collate([(torch.zeros(1), 1)] * 3)[0] == 3
