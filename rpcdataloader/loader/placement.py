"""On which nodes the workers of a loader are."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rpcdataloader.client.client import connect_timeout, get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.discovery import Elastic, Local, Remote, Where
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.sharing import Partition, current_partition, share_of
from rpcdataloader.errors import ConnectError, ConnectionLostError, RPCError
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.plan.actions import PlanOptions

logger = logging.getLogger("rpcdataloader.loader")

# Seconds that named nodes are waited for when another one is there. Jobs start node servers at the same time, but these
# import torch on machines of different speed; and shares of ranks fit together where all see the same nodes.
PATIENCE = 10.0

# Seconds between two looks at a directory or name, where node servers come and go.
_LOOK_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the workers of a pass should be.

    Attributes:
        homes: The node of each worker; one that has several appears as often. Some may be away.
        others: More nodes, which help out while all of these are away; those that this rank should ask first come
            first.
        max_workers: Of this process, however many nodes there come to be; 0 for no limit.
        register: Where nodes come and go; None if they are named.
        missing: Nodes that were never there; they join when they come.
    """

    homes: tuple[Node, ...]
    others: tuple[Node, ...] = ()
    partition: Partition = field(default_factory=Partition)
    num_offered: int = 0
    max_workers: int = 0
    register: Elastic | None = None
    missing: tuple[Node, ...] = ()


def place(
    where: Local | Remote | Elastic,
    *,
    partition: Partition | None = None,
    num_workers: int = 0,
    min_workers: int = 0,
) -> Placement:
    """Choose the workers of this process.

    Args:
        partition: This process's place among those that share the workers; None finds it out. The embedded pool is
            not shared.
        num_workers: How many to use; 0 for all of this process's share (of the embedded pool: as many as CPUs). Of a
            remote pool never more than the share.
        min_workers: Wait until this process's share has this many.

    Raises:
        ConnectError: No node server can be reached, or too few.
        RPCError: One of those that are named refuses this client.
        Exception: A node cannot have what was added to its session, such as modules.
    """
    partition = partition or current_partition()

    def choose(nodes: Sequence[Node]) -> list[int]:
        # Servers come and go in a register, in the order in which they came: those before keep their shares.
        offered = [node.num_workers() for node in nodes]
        return share_of(offered, partition, by_node=isinstance(where, Elastic))[: num_workers or None]

    least = min(min_workers, num_workers or min_workers)  # streams that go on may be fewer
    nodes, missing = _find_nodes(where, lambda nodes: len(choose(nodes)), least)
    _let_follow([session for session in (node.session() for node in nodes) if session.is_ready])
    offered = [node.num_workers() for node in nodes]
    if isinstance(where, Local):
        return Placement((nodes[0],) * (num_workers or where.num_workers or offered[0]))
    if partition.world_size > sum(offered):
        _warn_of_doubling(partition.world_size, sum(offered))
    share = choose(nodes)
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
        # Those in a register are seen by who watches that.
        () if isinstance(where, Elastic) else tuple(missing),
    )


def _let_follow(sessions: Sequence[RemoteSession]) -> None:
    """Tell sessions what has changed, all at the same time. Those that are lost meanwhile are found to be later."""
    waits = []
    for session in sessions:
        with contextlib.suppress(ConnectionLostError):
            waits.append(session.follow())
    for wait in waits:
        with contextlib.suppress(ConnectionLostError):
            wait()


def check_min_workers(min_workers: int, num_workers: int, where: Where | None) -> None:
    """Raise a ``ValueError`` if what the user has chosen is negative, or contradicts the rest."""
    if min_workers < 0:
        raise ValueError(f"min_workers must be 0 or more, but is {min_workers}")
    if min_workers and not isinstance(where, (Remote, Elastic)):
        raise ValueError("min_workers is how many workers of node servers are waited for: name these in workers=")
    if 0 < num_workers < min_workers:
        raise ValueError(f"num_workers={num_workers} and min_workers={min_workers} contradict each other")


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


def _find_nodes(
    where: Local | Remote | Elastic, count: Callable[[Sequence[Node]], int], min_workers: int
) -> tuple[list[Node], list[Node]]:
    """The nodes that are there, or were before, and those that never were; ``count`` is this process's share of them.

    The first one is waited for, and all others for :data:`PATIENCE` after it, once; for longer if it is too little.
    """
    limit, began, patient_until = connect_timeout(), time.monotonic(), math.inf
    sessions: dict[Node, RemoteSession] = {}
    while True:
        nodes = get_client().nodes(where)
        sessions |= {node: node.session() for node in nodes if node not in sessions}
        there = [node for node in nodes if node.offered is not None]
        missing = [node for node in nodes if node.offered is None]
        connecting = [node for node in missing if sessions[node].is_usable]
        for node in connecting:
            sessions[node].is_quiet = bool(there)
        now, is_enough = time.monotonic(), bool(there) and count(there) >= min_workers
        if is_enough:
            patient_until = min(patient_until, now + PATIENCE)
            if now >= patient_until or all(node.is_missed for node in connecting):
                break
        elif now >= began + limit or not (connecting or (there and isinstance(where, Elastic))):
            if there:
                break
            sessions[nodes[0]].wait()  # raises its error, at the latest when it has connected for as long
            continue  # it has just come
        pause = (patient_until if is_enough else began + limit) - now
        waited_for = [sessions[node] for node in connecting]
        get_client().wait_for_any(waited_for, min(pause, _LOOK_PAUSE) if isinstance(where, Elastic) else pause)
    for node in missing:
        try:
            sessions[node].wait(lambda: False)
        except RPCError as error:
            # One that is not what it should be does not become so by itself.
            if isinstance(where, Remote) and not isinstance(error, (ConnectError, ConnectionLostError)):
                raise
            if not node.is_missed:
                # The text alone: who keeps the error keeps its frames, in which the iterator is about to be.
                label, reason = current_partition().label, str(error)
                logger.warning("%sgoing on without %s until it comes: %s", label, node, reason)
        node.is_missed = True
    if not is_enough:
        raise ConnectError(
            f"min_workers={min_workers}, but {count(there)} workers were there for this process within {limit:g} s; "
            f"missing: {', '.join(map(str, missing)) or 'no node'}"
        )
    return there, missing


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
        leaves_out=settings.skips and not settings.iterable,
        label=settings.partition.label,
        rank=placement.partition.rank,
        world_size=placement.partition.world_size,
        num_offered=placement.num_offered,
        max_workers=placement.max_workers,
    )
