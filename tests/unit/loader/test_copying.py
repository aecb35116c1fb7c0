"""Copies to a device: which calls are made of torch, in which order, and which device is meant."""

from __future__ import annotations

import contextlib
import threading
import weakref

import numpy as np
import pytest
import torch

from rpcdataloader.loader.copying import Carrier, StreamCarrier, find_device, make_carrier
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.tensors import Movable
from tests.devices import FakeDevice

CPU = torch.device("cpu")


class FakeModule:
    """Stands for ``torch.cuda``. Everything that is done on a stream goes into one log, with that stream."""

    def __init__(self):
        self.log = []
        self.current = "consumer's"
        self.num_streams = 0
        self.events = []

    def Stream(self, device):
        assert device.index is not None or device == CPU
        self.num_streams += 1
        return FakeStream(self, f"side {self.num_streams}")

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextlib.contextmanager
    def device(self, device):
        self.log.append(("device", str(device)))
        yield
        self.log.append(("device", "before"))

    def current_stream(self, device):
        assert device == CPU
        return FakeStream(self, self.current)

    def Event(self, enable_timing=False):
        self.events.append(FakeEvent(self, enable_timing))
        return self.events[-1]

    def is_available(self):
        return True

    def device_count(self):
        return 2

    def current_device(self):
        return 1


class FakeStream:
    def __init__(self, module, name):
        self.name = name
        self._module = module

    def wait_event(self, event):
        self._module.log.append(("wait", self.name, event.recorded))


class FakeEvent:
    def __init__(self, module, is_timed):
        self._module = module
        self.is_timed = is_timed
        self.recorded = None
        self.at = None  # milliseconds, when it is done

    def query(self):
        return self.at is not None

    def elapsed_time(self, later):
        assert self.is_timed
        assert later.is_timed
        return later.at - self.at

    def record(self, stream):
        self.recorded = f"event on {stream.name}"
        self._module.log.append(("record", stream.name))


@pytest.fixture
def module(monkeypatch):
    module = FakeModule()
    copy = torch.Tensor.copy_

    def logged_copy(self, source, non_blocking=False):
        module.log.append(("copy", module.current, source.nbytes, non_blocking))
        return copy(self, source)

    def record_stream(self, stream):
        module.log.append(("protect", stream.name, self.nbytes))

    monkeypatch.setattr(torch.Tensor, "copy_", logged_copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return module


def make_blocks():
    return [torch.full((size,), size, dtype=torch.uint8) for size in (3, 5)]


def test_copies_are_asynchronous_on_a_stream_of_their_own_and_the_consumer_waits(module):
    carrier = StreamCarrier(CPU, PageablePool(), module)
    copies = carrier.copy(make_blocks())
    assert module.log == [
        ("device", "cpu"),
        ("copy", "side 1", 3, True),
        ("copy", "side 1", 5, True),
        ("record", "side 1"),
        ("device", "before"),
    ]
    assert [memory.tolist() for memory in copies.memory] == [[3] * 3, [5] * 5]
    module.log.clear()
    module.current = "another one"  # of whoever asks for the batch
    copies.wait()
    assert module.log == [
        ("wait", "another one", "event on side 1"),
        ("protect", "another one", 3),
        ("protect", "another one", 5),
    ]


def test_copies_are_timed_by_events_and_nothing_waits_for_them(module):
    copies = StreamCarrier(CPU, PageablePool(), module).copy(make_blocks(), is_timed=True)
    assert copies.times() is None
    module.log.clear()
    copies.wait()
    assert [entry[:2] for entry in module.log][:3] == [
        ("record", "consumer's"), ("wait", "consumer's"), ("record", "consumer's"),
    ]  # fmt: skip
    assert copies.times() is None
    # The copy begins, the stream of the consumer arrives, the copy ends, and that stream goes on.
    start, end, before, after = module.events
    start.at, before.at, end.at, after.at = 10.0, 13.0, 15.0, 15.5
    assert copies.times() == pytest.approx((0.005, 0.0025))


def test_copies_that_are_not_timed_take_one_event(module):
    copies = StreamCarrier(CPU, PageablePool(), module).copy(make_blocks())
    copies.wait()
    assert [event.is_timed for event in module.events] == [False]
    assert copies.times() is None


def test_all_copies_of_a_loader_are_on_one_stream(module):
    carrier = StreamCarrier(CPU, PageablePool(), module)
    for _ in range(3):
        carrier.copy(make_blocks())
    assert module.num_streams == 1


def test_what_is_copied_is_not_kept(module):
    blocks = make_blocks()
    storages = [weakref.ref(block.untyped_storage()) for block in blocks]
    copies = StreamCarrier(CPU, PageablePool(), module).copy(blocks)
    del blocks
    assert [storage() for storage in storages] == [None, None]
    copies.wait()


def test_device_with_one_stream_is_copied_to_in_order():
    copies = Carrier(torch.device("meta"), PageablePool()).copy(make_blocks())
    copies.wait()
    assert [(memory.device.type, memory.nbytes) for memory in copies.memory] == [("meta", 3), ("meta", 5)]
    seconds, stalled = copies.times()
    assert seconds > 0
    assert stalled == 0


def transfer(carrier, batch):
    encoded = dumps_reply(batch)
    movable = Movable()
    blocks = [carrier._fill(buffer) for buffer in encoded.buffers]
    return loads(encoded.payload, blocks, allocator=carrier.allocator, movable=movable), movable


def test_a_batch_is_moved_by_one_copy_of_blocks_that_the_allocator_knows():
    device = FakeDevice()
    sent = {"large": torch.rand(300, 300), **{str(number): torch.rand(9) for number in range(500)}}
    batch, movable = transfer(device, sent)
    copies = device.carry(movable)
    [blocks] = device.copied
    assert len(blocks) == 2
    assert {id(block) for block in blocks} <= {id(block) for block in device.pinned.blocks}
    copies.wait()
    assert all(map(device.holds, batch.values()))
    assert all(torch.equal(batch[name], sent[name]) for name in sent)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_batches_are_the_same_in_every_mode_of_autograd(mode):
    device = FakeDevice()
    batch, movable = transfer(device, [torch.ones(3), torch.ones(2, requires_grad=True)])
    with mode():
        device.carry(movable).wait()
    assert not any(tensor.is_inference() for tensor in batch)
    assert [tensor.requires_grad for tensor in batch] == [False, True]
    batch[0].requires_grad_()
    (batch[0].sum() + batch[1].sum()).backward()


def test_tensors_that_lie_elsewhere_by_default_do_not_matter():
    device = FakeDevice()
    with torch.device("meta"):
        batch, movable = transfer(device, {"one": torch.ones(3, device="cpu")})
        device.carry(movable).wait()
    assert batch["one"].tolist() == [1.0] * 3


def test_batches_of_this_process_are_sent_as_those_of_workers():
    device = FakeDevice()
    image = torch.rand(300, 300)
    sent = {"image": image, "twice": [image], "row": image[5], "array": np.arange(3), "text": "a", "n": torch.tensor(3)}
    batch = device.send(sent)
    assert batch["image"] is batch["twice"][0]
    assert torch.equal(batch["row"], image[5])
    assert all(map(device.holds, (batch["image"], batch["row"], batch["n"])))
    assert (batch["array"].tolist(), batch["text"], int(batch["n"])) == ([0, 1, 2], "a", 3)
    assert not device.holds(sent["image"])


# Which device


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_memory_of_this_process_is_no_device(device):
    assert find_device(device) is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", torch.device("cuda", 1)])
def test_device_that_is_there_is_found(device, module, monkeypatch):
    monkeypatch.setattr(torch, "cuda", module)
    assert find_device(device) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda:2", "there are 2, counted from 0"),
        ("xpu", r"torch \d.* sees no xpu device"),
        ("meta", "sees no meta device"),
        ("nonsense", "nonsense"),
        ("", "device=''"),
    ],
)
def test_device_that_is_not_there_is_an_error_that_names_it(device, reason, module, monkeypatch):
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device={device!r} is not available: .*{reason}" if device else reason):
        find_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", 0])
def test_without_an_accelerator_it_is_an_error(device):
    with pytest.raises(ValueError, match=f"device={device!r} is not available"):
        find_device(device)


@pytest.mark.parametrize("device", [True, 1.5, ["cuda"], object()])
def test_what_is_no_device_is_a_type_error(device):
    with pytest.raises(TypeError, match="device must be"):
        find_device(device)


def test_without_an_index_it_is_the_current_device_of_the_thread(module, monkeypatch):
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr("rpcdataloader.loader.copying.pinned_allocator_for", lambda _device: None)
    pool = PageablePool()
    carrier = make_carrier(torch.device("cuda"), pool)
    assert isinstance(carrier, StreamCarrier)
    assert carrier.device == torch.device("cuda", 1)
    assert carrier.allocator is pool
    assert make_carrier(torch.device("cuda", 0), pool).device == torch.device("cuda", 0)


def test_batches_are_received_into_memory_that_is_pinned_for_the_device(module, monkeypatch):
    asked, pinned = [], object()
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(
        "rpcdataloader.loader.copying.pinned_allocator_for", lambda device: asked.append(device) or pinned
    )
    assert make_carrier(torch.device("cuda"), PageablePool()).allocator is pinned
    assert asked == [torch.device("cuda", 1)]


def test_errors_of_the_device_are_raised():
    device = FakeDevice()
    device.errors[0] = RuntimeError("out of memory")
    _, movable = transfer(device, [torch.ones(3)])
    with pytest.raises(RuntimeError, match="out of memory"):
        device.carry(movable)


def test_fake_copies_are_made_when_waited_for():
    """So a consumer that does not wait is seen."""
    copies = FakeDevice().copy([torch.ones(1, dtype=torch.uint8)])
    assert copies.memory[0].item() == 0xEE
    copies.wait()
    assert copies.memory[0].item() == 1
    assert copies._device.waits == [(0, threading.current_thread())]


def test_carrier_is_for_any_device():
    assert Carrier(CPU, PageablePool()).send([torch.ones(3)])[0].tolist() == [1.0] * 3
