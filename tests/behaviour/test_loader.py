"""RPCDataloader beside torch's DataLoader, where tests/behaviour/test_differential.py does not look."""

from __future__ import annotations

import dis
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from rpcdataloader import (
    CostBatchSampler,
    ResumableDistributedSampler,
    RPCDataloader,
    RPCDataset,
    get_sample_seed,
    rpc_async,
)
from rpcdataloader.errors import LocalProtocolError, RPCTimeoutError
from rpcdataloader.loader.iterator import PassIterator
from rpcdataloader.plan.engine import Engine
from rpcdataloader.plan.table import Table
from tests.behaviour.differential_rows import Sized
from tests.conftest import AT_ONCE, TIMEOUT_SCALE, wait_until
from tests.support import datasets
from tests.support.comparison import assert_same
from tests.support.datasets import Numbers, notes
from tests.support.devices import plug_in_pinned
from tests.support.forks import status_of_fork
from tests.support.streams import Parts

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    # torch's own workers are forks, too.
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def flat(batches):
    return [int(number) for batch in batches for number in batch.reshape(-1)]


# Exceptions between two steps of a pass


class Alarm(BaseException):
    """Raised by a signal handler, as KeyboardInterrupt is: an ``Exception`` might be the dataset's."""


WHERE_CHECKED = "advance", "_draw", "__next__", "_next", "_take_sample", "_note"


@pytest.mark.parametrize("place", ["workers", "inline", "inline stream"])
def test_pass_that_a_signal_handler_interrupts_goes_on_or_says_how_to(workers, place):
    num_steps, num_complete, num_checked, num_failed, num_told = 0, 0, 0, 0, 0
    before = sys.gettrace()

    def interrupt(frame, event, _argument):
        # Handlers run when a function of deciding or carrying out begins; where something is drawn or returned, also
        # when a call is over, before the next step of its caller takes the result.
        nonlocal left, last, num_checked
        module, name = frame.f_globals["__name__"], frame.f_code.co_name
        is_checked = module == "rpcdataloader.loader.tasks" or name in WHERE_CHECKED
        if event == "opcode":
            left -= last.startswith("CALL")
            last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        elif event == "call":
            left -= module.startswith(("rpcdataloader.loader.driver", "rpcdataloader.plan."))
        if left < 0:
            num_checked += event == "opcode"
            raise Alarm  # ends the trace
        frame.f_trace_opcodes = is_checked
        return interrupt if is_checked else None

    while num_complete < 5:  # how many steps there are depends on what has arrived
        dataset = Parts([60]) if place == "inline stream" else range(60)
        loader = RPCDataloader(dataset, 2, workers=workers if place == "workers" else "inline", timeout=30)
        batches = iter(loader)
        received, left, last = flat([next(batches)]), num_steps, ""
        num_steps += 1
        sys.settrace(interrupt)
        try:
            received += flat([next(batches)])
            num_complete += 1
        except Alarm:
            pass
        finally:
            sys.settrace(before)
        assert 2 * loader.state_dict()["num_batches"] == len(received)
        try:
            for batch in batches:
                received += batch.tolist()
        except RuntimeError as error:
            num_failed += 1
            num_told += "Alarm has interrupted this pass" in str(error)
            loader.load_state_dict(loader.state_dict())
            received += flat(loader)
        assert received == list(range(60))
    assert num_told == num_failed > 0
    assert num_checked >= 5


class Model:
    """Stands for what a loop has in its variables."""


def fail(_worker):
    raise ValueError("a fault of the init function")


@pytest.mark.parametrize("how", ["by a signal", "in a worker"])
def test_pass_that_has_failed_and_the_variables_of_its_loop_go_with_their_last_reference(workers, how):
    options = {} if how == "by a signal" else {"worker_init_fn": fail}

    def interrupt(frame, event, _argument):
        if event == "call" and frame.f_globals["__name__"] == "rpcdataloader.plan.engine":
            raise Alarm

    def train():
        model = Model()
        batches = iter(RPCDataloader(range(20), 2, workers=workers, **options))
        if how == "by a signal":
            next(batches)
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                next(batches)
            except Alarm:
                pass
            finally:
                sys.settrace(before)
        errors = []
        for _ in range(2):  # it says so again
            try:
                for _ in batches:
                    pass
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
        return weakref.ref(model), weakref.ref(batches), errors

    gc.disable()
    try:
        model, batches, (error, again) = train()
        assert error == again
        assert ("Alarm has interrupted" if how == "by a signal" else "a fault of the init") in error
        assert model() is None
        wait_until(lambda: batches() is None, what="another thread has told the pass of its failure")
    finally:
        gc.enable()


class KillsItsWorker:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.kill(os.getpid(), signal.SIGKILL) if index == 2 else index


@pytest.mark.parametrize("event", ["answered", "worker_at_work", "worker_ready", "worker_lost"])
def test_error_in_a_thread_that_receives_ends_the_pass(workers, event, monkeypatch, caplog):
    def fail(*_args, **_options):
        raise LookupError("a fault of ours")

    monkeypatch.setattr(Engine, event, fail)
    with pytest.raises(LookupError, match="a fault of ours"):
        flat(RPCDataloader(KillsItsWorker(), workers=workers, num_workers=1, timeout=AT_ONCE))
    assert "an event was not handled" in caplog.text


# A generator that is dropped is interrupted, too.
@pytest.mark.filterwarnings("ignore:Exception ignored (in|while closing):pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["workers", "inline", "inline stream"])
@pytest.mark.parametrize("num_taken", [5, 30])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_epoch_whose_beginning_a_signal_handler_interrupts_leaves_no_iterator_that_hangs(
    workers, place, num_taken, every
):
    before, num_interrupted, number = sys.gettrace(), 0, 1

    def interrupt(frame, event, _argument):
        nonlocal left
        left -= event == "call" and frame.f_globals["__name__"].startswith("rpcdataloader.")
        if left < 0:
            raise Alarm

    while True:
        dataset = Parts([60]) if place == "inline stream" else range(60)
        where = {"workers": workers, "num_workers": 1} if place == "workers" else {"workers": "inline"}
        loader = RPCDataloader(dataset, 2, persistent_workers=True, timeout=30, **where)
        batches = iter(loader)
        received, left = flat(itertools.islice(batches, num_taken)), number
        number += every
        sys.settrace(interrupt)
        try:
            iter(loader)
        except Alarm:
            num_interrupted += 1
        else:
            break
        finally:
            sys.settrace(before)
        found, told = [], "Alarm has interrupted this pass"
        try:
            found += flat(batches)
        except RuntimeError as error:
            told = str(error)
        assert "Alarm has interrupted this pass" in told
        # The rest of the last pass, or a new one.
        assert received + found == list(range(60)) or found in ([], list(range(60)))
        assert flat(loader) == list(range(60))
    assert num_interrupted >= 2


class Waits(IterableDataset):
    """Its third number waits for an event."""

    def __init__(self):
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __iter__(self):
        for number in range(6):
            if number == 2:
                self.is_there.set()
                assert self.may_go.wait(30 * TIMEOUT_SCALE)
            yield number


def test_interrupt_while_another_thread_has_its_turn_ends_nothing():
    stream, found = Waits(), []
    batches = iter(RPCDataloader(stream, None, workers="inline"))
    found += [next(batches), next(batches)]
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(next, batches)
        assert stream.is_there.wait(30 * TIMEOUT_SCALE)

        def interrupt(_signal, _frame):
            raise Alarm

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3 * TIMEOUT_SCALE)
        try:
            with pytest.raises(Alarm):
                next(batches)
        finally:
            signal.signal(signal.SIGALRM, before)
            stream.may_go.set()
        found.append(third.result())
    assert [*found, *batches] == list(range(6))


def test_thread_that_returns_a_batch_leaves_the_turn_of_another_alone(workers):
    """An interrupt ends the pass while a batch is out of the engine, whatever other threads do meanwhile."""
    batches = iter(RPCDataloader(range(10), 1, workers=workers, num_workers=1))
    returns, has_left, may_go = [], threading.Event(), threading.Event()
    found = flat([next(batches)])

    def stop_after_the_turn(frame, event, _argument):
        if frame.f_code is not PassIterator.__next__.__code__:
            return None
        if event == "line" and frame.f_locals.get("answer") is not None and not batches._turn._is_owned():
            has_left.set()
            assert may_go.wait(30 * TIMEOUT_SCALE)
        return stop_after_the_turn

    def take():
        sys.settrace(stop_after_the_turn)
        try:
            returns.extend(flat([next(batches)]))
        finally:
            sys.settrace(None)

    other = threading.Thread(target=take)
    other.start()
    assert has_left.wait(30 * TIMEOUT_SCALE)

    def interrupt(frame, event, argument):
        if event == "return" and frame.f_code is Table.pop_deliverable.__code__ and argument is not None:
            may_go.set()
            other.join()
            raise Alarm

    sys.setprofile(interrupt)
    try:
        with pytest.raises(Alarm):
            next(batches)
    finally:
        sys.setprofile(None)
    with pytest.raises(RuntimeError, match="Alarm has interrupted this pass"):
        next(batches)
    assert found + returns == [0, 1]


def test_warning_that_is_an_error_takes_the_place_of_a_batch_as_with_torch():
    ends = []
    stream = Sized(5, 2)  # has more samples than it says
    for loader in DataLoader(stream), RPCDataloader(stream, workers="inline"):
        assert len(loader) == 2
        batches, found = iter(loader), []
        for _ in range(6):
            try:
                found.append(int(next(batches)))
            except (UserWarning, StopIteration) as end:
                found.append(str(end)[:26])
        ends.append(found)
    assert ends[0] == ends[1]


# Workers


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


def test_interrupt_while_a_worker_is_asked_for_leaves_none(shared_server):
    assert RPCDataset(shared_server.address, datasets.State).epoch == 0  # the session is there
    loader = RPCDataloader(Numbers(8), workers=shared_server.address)
    before = set(shared_server.processes())

    def interrupt(frame, event, _argument):
        starts = frame.f_back is not None and frame.f_back.f_code is threading.Thread.start.__code__
        if event == "call" and starts and frame.f_code is threading.Event.wait.__code__:  # that the thread has begun
            raise KeyboardInterrupt

    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    finally:
        sys.settrace(None)
    gc.collect()
    assert flat(loader) == list(range(8))
    wait_until(lambda: set(shared_server.processes()) <= before, what="the end of all workers")


def test_iterator_says_whether_the_next_batch_is_here(workers, fifo):
    batches = iter(RPCDataloader(datasets.Gated(2, 0, fifo), batch_size=1, workers=workers))
    assert not batches.is_ready()
    open(fifo, "w").close()
    wait_until(batches.is_ready)
    assert flat(batches) == [0, 1]
    assert batches.is_ready()  # to tell that it is at its end


class Deadly(datasets.Gated):
    """Kills its worker where it waits."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == self.index:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


def test_death_at_a_batch_of_the_last_epoch_is_not_that_of_another(workers, fifo, caplog):
    indices = [*range(8)]
    options = {"num_workers": 1, "persistent_workers": True, "sampler": indices}
    loader = RPCDataloader(Deadly(16, 1, fifo), batch_size=None, workers=workers, **options)
    assert int(next(iter(loader))) == 0
    indices[:] = range(8, 16)  # of the next epoch
    with open(fifo, "w"):  # once the worker is at the next sample
        again = iter(loader)
    assert [int(number) for number in again] == list(range(8, 16))
    (told,) = [text for text in caplog.messages if "was killed by SIGKILL" in text]
    assert "while it loaded" not in told


def test_loader_without_workers_stays_one():
    loader = RPCDataloader(datasets.Numbers(4))
    loader.num_workers = 1
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


class GatedNotes(datasets.Gated):
    """Notes each sample before it is there."""

    def __init__(self, size, index, fifo, log):
        super().__init__(size, index, fifo)
        self.log = log

    def __getitem__(self, index):
        datasets.note(self.log, index)
        return super().__getitem__(index)


def test_new_epoch_does_not_wait_for_what_the_last_one_had_asked_for(workers, fifo, tmp_path):
    dataset = GatedNotes(8, 1, fifo, str(tmp_path / "log"))
    options = {"batch_size": None, "num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    loader = RPCDataloader(dataset, workers=workers, **options)
    assert int(next(iter(loader))) == 0
    with open(fifo, "w"):  # once the worker is at the next sample, with others to come
        again = iter(loader)
        rpc_async(workers, len, ("",)).wait()  # comes after what its connection was to send
    assert int(next(again)) == 0
    open(fifo, "w").close()
    assert datasets.notes(dataset.log)[:3] == ["0", "1", "0"]


# In other threads and processes


@pytest.mark.parametrize("inline", [False, True])
def test_threads_that_share_an_iterator_get_batches_of_their_own(workers, inline):
    batches = iter(RPCDataloader(Numbers(1000), batch_size=2, workers="inline" if inline else workers))
    with ThreadPoolExecutor(3) as pool:
        received = list(pool.map(list, [batches] * 3))
    assert sorted(flat(itertools.chain(*received))) == list(range(1000))


def test_iterator_belongs_to_its_process(workers):
    iterator = iter(RPCDataloader(Numbers(8), workers=workers))
    next(iterator)

    def go_on():
        with pytest.raises(LocalProtocolError, match=r"this iterator belongs to process \d+, of which"):
            next(iterator)

    assert status_of_fork(go_on) == 0
    assert [int(number) for number in iterator] == list(range(1, 8))


def test_child_of_a_fork_waits_for_no_thread_of_its_parent(workers):
    loader = RPCDataloader(Numbers(8), workers=workers)
    iterator = iter(loader)
    next(iterator)
    taken, over = threading.Event(), threading.Event()

    def hold():
        with iterator._turn, iterator.driver.condition, loader._recorder._lock:
            taken.set()
            over.wait()

    def begin_anew():
        with pytest.raises(LocalProtocolError, match="this iterator belongs to process"):
            next(iterator)
        loader.diagnosis()
        assert flat(loader) == list(range(8))

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        assert status_of_fork(begin_anew) == 0
    finally:
        over.set()
        thread.join()


def test_torch_workers_cannot_use_an_rpc_dataset_and_say_so(workers):
    dataset = RPCDataset(workers, Numbers)
    iterator = iter(DataLoader(dataset, sampler=[0], num_workers=1))
    with pytest.raises(LocalProtocolError, match="dataset Numbers belongs to process"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    del iterator
    gc.collect()  # the traceback refers to it, and it to pipes
    for usable in dataset, RPCDataset("inline", Numbers):
        assert torch.cat(list(DataLoader(usable, 8))).tolist() == list(range(20))
        assert [int(number) for number in DataLoader(Subset(usable, [1, 2]))] == [1, 2]


# Time limit


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int64, torch.tensor])
def test_timeouts_may_be_numbers_of_other_libraries(workers, fifo, kind):
    assert rpc_async(workers, abs, (-1,), timeout=kind(30)).wait() == 1
    own = {} if kind is torch.tensor else {"task_timeout": kind(30), "reconnect_timeout": kind(30)}
    assert flat(RPCDataloader(Numbers(4), workers=workers, timeout=kind(30), **own)) == [0, 1, 2, 3]
    late = rpc_async(workers, open, (fifo,), timeout=0.1)  # the thread that keeps times goes on
    with pytest.raises(RPCTimeoutError):
        late.wait()
    os.close(os.open(fifo, os.O_RDWR))


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
    ours = run(RPCDataloader(dataset, workers=workers, timeout=timeout))
    assert (ours[0], ours[2]) == (error, rest)
    assert ours[1].startswith(f"{text} for batch 0 ")
    assert rest == list(range(6))


# Pinned memory


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
    pinned, asked = plug_in_pinned(monkeypatch)
    workers = {"TCP": shared_server, "Unix": unix_server}[where].address
    loader = RPCDataloader(range(40), batch_size=4, workers=workers, pin_memory=True, collate_fn=many_kinds)
    batches = list(loader)
    assert len(asked) == len(batches) == 10
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


# Other programs and versions


NEWER_TORCH = """
import importlib, inspect
from torch.utils.data import DataLoader, IterableDataset, Subset
from rpcdataloader.loader import dataloader

of_torch = inspect.signature(DataLoader)
novel = inspect.Parameter("novel", inspect.Parameter.KEYWORD_ONLY, default=None)
DataLoader.__signature__ = of_torch.replace(parameters=[*of_torch.parameters.values(), novel])
print([batch.tolist() for batch in importlib.reload(dataloader).RPCDataloader([1, 2], workers="inline")])
"""


def test_argument_that_a_newer_torch_adds_keeps_its_default(zygote):
    ended = zygote.start(NEWER_TORCH).wait()
    assert (ended.status, ended.output) == (0, "[[1], [2]]\n"), ended.errors


def test_orders_and_seeds_are_drawn_on_the_cpu_whatever_the_default_device():
    def draw():
        samplers = [ResumableDistributedSampler(range(9), 1, 0, shuffle=shuffle) for shuffle in (True, False)]
        generator = torch.Generator().manual_seed(0)
        loader = RPCDataloader(range(4), generator=generator, workers="inline", collate_fn=lambda _: get_sample_seed())
        return [*map(list, samplers), list(CostBatchSampler([1] * 9, 3, num_replicas=1, rank=0)), list(loader)]

    orders = draw()
    with torch.device("meta"):  # as torch.set_default_device does
        assert get_sample_seed() >= 0
        assert draw() == orders


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="this numpy has one kind for all")
def test_global_generator_of_numpy_may_be_of_another_kind(workers):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.SFC64(0))
    try:
        state = str(np.random.get_state(legacy=False))
        loader, resumed = (RPCDataloader(range(6), 2, workers=workers) for _ in range(2))
        begun = flat([next(iter(loader))])
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert begun + flat(resumed) == list(range(6))
        assert str(np.random.get_state(legacy=False)) == state
    finally:
        np.random.set_bit_generator(before)


# Subclasses, written for torch's loader


class Endless:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


def renewable(base):
    """A loader that keeps one pass over several epochs, and begins another one when it is told to."""

    class Renewable(base):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
            self.iterator = super().__iter__()

        def __iter__(self):
            return (next(self.iterator) for _ in range(2))

        def reset(self):
            self.iterator = self._get_iterator()

    return Renewable


def counting(base):
    """A loader that puts something around torch's iterator."""

    class Counting(base):
        def _get_iterator(self):
            return enumerate(super()._get_iterator())

    return Counting


class Placed(Numbers):
    """Where it is loaded, and what the dataset was when the pass began."""

    changed = False

    def __getitem__(self, index):
        return index, os.getpid() != TRAINER, get_worker_info() is not None, self.changed


TRAINER = os.getpid()


def told(batch):
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_subclass_that_begins_anew_by_torchs_method_has_new_workers(persistent_workers):
    def drive(base, **options):
        dataset = Placed(4)
        loader = renewable(base)(dataset, 2, persistent_workers=persistent_workers, **options)
        found = [told(batch) for _epoch in range(2) for batch in loader]
        dataset.changed = True
        loader.reset()
        return found + [told(batch) for batch in loader]

    expected = drive(DataLoader, num_workers=1)
    assert [batch[1:] for batch in expected] == [[[True] * 2, [True] * 2, [number > 3] * 2] for number in range(6)]
    assert drive(RPCDataloader, workers="local:1") == expected
    inline = drive(RPCDataloader, workers="inline")
    assert [[batch[0], batch[2]] for batch in inline] == [[batch[0], batch[2]] for batch in expected]
    assert not any(place for batch in inline for place in batch[1])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_subclass_that_overrides_torchs_method_is_asked_for_each_pass(options):
    loader = counting(RPCDataloader)(Placed(4), 2, **options)
    for _epoch in range(2):
        batches = list(loader)
        assert [number for number, _batch in batches] == [0, 1]
        assert [told(batch)[:2] for _, batch in batches] == [[[k, k + 1], [bool(options)] * 2] for k in (0, 2)]
