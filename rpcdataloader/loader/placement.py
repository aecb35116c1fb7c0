"""On which nodes the workers of a loader are."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.discovery import Elastic, Local, Remote
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.sharing import Partition, current_partition, share_of
from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.plan.options import PlanOptions

logger = logging.getLogger("rpcdataloader.loader")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers of a pass should be.

    Attributes:
        homes: The node of each worker; one that has several appears as often. Some may be away.
        others: More nodes, which help out while all of these are away; those that this rank should ask first come
            first.
        partition: This process's place among those that share the nodes.
        num_offered: Workers of all nodes together.
        max_workers: Of this process, however many nodes there come to be; 0 for no limit.
        register: Where nodes come and go; None if they are named.
    """

    homes: tuple[Node, ...]
    others: tuple[Node, ...] = ()
    partition: Partition = field(default_factory=Partition)
    num_offered: int = 0
    max_workers: int = 0
    register: Elastic | None = None


def place(where: Local | Remote | Elastic, *, partition: Partition | None = None, num_workers: int = 0) -> Placement:
    """Choose the workers of this process.

    Args:
        partition: This process's place among those that share the workers; None finds it out. The embedded pool is
            not shared.
        num_workers: How many to use; 0 for all of this process's share (of the embedded pool: as many as CPUs). Of a
            remote pool never more than the share.

    Raises:
        ConnectError: A node server cannot be reached that never could; of those that come and go, none can.
    """
    nodes = get_client().nodes(where)
    sessions = [node.session() for node in nodes]
    if isinstance(where, Elastic):
        nodes = _those_that_answer(nodes)
    offered = [node.num_workers() for node in nodes]
    for session in sessions:
        if session.is_ready:
            session.follow()
    if isinstance(where, Local):
        return Placement((nodes[0],) * (num_workers or where.num_workers or offered[0]))
    partition = partition or current_partition()
    if partition.world_size > sum(offered):
        _warn_of_doubling(partition.world_size, sum(offered))
    # Servers come and go: those before keep their shares, where the order is that in which they came.
    share = share_of(offered, partition, by_node=isinstance(where, Elastic))[: num_workers or None]
    # Ranks that lose their nodes at the same time do not all ask the same one.
    first = partition.rank % len(nodes)
    others = [node for node in nodes[first:] + nodes[:first] if node not in {nodes[index] for index in share}]
    return Placement(
        tuple(nodes[index] for index in share),
        tuple(others),
        partition,
        sum(offered),
        num_workers,
        where if isinstance(where, Elastic) else None,
    )


def prepare(dataset: RemoteDataset, nodes: tuple[Node, ...], *, wait: bool = True) -> None:
    """Have a dataset on those of ``nodes`` that are there.

    Args:
        wait: When none is there, wait for one.

    Raises:
        ConnectError: None can be reached.
        ConnectionLostError: All have gone meanwhile.
        Exception: What building it raised.
    """
    sessions = [node.session() for node in dict.fromkeys(nodes)]
    ready = [session for session in sessions if session.is_ready]
    if wait and not ready:
        ready = [_wait_for_one(sessions)]
    try:
        dataset.build_on(ready)
    except ConnectionLostError:
        if wait and not any(dataset.is_on(session) for session in ready):
            raise


def _wait_for_one(sessions: Sequence[RemoteSession]) -> RemoteSession:
    """The first of ``sessions``, which all connect already, that comes to be; the error of the last if none does."""
    for session in sessions[:-1]:
        with contextlib.suppress(RPCError):
            session.wait()
            return session
    sessions[-1].wait()
    return sessions[-1]


def _those_that_answer(nodes: Sequence[Node]) -> list[Node]:
    answering: list[Node] = []
    errors: list[RPCError] = []
    for node in nodes:
        try:
            node.num_workers()
            answering.append(node)
        except RPCError as exc:
            errors.append(exc)
    if not answering:
        raise errors[0]
    for error in errors:
        logger.warning("going on without a node server that is registered: %s", error)
    return answering


@functools.cache  # once, and not for every epoch of every loader
def warn_of_few(num_workers: int, num_offered: int, where: str) -> None:
    """Say that there are fewer workers than the user has asked for."""
    logger.warning(
        "num_workers is %d, but this process's share of what %s offer is %d: start them with more --num-workers",
        num_workers,
        where,
        num_offered,
    )


@functools.cache
def _warn_of_doubling(world_size: int, num_workers: int) -> None:
    logger.warning("%d ranks share %d workers: some are used by more than one rank", world_size, num_workers)


def plan_options(settings: PassSettings, placement: Placement) -> PlanOptions:
    """What the engine has to know of both."""
    return PlanOptions(
        num_workers=len(placement.homes),
        is_iterable=settings.iterable,
        prefetch_factor=settings.prefetch_factor,
        in_order=settings.in_order,
        max_in_flight_bytes=settings.max_in_flight_bytes,
        max_retries=settings.max_retries,
        task_timeout=settings.task_timeout,
        reconnect_timeout=settings.reconnect_timeout,
        marks_last_try=settings.marks_last_try,
        label=settings.partition.label,
        rank=placement.partition.rank,
        world_size=placement.partition.world_size,
        num_offered=placement.num_offered,
        max_workers=placement.max_workers,
    )
