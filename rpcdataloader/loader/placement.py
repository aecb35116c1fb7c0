"""On which nodes the workers of a loader are."""

from __future__ import annotations

import functools
import logging

from rpcdataloader.client.discovery import Local, Registered, Remote
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.session import Session
from rpcdataloader.client.sharing import Partition, current_partition, share_of
from rpcdataloader.errors import RPCError

logger = logging.getLogger("rpcdataloader.loader")


def place(
    where: Local | Remote | Registered, *, partition: Partition | None = None, num_workers: int = 0
) -> tuple[Session, ...]:
    """Choose the workers of this process.

    Args:
        partition: This process's place among those that share the workers; None finds it out. The embedded pool is
            not shared.
        num_workers: How many to use; 0 for all of this process's share (of the embedded pool: as many as CPUs). Of a
            remote pool never more than the share.

    Returns:
        The session of each worker; one that has several appears as often.

    Raises:
        ConnectError: A node server cannot be reached; of those in a register, none can.
    """
    sessions = [node.session() for node in get_client().nodes(where)]
    if isinstance(where, Registered):
        sessions = _that_answer(sessions)
    offered = [session.wait().num_workers for session in sessions]
    for session in sessions:
        session.follow_rank()
    if isinstance(where, Local):
        return (sessions[0],) * (num_workers or where.num_workers or offered[0])
    partition = partition or current_partition()
    if partition.world_size > sum(offered):
        _warn_of_doubling(partition.world_size, sum(offered))
    share = share_of(offered, partition)
    return tuple(sessions[index] for index in share[: num_workers or None])


def _that_answer(sessions: list[Session]) -> list[Session]:
    answering: list[Session] = []
    errors: list[RPCError] = []
    for session in sessions:
        try:
            session.wait()
            answering.append(session)
        except RPCError as exc:
            errors.append(exc)
    if not answering:
        raise errors[0]
    for error in errors:
        logger.warning("going on without a node server that is registered: %s", error)
    return answering


@functools.cache  # once, and not for every epoch of every loader
def _warn_of_doubling(world_size: int, num_workers: int) -> None:
    logger.warning("%d ranks share %d workers: some are used by more than one rank", world_size, num_workers)
