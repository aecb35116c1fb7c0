"""Embedding tables that are spread over ranks: whose table it is, and how ids and embeddings travel.

Each rank holds the tables of some features, and looks up what the batches of all ranks ask of them. Ids go to the
table's rank (:func:`exchange`), embeddings come back (:func:`all_to_all`), and so do gradients in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives


def split_features(features: list[str], num_ranks: int) -> list[list[str]]:
    """Return the features of each rank: neighbours, and about as many for each."""
    if num_ranks > len(features):
        raise ValueError(f"{num_ranks} ranks cannot share {len(features)} tables: start fewer ranks")
    ends = [len(features) * (rank + 1) // num_ranks for rank in range(num_ranks)]
    return [features[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def exchange(indices: Tensor, lengths: Tensor, num_features: list[int]) -> tuple[Tensor, Tensor]:
    """Send the ids of a batch to the ranks of their tables, and receive those for this rank's tables.

    Args:
        indices: Of this rank's rows, in the combined form.
        lengths: Of its lists.
        num_features: How many features each rank has, in the order of the batch.

    Returns:
        Indices and lengths of this rank's features, for the rows of all ranks, rank after rank.
    """
    num_ranks, own = len(num_features), num_features[dist.get_rank()]
    num_rows = len(lengths) // sum(num_features)
    sent = [number * num_rows for number in num_features]
    received_lengths = _move(lengths, sent, [own * num_rows] * num_ranks)
    by_rank = received_lengths.view(num_ranks, own, num_rows)
    sums = [torch.stack([part.sum() for part in lengths.split(sent)]), by_rank.sum(dim=2).flatten()]
    sizes = torch.cat(sums).tolist()  # a GPU is waited for once
    sent_ids, pieces = sizes[:num_ranks], sizes[num_ranks:]
    received_ids = [sum(pieces[own * rank : own * (rank + 1)]) for rank in range(num_ranks)]
    lists = _move(indices, sent_ids, received_ids).split(pieces)
    order = [own * rank + feature for feature in range(own) for rank in range(num_ranks)]
    return torch.cat([lists[place] for place in order]), by_rank.transpose(0, 1).flatten()


def _move(values: Tensor, sent: list[int], received: list[int]) -> Tensor:
    return collectives.wait_tensor(_start(values, sent, received))


def _start(values: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Begin an all-to-all; its result may be used after ``wait_tensor``."""
    group = dist.distributed_c10d._get_default_group().group_name
    return torch.ops._c10d_functional.all_to_all_single(values.contiguous(), received, sent, group)


@dataclass
class Requested:
    """Embeddings on their way; in the backward pass, their gradient on its way back."""

    values: Tensor
    gradient: list[Tensor] = field(default_factory=list)


class _Request(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, sent: list[int], received: list[int], gradient: list[Tensor]) -> Tensor:
        ctx.gradient, ctx.shape = gradient, pooled.shape
        return _start(pooled.flatten(), sent, received)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return collectives.wait_tensor(ctx.gradient.pop()).view(ctx.shape), None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sent: list[int], received: list[int], gradient: list[Tensor]) -> Tensor:
        ctx.sent, ctx.received, ctx.gradient = sent, received, gradient
        return collectives.wait_tensor(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # What is on its way has another shape than autograd wants here, so that the request takes it from the list.
        ctx.gradient.append(_start(gradient, ctx.received, ctx.sent))
        return gradient, None, None, None


def all_to_all_request(pooled: Tensor, widths: list[int]) -> Requested:
    """Begin what :func:`all_to_all` does; only :func:`all_to_all_wait` can use the result.

    In the backward pass, this is where the gradient is waited for.
    """
    gradient: list[Tensor] = []
    return Requested(_Request.apply(pooled, *_sizes(len(pooled) // len(widths), widths), gradient), gradient)


def all_to_all_wait(requested: Requested, widths: list[int]) -> Tensor:
    """End what :func:`all_to_all_request` began. In the backward pass, the gradient is sent from here."""
    num_rows = len(requested.values) // sum(widths)
    received = _Wait.apply(requested.values, *_sizes(num_rows, widths), requested.gradient)
    parts = received.split([num_rows * width for width in widths])
    return torch.cat([part.view(num_rows, -1) for part in parts], dim=1)


def _sizes(num_rows: int, widths: list[int]) -> tuple[list[int], list[int]]:
    """Return how many values go to each rank and come from it, if each has a batch of so many rows."""
    return [num_rows * widths[dist.get_rank()]] * len(widths), [num_rows * width for width in widths]


def all_to_all(pooled: Tensor, widths: list[int]) -> Tensor:
    """Give each rank the embeddings of its rows.

    Args:
        pooled: Of this rank's features for the rows of all ranks, (ranks * rows, width of these features).
        widths: Of the features of each rank.

    Returns:
        Embeddings of all features for this rank's rows, (rows, sum of widths).
    """
    return all_to_all_wait(all_to_all_request(pooled, widths), widths)


torch.fx.wrap("all_to_all")
