"""What only a real accelerator shows: that received tensors are pinned, and that their memory is not used too early."""

import numpy as np
import pytest
import torch

from rpcdataloader import RPCDataloader, rpc_async
from rpcdataloader.wire.pickling import dumps_reply, loads
from rpcdataloader.wire.slabs import PinnedAllocator
from tests.gpu.samples import CYCLES, Samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("clean_client"),
]


def many_kinds(samples):
    return {
        "stacked": torch.stack([sample["large"] for sample in samples]),
        "few": torch.arange(10),
        "strided": torch.rand(40, 500).t(),
        "half": torch.rand(70_000).bfloat16(),
        "part": torch.rand(1000)[5:],
        "array": np.arange(100_000.0),
    }


def thousands(_samples):
    return {str(number): torch.full((3,), number) for number in range(2000)}


@pytest.mark.parametrize("collate", [many_kinds, thousands, None])
@pytest.mark.parametrize("workers", ["local:2", "inline"])
def test_every_dense_tensor_is_pinned(workers, collate):
    for batch in RPCDataloader(Samples(), batch_size=16, workers=workers, pin_memory=True, collate_fn=collate):
        dense = [value for value in batch.values() if torch.is_tensor(value) and value.layout is torch.strided]
        assert len(dense) == {many_kinds: 5, thousands: 2000, None: 3}[collate]
        assert all(tensor.is_pinned() for tensor in dense)


def test_result_of_a_call_is_pinned(shared_server):
    result = rpc_async(shared_server.address, torch.ones, (1 << 20,), pin_memory=True).wait()
    assert result.is_pinned()


# A batch that is copied asynchronously, and dropped

SIZE = 1 << 15  # of two tensors that share a block


def receive(allocator, value):
    """Receive a message of two tensors; returns the block and the payload."""
    encoded = dumps_reply([torch.full((SIZE,), value, dtype=torch.uint8) for _ in range(2)])
    [buffer] = encoded.buffers
    block = allocator.allocate(buffer.nbytes)
    block.view[:] = buffer
    return block, encoded.payload


def ours(allocator, value):
    block, payload = receive(allocator, value)
    return loads(payload, [block], allocator=allocator)[1]


def by_pointer(allocator, value):
    block, _ = receive(allocator, value)
    # torch's allocator also recognises the pointer to the beginning of a block, but no other.
    return torch.frombuffer(block.view, dtype=torch.uint8, offset=SIZE)


@pytest.mark.parametrize(("make", "is_safe"), [(ours, True), (by_pointer, False)])
def test_memory_is_not_received_into_while_it_is_copied_from(make, is_safe):
    allocator = PinnedAllocator()
    arrived = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(1000)
    # A block of this size that is free, so that none has to be made, which might wait for the device.
    arrived.copy_(make(allocator, 1))
    torch.cuda.synchronize()

    batch = make(allocator, 2)
    torch.cuda._sleep(CYCLES)
    arrived.copy_(batch, non_blocking=True)
    del batch
    make(allocator, 3)  # the next one
    torch.cuda.synchronize()
    assert (arrived.unique().tolist() == [2]) == is_safe
