"""torch's default collate into recycled memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rpcdataloader.wire.slabs import Allocator

# Least size of batches that are collated into recycled memory: smaller ones are copied into a slab for sending anyway,
# and malloc reuses their memory without page faults.
MIN_RECYCLED_BYTES = 1 << 16


class TensorCollator:
    """Stacks the tensors of a batch, replacing torch's function of the default collate.

    torch's function allocates shared memory whenever worker info is set, for another process. That is wasted here: 27
    ms for 64x3x224x224 float32, against 16 ms into fresh memory and 2.5 ms into recycled memory.

    Otherwise it does what torch does outside of workers, errors included.

    Args:
        allocator: Recycled memory; None for fresh memory.
    """

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator

    def install(self) -> None:
        """Replace torch's function, so that a user's function that calls ``default_collate`` gains too.

        A replacement registered by the user stays.
        """
        current = default_collate_fn_map.get(torch.Tensor)
        if current is collate_tensor_fn or isinstance(current, TensorCollator):
            default_collate_fn_map[torch.Tensor] = self

    def __call__(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack the tensors along a new first dimension."""
        if _is_strided(first := batch[0]):
            memory, size_bytes = None, first.nbytes * len(batch)
            # torch.stack(out=) converts different dtypes silently, and refuses tensors that require grad.
            if self._allocator is not None and size_bytes >= MIN_RECYCLED_BYTES and are_alike(batch):
                flat = self._allocator.allocate(size_bytes).tensor
                memory = flat.view(first.dtype).view(len(batch), *first.shape)
            # All of torch's function for this case; calling it costs more than stacking a few numbers.
            return torch.stack(tuple(batch), out=memory)
        worker_info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        finally:
            torch_worker._worker_info = worker_info
        return stacked


def _is_strided(value: Any) -> bool:
    """Whether this is an ordinary tensor: not sparse, nested or of a subclass."""
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def are_alike(batch: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are plain ones on the CPU, without grad, of one dtype and shape."""
    dtype, shape = batch[0].dtype, batch[0].shape
    return all(
        _is_strided(value)
        and value.is_cpu
        and value.dtype == dtype
        and value.shape == shape
        and not (value.requires_grad or value.is_quantized)
        for value in batch
    )
