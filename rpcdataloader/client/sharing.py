"""This process's rank in a distributed job, its share of the workers, and the rank in its errors.

Every rank computes the same, without communication.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed

from rpcdataloader import errors


@dataclass(frozen=True, slots=True)
class Partition:
    """This process's place among the trainers."""

    rank: int = 0  # number from 0 to ``world_size - 1``
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}: rank must be 0 to world size - 1")

    @property
    def label(self) -> str:
        """Beginning of this rank's messages: ``"[rank 3 of 8] "``; empty with a single rank."""
        return f"[rank {self.rank} of {self.world_size}] " if self.world_size > 1 else ""


def has_process_group() -> bool:
    """Whether this process has called ``torch.distributed.init_process_group``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def current_partition(environ: Mapping[str, str] = os.environ) -> Partition:
    """The rank of this process: from torch.distributed if initialised, else from RANK and WORLD_SIZE, which torchrun
    sets, else its place in its Slurm step.

    Raises:
        ValueError: The variables are set to invalid values.
    """
    if has_process_group():
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

    All (k, node) pairs are sorted, the first worker of every node before the second of any, and dealt out in turn. So
    shares differ by at most one; and if the world size is a multiple of the number of nodes, a rank's workers are on
    one node, which then builds that rank's dataset once. With more ranks than workers, ranks share workers.

    Args:
        by_node: Put all workers of a node before those of the next one: another node at the end changes no share.
    """
    pairs = [(k, node) for node, count in enumerate(num_workers) for k in range(count)]
    if not by_node:
        pairs.sort()
    nodes = [node for _k, node in pairs]
    if partition.world_size > len(pairs):
        return [nodes[partition.rank % len(nodes)]]
    return nodes[partition.rank :: partition.world_size]


def rank_of_step(environ: Mapping[str, str], is_terminal: bool) -> tuple[int, int] | None:
    """Rank and world size that Slurm gave this process in its step; None outside of a step. Pure.

    Only processes started by ``srun`` have a rank: the shell of a batch script also has ``SLURM_PROCID=0`` and
    ``SLURM_NTASKS=8``, and is alone. The variables that begin with ``SLURM_STEP`` are those of steps.

    In a step over all components of a heterogeneous job (``srun A : B``), the tasks of one component count: the others
    run another program. A process that cannot tell them apart, in a job without script and ``salloc``, counts all.

    Args:
        is_terminal: True if standard input is a terminal. The shell of ``srun --pty bash`` is a task, but programs
            that a user runs in it have no rank. A step started from there has one; it inherits ``SLURM_PTY_PORT``.

    Raises:
        ValueError: A variable is not a number.
    """
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if not all(name in environ for name in names) or (is_terminal and "SLURM_PTY_PORT" in environ):
        return None
    rank, world_size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
    tasks = _of_components(environ, "SLURM_NTASKS")
    nodes = _of_components(environ, "SLURM_JOB_NUM_NODES")
    # Components share no node: a step on as many nodes as all have is one over all of them. Ranks follow their order.
    if len(tasks) > 1 and sum(tasks) == world_size and sum(nodes) == int(environ.get("SLURM_STEP_NUM_NODES", 0)):
        for count in tasks:
            if rank < count:
                return rank, count
            rank -= count
    return rank, world_size


def _of_components(environ: Mapping[str, str], name: str) -> list[int]:
    """A variable's values for each component of a heterogeneous job; empty if one is missing."""
    keys = [f"{name}_HET_GROUP_{k}" for k in range(int(environ.get("SLURM_HET_SIZE", 0)))]
    return [int(environ[key]) for key in keys] if all(key in environ for key in keys) else []


def of_rank(error: BaseException, partition: Partition) -> BaseException:
    """The error to raise: a copy that begins with the rank if its class is this package's.

    Exceptions of user code stay as they are; the cause of one from a worker names the rank.
    """
    text = partition.label
    cause = error.__cause__
    if text and isinstance(cause, errors.RemoteTraceback):
        where = str(cause.args[0])
        if not where.startswith(text):  # not yet labelled
            cause.args = (text + where, *cause.args[1:])
    elif text and type(error).__module__ == errors.__name__ and not str(error).startswith(text):
        named = type(error)(f"{text}{error}").with_traceback(error.__traceback__)
        named.__cause__ = cause
        return named
    return error
