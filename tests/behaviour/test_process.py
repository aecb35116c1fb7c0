"""Workers of node servers have the settings of the script's process and thread, as forks of it do."""

from __future__ import annotations

import contextlib
import csv
import decimal
import os
import signal
import socket
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader
from rpcdataloader.host.process import ProcessSettings, ThreadSettings

pytestmark = pytest.mark.usefixtures("clean_client")


class Settings:
    """A dataset that tells what holds where it is loaded."""

    def __len__(self):
        return 1

    def __getitem__(self, _index):
        return look()


def look() -> dict[str, object]:
    found: dict[str, object] = {
        "arguments": sys.argv,
        "depth": sys.getrecursionlimit(),
        "field": csv.field_size_limit(),
        "dtype": torch.ones(1).dtype,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "third": str(decimal.Decimal(1) / 3),
        "grad": torch.ones(1, requires_grad=True).sum().requires_grad,
        "digits": digits(),
    }
    with socket.socket() as made:
        found["timeout"] = made.gettimeout()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        with open(path, "w", encoding="utf-8"):
            found["mode"] = oct(os.stat(path).st_mode)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.float64(1) / np.float64(0)
        found["zero"] = "inf"
    except FloatingPointError:
        found["zero"] = "error"
    try:
        warnings.warn("rarely right", UserWarning, stacklevel=1)
        found["warning"] = "none"
    except UserWarning:
        found["warning"] = "error"
    return found


def digits() -> object:
    try:
        return len(str(10**5000))
    except ValueError:
        return "too many"


def choose(number: int) -> None:
    """Set all that :func:`look` tells, one way or the other."""
    sys.argv = ["train.py", str(number)]
    sys.setrecursionlimit(2000 + number)
    csv.field_size_limit(5000 + number)
    torch.set_default_dtype((torch.float32, torch.float64)[number])
    torch.use_deterministic_algorithms(bool(number))
    decimal.getcontext().prec = 5 + number
    torch.set_grad_enabled(not number)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits((0, 1000)[number])
    socket.setdefaulttimeout(1.0 + number)
    os.umask((0o022, 0o077)[number])
    np.seterr(divide=("raise", "ignore")[number])
    warnings.filterwarnings(("ignore", "error")[number], "rarely", UserWarning)


@pytest.fixture(autouse=True)
def restored():
    process, thread = ProcessSettings.current(), ThreadSettings.current()
    yield
    process.apply()
    thread.apply()


def test_settings_of_process_and_thread_reach_workers_of_sessions_that_are_there(serve):
    server = serve("--num-workers", "1")
    loader = RPCDataloader(Settings(), None, collate_fn=dict, workers=server.address, num_workers=1)
    seen = []
    for number in range(2):
        choose(number)
        expected = look()
        assert list(loader) == [expected]
        seen.append(expected)
    # The limit on digits came with Python 3.11, and some versions of 3.10.
    assert all(seen[0][name] != seen[1][name] for name in seen[0] if name != "digits")


class Category(UserWarning):
    """Of a module that workers import."""


class Unknown(UserWarning):
    """Of one that no node has."""


Unknown.__module__ = "only_here"


class Filters:
    def __len__(self):
        return 1

    def __getitem__(self, _index):
        return [(action, str(category)) for action, _message, category, *_where in warnings.filters]


class Thread:
    def __len__(self):
        return 1

    def __getitem__(self, _index):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), str(product.dtype)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (contextlib.nullcontext(), (False, True, "torch.float32")),
        (torch.inference_mode(), (True, False, "torch.float32")),
        (torch.autocast("cpu", torch.bfloat16), (False, True, "torch.bfloat16")),
    ],
)
@pytest.mark.parametrize("place", ["node", "torch"])
def test_workers_have_the_modes_of_the_thread_that_begins_a_pass(shared_server, context, expected, place):
    with context:
        if place == "torch":
            loader = torch.utils.data.DataLoader(
                Thread(), None, collate_fn=list, num_workers=1, multiprocessing_context="fork"
            )
        else:
            loader = RPCDataloader(Thread(), None, collate_fn=list, num_workers=1, workers=shared_server.address)
        assert [tuple(sample) for sample in loader] == [expected]


def test_workers_of_this_machine_keep_all_filters_and_those_of_nodes_the_ones_whose_categories_they_have(shared_server):
    warnings.filterwarnings("ignore", category=Unknown)
    warnings.filterwarnings("ignore", category=Category)
    warnings.filterwarnings("once", category=BytesWarning)
    warnings.simplefilter("ignore", category=(FutureWarning, ImportWarning))
    here, there = (
        next(iter(RPCDataloader(Filters(), None, collate_fn=list, num_workers=1, workers=workers)))
        for workers in (None, shared_server.address)
    )
    assert here == Filters()[0]
    assert [entry for entry in there if entry in here] == [entry for entry in here if "only_here" not in entry[1]]


def test_worker_has_the_settings_of_the_thread_that_iterates(serve):
    def count() -> str:
        decimal.getcontext().prec = 3
        (batch,) = loader
        return batch["third"]

    server = serve("--num-workers", "1")
    loader = RPCDataloader(Settings(), None, collate_fn=dict, workers=server.address, num_workers=1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(count).result() == "0.333"
    assert [batch["third"] for batch in loader] == [str(decimal.Decimal(1) / 3)]


class Thirds:
    def __len__(self):
        return 8

    def __getitem__(self, _index):
        return str(decimal.Decimal(1) / 3), os.getpid()


def test_worker_that_replaces_a_persistent_one_has_the_settings_of_the_first_pass(serve):
    options = {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": True, "collate_fn": tuple}
    decimal.getcontext().prec = 3
    loader = RPCDataloader(Thirds(), None, workers=serve("--num-workers", "1").address, **options)
    assert {third for third, _pid in loader} == {"0.333"}
    decimal.getcontext().prec = 5
    batches = iter(loader)
    _third, lost = next(batches)
    os.kill(lost, signal.SIGKILL)
    thirds, pids = zip(*batches, strict=True)
    assert pids[-1] != lost
    assert {*thirds} == {"0.333"}
