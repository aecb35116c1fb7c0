"""What comes out of a loader is what the collate function returned, and each tensor of it stands for itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader
from tests.support import kinds
from tests.support.comparison import assert_same
from tests.support.devices import plug_in

pytestmark = [
    pytest.mark.usefixtures("clean_client"),
    # What torch says when it rebuilds the rarer kinds.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning", "ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning"),
]


@pytest.fixture(params=["tcp", "unix"])
def workers(request, shared_server, unix_server):
    return {"tcp": shared_server, "unix": unix_server}[request.param].address


@pytest.fixture
def batch(workers):
    (batch,) = RPCDataloader([0], collate_fn=kinds.make_small_and_large, workers=workers)
    return batch


def tensors_of(batch):
    return [batch["image"], batch["label"], batch["weight"], *batch["boxes"]]


# Everything arrives as it was


@pytest.mark.parametrize("where", ["tcp", "unix", "tcp to a device", "inline to a device"])
@pytest.mark.parametrize("name", kinds.MAKERS)
def test_every_kind_arrives_as_it_was(shared_server, unix_server, monkeypatch, where, name):
    place, _, is_moved = where.partition(" to ")
    workers = {"tcp": shared_server.address, "unix": unix_server.address}.get(place, place)
    device = plug_in(monkeypatch) if is_moved else None
    options = {"sampler": [name], "batch_size": None, "collate_fn": kinds.as_is, "device": device and "cuda:0"}
    (batch,) = RPCDataloader(kinds.Kinds(), **options, workers=workers)
    expected = kinds.make(name)
    if name == "tensors":
        for sent_compact in (
            "column of a large one",
            "with a step",
            "part of an image",
            "subclass, part of a large one",
        ):
            expected[sent_compact] = expected[sent_compact].clone()
        assert expected["part of an image"].is_contiguous(memory_format=torch.channels_last)
        names = "channels last", "requires grad", "parameter"
        assert device is None or [device.holds(batch[each]) for each in names] == [True, True, False]
        boxes = batch["boxes, large"]
        assert device is None or not (device.holds(boxes) or device.holds(boxes.scale))
    if name == "structures" and device is not None:  # the processor reads the sizes
        assert device.holds(batch["packed"].data)
        assert not device.holds(batch["packed"].batch_sizes)
    assert_same(batch, expected)


@pytest.mark.parametrize("value", [b"", "", None, (), torch.empty(0), np.empty(0)], ids=repr)
def test_batches_of_no_bytes(workers, value):
    dataset = [value] * 3
    loader = RPCDataloader(dataset, batch_size=None, workers=workers, collate_fn=kinds.as_is)
    assert_same(list(loader), dataset)


# Each tensor stands for itself


def test_a_kept_tensor_keeps_nothing_else_and_saves_nothing_else(batch):
    for tensor in tensors_of(batch):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < tensor.nbytes + 4096
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), tensor)
        assert tensor is batch["image"] or tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_kept_array_keeps_its_memory(workers):
    def arrays(samples):
        return np.full(3_000_000, samples[0], dtype=np.uint8)

    kept = list(RPCDataloader(range(5), collate_fn=arrays, workers=workers))
    # Fresh batches, which would land in the memory of these if it were free.
    assert len(list(RPCDataloader(range(5, 10), collate_fn=arrays, workers=workers))) == 5
    for number, array in enumerate(kept):
        assert (array == number).all()


def test_changing_and_resizing_one_tensor_changes_no_other(batch):
    expected = kinds.make_small_and_large(None)
    untouched, originals = tensors_of(batch), tensors_of(expected)
    resized = []
    while untouched:
        tensor, _original = untouched.pop(0), originals.pop(0)
        if tensor is batch["image"]:
            # Torch's loader refuses this for every tensor of a batch, we for large ones.
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.resize_(tensor.numel() + 5000)
        else:
            resized.append(tensor.resize_(tensor.numel() + 5000).fill_(7))
        assert_same(untouched, originals)
    assert_same(batch["array"], expected["array"])
    assert all((tensor == 7).all() for tensor in resized)
