"""The tensors of a message are given other memory, and are otherwise what they were."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.tensors import Movable
from tests.integration import kinds
from tests.integration.comparison import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning", "ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning"),
]


class Elsewhere:
    """Memory that the tensors of a message have been moved to. What moves only has its old one overwritten."""

    def __init__(self, sent, some_stay=False):
        encoded = dumps_reply(sent)
        blocks = []
        for buffer in encoded.buffers:
            block = Block(torch.empty(buffer.nbytes, dtype=torch.uint8))
            block.view[:] = buffer
            blocks.append(block)
        movable = Movable()
        self.batch = loads(encoded.payload, blocks, movable=movable)
        self.old = movable.blocks
        self.memory = [block.clone() for block in self.old]
        movable.move(self.memory, torch.device("cpu"))
        if not some_stay:
            for block in self.old:
                block.fill_(0xEE)

    def holds(self, tensor):
        storage = tensor.untyped_storage()._cdata
        return any(memory.untyped_storage()._cdata == storage for memory in self.memory)


def tensors_in(batch):
    return [tensor for tensor in batch.values() if tensor.numel()]


def test_dense_tensors_of_every_kind_are_moved_and_stay_what_they_were():
    sent = {
        name: tensor
        for name, tensor in kinds.make("tensors").items()
        if type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not tensor.__dict__
        and tensor.is_leaf
        and name not in ("column of a large one", "with a step", "part of an image")  # which are sent compact
    }
    elsewhere = Elsewhere(sent)
    assert len(sent) > 50
    assert all(map(elsewhere.holds, tensors_in(elsewhere.batch)))
    assert_same(elsewhere.batch, sent)


def test_thousands_of_tensors_are_one_block():
    sent = {number: torch.full((20,), number) for number in range(2000)}
    elsewhere = Elsewhere(sent)
    assert len(elsewhere.memory) == 1
    assert all(map(elsewhere.holds, tensors_in(elsewhere.batch)))
    assert_same(elsewhere.batch, sent)


def test_a_few_small_tensors_are_one_block_too():
    elsewhere = Elsewhere({"label": torch.arange(1000), "weight": torch.rand(1000)})
    assert len(elsewhere.memory) == 1


@pytest.mark.parametrize("size", [3, 30_000])
def test_leaves_of_autograd_take_gradients_where_they_are(size):
    (leaf,) = Elsewhere([torch.ones(size, requires_grad=True)]).batch
    (2 * leaf).sum().backward()
    assert leaf.is_leaf
    assert leaf.grad.tolist() == [2.0] * size


def test_changing_one_in_place_does_not_disturb_autograd_of_another():
    one, other = Elsewhere([torch.ones(3), torch.ones(3)]).batch
    result = (one.requires_grad_() ** 2).sum()
    other.add_(1)
    result.backward()
    assert one.grad.tolist() == [2.0] * 3


def test_same_object_twice_stays_one_object():
    image = torch.rand(5)
    first, second = Elsewhere([image, image]).batch
    assert first is second


@pytest.mark.parametrize("size", [30, 30_000])
def test_other_tensors_stay_with_their_parts(size):
    dense = torch.rand(size)
    made = kinds.make("tensors")
    special = {
        name: made[name]
        for name in (
            "conjugate", "negative", "parameter", "subclass", "sparse", "not coalesced", "hybrid", "boxes", "attribute",
            "sparse rows", "sparse columns", "sparse blocks", "quantized by channel", "quantized", "nested", "meta",
        )
    }  # fmt: skip
    special["large"] = torch.rand(300, 300).to_sparse()
    jagged = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)
    elsewhere = Elsewhere({**special, "dense": dense, "jagged": jagged}, some_stay=True)
    there = elsewhere.batch.pop("jagged")
    assert [part.tolist() for part in there.unbind()] == [part.tolist() for part in jagged.unbind()]
    assert elsewhere.holds(elsewhere.batch["dense"])
    assert not elsewhere.holds(elsewhere.batch["parameter"])
    assert not elsewhere.holds(there.values())
    assert not elsewhere.holds(elsewhere.batch["sparse"]._values())
    # Large ones have blocks of their own, which are not copied.
    assert len(elsewhere.memory) == 1
    assert_same(elsewhere.batch, {**special, "dense": dense})


def test_sizes_of_a_packed_sequence_stay_and_its_data_move():
    sent = pack_sequence([torch.rand(5, 3), torch.rand(2, 3)], enforce_sorted=False)
    elsewhere = Elsewhere({"sequence": sent}, some_stay=True)
    sequence = elsewhere.batch["sequence"]
    assert type(sequence) is PackedSequence
    assert elsewhere.holds(sequence.data)
    assert elsewhere.holds(sequence.sorted_indices)
    assert elsewhere.holds(sequence.unsorted_indices)
    assert not elsewhere.holds(sequence.batch_sizes)
    assert torch.equal(sequence.data, sent.data)


def test_classes_are_unpickled_with_tensors_in_plain_memory():
    elsewhere = Elsewhere(Looking(torch.arange(5)))
    assert elsewhere.batch.seen == (elsewhere.old[0].data_ptr(), [0, 1, 2, 3, 4])
    assert elsewhere.holds(elsewhere.batch.tensor)


class Looking:
    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return {"tensor": self.tensor}

    def __setstate__(self, state):
        self.tensor = state["tensor"]
        self.seen = self.tensor.data_ptr(), self.tensor.tolist()


def test_arrays_stay():
    elsewhere = Elsewhere({"array": np.arange(20_000.0), "tensor": torch.arange(20_000.0)})
    assert len(elsewhere.memory) == 1
    assert elsewhere.batch["array"].sum() == elsewhere.batch["tensor"].double().sum()


@pytest.mark.parametrize("batch", [[], {"a": "b"}, 3], ids=["empty", "text", "number"])
def test_without_tensors_there_is_nothing_to_copy(batch):
    elsewhere = Elsewhere(batch)
    assert elsewhere.memory == []
    assert_same(elsewhere.batch, batch)


def test_memory_that_was_received_into_is_let_go_at_once():
    gc.disable()
    try:
        encoded = dumps_reply([torch.rand(100_000), torch.sparse_coo_tensor([[0]], [1.0], (3,)), torch.rand(3)])
        blocks = [Block(torch.empty(buffer.nbytes, dtype=torch.uint8)) for buffer in encoded.buffers]
        for block, buffer in zip(blocks, encoded.buffers, strict=True):
            block.view[:] = buffer
        large = weakref.ref(blocks[0].tensor.untyped_storage())
        movable = Movable()
        batch = loads(encoded.payload, blocks, movable=movable)
        del block, blocks
        movable.move([block.clone() for block in movable.blocks], torch.device("cpu"))
        assert large() is None
        assert len(batch) == 3
    finally:
        gc.enable()


class Raised:
    """A part of a batch that gives its tensor other memory as it is rebuilt."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __setstate__(self, state):
        self.tensor = state["tensor"]
        self.tensor.data = self.tensor.data + 1


def test_tensor_that_was_given_other_memory_keeps_its_content():
    [part, other] = Elsewhere([Raised(torch.arange(1000.0)), torch.ones(1000)]).batch
    assert torch.equal(part.tensor, torch.arange(1000.0) + 1)
    assert torch.equal(other, torch.ones(1000))
