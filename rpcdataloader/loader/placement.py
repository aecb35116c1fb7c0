"""The nodes of a loader's workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from rpcdataloader.client.background import Waiting
from rpcdataloader.client.client import connect_timeout, get_client
from rpcdataloader.client.datasets import RemoteDataset, describe_build
from rpcdataloader.client.discovery import Local, Remote, Where
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.sharing import Partition, current_partition, share_of
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    RemoteProtocolError,
    RPCError,
    RPCTimeoutError,
)
from rpcdataloader.host.resources import cpus_of_rank
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.plan.actions import PlanOptions
from rpcdataloader.plan.crew import told_of
from rpcdataloader.wire.connecting import SHORTAGES
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.loader")

# Seconds to wait for further named nodes after the first. Jobs start node servers at the same time, but these import
# torch on machines of different speed; and shares of ranks only fit together where all ranks see the same nodes.
PATIENCE = 10.0

# Seconds between two looks at a directory or name of node servers.
_LOOK_PAUSE = 0.1

# The same while there is none, and seconds after which those that were there are asked again.
_ASK_PAUSE = 1.0

# Of all passes: an epoch may take a second.
_seldom = Seldom()

# Errors of servers that others in their place would not mend.
_REFUSALS = AuthenticationError, RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Placement:
    """The intended nodes of a pass's workers."""

    homes: tuple[Node, ...]  # node of each worker, as often as it has workers; nodes may be away
    # Further nodes, which help while all homes are away, in this rank's order of preference.
    others: tuple[Node, ...] = ()
    partition: Partition = field(default_factory=Partition)
    num_offered: int = 0
    max_workers: int = 0  # limit on this process's workers, also when nodes join; 0 for no limit
    followed: Remote | None = None  # where node servers come and go; None for named nodes alone
    missing: tuple[Node, ...] = ()  # nodes that have not come yet; they join when they do


def choose_nodes(
    where: Local | Remote,
    local: LocalNode | None = None,
    *,
    partition: Partition | None = None,
    num_workers: int = 0,
    min_workers: int = 0,
) -> Placement:
    """Choose the nodes of this process's workers.

    Args:
        local: The place of workers on this machine, if ``where`` has some.
        partition: Rank and size of this process among those that share the workers; None to find it out. Workers of
            this machine are not shared.
        num_workers: Number of workers; 0 for all of this process's share (on this machine: one per CPU, divided among
            its ranks). Of node servers, never more than the share.
        min_workers: Number of workers in this process's share to wait for.

    Raises:
        ConnectError: No node server can be reached, or too few.
        RPCError: A named node server refuses this client.
        Exception: A node refuses an addition to its session, such as modules.
    """
    partition = partition or current_partition()
    pool, is_followed = (where, False) if isinstance(where, Local) else (where.local, bool(where.lookups))

    def choose(nodes: Sequence[Node]) -> list[Node]:
        own = [node for node in nodes if node.is_local]
        homes = [node for node in own for _ in range(num_local(node))]
        if remote := [node for node in nodes if node not in own]:
            # Servers come and go in a register. The order of coming keeps the shares of earlier ones.
            offered = [node.num_workers() for node in remote]
            homes += [remote[index] for index in share_of(offered, partition, by_node=is_followed)]
        return homes[: num_workers or None]

    def num_local(node: Node) -> int:
        chosen = num_workers if isinstance(where, Local) else 0
        return chosen or (pool and pool.num_workers) or _num_local_workers(node.num_workers())

    least = min(min_workers, num_workers or min_workers)  # resumed streams may be fewer
    nodes, missing = _find_nodes(where, local, lambda nodes: len(choose(nodes)), least)
    _update([session for session in (node.session() for node in nodes if not node.is_local) if session.is_ready])
    homes = choose(nodes)
    if isinstance(where, Local):
        return Placement(tuple(homes))
    num_offered = sum(node.num_workers() for node in nodes if not node.is_local)
    if 0 < num_offered < partition.world_size:
        ranks = f"{partition.world_size} ranks share {num_offered} workers"
        warn_once(f"{ranks}: some are used by more than one rank")
    # Ranks that lose their nodes at the same time ask different ones.
    first = partition.rank % len(nodes)
    others = [node for node in nodes[first:] + nodes[:first] if node not in homes]
    return Placement(
        tuple(homes),
        tuple(others),
        partition,
        num_offered,
        num_workers,
        where if is_followed else None,
        # Lookups tell of others.
        tuple(node for node in missing if node.address in where.addresses),
    )


def _num_local_workers(num_cpus: int) -> int:
    """The number of workers of this machine whose number the user did not choose; each rank has its own."""
    partition = current_partition()
    share = cpus_of_rank(num_cpus, partition.world_size)
    if share < num_cpus:
        what = f"{num_cpus} CPUs are shared with the other ranks of this machine"
        logger.info("%slocal is %d workers: %s", partition.label, share, what)
    return share


def _update(sessions: Sequence[RemoteSession]) -> None:
    """Send the changes to all sessions at the same time. Sessions that are lost, or busy, are noticed later."""
    waits = []
    for session in sessions:
        with contextlib.suppress(ConnectionLostError):
            waits.append(session.update())
    limit = Deadline(connect_timeout())
    for wait in waits:
        with contextlib.suppress(ConnectionLostError, RPCTimeoutError):
            wait(limit.remaining())


def has_local(where: Where | None) -> bool:
    """Whether there are workers of this machine, beside others or alone."""
    return isinstance(where, Local) or (isinstance(where, Remote) and where.local is not None)


def check_min_workers(min_workers: int, num_workers: int, where: Where | None) -> None:
    """Raise a ``ValueError`` if the user's choice is negative, or contradicts others."""
    if min_workers < 0:
        raise ValueError(f"min_workers must be 0 or more, but is {min_workers}")
    if min_workers and not isinstance(where, Remote):
        raise ValueError("min_workers needs node servers: name them in workers=")
    if 0 < num_workers < min_workers:
        raise ValueError(f"num_workers={num_workers} and min_workers={min_workers} contradict each other")


def prepare(dataset: RemoteDataset, nodes: tuple[Node, ...], *, wait: bool = True) -> None:
    """Build a dataset on those of ``nodes`` that can be reached, and begin the sessions of this machine.

    Args:
        wait: True to wait for one node if none can be reached.

    Raises:
        ConnectError: All nodes are unreachable.
        ConnectionLostError: All nodes have gone meanwhile.
        Exception: An exception from building the dataset.
    """
    sessions = []
    for node in dict.fromkeys(nodes):
        sessions.append(node.session())
        if node.is_local:
            with contextlib.suppress(ConnectError, ConnectionLostError):  # others would not mend themselves
                sessions[-1].wait()
    ready = [session for session in sessions if session.is_ready]
    if wait and not ready:
        ready = [_wait_for_one(sessions)]
    try:
        build(dataset, ready)
    except ConnectionLostError:
        if wait and not any(dataset.is_on(session) for session in ready):
            raise


def build(dataset: RemoteDataset, sessions: Iterable[RemoteSession]) -> None:
    """Build a dataset on ``sessions``, which are ready, or make its changes there, at the same time.

    A session that does not answer is waited for without limit if there is no other. Once another one has the dataset,
    it has the connect timeout left; then its thread goes on waiting, and it joins the pass when it answers.

    Raises:
        ConnectionLostError: A session has ended meanwhile, or has no room for the dataset at the moment, which others
            have, or have had. All others have the dataset nevertheless.
        Exception: An exception from building the dataset.
    """
    wanted = list(dict.fromkeys(sessions))
    wanted = [session for session in wanted if session not in dataset.late] or wanted
    if all(map(dataset.is_current, wanted)):
        return
    missing = set(wanted)
    with Waiting(get_client().alarm, lambda: describe_build(dataset, missing), current_partition().label):
        _build(dataset, wanted, missing)


def _build(dataset: RemoteDataset, wanted: Sequence[RemoteSession], missing: set[RemoteSession]) -> None:
    """Build on all of ``wanted``; those that are ``missing`` are waited for."""
    if len(wanted) == 1:
        try:
            dataset.build_on(wanted[0])
        except OSError as exc:
            if not (dataset.was_built and _is_short(dataset, wanted[0], exc)):
                raise
            raise ConnectionLostError(f"{wanted[0].name}: {exc}") from None
        return
    answers: queue.SimpleQueue[tuple[RemoteSession, BaseException | None]] = queue.SimpleQueue()

    def build_on(session: RemoteSession) -> None:
        error: BaseException | None = None
        try:
            dataset.build_on(session)
        except BaseException as exc:
            error = exc.with_traceback(None)
        answers.put((session, error))
        dataset.late.discard(session)

    for session in wanted:
        run = functools.partial(build_on, session)
        if not get_client().start_thread(f"rpcdl-build {session.name}", run, threading.Event()):
            run()
    limit = Deadline(None)
    lost: ConnectionLostError | None = None
    short: OSError | None = None
    while missing:
        try:
            session, error = answers.get(timeout=limit.remaining())
        except queue.Empty:
            break
        missing.discard(session)
        if isinstance(error, ConnectionLostError):
            lost = error
        elif isinstance(error, OSError) and _is_short(dataset, session, error):
            short = error
        elif error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and would keep the dataset
        elif limit.timeout is None:
            limit = Deadline(connect_timeout())
    if missing:
        dataset.late.update(missing)
        while not answers.empty():  # one has just answered
            dataset.late.discard(answers.get()[0])
        names = ", ".join(session.name for session in missing)
        logger.warning("going on without %s until it answers: it prepares dataset %s", names, dataset.name)
    if short is not None:
        try:
            if not dataset.was_built:
                raise short
            lost = lost or ConnectionLostError(str(short))
        finally:
            del short  # as above
    if lost is not None:
        try:
            raise lost
        finally:
            del lost  # as above


def _is_short(dataset: RemoteDataset, session: RemoteSession, error: OSError) -> bool:
    """Whether a node has no room to build a dataset at the moment, which is noted."""
    if error.errno not in SHORTAGES or dataset.is_on(session):  # a change raised it
        return False
    dataset.shortages[session] = error.with_traceback(None)
    text = f"{session.name} has no room for dataset {dataset.name}: {error}"
    if dataset.was_built and _seldom.is_due(f"{session.name}, {dataset.name}: {error.errno}"):
        logger.warning("%s%s; it is asked again", current_partition().label, text)
    return True


def _wait_for_one(sessions: Sequence[RemoteSession]) -> RemoteSession:
    """Return the first of the connecting ``sessions`` that succeeds; raise an error if all fail."""
    for session in get_client().in_order_of_coming(sessions):
        with contextlib.suppress(RPCError):
            session.wait()
            return session
    sessions[-1].wait()
    return sessions[-1]


def _find_nodes(
    where: Local | Remote, local: LocalNode | None, count: Callable[[Sequence[Node]], int], min_workers: int
) -> tuple[list[Node], list[Node]]:
    """Return the nodes that are or were connected, and those that may still come; ``count`` is this process's share."""
    there: list[Node] = []

    def describe() -> str | None:
        if not there:  # connecting sessions speak for themselves
            return "node servers" if isinstance(where, Remote) and where.lookups else None
        num_workers = count(there)
        return f"min_workers={min_workers}: {num_workers} workers are there" if num_workers < min_workers else None

    with Waiting(get_client().alarm, describe, current_partition().label):
        return there, _wait_for_nodes(where, local, count, min_workers, there)


def _wait_for_nodes(
    where: Local | Remote,
    local: LocalNode | None,
    count: Callable[[Sequence[Node]], int],
    min_workers: int,
    there: list[Node],
) -> list[Node]:
    """Note the nodes that are or were connected in ``there``; return those that may still come.

    It waits for the first node, and :data:`PATIENCE` longer for all others, once; longer if the share is too small.
    """
    limit = connect_timeout()
    deadline, is_enough = time.monotonic() + limit, False
    is_followed = isinstance(where, Remote) and bool(where.lookups)
    sessions: dict[Node, RemoteSession] = {}
    again = time.monotonic() + _ASK_PAUSE
    while True:
        nodes = get_client().nodes(where, local) if isinstance(where, Remote) else [node for node in [local] if node]
        if is_followed and time.monotonic() >= again:  # one that was killed may have begun again
            again = time.monotonic() + _ASK_PAUSE
            refused = [node for node in sessions if isinstance(sessions[node].connection.error, _REFUSALS)]
            sessions = {node: each for node, each in sessions.items() if each.is_usable or node in refused}
        sessions |= {node: node.session() for node in nodes if node not in sessions and not node.is_local}
        there[:] = [node for node in nodes if node.offered is not None]
        missing = [node for node in nodes if node.offered is None]
        connecting = [node for node in missing if sessions[node].is_usable]
        for node in connecting:
            sessions[node].is_quiet = bool(there) and node.is_missed
        if not is_enough and there and count(there) >= min_workers:
            is_enough, deadline = True, time.monotonic() + PATIENCE
        may_come = any(not (is_enough and node.is_missed) for node in connecting)
        if is_followed and not is_enough:  # others may follow, unless all of these refuse this client
            may_come |= any(
                not isinstance(sessions[node].connection.error, _REFUSALS) for node in nodes if not node.is_local
            )
        pause = deadline - time.monotonic()
        if pause > 0 and may_come:
            is_empty = not there and not connecting
            waited_for, look = [sessions[node] for node in connecting], _ASK_PAUSE if is_empty else _LOOK_PAUSE
            get_client().wait_for_any(waited_for, min(pause, look) if is_followed else pause)
            if is_empty:
                label, names = current_partition().label, ", ".join(map(str, nodes))
                warn_once(f"{label}no answer from {names}: waiting for node servers, for at most {limit:g} s")
                sessions = {}  # one that was killed may have begun again
        elif there:
            break
        else:
            sessions[nodes[0]].wait()  # raises its error, at the latest after the same time; or it has just connected
    for node in missing:
        _miss(node, sessions[node], is_named=isinstance(where, Remote) and node.address in where.addresses)
    if not is_enough:
        raise ConnectError(
            f"min_workers={min_workers}, but {count(there)} workers were there for this process within {limit:g} s; "
            f"missing: {', '.join(map(str, missing)) or 'no node'}"
        )
    return [node for node in missing if not node.is_foreign]


def _miss(node: Node, session: RemoteSession, *, is_named: bool) -> None:
    """Go on without a node, and tell the user once.

    Raises:
        AuthenticationError: A node that the user has named refuses this client.
    """
    try:
        session.wait(lambda: False)
    except RPCError as error:
        if is_named and isinstance(error, AuthenticationError):
            raise
        if not session.is_usable:  # otherwise it has not answered this time
            node.is_foreign = isinstance(error, RemoteProtocolError)
        if not node.is_missed:
            until = "" if node.is_foreign else " until it comes"
            # Only the text: an error keeps its frames alive, and with them the iterator to be.
            label = current_partition().label
            logger.warning("%sgoing on without %s%s: %s", label, node, until, told_of(node, error))
    node.is_missed = session.is_quiet = True


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, and not again for every epoch of every loader."""
    logger.warning("%s", text)


# What the engine has from the loader's arguments, by the same names.
_OF_SETTINGS = {each.name for each in fields(PlanOptions)} & {each.name for each in fields(PassSettings)}


def plan_options(settings: PassSettings, placement: Placement) -> PlanOptions:
    """Return the engine's options."""
    return PlanOptions(
        **{name: getattr(settings, name) for name in _OF_SETTINGS},
        num_workers=len(placement.homes),
        is_iterable=settings.iterable,
        connect_timeout=connect_timeout(),
        label=settings.partition.label,
        rank=placement.partition.rank,
        world_size=placement.partition.world_size,
        num_offered=placement.num_offered,
        max_workers=placement.max_workers,
    )
