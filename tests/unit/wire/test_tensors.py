"""Tensors to blocks and back, always tested together."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.wire import tensors
from rpcdataloader.wire.slabs import Allocator, Block, PageablePool
from rpcdataloader.wire.tensors import Index, is_dense, pack, rebuild
from tests.support import comparison
from tests.support.devices import FakePinned

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e5m2]


def transfer(sent: list[torch.Tensor], allocator: Allocator | None = None) -> list[torch.Tensor]:
    index, buffers = pack(sent)
    blocks: list[Block] = []
    for buffer in buffers:
        blocks.append((allocator or PageablePool()).allocate(buffer.nbytes))
        blocks[-1].view[:] = buffer
    index = Index(*pickle.loads(pickle.dumps(tuple(index))))
    return rebuild(index, [block.tensor for block in blocks], in_place=isinstance(allocator, FakePinned))


def has_gaps(tensor: torch.Tensor) -> bool:
    num_spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return num_spanned > tensor.numel() > 0


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert received._base is None
    if has_gaps(sent):
        received, sent = (each.clone(memory_format=torch.contiguous_format) for each in (received, sent))
    comparison.assert_same(received, sent)


@contextlib.contextmanager
def limits(min_block_bytes: int, max_slab_bytes: int) -> Iterator[None]:
    """Make small tensors large, so that examples stay small."""
    with (
        mock.patch.object(tensors, "MIN_BLOCK_BYTES", min_block_bytes),
        mock.patch.object(tensors, "MAX_SLAB_BYTES", max_slab_bytes),
    ):
        yield


@st.composite
def messages(draw: st.DrawFn) -> list[torch.Tensor]:
    """Up to eight tensors of any layout on up to three storages."""
    sizes = draw(st.lists(st.integers(0, 640).map(lambda size: size // 16 * 16), min_size=1, max_size=3))
    # Bytes that are fine for every dtype, bool included.
    storages = [(torch.arange(size + i) % 7 % 2)[i:].to(torch.uint8) for i, size in enumerate(sizes)]
    sent: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 8))):
        storage = draw(st.sampled_from(storages)).untyped_storage()
        dtype = draw(st.sampled_from(DTYPES))
        room = storage.nbytes() // dtype.itemsize
        offset = draw(st.integers(0, room))
        shape, strides = [], []
        left = room - offset  # elements behind the first one, and it
        for _ in range(draw(st.integers(0, 4))):
            size, stride = draw(st.integers(0, 6)), draw(st.integers(0, 20))
            if size > 1:
                size = min(size, 1 + max(left - 1, 0) // stride) if stride else size
                left -= (size - 1) * stride
            shape.append(size)
            strides.append(stride)
        if room - offset == 0 and 0 not in shape:
            shape.append(0)
            strides.append(1)
        sent.append(torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides)))
    return sent


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@given(sent=messages(), min_block_bytes=st.sampled_from([1, 32, 100, 1 << 16]), max_slab_bytes=st.integers(100, 2000))
@settings(max_examples=150, deadline=None)
def test_any_tensors_arrive_as_they_were(pinned, sent, min_block_bytes, max_slab_bytes):
    with limits(min_block_bytes, max_slab_bytes):
        received = transfer(sent, FakePinned() if pinned else None)
    for there, here in zip(received, sent, strict=True):
        assert_same(there, here)


def test_large_tensors_are_not_copied_nor_more_of_their_storage_sent():
    tensor = torch.rand(3, 300, 300)[1].t()
    _, (buffer,) = pack([tensor])
    assert buffer.nbytes == tensor.nbytes
    tensor.fill_(2)
    assert torch.frombuffer(buffer, dtype=torch.float32).unique().tolist() == [2]


def test_small_tensors_are_gathered_into_slabs_of_a_megabyte():
    sent = [torch.full((50_000,), i, dtype=torch.uint8) for i in range(50)]
    _, buffers = pack(sent)
    assert [buffer.nbytes for buffer in buffers] == [1_000_000, 1_000_000, 500_000]
    for there, here in zip(transfer(sent), sent, strict=True):
        assert_same(there, here)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_changing_one_in_place_changes_no_other_and_autograd_does_not_mind(pinned):
    kinds = [torch.arange(3), torch.rand(2, 2), torch.tensor(True), torch.rand(4, 2).t()]
    sent = [kinds[i % 4].clone() for i in range(65)]
    allocator = FakePinned() if pinned else None
    received = transfer(sent, allocator)
    assert allocator is None or all(map(allocator.holds, received))
    weight = torch.ones(2, 2, requires_grad=True)
    loss = (weight * received[1]).sum()  # saves received[1] for the backward pass
    for i, tensor in enumerate(received):
        if i != 1:
            tensor.zero_()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.equal(sent[1])


def test_large_tensors_stay_where_they_were_received_on_the_storage_of_their_block():
    allocator = FakePinned()
    received = transfer([torch.rand(100_000), torch.rand(300, 100), torch.rand(5)], allocator)
    assert received[0].data_ptr() == allocator.blocks[0].data_ptr()
    assert received[1].data_ptr() == allocator.blocks[1].data_ptr()
    assert all(allocator.holds(tensor) for tensor in received)


# The first is what torch.set_default_device does.
@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad])
def test_modes_of_the_trainer_are_no_concern(mode):
    matrix = torch.rand(200, 200)
    sent = [matrix, matrix[:, 1], torch.empty(0, 3), *(torch.rand(3) for _ in range(5)), torch.rand(2, 3).t()]
    with mode():
        received = transfer(sent)
    for there, here in zip(received, sent, strict=True):
        assert there.device.type == "cpu"
        assert_same(there, here)


def test_tensors_without_memory_are_not_dense():
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    assert not is_dense(freed)
    assert not is_dense(torch._efficientzerotensor((3,)))
