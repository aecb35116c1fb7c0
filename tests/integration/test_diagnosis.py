"""``loader.diagnosis()`` names the cause of every wait, with real workers and a consumer of known speed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from rpcdataloader import Diagnosis, RPCDataloader
from rpcdataloader.diagnosis.words import WORDS
from rpcdataloader.errors import LocalProtocolError
from tests.integration.causes import SLOW_NODE, Causes, SlowSampler, StreamOfCauses, collate_slowly
from tests.integration.crew import wait_for_crew, workers_of
from tests.integration.tampering import Proxy

pytestmark = pytest.mark.usefixtures("shared_server", "wide_servers", "clean_client")

# On a machine that has other things to do, workers that burn CPU time wait for it, too, and are told so.
BUSY = {"workers", "oversubscribed"}


class Cause(NamedTuple):
    """A pass that waits for a known reason.

    Attributes:
        dataset: What is loaded, without automatic collation if there is no batch size.
        consumer: Seconds that the loop takes for a batch.
        num_batches: Batches that it takes.
        bounds: What may be named.
        options: More arguments of the loader.
        around: What is done to the pool during the pass: a context manager that is given the iterator.
    """

    dataset: Any
    consumer: float
    num_batches: int
    bounds: set[str]
    options: dict[str, Any]
    around: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@contextlib.contextmanager
def stopped_in_turns(iterator: Any) -> Iterator[None]:
    """Each worker is stopped for a while, one after the other."""
    wait_for_crew(iterator, 8)
    pids = [worker.pid for worker in workers_of(iterator)]
    assert min(pids) > 1
    is_over = threading.Event()

    def stop() -> None:
        while not is_over.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                is_over.wait(0.3)
                os.kill(pid, signal.SIGCONT)
                if is_over.wait(0.05):
                    break

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


CAUSES = {
    "none": Cause(Causes(stall=0.002), 0.1, 25, {"none"}, {"prefetch_factor": 4}),
    "workers": Cause(Causes(cpu=0.01), 0.001, 60, BUSY, {"num_workers": 1}),
    "workers, streams": Cause(StreamOfCauses(cpu=0.01), 0.001, 60, BUSY, {"num_workers": 1}),
    "storage": Cause(Causes(stall=0.04), 0.002, 80, {"storage"}, {}),
    "storage, streams": Cause(StreamOfCauses(stall=0.04), 0.002, 80, {"storage"}, {}),
    "collate": Cause(
        Causes(stall=0.001), 0.001, 40, {"collate"}, {"batch_size": 2, "collate_fn": collate_slowly, "num_workers": 1}
    ),
    "oversubscribed": Cause(Causes(cpu=0.02), 0.001, 80, {"oversubscribed"}, {"num_workers": 8}),
    "sampler": Cause(Causes(), 0.005, 60, {"sampler"}, {"sampler": SlowSampler(0.02)}),
    "window": Cause(Causes(stall=0.004), 0.004, 50, {"window"}, {"prefetch_factor": 1}),
    "straggler": Cause(
        Causes(stall=0.01), 0.01, 200, {"straggler"}, {"num_workers": 8, "prefetch_factor": 2}, stopped_in_turns
    ),
    "network": Cause(Causes(size=500_000), 0.01, 25, {"network"}, {}),
    "node": Cause(Causes(stall=0.03), 0.003, 150, {"node"}, {"num_workers": 8}),
}


def run(cause: Cause, addresses: list[str], speed: float = 1.0) -> tuple[Diagnosis, RPCDataloader]:
    """Take the batches of a pass; the first epoch of persistent workers is for their imports."""
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, **cause.options}
    loader = RPCDataloader(cause.dataset, workers=addresses, persistent_workers=True, **options)
    batches = iter(loader)
    for _ in range(2 * options["num_workers"]):
        next(batches)
    batches = iter(loader)
    with cause.around(batches):
        for _ in range(cause.num_batches):
            next(batches)
            time.sleep(cause.consumer / speed)
        return loader.diagnosis(), loader


# Servers of the causes that need their own.


def delayed(direction: str, _connection: int, number: int, frame: Any) -> list[Any]:
    """A link with latency, for one request at a time."""
    if direction == "down" and number > 2:
        time.sleep(0.06)
    return [frame]


class NarrowLink:
    """A link of 20 MB per second, which all connections share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, direction: str, _connection: int, _number: int, frame: Any) -> Any:
        return self._in_parts(frame.encode()) if direction == "down" and frame.blocks else [frame]

    def _in_parts(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), 50_000):
            with self._lock:
                time.sleep(0.0025)
            yield data[start : start + 50_000]


@contextlib.contextmanager
def pool(name: str, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The node servers of a cause."""
    get = request.getfixturevalue
    if name == "node":
        slow = get("serve")("--num-workers", "4", before=f"os.environ[{SLOW_NODE!r}] = '1'")
        yield [slow.address, get("wide_servers")[0].address]
    elif name in ("window", "network"):
        with Proxy(get("shared_server").address, delayed if name == "window" else NarrowLink()) as proxy:
            yield [proxy.address]
    else:
        yield [get("wide_servers")[0].address]


@pytest.mark.parametrize("name", CAUSES)
def test_diagnosis_names_the_cause(name, request):
    cause = CAUSES[name]
    with pool(name, request) as addresses:
        diagnosis, _loader = run(cause, addresses)
    assert diagnosis.bound in cause.bounds, diagnosis
    assert diagnosis.text
    assert set(diagnosis.stages) == {
        "draw", "window", "send", "queue", "fetch", "collate", "encode", "reply", "receive", "decode", "reorder",
        "copy", "wait",
    }  # fmt: skip


# The other bounds have no part here: a wait for the trainer's own process, and for copies to a device, is
# tests/simulation's.
def test_most_bounds_have_a_cause():
    assert WORDS.keys() - {bound for cause in CAUSES.values() for bound in cause.bounds} == {
        "start", "trainer", "device_copy", "unclear"
    }  # fmt: skip


# What else the loader tells


def test_pass_that_waits_is_told_in_one_line_when_it_ends(wide_servers, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    caplog.set_level(logging.INFO, "rpcdataloader.loader")
    dataset = torch.utils.data.Subset(Causes(stall=0.04), range(40))
    loader = RPCDataloader(dataset, None, num_workers=1, workers=[wide_servers[0].address])
    batches = iter(loader)
    assert len(list(batches)) == 40
    assert next(batches, None) is None
    lines = [record for record in caplog.records if "The loop waits" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.INFO
    assert lines[0].getMessage().endswith(loader.diagnosis().text)
    assert "for storage" in lines[0].getMessage()


def test_pass_that_does_not_wait_is_not_told(wide_servers, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.loader")
    loader = RPCDataloader(
        torch.utils.data.Subset(Causes(), range(20)), None, num_workers=2, workers=[wide_servers[0].address],
        persistent_workers=True, prefetch_factor=4,
    )  # fmt: skip
    list(loader)
    caplog.clear()
    for _ in loader:
        time.sleep(0.05)
    assert "The loop" not in caplog.text


def test_the_pass_before_is_told_of_until_the_next_has_delivered_enough(wide_servers):
    loader = RPCDataloader(Causes(stall=0.04), None, num_workers=1, workers=[wide_servers[0].address])
    batches = iter(loader)
    for _ in range(30):
        next(batches)
    first = loader.diagnosis()
    assert first.bound == "storage"
    del batches
    # The workers of a pass that was dropped are gone, and what was known of them is not.
    assert loader.diagnosis() == first
    batches = iter(loader)
    next(batches)
    assert loader.diagnosis() == first


def test_diagnosis_may_be_asked_for_by_another_thread_at_any_time(wide_servers):
    loader = RPCDataloader(Causes(), None, num_workers=2, workers=[wide_servers[0].address])
    batches, found, is_over = iter(loader), [], threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            found.append(loader.diagnosis().evidence["batches"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(2000):
            next(batches)
    finally:
        is_over.set()
        thread.join()
    # The first window does not count.
    assert 1900 < loader.diagnosis().evidence["batches"] <= 2000
    assert len(found) > 10


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"workers": "inline"}], ids=str)
def test_loader_that_loads_in_the_training_process_has_no_diagnosis(options):
    loader = RPCDataloader([1, 2, 3], **options)
    list(loader)
    with pytest.raises(LocalProtocolError, match="loads in the training process"):
        loader.diagnosis()


def test_there_is_no_diagnosis_before_the_first_pass(wide_servers):
    loader = RPCDataloader([1, 2, 3], workers=[wide_servers[0].address])
    with pytest.raises(LocalProtocolError, match="before the first pass"):
        loader.diagnosis()


def test_profiler_shows_next_as_that_of_a_loader(wide_servers):
    loader = RPCDataloader([1, 2, 3], workers=[wide_servers[0].address])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 3
    (row,) = [row for row in profile.key_averages() if "enumerate(DataLoader)" in row.key]
    assert row.key == "enumerate(DataLoader)#RPCDataloader.__next__"
    assert row.count == 4  # the end, too


# Each cause many times, with a consumer of other speeds, on a machine that has nothing else to do.


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("speed", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("name", CAUSES)
def test_diagnosis_names_the_cause_every_time(name, speed, request):
    cause = CAUSES[name]
    with pool(name, request) as addresses:
        found = [run(cause, addresses, speed)[0] for _ in range(20)]
    assert [diagnosis for diagnosis in found if diagnosis.bound not in cause.bounds] == []


class Failing(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        raise LookupError(index)


def test_notes_do_not_grow_where_every_batch_is_an_exception(shared_server: Any) -> None:
    iterator: Any = iter(RPCDataloader(Failing(), batch_size=None, workers=shared_server.address, num_workers=1))
    for _ in range(300):
        with pytest.raises(LookupError):
            next(iterator)
    assert len(iterator._driver.recorder.deliveries) < 10
