"""Batches that are delivered on a device, as seen with one that is made up; tests/gpu has what a real one shows."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.loader import inline, seat
from rpcdataloader.loader.copying import Carrier, DeviceCopies
from rpcdataloader.loader.plain import from_plain, is_plain
from rpcdataloader.wire.slabs import PageablePool
from tests.conftest import wait_until
from tests.support.causes import Causes
from tests.support.datasets import Failing
from tests.support.devices import plug_in

pytestmark = pytest.mark.usefixtures("clean_client")

NAME = "cuda:0"


@pytest.fixture
def device(monkeypatch):
    return plug_in(monkeypatch)


def tensors_of(batch):
    return [value for value in batch.values() if type(value) is torch.Tensor]


class Images:
    """What most samples are: something large, something small, and something that is no tensor."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {
            "image": torch.full((3, 64, 64), float(index)),
            "label": torch.tensor(index),
            "index": index,
            "name": f"sample {index}",
        }


class ImageStream(IterableDataset):
    def __iter__(self):
        images = Images()
        return map(images.__getitem__, range(len(images)))


class Counting(IterableDataset):
    """Its state is a large tensor, which it goes on changing."""

    taken = torch.zeros(100_000, dtype=torch.int64)

    def __iter__(self):
        for _ in range(20):
            self.taken += 1
            yield 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def check(batch, indices, device):
    assert [batch[name].tolist() for name in ("label", "index")] == [indices, indices]
    assert batch["image"].shape == (len(indices), 3, 64, 64)
    assert batch["image"][:, 2, 63, 63].tolist() == [float(index) for index in indices]
    assert batch["name"] == [f"sample {index}" for index in indices]
    assert all(map(device.holds, tensors_of(batch)))


def where_of(request, workers):
    return {"workers": {"workers": workers}, "inline": {"workers": "inline"}, "this process": {}}[request]


@pytest.mark.parametrize(
    ("where", "options"),
    [
        *itertools.product(("workers", "inline", "this process"), ({}, {"pin_memory": True})),
        *((where, {"persistent_workers": True}) for where in ("workers", "inline")),
        ("workers", {"in_order": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_every_batch_is_there(device, workers, where, options):
    loader = RPCDataloader(Images(), batch_size=4, device=NAME, **where_of(where, workers), **options)
    for _ in range(2):
        batches = list(loader)
        if options.get("in_order") is False:
            batches.sort(key=lambda batch: batch["index"][0])
        assert len(batches) == 5
        for number, batch in enumerate(batches):
            check(batch, list(range(4 * number, 4 * number + 4)), device)
    assert loader.device == NAME
    assert len(iter(loader)) == 5


def test_an_image_batch_is_two_copies_for_which_the_consumer_waits_before_it_sees_the_batch(device, workers):
    for number, _ in enumerate(RPCDataloader(Images(), batch_size=4, device=NAME, workers=workers)):
        # The copies are in the order of the batches, and one is on its way.
        assert device.waits[-1] == (number, threading.current_thread())
        assert len(device.waits) == number + 1
    # The images, and all that is small.
    assert [len(blocks) for blocks in device.copied] == [2] * 5
    pinned = {id(block) for block in device.pinned.blocks}
    assert all(id(block) in pinned for blocks in device.copied for block in blocks)


def many_features(samples):
    return {f"{kind} {i}": torch.tensor([i, *samples]) for i in range(1000) for kind in ("values", "lengths")}


def test_thousands_of_tensors_are_one_copy(device, workers):
    loader = RPCDataloader(range(3), batch_size=1, collate_fn=many_features, device=NAME, workers=workers)
    for number, batch in enumerate(loader):
        assert len(batch) == 2000
        assert all(map(device.holds, batch.values()))
        assert [values.tolist() for values in batch.values()] == [[i // 2, number] for i in range(2000)]
    assert [len(blocks) for blocks in device.copied] == [1] * 3


def test_a_copy_begins_when_the_batch_arrives(device, workers):
    """And not when somebody asks for it."""
    iterator = iter(RPCDataloader(Images(), batch_size=4, device=NAME, workers=workers))
    wait_until(lambda: device.copied, what="the first copy")
    assert device.waits == []
    check(next(iterator), [0, 1, 2, 3], device)


def test_state_of_a_stream_is_as_it_was_then_and_stays_here(device, workers):
    loader = RPCDataloader(Counting(), 4, device=NAME, workers=workers, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()["streams"][0][3]
    assert is_plain(state)
    taken = from_plain(state)["taken"]
    assert not device.holds(taken)
    assert taken.unique().tolist() == [4]


@pytest.mark.parametrize("where", ["workers", "inline"])
def test_streams_and_their_state(device, workers, where):
    options = {"batch_size": 4, "device": NAME, **where_of(where, workers)}
    if where == "workers":
        options["num_workers"] = 1
    loader = RPCDataloader(ImageStream(), **options)
    iterator = iter(loader)
    check(next(iterator), [0, 1, 2, 3], device)
    check(next(iterator), [4, 5, 6, 7], device)
    state = loader.state_dict()  # of what was delivered, not of what is on its way
    iterator = None
    resumed = RPCDataloader(ImageStream(), **options)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == 3
    for number, batch in enumerate(rest, 2):
        check(batch, list(range(4 * number, 4 * number + 4)), device)


def test_an_exception_comes_in_place_of_its_batch(device, workers):
    dataset = Failing(8, {1: (ValueError, "no sample 1"), 7: (ValueError, "no sample 7")})
    iterator = iter(RPCDataloader(dataset, batch_size=2, device=NAME, workers=workers))
    for expected in (None, [2, 3], [4, 5], None):
        if expected is None:
            with pytest.raises(ValueError, match="no sample"):
                next(iterator)
        else:
            assert device.holds(batch := next(iterator))
            assert batch.tolist() == expected
    assert next(iterator, None) is None


class ChangesOnArrival:
    """Its tensors get another shape, or other memory, when it is unpickled."""

    def __init__(self, _samples):
        self.tensors = [torch.tensor([[number, 1], [2, 3]]) for number in range(4)]

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.tensors[0].t_()
        self.tensors[1].data = torch.tensor([10, 11])
        self.tensors[2].add_(100)


def test_tensors_that_unpickling_has_changed_arrive_so(device, workers):
    (batch,) = RPCDataloader([1], collate_fn=ChangesOnArrival, device=NAME, workers=workers)
    expected = [[[0, 2], [1, 3]], [10, 11], [[102, 101], [102, 103]], [[3, 1], [2, 3]]]
    assert [tensor.tolist() for tensor in batch.tensors] == expected
    assert list(map(device.holds, batch.tensors)) == [False, False, True, True]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_memory_of_this_process_is_where_batches_are_anyway(workers, device):
    loader = RPCDataloader(RPCDataset(workers, Images), batch_size=4, device=device)
    assert [batch["label"].tolist() for batch in loader] == [list(range(4 * n, 4 * n + 4)) for n in range(5)]


@pytest.mark.parametrize("computes", [True, False])
def test_wait_while_the_device_is_at_work_is_none(workers, device, computes):
    device.computes = computes
    loader = RPCDataloader(
        Causes(stall=0.04), None, num_workers=1, workers=workers, device=NAME, persistent_workers=True
    )
    next(iter(loader))
    # A pass of workers that are there: the start of the first one is a wait, too.
    batches = iter(loader)
    for _ in range(30):
        next(batches)
    diagnosis = loader.diagnosis()
    assert (diagnosis.bound in ("workers", "start")) == (diagnosis.wait_share >= 0.05) == (not computes)


def num_answered(run):
    """Batches that have arrived, and are not on their way to the device."""
    return sum(task.answer is not None for task in list(run.engine.table.tasks.values()))


def test_diagnosis_knows_how_long_copies_take(device, workers):
    device.seconds = 0.02, 0.0
    loader = RPCDataloader(Images(), 1, workers=workers, device=NAME, sampler=[0] * 10_000)
    for _batch in loader:  # some are measured
        if seconds := loader.diagnosis().metrics().get("copy_seconds", 0.0):
            break
    assert seconds == pytest.approx(0.02)


@pytest.mark.usefixtures("device")
def test_profiler_shows_the_wait_for_each_copy(workers):
    loader = RPCDataloader(Images(), 2, workers=workers, device=NAME)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 10
    assert [row.count for row in profile.key_averages() if row.key == "RPCDataloader.copy"] == [10]


def test_one_batch_is_copied_ahead_and_no_more(device, workers):
    iterator = iter(RPCDataloader(Images(), batch_size=1, device=NAME, workers=workers, prefetch_factor=4))
    run = iterator.driver
    for num_delivered in range(1, 5):
        next(iterator)
        # The others have arrived, and wait for their turn in the memory of this process. One place of the window may
        # be free: that of a batch that was copied after the sampler was asked.
        wait_until(lambda: run.ahead is not None and num_answered(run) >= 7, what="a full window")
        assert len(device.copied) == num_delivered + 1
        assert len(device.waits) == num_delivered


class Listed(Carrier):
    """A carrier to a made-up device that is quick.

    Attributes:
        memory: What each batch occupies there, as weak references.
    """

    def __init__(self):
        driver = Mock()
        driver.Event.return_value.elapsed_time.return_value = 1.0
        super().__init__(torch.device("cpu"), PageablePool(), driver)
        self.memory = []

    def is_device_busy(self):
        return False

    def copy(self, blocks, is_timed=False):  # noqa: ARG002
        leases = [(ctypes.c_uint8 * len(block))() for block in blocks]
        self.memory.append(weakref.ref(leases[0]))
        memory = [
            torch.frombuffer(lease, dtype=torch.uint8).copy_(block) for lease, block in zip(leases, blocks, strict=True)
        ]
        done = self.module.Event()
        return DeviceCopies(self, memory, done, done)


@pytest.mark.usefixtures("device")
def test_the_device_holds_the_batch_in_use_and_the_next_one(workers, monkeypatch):
    carrier = Listed()
    for module in seat, inline:
        monkeypatch.setattr(module, "make_carrier", lambda _found, _pageable: carrier)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _self, _stream: None)
    batches = iter(RPCDataloader(Images(), batch_size=2, device=NAME, workers=workers))
    for number in range(10):
        batches.driver.recorder.next_probe = 0.0  # each batch is one
        batch = next(batches)

        def on_device():
            return {other for other, memory in enumerate(carrier.memory) if memory() is not None}

        wait_until(lambda now=number: on_device() <= {now, now + 1}, 5)
        assert number in on_device()
        del batch
        wait_until(lambda now=number: on_device() <= {now + 1}, 5)


def test_an_iterator_that_is_dropped_lets_everything_go(device, workers):
    iterator = iter(RPCDataloader(Images(), batch_size=4, device=NAME, workers=workers))
    next(iterator)
    run = iterator.driver
    iterator = None
    wait_until(lambda: run.is_closed, what="the end of the iterator")
    wait_until(lambda: run.ahead is None and not num_answered(run), what="what it had")
    assert device.copied


def test_interrupt_while_a_batch_is_sent_to_the_device_loses_none(device, server, monkeypatch):
    """It comes at once, and ends the pass; the state goes on."""
    loader = RPCDataloader(Images(), 2, workers=server.address, num_workers=1, device=NAME)
    batches = iter(loader)
    found = next(batches)["index"].tolist()
    tasks = batches.driver.engine.table.tasks
    wait_until(lambda: all(task.size_bytes is not None for task in tasks.values()), what="more than one batch is here")
    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt has interrupted this pass"):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    found += [number for batch in loader for number in batch["index"].tolist()]
    assert found == list(range(20))
