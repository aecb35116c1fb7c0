"""RPCDataloader beside torch's DataLoader, where tests/integration/test_differential.py does not look."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import os
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
    get_worker_info,
)

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.errors import ConnectionLostError, SerializationError
from rpcdataloader.loader import intake as answers
from rpcdataloader.loader import iterator as iterator_module
from rpcdataloader.loader import placement
from rpcdataloader.wire.slabs import PinnedAllocator
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until
from tests.integration import datasets, kinds
from tests.integration.comparison import assert_same
from tests.integration.datasets import Numbers, notes
from tests.integration.differential import epochs, seed

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    # torch's own workers are forks, too.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


@pytest.fixture
def workers(shared_server):
    return shared_server.address


def flat(batches):
    return [int(number) for batch in batches for number in batch.reshape(-1)]


# The same as torch's


class Counting(Sampler):
    """Notes how far it was consumed."""

    def __init__(self, size):
        self.size = size
        self.consumed = 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for index in range(self.size):
            self.consumed += 1
            yield index


class Tensors(Sampler):
    """Yields batches of indices as tensors."""

    def __len__(self):
        return 3

    def __iter__(self):
        yield from torch.arange(12).flip(0).split(4)


class Generators(Tensors):
    """Yields batches of indices as generators."""

    def __iter__(self):
        for start in range(3):
            yield (index for index in range(start, 12, 3))


class Failing(Tensors):
    """Raises once, before its last batch."""

    has_raised = False

    def __iter__(self):
        self.left = list(super().__iter__())
        return self

    def __next__(self):
        if len(self.left) == 1 and not self.has_raised:
            self.has_raised = True
            raise InterruptedError
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_no_batch_is_lost_where_a_signal_handler_raises_before_what_was_drawn_has_a_name(workers):
    loader = RPCDataloader(range(12), workers=workers, timeout=30)
    num_interrupted, before = 0, sys.gettrace()

    def trace(frame, event, _argument):
        # Handlers run when a call is over, before the next step of its caller takes the result.
        nonlocal left, num_interrupted, last
        if frame.f_code.co_name not in ("advance", "_draw") or "loader" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= last.startswith("CALL")
            last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if left < 0:
            left = sys.maxsize
            num_interrupted += 1
            raise Alarm
        return trace

    for num_steps in itertools.count():
        batches = iter(loader)
        received, left, last = flat([next(batches)]), num_steps, ""
        sys.settrace(trace)
        try:
            received += flat([next(batches)])
            break  # there are not that many steps
        except Alarm:
            pass
        finally:
            sys.settrace(before)
        failures = []
        try:
            for batch in batches:
                received += batch.tolist()
        except RuntimeError as error:
            failures.append(str(error))
        # The other end is that the pass was in the middle of its work, and says so.
        assert received == list(range(12)) or "Alarm has interrupted this pass" in failures[0]
    assert num_interrupted >= 5


@pytest.mark.parametrize("where", ["local:1", "inline"])
def test_no_batch_is_lost_where_a_sampler_raises(where):
    loader = RPCDataloader(range(12), batch_sampler=Failing(), workers=where, prefetch_factor=1)
    batches, received = iter(loader), []
    while True:
        try:
            received += flat([next(batches)])
        except InterruptedError:
            state = loader.state_dict()
            assert state["num_samples"] == len(received)
        except StopIteration:
            break
    assert received == list(range(12))[::-1]
    loader.load_state_dict(state)
    assert flat(loader) == received[state["num_samples"] :]


class Alarm(Exception):
    """Raised by a signal handler."""


def test_pass_that_a_signal_handler_interrupts_goes_on_or_says_how_to(workers):
    num_failed, num_told, before = 0, 0, sys.gettrace()
    for num_calls in itertools.count():
        left = num_calls

        def interrupt(frame, _event, _argument):
            # Handlers run between two steps, as this function does; here, of deciding and of carrying out.
            nonlocal left
            if frame.f_globals["__name__"].startswith(("rpcdataloader.loader.driver", "rpcdataloader.plan.")):
                left -= 1
                if left < 0:
                    raise Alarm

        loader = RPCDataloader(range(60), batch_size=2, workers=workers, timeout=30)
        received, batches = [], iter(loader)
        received += flat([next(batches)])
        sys.settrace(interrupt)
        try:
            next(batches)
            break  # there are not that many steps
        except Alarm:
            pass
        finally:
            sys.settrace(before)
        try:
            for batch in batches:
                received += batch.tolist()
            assert received == list(range(60))
        except RuntimeError as error:
            num_failed += 1
            num_told += "Alarm has interrupted this pass" in str(error)
            loader.load_state_dict(loader.state_dict())
            assert received + flat(loader) == list(range(60))
    assert num_told == num_failed > 0


@pytest.mark.parametrize("where", ["local:1", "inline"])
def test_no_batch_is_lost_where_a_signal_handler_raises_after_the_draw(where):
    num_interrupted = 0

    def interrupt(frame, event, _argument):
        # Handlers run when a function begins, and when a call is over, as this one does.
        nonlocal left, num_interrupted
        is_next = event == "return" and frame.f_code.co_name == "__next__"
        if frame.f_globals["__name__"] == "rpcdataloader.loader.tasks" and event != "c_call" and not is_next:
            left -= 1
            if left < 0:
                num_interrupted += 1
                raise Alarm

    for num_calls in range(20):
        left = num_calls
        loader = RPCDataloader(range(24), batch_sampler=[[i, i + 1] for i in range(0, 24, 2)], workers=where)
        received, batches = [], iter(loader)
        received += flat([next(batches)])
        sys.setprofile(interrupt)
        try:
            received += flat([next(batches)])
        except Alarm:
            pass
        finally:
            sys.setprofile(None)
        assert received + flat(batches) == list(range(24))
    assert num_interrupted > 10


class Ending(Tensors):
    """A generator, which gives nothing more after it has raised."""

    def __iter__(self):
        for number, indices in enumerate(super().__iter__()):
            if number == 2:
                raise Alarm
            yield indices


@pytest.mark.parametrize("where", ["local:1", "inline"])
def test_sampler_that_an_exception_has_ended_is_not_at_its_end(where):
    loader = RPCDataloader(range(12), batch_sampler=Ending(), workers=where, prefetch_factor=1)
    received, batches = [], iter(loader)

    def receive():
        while True:
            with contextlib.suppress(Alarm):
                received.extend(flat([next(batches)]))

    with pytest.raises(RuntimeError, match="Alarm has ended the sampler before its end"):
        receive()
    assert loader.state_dict()["num_samples"] == len(received)
    assert not loader.state_dict()["finished"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_num_workers_alone_means_what_it_means_to_torch(num_workers):
    def run(make_loader):
        seed()
        return list(epochs(make_loader(Numbers(), batch_size=6, shuffle=True, num_workers=num_workers), 2))

    assert_same(run(RPCDataloader), run(DataLoader))
    samples = list(RPCDataloader(datasets.Processes(), num_workers=num_workers))
    processes = {int(pid) for _, pid, _ in samples}
    assert (processes == {os.getpid()}) if num_workers == 0 else (os.getpid() not in processes)


class Gone(Numbers):
    """Ends the epoch of torch's loader without a word."""

    def __getitem__(self, index):
        if index == 7:
            raise StopIteration
        return index


def test_more_workers_than_are_offered_are_asked_for_with_one_warning(workers, caplog):
    placement.warn_once.cache_clear()
    for num_workers in (2, 3, 3):
        assert flat(RPCDataloader(range(4), workers=workers, num_workers=num_workers)) == [0, 1, 2, 3]
    # A busy machine may be told of slow starts, too.
    (message,) = [text for text in caplog.messages if "num_workers" in text]
    assert message == (
        f"num_workers is 3, but this process's share of the workers of {workers} is 2: "
        "start them with more --num-workers"
    )


# How far ahead


@pytest.mark.parametrize("prefetch_factor", [1, 2, 3])
def test_sampler_is_consumed_as_far_ahead_as_by_torch(workers, prefetch_factor):
    def steps(make_loader):
        sampler = Counting(12)
        iterator = iter(make_loader(sampler))
        consumed = [sampler.consumed]
        for _batch in iterator:
            consumed.append(sampler.consumed)
        return consumed

    options = {"batch_size": None, "prefetch_factor": prefetch_factor}
    expected = steps(lambda sampler: DataLoader(Numbers(), sampler=sampler, num_workers=2, **options))
    assert steps(lambda sampler: RPCDataloader(Numbers(), sampler=sampler, workers=workers, **options)) == expected
    assert expected[0] == 2 * prefetch_factor


@pytest.mark.parametrize("batch_size", [None, 4])
def test_sampler_of_a_hundred_million_indices_is_not_listed(workers, batch_size):
    sampler = Counting(10**8)
    iterator = iter(RPCDataloader(Numbers(100), batch_size, sampler=sampler, workers=workers))
    for number in range(5):
        next(iterator)
        assert sampler.consumed == (number + 1 + 2 * 2) * (batch_size or 1)


def test_batches_come_in_any_order_when_asked(workers, fifo):
    dataset = datasets.Gated(8, 0, fifo)
    batches = iter(RPCDataloader(dataset, workers=workers, in_order=False))
    # The worker that waits has another one, which waits behind it.
    first = [int(next(batches)) for _ in range(6)]
    assert 0 not in first
    open(fifo, "w").close()
    last = flat(batches)
    assert last[0] == 0
    assert sorted(first + last) == list(range(8))


# Workers


class _WorkerInit:
    def __init__(self, log):
        self.log = log

    def __call__(self, number):
        info = get_worker_info()
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        known = [info.id, info.num_workers, info.seed - info.id, type(info.dataset).__name__]
        datasets.note(self.log, number, *known, torch.initial_seed() - number, *draws)


def test_init_function_runs_once_per_worker_and_sees_what_it_sees_with_torch(workers, tmp_path):
    def run(name, make_loader):
        log = str(tmp_path / name)
        torch.manual_seed(3)
        loader = make_loader({"worker_init_fn": _WorkerInit(log), "persistent_workers": True})
        for _epoch in range(2):
            samples = [tuple(map(int, sample)) for sample in loader]
        wait_until(lambda: len(notes(log)) >= 2)
        return sorted(notes(log)), samples

    expected, samples = run("theirs", lambda options: DataLoader(datasets.Informed(), num_workers=2, **options))
    assert len(expected) == 2
    lines, ours = run("ours", lambda options: RPCDataloader(datasets.Informed(), workers=workers, **options))
    assert lines == expected
    # In the dataset, too; which worker has which batch is nobody's business.
    assert [(sample[0], *sample[2:]) for sample in ours] == [(sample[0], *sample[2:]) for sample in samples]
    assert {sample[1] for sample in ours} <= {0, 1}


def test_persistent_workers_stay_and_others_do_not(workers):
    persistent = RPCDataloader(datasets.Processes(), workers=workers, persistent_workers=True)
    processes = {int(pid) for _epoch in range(3) for _, pid, _ in persistent}
    assert len(processes) <= 2
    loader = RPCDataloader(datasets.Processes(), workers=workers)
    first, second = ({int(pid) for _, pid, _ in loader} for _epoch in range(2))
    assert not first & second


def test_finished_iterator_stays_finished_and_its_workers_are_gone(shared_server):
    before = set(shared_server.processes())
    iterator = iter(RPCDataloader(Numbers(3), workers=shared_server.address))
    assert flat(iterator) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    wait_until(lambda: len(set(shared_server.processes()) - before) <= 1, what="only the session left")


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_dropped_iterator_frees_its_workers_in_the_middle_of_a_batch(shared_server, fifo, persistent_workers):
    witness = RPCDataset(shared_server.address, datasets.State)
    assert witness.epoch == 0  # the session, and the worker that answers questions
    before = set(shared_server.processes())
    dataset = datasets.Gated(20, 3, fifo)
    loader = RPCDataloader(dataset, workers=shared_server.address, persistent_workers=persistent_workers)
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    wait_until(lambda: len(set(shared_server.processes()) - before) == 2, what="both workers")
    del iterator, loader
    gc.collect()
    wait_until(lambda: set(shared_server.processes()) <= before, what="the workers of the iterator ended")


# Errors of user code


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_function_that_cannot_be_pickled_is_named(workers, name):
    thread = datasets.Threaded()
    loader = RPCDataloader(Numbers(), workers=workers, **{name: lambda _: thread})
    with pytest.raises(SerializationError, match=rf"^{name}\.<closure>\.thread\.\w+.* cannot be pickled"):
        iter(loader)


# Time limit


def test_timeout_is_an_error_as_with_torch_and_waiting_may_go_on(workers, fifo):
    def run(loader):
        iterator = iter(loader)
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        open(fifo, "w").close()
        return type(caught.value), str(caught.value), flat(iterator)

    dataset, timeout = datasets.Gated(6, 0, fifo), 3 * TIMEOUT_SCALE
    error, text, rest = run(DataLoader(dataset, num_workers=2, timeout=timeout))
    gc.collect()  # torch's iterator, which the traceback refers to
    assert run(RPCDataloader(dataset, workers=workers, timeout=timeout)) == (error, text, rest)
    assert rest == list(range(6))


# Pinned memory


def test_pin_memory_without_an_accelerator_warns_as_torch_does(workers):
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")

    def warnings_of(loader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert flat(loader) == list(range(20))
        return [warning for warning in caught if "pin_memory" in str(warning.message)]

    by_torch = warnings_of(DataLoader(Numbers(), num_workers=2, pin_memory=True))
    for where in (workers, "inline"):
        [ours] = warnings_of(RPCDataloader(Numbers(), workers=where, pin_memory=True))
        assert ours.filename == __file__
        for expected in by_torch:  # older versions say nothing
            assert (ours.category, str(ours.message)) == (expected.category, str(expected.message))


class _Pinned:
    """Stands for pinned memory."""

    def __init__(self):
        self.storages = set()
        self.made = []

    def empty(self, size_bytes):
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        self.made.append(tensor)
        self.storages.add(tensor.untyped_storage()._cdata)
        return tensor

    def holds(self, tensor):
        return tensor.untyped_storage()._cdata in self.storages


def many_kinds(samples):
    torch.manual_seed(0)
    return {
        "large": torch.rand(3, 50_000),
        "small": [torch.rand(4), torch.tensor(samples)],
        "thousands": [torch.full((2,), i) for i in range(300)],
        "strided": torch.rand(40, 500).t(),
        "expanded": torch.rand(5, 1).expand(5, 4),
        "half": torch.rand(70_000).bfloat16(),
    }


@pytest.mark.parametrize("where", ["TCP", "Unix"])
def test_every_tensor_of_a_batch_lives_in_pinned_memory(shared_server, unix_server, where, monkeypatch):
    """Also what a worker on this machine shares, which is copied."""
    pinned, kept = _Pinned(), []
    workers = {"TCP": shared_server, "Unix": unix_server}[where].address

    def pin(batch):
        # What torch would do next: nothing, for it is pinned.
        kept.append(batch)
        return batch

    monkeypatch.setattr(answers, "pinned_allocator", lambda: PinnedAllocator(pinned.empty))
    monkeypatch.setattr(answers, "pin", pin)
    loader = RPCDataloader(range(40), batch_size=4, workers=workers, pin_memory=True, collate_fn=many_kinds)
    batches = list(loader)
    assert len(kept) == len(batches) == 10
    tensors = [
        tensor
        for batch in batches
        for value in batch.values()
        for tensor in (value if isinstance(value, list) else [value])
    ]
    assert len(tensors) == 10 * 306
    assert all(map(pinned.holds, tensors))
    for number, batch in enumerate(batches):
        assert_same(batch, many_kinds([*range(4 * number, 4 * number + 4)]))


def test_batch_type_with_a_method_for_pinning_has_it_called(workers, monkeypatch):
    def collate(samples):
        return kinds.Pinnable(torch.tensor(samples))

    for module in (answers, iterator_module):
        monkeypatch.setattr(module, "pinned_allocator", lambda: PinnedAllocator(_Pinned().empty))
    for where in (workers, "inline"):
        for pin_memory in (False, True):
            loader = RPCDataloader(range(3), workers=where, pin_memory=pin_memory, collate_fn=collate)
            assert [batch.pinned for batch in loader] == [pin_memory] * 3


# Memory


def outstanding(log, delivered):
    """The most samples that were loaded and not delivered at any time."""
    loaded = [float(line.split()[1]) for line in notes(log)]
    return max(sum(t <= moment for t in loaded) - sum(t <= moment for t in delivered) for moment in loaded)


def consume_late(loader, log, ahead):
    """Take a batch only when so many are ready, to see how far the workers go; returns when each was taken."""
    already, delivered = len(notes(log)), []
    iterator = iter(loader)
    for number in range(len(loader)):
        wait_until(lambda: len(notes(log)) - already >= min(number + ahead, len(loader)))  # noqa: B023
        delivered.append(time.monotonic())
        next(iterator)
    return delivered


def test_bytes_in_flight_stay_below_the_limit(workers, tmp_path):
    megabyte = 1 << 20
    log = str(tmp_path / "log")
    dataset = datasets.Recorded(24, log, megabyte)
    options = {"batch_size": None, "workers": workers, "prefetch_factor": 6, "persistent_workers": True}
    limited = RPCDataloader(dataset, **options, max_in_flight_bytes=4 * megabyte)
    list(limited)  # from now on it knows how large a batch is
    os.unlink(log)
    delivered = consume_late(limited, log, ahead=3)
    assert 3 <= outstanding(log, delivered) <= 4

    os.unlink(log)
    unlimited = RPCDataloader(dataset, **options)
    delivered = consume_late(unlimited, log, ahead=12)
    assert outstanding(log, delivered) == 12


def test_limit_below_one_batch_lets_one_after_the_other_through(workers, tmp_path):
    dataset = datasets.Recorded(10, str(tmp_path / "log"), 200_000)
    loader = RPCDataloader(dataset, batch_size=None, workers=workers, max_in_flight_bytes=1, persistent_workers=True)
    for _epoch in range(2):
        assert [int(batch[0]) for batch in loader] == list(range(10))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_memory_does_not_grow_over_epochs(workers, tmp_path, persistent_workers):
    dataset = datasets.Recorded(10, str(tmp_path / "log"), 3 << 20)
    loader = RPCDataloader(dataset, batch_size=2, workers=workers, persistent_workers=persistent_workers)

    def run(num_epochs):
        for _epoch in range(num_epochs):
            for _batch in loader:
                pass
            gc.collect()
        return resident_bytes(), len(gc.get_objects())

    run(2)
    memory, objects = run(1)
    later_memory, later_objects = run(4)
    # 120 MB have gone through.
    assert later_memory < memory + (24 << 20)
    assert later_objects < objects + 500


# Nodes that die, and workers that end without dying; tests/integration/test_recovery.py has the others


def test_worker_that_dies_between_epochs_is_replaced(workers):
    loader = RPCDataloader(datasets.Processes(), workers=workers, persistent_workers=True)
    first = {int(pid) for _, pid, _ in loader}
    iterator = iter(loader)
    victim = int(next(iterator)[1])
    del iterator
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_running(victim))
    samples = [(int(index), int(pid)) for index, pid, _ in loader]
    assert [index for index, _ in samples] == list(range(20))
    assert victim not in {pid for _, pid in samples}
    assert victim in first | {victim}


def test_persistent_workers_of_a_server_that_had_no_room_for_all_stay(serve, caplog):
    server = serve("--num-workers", "4", "--max-connections", "2")
    loader = RPCDataloader(datasets.Processes(), workers=server.address, persistent_workers=True)
    samples = [[tuple(map(int, sample)) for sample in loader] for _epoch in range(3)]
    assert [[index for index, _, _ in epoch] for epoch in samples] == [list(range(20))] * 3
    wait_until(lambda: sum("going on with" in message for message in caplog.messages) >= 2)
    samples.append([tuple(map(int, sample)) for sample in loader])
    assert len({pid for epoch in samples for _, pid, _ in epoch}) <= 2
    wait_until(lambda: len(server.processes()) == 3, what="only the session and two workers")


def test_drained_server_hands_its_batches_to_another(serve, shared_server, tmp_path):
    leaving = serve("--num-workers", "2")
    log = str(tmp_path / "log")
    dataset = RPCDataset([leaving.address, shared_server.address], datasets.Recorded, 60, log, 1000)
    loader = RPCDataloader(dataset, batch_size=2)
    indices = []
    for number, batch in enumerate(loader):
        indices += batch[:, 0].tolist()
        if number == 3:
            leaving.signal(signal.SIGTERM)
    assert indices == list(range(60))
    assert leaving.wait() == 0


def test_drain_of_the_only_server_is_an_error(serve, fifo):
    server = serve("--num-workers", "1")
    iterator = iter(RPCDataloader(datasets.Gated(1_000_000, 5, fifo), workers=server.address, reconnect_timeout=0))
    for _ in range(5):
        next(iterator)
    server.signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log)
    open(fifo, "w").close()
    with pytest.raises(ConnectionLostError, match=server.address):
        list(iterator)
