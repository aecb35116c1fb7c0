"""``loader.diagnosis()`` names the cause of every wait, with real workers and a consumer of known speed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rpcdataloader import Diagnosis, RPCDataloader
from rpcdataloader.client.client import get_client
from rpcdataloader.diagnosis.words import WORDS
from rpcdataloader.loader import driver
from tests.conftest import TIMEOUT_SCALE
from tests.integration.causes import Causes, StreamOfCauses, init_slowly
from tests.integration.network import why_not
from tests.integration.waits import CAUSES, POOLS, Cause, run, take_advice

pytestmark = pytest.mark.usefixtures("shared_server", "wide_servers", "clean_client")

needs_networks = pytest.mark.skipif(bool(reason := why_not()), reason=f"no networks of our own: {reason}")
NAMES = [pytest.param(name, marks=needs_networks) if "1 Gb/s" in name else name for name in CAUSES]


def seconds_without_cpu() -> float:
    """How long processes of this machine have waited for a CPU since it started; 0 where the kernel does not say."""
    with contextlib.suppress(OSError):
        some, *_full = Path("/proc/pressure/cpu").read_text().splitlines()
        return int(some.rpartition("total=")[2]) / 1e6
    return 0.0


def run_and_judge(cause: Cause, addresses: list[str], speed: float = 1.0) -> tuple[Diagnosis, str]:
    """Run a pass; returns its diagnosis, and what speaks against that, with the numbers."""
    start, waited = time.monotonic(), seconds_without_cpu()
    diagnosis, _loader = run(cause, addresses, speed)
    waited, seconds = seconds_without_cpu() - waited, time.monotonic() - start
    # Where others take the CPUs, too, that is a cause as real as the one of the test.
    others = {"oversubscribed"} if waited > seconds / 2 else set()
    is_right = diagnosis.bound in cause.bounds | others
    return diagnosis, "" if is_right else f"{diagnosis}, and {waited:.2f} of {seconds:.2f} s without a CPU"


@pytest.mark.parametrize("name", NAMES)
def test_diagnosis_names_the_cause(name, zygote):
    cause = CAUSES[name]
    with cause.pool(zygote) as addresses:
        diagnosis, wrong = run_and_judge(cause, addresses)
    assert not wrong
    assert diagnosis.text
    assert set(diagnosis.stages) == {
        "draw", "window", "send", "queue", "fetch", "collate", "encode", "reply", "receive", "decode", "reorder",
        "copy", "wait",
    }  # fmt: skip


# Copies to a device are test_device's.
def test_most_bounds_have_a_cause():
    assert WORDS.keys() - {bound for cause in CAUSES.values() for bound in cause.bounds} == {"device_copy", "unclear"}


# One line of each pass that waits


@pytest.fixture
def told(caplog):
    """The lines so far, once all iterators without references are closed."""
    caplog.set_level(logging.INFO, "rpcdataloader.loader")

    def told() -> list[str]:
        is_closed = threading.Event()
        get_client().janitor.leave(is_closed.set)
        assert is_closed.wait(10 * TIMEOUT_SCALE)
        return [text for record in caplog.records if (text := record.getMessage()).startswith("The loop")]

    return told


def make_waiting_loader(servers, length: int = 10_000, **options) -> RPCDataloader:
    dataset = torch.utils.data.Subset(Causes(stall=0.01), range(length))
    return RPCDataloader(dataset, None, num_workers=1, workers=[servers[0].address], **options)


def leave_by_break(loader: RPCDataloader) -> None:
    for number, _ in enumerate(loader):
        if number == 20:
            break


def leave_by_islice(loader: RPCDataloader) -> None:
    assert len(list(itertools.islice(loader, 20))) == 20


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_islice])
def test_pass_that_is_left_is_told_in_one_line(wide_servers, told, leave):
    loader = make_waiting_loader(wide_servers)
    leave(loader)
    (line,) = told()
    assert line == loader.diagnosis().text
    assert "for storage" in line


def test_pass_of_workers_that_stay_is_told_when_the_next_begins(wide_servers, told):
    loader = make_waiting_loader(wide_servers, 20, persistent_workers=True)
    leave_by_islice(loader)
    assert told() == []
    assert len(list(loader)) == 20
    assert len(told()) == 2
    iter(loader)
    assert len(told()) == 2


def test_pass_that_is_left_in_its_first_window_is_not_told(wide_servers, told):
    next(iter(make_waiting_loader(wide_servers)))
    assert told() == []


def test_pass_that_fails_is_not_told(wide_servers, told):
    batches = iter(make_waiting_loader(wide_servers))
    for _ in range(20):
        next(batches)
    batches.driver.fail(OSError("no worker is left"))
    with pytest.raises(OSError, match="no worker is left"):
        next(batches)
    del batches
    assert told() == []


def test_pass_that_was_marked_is_not_told(wide_servers, told):
    batches = iter(make_waiting_loader(wide_servers, 20))
    batches.driver.is_told = True
    assert len(list(batches)) == 20
    assert told() == []


def test_error_of_a_diagnosis_ends_no_training_and_is_logged_once(wide_servers, told, caplog, monkeypatch):
    def fail(_records):
        raise OverflowError("a bug")

    monkeypatch.setattr(driver, "diagnose", fail)
    monkeypatch.setattr(driver, "_failures", itertools.count())
    loader = make_waiting_loader(wide_servers, 20)
    for _ in range(2):
        assert len(list(loader)) == 20
    assert told() == []
    (record,) = [record for record in caplog.records if "cannot say why the loop has waited" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "a bug" in str(record.exc_info)


def test_pass_that_waits_for_its_first_batch_is_told(wide_servers, told):
    loader = RPCDataloader(
        torch.utils.data.Subset(Causes(), range(30)), None, num_workers=2, workers=[wide_servers[0].address],
        prefetch_factor=4, worker_init_fn=init_slowly,
    )  # fmt: skip
    for _ in loader:
        time.sleep(0.02)
    (line,) = told()
    assert "for its first batch" in line


@pytest.mark.parametrize("lengths", [(40, 40), (10, 60)], ids=str)
@pytest.mark.parametrize("is_left", [False, True], ids=["ends", "is left"])
def test_streams_that_have_ended_leave_no_small_window(wide_servers, told, lengths, is_left):
    """What is left of the window when streams end is no reason of the waits before."""
    loader = RPCDataloader(StreamOfCauses(*lengths, stall=0.04), None, num_workers=2, workers=[wide_servers[0].address])
    batches = itertools.islice(loader, sum(lengths) - 10 if is_left else None)
    assert len(list(batches)) == sum(lengths) - 10 * is_left
    (line,) = told()
    assert "for storage" in line
    setup = loader._recorder.setup
    assert setup.window == setup.prefetch_factor * len(setup.workers) == 4


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
def test_loader_that_loads_in_the_training_process_says_that_it_has_no_workers(options):
    loader = RPCDataloader([1, 2, 3], **options)
    for _ in loader:
        diagnosis = loader.diagnosis()
        assert (diagnosis.bound, diagnosis.wait_share, diagnosis.more_workers) == ("unclear", 0.0, None)
        assert diagnosis.text.startswith("The loader has no workers, ")


def test_loader_says_that_nothing_is_known_before_the_first_pass(wide_servers):
    diagnosis = RPCDataloader([1, 2, 3], workers=[wide_servers[0].address]).diagnosis()
    assert (diagnosis.bound, diagnosis.wait_share) == ("unclear", 0.0)
    assert diagnosis.text == "Nothing is known of the loop before the first pass: iterate over the loader."


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
    assert 0 < sum(row.cpu_time_total for row in rows.values() if row.key != name) < rows[name].cpu_time_total
    assert rows["RPCDataloader.wait"].cpu_time_total > rows[name].cpu_time_total / 2


def ranges_of(batches):
    """How often the profiler shows each range."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in batches:
            pass
    return {row.key.removeprefix("RPCDataloader."): row.count for row in profile.key_averages() if "RPC" in row.key}


def test_profiler_shows_every_draw_and_send_of_fast_batches(wide_servers):
    loader = RPCDataloader(Causes(), None, num_workers=1, workers=[wide_servers[0].address])
    batches = iter(loader)
    next(batches)
    counts = ranges_of(itertools.islice(batches, 500))
    assert counts["enumerate(DataLoader)#RPCDataloader.__next__"] == 500
    assert counts["draw"] == counts["send"] == 500


def test_profiler_shows_a_loader_in_the_training_process():
    assert ranges_of(RPCDataloader([1, 2, 3], workers="inline")) == {
        "enumerate(DataLoader)#RPCDataloader.__next__": 4  # the last one finds the end
    }


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
def test_recommended_workers_end_the_wait_and_two_thirds_of_the_least_do_not(cause, zygote):
    with cause.pool(zygote) as addresses:
        taken = [take_advice(cause, addresses) for _ in range(10)]
    assert sum(advice.is_enough for advice in taken) >= 9, str(taken)
    assert all(advice.fewer_are_too_few for advice in taken if advice.more), str(taken)
