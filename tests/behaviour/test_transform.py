"""Streams whose samples are transformed in all workers: ``transform=``."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import gc
import itertools
import os
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client.client import Client
from rpcdataloader.errors import BadSamplesError, ConnectionLostError, SerializationError
from rpcdataloader.fetch.raw import RawBatch, RawIndices
from rpcdataloader.loader import sampler
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.support.datasets import note, notes, wait_for

pytestmark = pytest.mark.usefixtures("clean_client")

LENGTH = 40
LARGE = 100_000  # bytes that are not copied into a pickle


class Stream(IterableDataset):
    """Numbers in dicts, with a large byte string and an array. One of them may wait for a FIFO."""

    def __init__(self, length=LENGTH, broken=(), log=None, held=None, fifo=None):
        self.length, self.broken, self.log, self.held, self.fifo = length, broken, log, held, fifo
        self.epoch = 0

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        return iter(Numbers(self, worker.id, worker.num_workers))


class Odd(Exception):
    """Cannot be made of its arguments."""

    def __init__(self, number, why):
        super().__init__(f"{number} is {why}")


class Numbers:
    def __init__(self, stream, first, step):
        self.stream, self.numbers = stream, iter(range(first, stream.length, step))

    def __iter__(self):
        return self

    def __next__(self):
        number = next(self.numbers)
        if self.stream.log is not None:
            note(self.stream.log, "source", os.getpid())
        if number == self.stream.held:
            wait_for(self.stream.fifo)
        if number in self.stream.broken:
            raise Odd(number, "odd") if number == 20 else ValueError(f"sample {number} is broken")
        number += 1000 * self.stream.epoch
        content = {"bytes": bytes([number % 256]) * LARGE, "array": np.full(20_000, number)}
        return {"number": number, "noise": torch.rand(()), **content}


class Decode:
    """Checks a raw sample, and returns its number and random numbers."""

    def __init__(self, broken=(), log=None, deadly=None):
        self.broken, self.log, self.deadly = broken, log, deadly

    def __call__(self, sample):
        number = sample["number"]
        if self.log is not None:
            note(self.log, number, os.getpid())
        if self.deadly is not None and number == 21 and not os.path.exists(self.deadly):
            Path(self.deadly).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self.broken:
            raise KeyError(f"no label for {number}")
        assert type(sample["bytes"]) is bytes
        assert sample["bytes"] == bytes([number % 256]) * len(sample["bytes"])
        assert (sample["array"] == number).all()
        sample["array"] += 1  # each sample has memory of its own
        return torch.tensor([float(number), float(sample["noise"]), float(torch.rand(()))])


def make(workers, stream=None, decode=None, batch_size=4, **options):
    loader = RPCDataloader(
        Stream() if stream is None else stream,
        batch_size,
        workers=workers,
        transform=decode or Decode(),
        generator=torch.Generator().manual_seed(5),
        **options,
    )
    assert isinstance(loader, RPCDataloader)
    return loader


def as_lists(batches):
    return [batch.tolist() for batch in batches]


def numbers(batches):
    return [int(sample[0]) for batch in batches for sample in batch]


@pytest.fixture(scope="module")
def expected():
    torch.manual_seed(11)
    return as_lists(make("inline"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def test_batches_are_those_of_the_stream_for_any_number_of_workers(expected, wide_servers, tmp_path):
    assert numbers(expected) == list(range(LENGTH))
    for num_workers in (1, 3):
        log = tmp_path / f"log{num_workers}"
        loader = make(wide_servers[0].address, decode=Decode(log=str(log)), num_workers=num_workers)
        assert as_lists(loader) == expected
        notes = [line.split() for line in log.read_text().splitlines()]
        assert sorted(int(number) for number, _pid in notes) == list(range(LENGTH)), "each is transformed once"


def test_generator_may_be_changed_before_a_pass(expected):
    loader = make("inline")
    seed = loader.generator.initial_seed()
    loader.generator = torch.Generator().manual_seed(seed + 1)
    assert as_lists(loader) != expected
    loader.generator = torch.Generator().manual_seed(seed)
    assert as_lists(loader) == expected


def test_timeout_bounds_the_wait_for_the_stream(wide_servers, fifo):
    batches = iter(make(wide_servers[0].address, Stream(held=0, fifo=fifo), timeout=TIMEOUT_SCALE))
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after \d+.* seconds"):
        next(batches)
    open(fifo, "w").close()
    assert numbers(batches) == list(range(LENGTH))


def test_source_workers_take_their_parts(wide_servers, tmp_path):
    log = tmp_path / "log"
    loader = make(wide_servers[0].address, Stream(log=str(log)), num_workers=2, source_workers=2)
    assert numbers(loader)[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert len(set(log.read_text().split("\n"))) == 3  # two, and the end
    loader.source_workers = 1
    assert numbers(loader) == list(range(LENGTH))


def test_remote_stream_and_epochs(wide_servers):
    dataset = RPCDataset(wide_servers[0].address, Stream, 12)
    for persistent in (False, True):
        loader = RPCDataloader(dataset, 4, transform=Decode(), num_workers=2, persistent_workers=persistent)
        first = as_lists(loader)
        dataset.set_epoch(1 + persistent)
        second = as_lists(loader)
        assert numbers(first) == list(range(1000 * persistent, 1000 * persistent + 12))
        assert numbers(second) == list(range(1000 + 1000 * persistent, 1012 + 1000 * persistent))
        assert not set(first[0][0][1:]) & set(second[0][0][1:])  # the stream draws others, and the transform does


def await_third_batch(log, sample):
    """A transform: the stream has been asked for that."""
    wait_until(lambda: len(notes(log)) > 8)
    return sample["number"]


def test_batch_that_is_there_does_not_wait_for_those_after_skipped_ones(wide_servers, fifo, tmp_path):
    log = str(tmp_path / "log")
    stream = Stream(12, broken=range(4, 8), log=log, held=8, fifo=fifo)
    options = {"num_workers": 2, "on_error": "skip", "timeout": 5 * TIMEOUT_SCALE}
    batches = iter(make(wide_servers[0].address, stream, functools.partial(await_third_batch, log), **options))
    assert next(batches).tolist() == [0, 1, 2, 3]
    Path(fifo).write_text("")
    assert as_lists(batches) == [[8, 9, 10, 11]]


@pytest.mark.parametrize("who", ["source", "transform"])
def test_a_worker_that_is_killed_changes_nothing(expected, wide_servers, tmp_path, who):
    log, deadly = tmp_path / "log", str(tmp_path / "killed") if who == "transform" else None
    loader = make(wide_servers[0].address, Stream(log=str(log)), Decode(deadly=deadly), num_workers=2)
    batches = iter(loader)
    found = as_lists(itertools.islice(batches, 3))
    if who == "source":
        os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    assert found + as_lists(batches) == expected


def named(error):
    return str(getattr(error, "__notes__", error.__cause__))  # Python 3.10 has no notes


def test_exceptions_are_raised_in_their_turn_and_named(wide_servers):
    stream = Stream(broken=(9, 20, *range(28, LENGTH)))
    batches = iter(make(wide_servers[0].address, stream, Decode(broken=(5,)), num_workers=2))
    assert numbers([next(batches)]) == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="no label for 5") as caught:
        next(batches)
    assert "sample 1 of a batch of source worker 0 at position 5, batch 1" in named(caught.value)
    with pytest.raises(ValueError, match="sample 9 is broken") as caught:
        next(batches)
    assert "position 9 of stream 0, batch 2" in named(caught.value)
    assert numbers(itertools.islice(batches, 2)) == [*range(10, 18)]
    with pytest.raises(Odd, match="20 is odd"):
        next(batches)
    assert numbers([next(batches)]) == [21, 22, 23, 24]
    with pytest.raises(ValueError, match="sample 28 is broken"):
        next(batches)
    # Failed samples that are under way do not keep a pass that is left.
    reference = weakref.ref(batches)
    del batches, caught
    gc.collect()
    assert reference() is None


def stop(_sample):
    raise StopIteration


def test_transform_that_raises_stop_iteration_does_not_end_the_epoch(wide_servers):
    for workers in "inline", wide_servers[0].address:
        with pytest.raises(RuntimeError, match="transform raised StopIteration"):
            next(iter(make(workers, decode=stop)))


def test_samples_that_fail_can_be_skipped(wide_servers, caplog):
    options = {"num_workers": 1, "on_error": "skip"}
    for workers in "inline", wide_servers[0].address:
        caplog.clear()
        loader = make(workers, Stream(broken=(9, 39)), Decode(broken=(5, 6)), **options)
        assert numbers(loader) == [number for number in range(LENGTH) if number not in (5, 6, 9, 39)]
        assert loader.num_skipped == 4
        assert "no label for 5" in caplog.text
        assert "sample 9 is broken" in caplog.text
        num_batches = len(list(loader))
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        state = loader.state_dict()
        continued = make(workers, Stream(broken=(9, 39)), Decode(broken=(5, 6)), **options)
        continued.load_state_dict(state)
        assert numbers(continued) == []
        assert continued.num_skipped == 4
    loader = make(workers, decode=Decode(broken=range(5)), max_skipped=3, **options)
    with pytest.raises(BadSamplesError, match="more than max_skipped=3"):
        list(loader)


def test_arguments_that_are_changed_later_hold_for_the_stream(tmp_path):
    """As Lightning gives loaders a ``worker_init_fn``."""
    loader = make("inline", Stream(12, broken=(5,)))
    loader.on_error = "skip"
    loader.worker_init_fn = functools.partial(note, str(tmp_path / "log"), "begins")
    assert numbers(loader) == [*range(5), *range(6, 12)]
    assert notes(str(tmp_path / "log")) == ["begins 0"] * 2


class Deadly(Stream):
    """Ends its process when its first batch has arrived."""

    def __iter__(self):
        for sample in super().__iter__():
            if sample["number"] == 4:
                wait_until(lambda: "arrived" in notes(self.log))
                note(self.log, "ends")
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def await_three_ends(log, sample):
    """A transform."""
    note(log, "arrived")
    wait_until(lambda: notes(log).count("ends") == 3)
    return sample["number"]


def test_stream_that_ends_every_worker_is_an_error_in_its_turn(wide_servers, tmp_path):
    log = str(tmp_path / "log")
    transform = functools.partial(await_three_ends, log)
    batches = iter(make(wide_servers[0].address, Deadly(log=log), transform, num_workers=2))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(ConnectionLostError, match="batch 1 has ended 3 workers in a row"):
        next(batches)
    assert list(batches) == []


class Unopened(IterableDataset):
    """The file of its samples is missing."""

    def __iter__(self):
        raise FileNotFoundError("samples.tar")


@pytest.mark.parametrize("options", [{"on_error": "skip"}, {"retry_on": OSError}], ids=str)
def test_stream_that_cannot_begin_is_an_error_at_once(wide_servers, options, caplog):
    for workers in "inline", wide_servers[0].address:
        with pytest.raises(FileNotFoundError, match="samples"):
            next(iter(make(workers, Unopened(), num_workers=1, **options)))
    assert not caplog.text


class Retried:
    """Changes its sample before it fails, the first time."""

    def __init__(self, log):
        self.log = log

    def __call__(self, sample):
        sample["array"] += 1
        note(self.log, "called")
        if len(notes(self.log)) == 1:
            raise OSError("a label cannot be read")
        return int(sample["number"]), sample["array"].max()


def test_sample_that_is_retried_is_as_the_stream_gave_it(wide_servers, tmp_path):
    for workers in "inline", wide_servers[0].address:
        log = tmp_path / workers.replace("/", "-")
        loader = make(workers, Stream(3), Retried(str(log)), num_workers=1, retry_on=OSError, collate_fn=list)
        assert list(loader) == [[(0, 1), (1, 2), (2, 3)]]
        assert log.read_text().count("called") == 4


def test_arguments_that_are_read_again_may_be_iterators(tmp_path):
    retried = Retried(str(tmp_path / "log"))
    loader = make(iter(["inline"]), Stream(3), retried, retry_on=iter([OSError]), collate_fn=list)
    assert list(loader) == [[(0, 1), (1, 2), (2, 3)]]


def test_interrupt_loses_no_raw_batch(monkeypatch):
    batches = iter(make("inline", Stream(12)))
    with monkeypatch.context() as patch:
        patch.setattr(RawIndices, "__init__", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert numbers(batches) == list(range(12))


def test_transform_gets_samples_as_they_were_after_an_interrupt(expected):
    decode, interrupts = Decode(), [KeyboardInterrupt]

    def transform(sample):
        if sample["number"] == 6 and interrupts:
            raise interrupts.pop()
        return decode(sample)

    batches = iter(make("inline", decode=transform))
    found = [next(batches).tolist()]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert found + as_lists(batches) == expected


def test_error_at_the_beginning_of_the_stream_names_the_rank_once(wide_servers):
    stream = Stream()
    stream.lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"^\[rank 1 of 2\] dataset.lock is a"):
        iter(make(wide_servers[0].address, stream, partition=(1, 2)))


class Gated(Decode):
    """Transforms nothing before a FIFO was opened."""

    def __init__(self, fifo):
        super().__init__()
        self.fifo = fifo

    def __call__(self, sample):
        if self.fifo is not None:
            wait_for(self.fifo)
            self.fifo = None
        return super().__call__(sample)


def test_raw_samples_have_a_limit(wide_servers, fifo, monkeypatch):
    held = []  # bytes of raw samples in this process, as each batch of them is dealt out
    of_pass = []  # the same, of those that wait for the transform, or of which a batch is about to be returned
    drivers = []

    def all_batches():
        return [each for each in gc.get_objects() if type(each) is RawBatch]

    of_others = all_batches()  # of earlier tests, until the collector comes

    def noted(batch):
        ids = set(map(id, of_others))
        held.append(sum(each._block.nbytes for each in all_batches() if id(each) not in ids))
        for driver in drivers:
            kept = [*driver.engine.table.tasks.values(), *filter(None, [driver.taken])]
            of_pass.append(batch._block.nbytes + sum(entry.payload.request.size_bytes for entry in kept))
        return RawIndices(batch)

    monkeypatch.setattr(sampler, "RawIndices", noted)
    options = {"num_workers": 1, "prefetch_factor": 16, "max_in_flight_bytes": 6_000_000}
    batches = iter(make(wide_servers[0].address, decode=Gated(fifo), **options))
    driver = batches.driver
    drivers.append(driver)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, batches)
        # Until no more may be drawn, though there is one; or all were.
        wait_until(lambda: len(held) == 10 or (driver.begun.source.is_ready() and not driver.may_draw()))
        open(fifo, "w").close()
        found = numbers([first.result()])
    assert found + numbers(batches) == list(range(LENGTH))
    assert max(held) <= 6_000_000  # of 10, which the window allows
    assert max(of_pass) <= 3_000_000


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_dropped_iterator_frees_the_workers_of_the_stream_and_of_the_transform(wide_servers, persistent_workers):
    server = wide_servers[0]
    loader = make(server.address, num_workers=2, persistent_workers=persistent_workers)
    batches = iter(loader)
    next(batches)
    wait_until(lambda: len(server.processes()) >= 4, what="the session, and three workers")
    passes = weakref.ref(batches), weakref.ref(batches.driver.begun.source.samples._batches)
    del batches, loader
    gc.collect()
    wait_until(lambda: [each() for each in passes] == [None, None], 5, what="both passes freed")
    wait_until(lambda: len(server.processes()) <= 1, what="the workers of the iterator ended")


class Sums(Dataset):
    def __getitem__(self, payload):
        return sum(float(part.sum()) for part in payload.values())


def test_sampler_may_yield_payloads_of_any_size(wide_servers):
    """As with torch: what the sampler yields is what the dataset gets."""
    payloads = [{"array": np.full(100_000, i), "tensor": torch.full((50_000,), float(i))} for i in range(6)]
    loader = RPCDataloader(Sums(), 2, sampler=payloads, workers=wide_servers[0].address, num_workers=2)
    assert as_lists(loader) == [[150_000.0 * i, 150_000.0 * (i + 1)] for i in (0, 2, 4)]


# Samples that the stream goes on to change


@dataclasses.dataclass
class Record:
    content: Any
    number: int = 0


BUFFERS = {
    "bytearray": lambda: bytearray(2),
    "large bytearray": lambda: bytearray(LARGE),
    "array": lambda: np.zeros(2, np.uint8),
    "large array": lambda: np.zeros(LARGE, np.uint8),
    "permuted array": lambda: np.zeros((300, 400), np.uint8).T,
    "array of objects": lambda: np.zeros(2, object),
    "tensor": lambda: torch.zeros(2, dtype=torch.uint8),
    "large tensor": lambda: torch.zeros(LARGE, dtype=torch.uint8),
    "tensor with grad": lambda: torch.zeros(2, requires_grad=True),
    "list": lambda: [0, 0],
    "array module": lambda: array.array("i", [0, 0]),
}

HOLDERS = {
    "alone": lambda buffer: buffer,
    "in a dict": lambda buffer: {"a": (1, [buffer])},
    "in an object": lambda buffer: Record(buffer),
    "in a subclass": lambda buffer: collections.OrderedDict(a=buffer),
}


class Refilled(IterableDataset):
    """Reads each record into the same buffer, and changes what holds it."""

    def __init__(self, make_buffer, hold):
        self.make_buffer, self.hold = make_buffer, hold

    def __iter__(self):
        buffer = self.make_buffer()
        held = self.hold(buffer)
        for number in range(6):
            with torch.no_grad():
                buffer[0] = number
            if isinstance(held, dict):
                held["number"] = number
            elif isinstance(held, Record):
                held.number = number
            yield held


def find_number(sample):
    """The number in the buffer, and the one beside it."""
    beside = None
    if isinstance(sample, dict):
        beside, sample = sample["number"], sample["a"]
    elif isinstance(sample, Record):
        beside, sample = sample.number, sample.content
    while isinstance(sample, tuple) or (isinstance(sample, list) and len(sample) == 1):
        sample = sample[-1]
    while not isinstance(sample, (int, float)):
        sample = sample[0].item() if getattr(sample, "ndim", 0) == 1 and sample.dtype != object else sample[0]
    assert beside in (None, sample)
    return int(sample)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", BUFFERS)
def test_transform_gets_each_sample_as_it_was_when_the_stream_gave_it(kind, holder):
    stream = Refilled(BUFFERS[kind], HOLDERS[holder])
    loader = RPCDataloader(stream, 3, transform=find_number, workers="inline")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_workers_transform_each_sample_as_it_was(wide_servers):
    stream = Refilled(BUFFERS["large array"], HOLDERS["in an object"])
    loader = RPCDataloader(stream, 3, transform=find_number, workers=wide_servers[0].address, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_sample_that_cannot_be_copied_is_an_error_that_names_it(wide_servers):
    class Locked(IterableDataset):
        def __iter__(self):
            yield from ({"number": 1}, {"lock": threading.Lock()})

    batches = iter(RPCDataloader(Locked(), 2, transform=len, workers=wide_servers[0].address))
    with pytest.raises(SerializationError, match=r"samples\[1\]\['lock'\] is a _thread.lock"):
        next(batches)


def test_state_from_before_the_first_pass_begins_the_stream_anew_with_persistent_workers():
    loader = make("local", num_workers=1, persistent_workers=True)
    state = loader.state_dict()
    expected = as_lists(loader)
    loader.load_state_dict(state)
    assert as_lists(loader) == expected


def test_stream_is_read_by_processes_of_the_loaders_context(monkeypatch):
    contexts, local_node = [], Client.local_node

    def noted(self, context, inherited):
        contexts.append(context)
        return local_node(self, context, inherited)

    monkeypatch.setattr(Client, "local_node", noted)
    loader = RPCDataloader(Stream(2), num_workers=1, transform=str, multiprocessing_context="fork")
    assert len(list(loader)) == 2
    assert contexts == [loader.multiprocessing_context] * 2
