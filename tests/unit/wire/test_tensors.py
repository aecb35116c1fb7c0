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
from rpcdataloader.wire.slabs import Allocator, Block, PageablePool, PinnedAllocator
from rpcdataloader.wire.tensors import Index, is_dense, pack, rebuild

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e5m2]


class FakePinned(PinnedAllocator):
    """Pinned memory without a device: remembers which memory it gave out."""

    def __init__(self) -> None:
        self.memory: list[torch.Tensor] = []
        super().__init__(self._remember)

    def _remember(self, size_bytes: int) -> torch.Tensor:
        self.memory.append(torch.empty(size_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def owns(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return any(storage.data_ptr() == memory.data_ptr() for memory in self.memory)


def transfer(sent: list[torch.Tensor], allocator: Allocator | None = None) -> list[torch.Tensor]:
    index, buffers = pack(sent)
    blocks: list[Block] = []
    for buffer in buffers:
        blocks.append((allocator or PageablePool()).allocate(buffer.nbytes))
        blocks[-1].view[:] = buffer
    index = Index(*pickle.loads(pickle.dumps(tuple(index))))
    return rebuild(index, [block.tensor for block in blocks], in_place=isinstance(allocator, FakePinned))


def content(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape).copy_(tensor)
    return copy.reshape(-1).view(torch.uint8).numpy().tobytes() if copy.numel() else b""


def span(tensor: torch.Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + elements * tensor.element_size() if tensor.numel() else start


def has_gaps(tensor: torch.Tensor) -> bool:
    start, end = span(tensor)
    return end - start > tensor.nbytes


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(received) is torch.Tensor
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    if not has_gaps(sent):
        assert received.stride() == sent.stride()
    assert content(received) == content(sent)
    assert not received.requires_grad
    assert received._base is None


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor([]),
        torch.empty(2, 0, 3),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(1, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(2, 1, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        torch.rand(3, 1).expand(3, 1000),
        torch.rand(()).expand(7),
        torch.rand(4, 6).t(),
        torch.rand(10).as_strided((4, 3), (2, 1)),
        torch.rand(2, 3, 4).permute(1, 2, 0),
        torch.rand(200, 300).t(),
        torch.rand(2, 3, 100, 150).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}:{tensor.stride()}",
)
def test_known_layouts_arrive_with_their_strides(tensor):
    (received,) = transfer([tensor])
    assert_same(received, tensor)
    assert received.stride() == tensor.stride()


class TestSending:
    def test_large_tensors_are_not_copied(self):
        tensor = torch.rand(300, 300).t()
        _, (buffer,) = pack([tensor])
        tensor.fill_(2)
        assert torch.frombuffer(buffer, dtype=torch.float32).unique().tolist() == [2]

    def test_only_the_span_of_a_slice_is_sent(self):
        _, (buffer,) = pack([torch.rand(1000, 20_000)[17]])
        assert buffer.nbytes == 20_000 * 4

    def test_column_is_sent_compact(self):
        matrix = torch.arange(1_000_000).reshape(1000, 1000)
        _, (buffer,) = pack([matrix[:, 3]])
        assert buffer.nbytes == 8000
        assert torch.frombuffer(buffer, dtype=torch.int64).equal(matrix[:, 3])

    def test_small_tensors_are_gathered_into_slabs_of_a_megabyte(self):
        sent = [torch.full((50_000,), i, dtype=torch.uint8) for i in range(50)]
        _, buffers = pack(sent)
        assert [buffer.nbytes for buffer in buffers] == [1_000_000, 1_000_000, 500_000]
        for there, here in zip(transfer(sent), sent, strict=True):
            assert_same(there, here)


@pytest.mark.parametrize("count", [2, 64, 65, 2000])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
class TestIndependence:
    def receive(self, count: int, pinned: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], FakePinned | None]:
        kinds = [torch.arange(3), torch.rand(2, 2), torch.tensor(True), torch.rand(4, 2).t()]
        sent = [kinds[i % 4].clone() for i in range(count)]
        allocator = FakePinned() if pinned else None
        return sent, transfer(sent, allocator), allocator

    def test_each_has_exactly_its_own_memory_except_pinned_ones(self, count, pinned):
        sent, received, allocator = self.receive(count, pinned)
        if pinned:
            assert max(t.untyped_storage().nbytes() for t in received) <= 1 << 20
        else:
            assert [t.untyped_storage().nbytes() for t in received] == [t.nbytes for t in sent]
            assert len({t.untyped_storage().data_ptr() for t in received}) == count
        if allocator:
            assert all(allocator.owns(tensor) for tensor in received)

    def test_changing_one_in_place_changes_no_other_and_autograd_does_not_mind(self, count, pinned):
        sent, received, _ = self.receive(count, pinned)
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
    assert received[0].data_ptr() == allocator.memory[0].data_ptr()
    assert received[1].data_ptr() == allocator.memory[1].data_ptr()
    assert all(allocator.owns(tensor) for tensor in received)


@pytest.mark.parametrize("device", ["meta"])
def test_default_device_of_the_program_is_no_concern(device):
    matrix = torch.rand(200, 200)
    sent = [matrix, matrix[:, 1], torch.empty(0, 3), *(torch.rand(3) for _ in range(5)), torch.rand(2, 3).t()]
    torch.set_default_device(device)
    try:
        received = transfer(sent, None)
    finally:
        torch.set_default_device(None)
    for there, here in zip(received, sent, strict=True):
        assert there.device.type == "cpu"
        assert_same(there, here)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_of_the_trainer_are_no_concern(mode):
    sent = [torch.rand(3), torch.rand(3), torch.rand(300, 300)]
    with mode():
        received = transfer(sent)
    for there, here in zip(received, sent, strict=True):
        assert_same(there, here)


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def without_memory() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.ones(2, requires_grad=True) * 2,
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch._efficientzerotensor((3,)),
        with_attribute,
        without_memory,
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch on beta features
def test_what_is_more_than_bytes_and_layout_is_not_dense(make):
    assert not is_dense(make())


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="this torch has no named tensors")
@pytest.mark.filterwarnings("ignore")
def test_named_tensors_are_not_dense():
    assert not is_dense(torch.ones(2, names=("n",)))
