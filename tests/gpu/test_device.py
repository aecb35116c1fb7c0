"""Batches that are delivered on a real device."""

import functools
import gc
import json

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from rpcdataloader import RPCDataloader
from rpcdataloader.loader.copying import Carrier
from rpcdataloader.wire.slabs import PageLock
from tests.conftest import wait_until
from tests.gpu.samples import CYCLES, Samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("clean_client"),
]


def check(batch, number):
    indices = list(range(8 * number, 8 * number + 8))
    assert all(tensor.device == torch.device("cuda", 0) for tensor in batch.values())
    assert batch["large"].amax((1, 2, 3)).tolist() == batch["large"].amin((1, 2, 3)).tolist() == indices
    assert batch["small"].tolist() == batch["index"].tolist() == indices


@pytest.mark.parametrize("workers", ["local:2", "inline", None])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_every_batch_is_there(workers, device):
    for number, batch in enumerate(RPCDataloader(Samples(), batch_size=8, workers=workers, device=device)):
        check(batch, number)


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="is not available: there are"):
        RPCDataloader(Samples(), workers="local:2", device=f"cuda:{torch.cuda.device_count()}")


def test_the_consumer_may_use_any_stream_and_mode():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for number, batch in enumerate(RPCDataloader(Samples(), batch_size=8, workers="local:2", device="cuda")):
            check(batch, number)
            assert not batch["large"].is_inference()


def thousands(samples):
    return {str(number): torch.full((20,), number) for number in range(2000)} | {"first": torch.tensor(samples[0])}


def images(samples):
    return torch.stack([sample["large"] for sample in samples]), torch.tensor([sample["index"] for sample in samples])


def copies_to_the_device(loader, folder):
    """Their names, in the trace of a pass."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in loader:
            pass
        torch.cuda.synchronize()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]


@pytest.mark.parametrize(
    ("samples", "collate", "copies_per_batch"),
    [(range(64), thousands, 1), (Samples(), images, 2), (Samples(), None, 2)],
)
def test_a_batch_is_as_many_copies_as_blocks(samples, collate, copies_per_batch, tmp_path):
    loader = RPCDataloader(samples, batch_size=8, workers="local:2", device="cuda", collate_fn=collate)
    list(loader)  # what torch does once
    names = copies_to_the_device(loader, tmp_path)
    assert len(names) == 8 * copies_per_batch
    assert all("Pinned" in name for name in names)


def test_tensors_by_the_thousand_are_right():
    loader = RPCDataloader(range(64), batch_size=8, workers="local:2", device="cuda", collate_fn=thousands)
    for number, batch in enumerate(loader):
        assert batch.pop("first").item() == 8 * number
        assert torch.stack(list(batch.values())).tolist() == [[i] * 20 for i in range(2000)]


class Kept(torch.Tensor):
    """A subclass."""


def special(_samples):
    base = torch.arange(40_000.0)
    return {
        "base": base,
        "part": base[100:200],
        "transposed": base.view(200, 200).t(),
        "leaf": torch.ones(3, requires_grad=True),
        "empty": torch.empty(0, 3),
        "packed": pack_sequence([torch.rand(5, 3), torch.rand(2, 3)]),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]),
        "subclass": torch.ones(3).as_subclass(Kept),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:Sparse:UserWarning")
@pytest.mark.parametrize("workers", ["local:2", "inline"])
def test_what_is_moved_and_what_stays(workers):
    (batch,) = RPCDataloader([1], workers=workers, device="cuda", collate_fn=special)
    moved = {name for name, value in batch.items() if (value.data if name == "packed" else value).is_cuda}
    assert moved == {"base", "part", "transposed", "leaf", "empty", "packed"}
    assert batch["part"].tolist() == list(range(100, 200))
    assert batch["transposed"].stride() == (1, 200)
    assert torch.equal(batch["transposed"].cpu(), torch.arange(40_000.0).view(200, 200).t())
    (2 * batch["leaf"]).sum().backward()
    assert batch["leaf"].grad.tolist() == [2.0] * 3
    assert not batch["packed"].batch_sizes.is_cuda
    torch.nn.LSTM(3, 4).cuda()(batch["packed"])
    assert batch["sparse"].to("cuda").to_dense().tolist() == torch.eye(3).tolist()


# The trainer is far ahead of the device, and has let batches go that the device has not read yet


def sums_behind_kernels(device):
    sums = []
    for batch in RPCDataloader(Samples(), batch_size=8, workers="local:2", device=device):
        torch.cuda._sleep(CYCLES)
        sums.append(batch["large"].mean((1, 2, 3)))
        del batch
    return [mean for each in sums for mean in each.tolist()]


def test_memory_of_a_batch_is_not_copied_to_while_it_is_read():
    torch.cuda._sleep(1000)
    assert sums_behind_kernels("cuda") == [float(index) for index in range(64)]


def test_that_could_be_seen(monkeypatch):
    """The test above fails if the allocator is not told who reads."""
    torch.cuda._sleep(1000)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    assert sums_behind_kernels("cuda") != [float(index) for index in range(64)]


@pytest.fixture
def registered(monkeypatch):
    """The beginnings of the memory that is page-locked."""
    addresses = set()
    register, unregister = PageLock.register, PageLock.unregister

    def note(self, address, size_bytes):
        register(self, address, size_bytes)
        addresses.add(address)

    def forget(self, address):
        addresses.remove(address)
        unregister(self, address)

    monkeypatch.setattr(PageLock, "register", note)
    monkeypatch.setattr(PageLock, "unregister", forget)
    return addresses


def test_memory_of_workers_is_not_written_while_the_device_reads_it(registered, monkeypatch):
    copied = []
    copy = Carrier.copy

    def copy_late(self, blocks, *args):
        copied.extend(block.is_pinned() for block in blocks)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)
        return copy(self, blocks, *args)

    monkeypatch.setattr(Carrier, "copy", copy_late)
    loader = RPCDataloader(Samples(), batch_size=8, workers="local:2", device="cuda", persistent_workers=True)
    for _ in range(3):
        for number, batch in enumerate(loader):
            check(batch, number)
    assert registered
    assert all(copied)
    del loader, batch
    gc.collect()
    wait_until(lambda: not registered)


def test_driver_that_refuses(monkeypatch):
    monkeypatch.setattr(PageLock, "register", functools.partialmethod(refused, PageLock.register))
    for number, batch in enumerate(RPCDataloader(Samples(), batch_size=8, workers="local:2", device="cuda")):
        check(batch, number)


def refused(registration, register, _address, size_bytes):
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        register(registration, 0, size_bytes)
    raise RuntimeError


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one_is_all_that_is_used():
    for number, batch in enumerate(RPCDataloader(Samples(), batch_size=8, workers="local:2", device="cuda:1")):
        assert batch["large"].device == torch.device("cuda", 1)
        assert batch["index"].tolist() == list(range(8 * number, 8 * number + 8))


def test_copies_are_timed():
    loader = RPCDataloader(Samples(), 8, workers="local:2", device="cuda", sampler=[0] * 8000)
    for _ in loader:  # some are measured, once they have ended
        if seconds := loader.diagnosis().metrics().get("copy_seconds", 0.0):
            break
    assert 0 < seconds < 0.03
