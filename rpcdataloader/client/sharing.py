"""Which workers belong to which rank of a distributed job. Every rank computes the same, without talking to others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed

from rpcdataloader.client.slurm import rank_of_step


@dataclass(frozen=True, slots=True)
class Partition:
    """This process's place among the trainers.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: Number of trainers.
    """

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}: rank must be 0 to world size - 1")

    @property
    def label(self) -> str:
        """Beginning of a message of this rank: ``"[rank 3 of 8] "``, or nothing where there is one rank only."""
        return f"[rank {self.rank} of {self.world_size}] " if self.world_size > 1 else ""


def current_partition(environ: Mapping[str, str] = os.environ) -> Partition:
    """The rank of this process: from torch.distributed if initialised, else from RANK and WORLD_SIZE, which torchrun
    sets, else its place in the step of Slurm that it belongs to.

    Raises:
        ValueError: The variables are set, and make no sense.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Partition(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if "RANK" in environ and "WORLD_SIZE" in environ:
        try:
            return Partition(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
        except ValueError as exc:
            raise ValueError(f"environment variables RANK and WORLD_SIZE: {exc}") from None
    try:
        return Partition(*(rank_of_step(environ, os.isatty(0)) or (0, 1)))
    except ValueError as exc:
        raise ValueError(f"environment variables of a Slurm step, such as SLURM_PROCID: {exc}") from None


def share_of(num_workers: Sequence[int], partition: Partition, *, by_node: bool = False) -> list[int]:
    """The nodes of one rank's workers: an entry, the number of a node, for each worker.

    All (k, node) pairs are put in order, the first worker of every node before the second of any, and dealt out in
    turn. So shares differ by at most one; and where the world size is a multiple of the number of nodes, a rank's
    workers are on one node, which then builds that rank's dataset once. With more ranks than workers, ranks double up.

    Args:
        num_workers: What each node offers.
        by_node: Put all workers of a node before those of the next one, so that another node at the end changes no
            share.
    """
    pairs = [(k, node) for node, count in enumerate(num_workers) for k in range(count)]
    if not by_node:
        pairs.sort()
    nodes = [node for _k, node in pairs]
    if partition.world_size > len(pairs):
        return [nodes[partition.rank % len(nodes)]]
    return nodes[partition.rank :: partition.world_size]
