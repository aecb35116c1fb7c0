"""What only a real accelerator shows: that received tensors are pinned."""

import pytest
import torch

from rpcdataloader import RPCDataloader, rpc_async

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("clean_client"),
]


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"large": torch.full((3, 64, 64), float(index)), "small": torch.tensor(index), "index": index}


def test_every_tensor_of_a_batch_is_pinned_and_arrives_right():
    loader = RPCDataloader(Samples(), batch_size=8, num_workers=2, pin_memory=True)
    for number, batch in enumerate(loader):
        assert all(tensor.is_pinned() for tensor in batch.values())
        copies = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
        del batch
        assert copies["large"][:, 0, 0, 0].tolist() == list(range(8 * number, 8 * number + 8))
        assert copies["small"].tolist() == copies["index"].tolist()


def test_result_of_a_call_is_pinned(shared_server):
    result = rpc_async(shared_server.address, torch.ones, (1 << 20,), pin_memory=True).wait()
    assert result.is_pinned()
