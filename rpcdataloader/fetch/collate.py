"""torch's default collate, into recycled memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.tensors import Stack

# Batches of at least this size are collated into recycled memory: what is smaller is copied into a slab on its way
# anyway, and malloc reuses it without page faults.
MIN_RECYCLED_BYTES = 1 << 16


class TensorCollator:
    """Stacks the tensors of a batch, in place of torch's function of the default collate.

    torch's allocates shared memory whenever worker info is set, to pass it to another process. Here that is pure cost:
    27 ms for 64x3x224x224 float32, against 16 ms into fresh memory and 2.5 ms into recycled memory.

    Otherwise it does what torch does outside of workers, errors included.

    Args:
        allocator: Of the recycled memory; None for fresh memory.

    Attributes:
        stacks: For a batch that only torch's own collate sees and that is sent then: what stands for a tensor that need
            not be made, by the ``id`` of the part of it that is in the first sample.
    """

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator
        self.stacks: Mapping[int, Stack] = {}

    def install(self) -> None:
        """Take the place of torch's function, so that a user's function that calls ``default_collate`` gains too.

        A function that the user has registered in its place stays.
        """
        current = default_collate_fn_map.get(torch.Tensor)
        if current is collate_tensor_fn or isinstance(current, TensorCollator):
            default_collate_fn_map[torch.Tensor] = self

    def __call__(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """Stack the tensors along a new first dimension."""
        if self.stacks and (stack := self.stacks.get(id(batch[0]))) is not None:
            return stack  # type: ignore[return-value]  # nobody looks at it before it is a tensor
        if _is_strided(batch[0]):
            # All that torch's function does then; calling it costs more than stacking a few numbers.
            return torch.stack(tuple(batch), out=self._lend_memory(batch))
        worker_info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        finally:
            torch_worker._worker_info = worker_info
        return stacked

    def _lend_memory(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Recycled memory for the result, if it is worth it and gives the same result as fresh memory.

        ``torch.stack(out=)`` converts different dtypes silently, and refuses tensors that require grad.
        """
        elem = batch[0]
        size_bytes = elem.nbytes * len(batch)
        if self._allocator is None or size_bytes < MIN_RECYCLED_BYTES or not are_alike(batch):
            return None
        return self._allocator.allocate(size_bytes).tensor.view(elem.dtype).view(len(batch), *elem.shape)


def _is_strided(value: Any) -> bool:
    """Whether this is a tensor without special treatment: not sparse, nested or of a subclass."""
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
