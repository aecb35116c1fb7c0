"""``loader.diagnosis()`` names the cause of every wait, with real workers and a consumer of known speed."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import sys
import threading
import time

import pytest
import torch

from rpcdataloader import Diagnosis, RPCDataloader
from rpcdataloader.client import client
from rpcdataloader.client.client import get_client
from rpcdataloader.client.discovery import ask_all
from rpcdataloader.host.resources import available_cpus
from rpcdataloader.loader import driver, waits
from rpcdataloader.wire.address import Address
from tests.conftest import TIMEOUT_SCALE, close_client, wait_until
from tests.support.causes import Causes, Children, SlowSampler
from tests.support.network import why_not
from tests.support.origins import run_ranks
from tests.support.waits import CAUSES, POOLS, Cause, run, wait_with_advice

pytestmark = pytest.mark.usefixtures("shared_server", "wide_servers", "clean_client")

needs_networks = pytest.mark.skipif(bool(reason := why_not()), reason=f"no networks of our own: {reason}")
NAMES = [pytest.param(name, marks=needs_networks) if "1 Gb/s" in name else name for name in CAUSES]


def run_and_judge(cause: Cause, addresses: list[str], speed: float = 1.0) -> tuple[Diagnosis, str]:
    """Run a pass; returns its diagnosis, and what speaks against that, with the numbers."""
    diagnosis, _loader = run(cause, addresses, speed)
    numbers = diagnosis.metrics()
    is_right = f"{diagnosis.bound} {diagnosis.part}".strip() == cause.bound
    is_right = is_right and all(numbers[name] >= share for name, share in cause.shares.items())
    return diagnosis, "" if is_right else f"{diagnosis.bound} {diagnosis.part}: {diagnosis} {numbers}"


def make_waiting_loader(servers, length=10_000, dataset=None, stall=0.01, **options) -> RPCDataloader:
    dataset = torch.utils.data.Subset(dataset or Causes(stall=stall), range(length))
    return RPCDataloader(dataset, None, num_workers=1, workers=[servers[0].address], **options)


# One line of each pass that waits


@pytest.mark.parametrize("rank", [0, 1])
def test_pass_that_waits_for_more_than_a_second_is_one_warning_of_rank_0(wide_servers, caplog, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(1 + rank))
    caplog.set_level(logging.INFO, "rpcdataloader.diagnosis")
    loader = make_waiting_loader(wide_servers, 40, stall=0.06)
    batches = iter(loader)
    for _ in batches:
        time.sleep(0.002)
    assert next(batches, None) is None
    close_client()  # ends the thread that asks for other ranks
    lines = [(record.levelname, text) for record in caplog.records if "step " in (text := record.getMessage())]
    assert lines == [("WARNING", f"Subset, 40 batches: {loader.diagnosis().text}")] * (1 - rank)


def test_pass_that_does_not_wait_is_not_told(wide_servers, caplog):
    caplog.set_level(logging.INFO, "rpcdataloader.diagnosis")
    loader = RPCDataloader(
        torch.utils.data.Subset(Causes(), range(40)), None, num_workers=2, workers=[wide_servers[0].address],
        persistent_workers=True, prefetch_factor=4,
    )  # fmt: skip
    list(loader)
    caplog.clear()
    for _ in loader:
        time.sleep(0.1)
    assert ("step " in caplog.text) == (loader.diagnosis().wait_share >= 0.05)  # where the machine stalls


def test_diagnosis_may_be_asked_for_by_a_signal_handler_at_any_time(wide_servers):
    loader = make_waiting_loader(wide_servers)
    asked = set()

    def ask(frame, _event, _argument):
        # Handlers run between lines, as this function does.
        if frame.f_globals["__name__"] == "rpcdataloader.diagnosis.records":
            if frame.f_lineno not in asked:
                asked.add(frame.f_lineno)
                loader.diagnosis()
            return ask
        return None

    batches, before = iter(loader), sys.gettrace()
    next(batches)
    sys.settrace(ask)
    try:
        for _batch in itertools.islice(batches, 50):
            pass
    finally:
        sys.settrace(before)
    assert asked


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"workers": "inline"}], ids=str)
def test_loader_without_workers_says_how_many_would_end_the_wait(options):
    loader = RPCDataloader(torch.utils.data.Subset(Causes(stall=0.05), range(12)), **options)
    assert loader.diagnosis().bound == "unclear"
    for _ in loader:
        time.sleep(0.025)
    diagnosis = loader.diagnosis()
    assert (diagnosis.bound, diagnosis.part) == ("workers", "here")
    waiting, yours = map(diagnosis.metrics().get, ("waiting_seconds", "yours_seconds"))
    assert (waiting > 0.045, yours > 0.02) == (True, True)
    assert diagnosis.wait_share == pytest.approx(waiting / (waiting + yours))
    needed = waiting / yours
    least, likely, most = diagnosis.more_workers
    assert least == math.ceil(needed) <= likely == math.ceil(1.1 * needed) <= most
    assert "This process loads each batch itself, in " in diagnosis.text


class SlowToPickle(Causes):
    """Takes a second to pickle, as a gigabyte does."""

    def __getstate__(self) -> object:
        time.sleep(1.0)
        return self.__dict__


def test_sending_an_instance_is_the_start_and_the_sentence_says_what_ends_it(wide_servers):
    loader = make_waiting_loader(wide_servers, 20, SlowToPickle())
    assert loader.diagnosis().text.startswith("Nothing is known of the loop before the first pass")
    assert not loader.diagnosis().is_urgent
    assert len(list(loader)) == 20
    diagnosis = loader.diagnosis()
    assert (diagnosis.bound, diagnosis.part) == ("start", "sending")
    assert "RPCDataset(workers, Class, ...) in place of an instance" in diagnosis.text
    assert diagnosis.wait_share > 0.8


def test_cpu_time_of_child_processes_counts(wide_servers):
    loader = make_waiting_loader(wide_servers, 20, Children(0.02))
    assert len(list(loader)) == 20
    numbers = loader.diagnosis().metrics()
    # Seconds on a CPU are those of the child, however long it waits for one.
    assert numbers["fetch_cpu_share"] * numbers["task_seconds"] > 0.01


def test_slow_sampler_is_named(wide_servers):
    loader = make_waiting_loader(wide_servers, stall=0.0, sampler=SlowSampler(0.02))
    assert len(list(itertools.islice(loader, 60))) == 60
    assert "The sampler takes" in loader.diagnosis().text


def test_cpus_of_a_machine_with_several_addresses_count_once(wide_servers):
    port = wide_servers[1].address.rpartition(":")[2]
    addresses = [wide_servers[0].address, f"localhost:{port}"]
    dataset = torch.utils.data.Subset(Causes(stall=0.01), range(200))
    loader = RPCDataloader(dataset, None, num_workers=2, workers=addresses)
    assert len(list(loader)) == 200
    assert loader.diagnosis().metrics()["cpus"] == available_cpus()


# Other ranks are silent


def train(address):
    """A rank whose workers are slow, unless it is rank 0, which ends its pass when others have told of theirs."""
    client.PERIOD = 0.05
    rank = int(os.environ["RANK"])
    records = []
    logger = logging.getLogger("rpcdataloader.diagnosis")
    logger.setLevel("INFO")
    logger.addFilter(lambda record: records.append((record.levelname, record.getMessage())))
    dataset = torch.utils.data.Subset(Causes(stall=0.03 * rank), range(60))
    batches = iter(RPCDataloader(dataset, None, num_workers=1, workers=[address]))

    def waits():
        (node,) = ask_all([Address.parse(address)])
        return {loop.rank: loop.wait_share for each in node.clients for loop in each.loops if loop.bound != "unclear"}

    def is_here(rank):
        return any(each.rank == rank for each in next(ask_all([Address.parse(address)])).clients)

    if not rank:
        wait_until(lambda: waits().get(1, 0.0) > 0.5, what="a report of rank 1")
    for _ in itertools.islice(batches, 50 if rank else None):
        time.sleep(0.01)
    if rank:
        wait_until(lambda: not is_here(0), what="the end of rank 0")
    close_client()
    return records


def test_sentence_of_rank_0_is_that_of_the_rank_that_waits_most(zygote, serve):
    told, silent = run_ranks(zygote, train, 2, serve("--num-workers", "2").address)
    assert silent == []
    ((level, line),) = told
    assert level == "WARNING"
    # On a busy machine, the start of rank 1 may take longer than the rest.
    assert re.match(
        r"\[rank 0 of 2\] Subset, 60 batches: rank 1 waits most \(\d+ %\): step .* (1 worker: |before the first batch)",
        line,
    )


def test_profiler_shows_next_as_that_of_a_loader(wide_servers):
    loader = RPCDataloader(Causes(stall=0.02), None, num_workers=1, workers=[wide_servers[0].address])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(itertools.islice(loader, 10))) == 10
    rows = {row.key: row for row in profile.key_averages() if "DataLoader" in row.key or "RPCDataloader" in row.key}
    assert rows.keys() == {
        "enumerate(DataLoader)#RPCDataloader.__next__", "RPCDataloader.draw", "RPCDataloader.send",
        "RPCDataloader.wait",
    }  # fmt: skip
    (name,) = (name for name in rows if "enumerate" in name)
    assert rows[name].count == 10
    assert {event.cpu_parent.name for event in profile.events() if event.name == "RPCDataloader.wait"} == {name}
    assert rows["RPCDataloader.wait"].cpu_time_total > rows[name].cpu_time_total / 10


# Each cause and each pool many times, with a consumer of other speeds, on a machine that has nothing else to do.


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_diagnosis_names_the_cause_every_time(name, speed, zygote):
    cause = CAUSES[name]
    with cause.pool(zygote) as addresses:
        wrong = [run_and_judge(cause, addresses, speed)[1] for _ in range(20)]
    assert [text for text in wrong if text] == []


def pool_of(name: str) -> object:
    """A parameter; the second worker that computes needs a CPU of its own."""
    is_small = "CPU" in name and len(os.sched_getaffinity(0)) < 2
    return pytest.param(POOLS[name], id=name, marks=pytest.mark.skipif(is_small, reason="this machine has one CPU"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cause", [pool_of(name) for name in POOLS])
def test_recommended_workers_end_the_wait(cause, zygote):
    with cause.pool(zygote) as addresses:
        shares = [wait_with_advice(cause, addresses) for _ in range(10)]
    assert sum(share < 0.05 for share in shares) >= 9, str(shares)


@pytest.fixture
def told(caplog):
    """The lines so far, once all iterators without references are closed."""
    caplog.set_level(logging.INFO, "rpcdataloader.diagnosis")

    def told() -> list[str]:
        is_closed = threading.Event()
        get_client().janitor.leave(is_closed.set)
        assert is_closed.wait(10 * TIMEOUT_SCALE)
        return [text for record in caplog.records if "step " in (text := record.getMessage())]

    return told


def test_pass_of_workers_that_stay_is_told_when_the_next_begins(wide_servers, told):
    loader = make_waiting_loader(wide_servers, 20, persistent_workers=True)
    assert len(list(itertools.islice(loader, 20))) == 20
    assert told() == []
    assert len(list(loader)) == 20
    assert len(told()) == 2
    iter(loader)
    assert len(told()) == 2


def test_error_of_a_diagnosis_ends_no_training_and_is_logged_once(wide_servers, told, caplog, monkeypatch):
    def fail(_records):
        raise OverflowError("a bug")

    monkeypatch.setattr(driver, "diagnose", fail)
    monkeypatch.setattr(waits, "_failures", itertools.count())
    loader = make_waiting_loader(wide_servers, 20)
    for _ in range(2):
        assert len(list(loader)) == 20
    assert told() == []
    (record,) = [record for record in caplog.records if "cannot say why the loop has waited" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "a bug" in str(record.exc_info)
