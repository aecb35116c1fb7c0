"""A status connection: the gate that took it answers, from memory that all processes share and from ``/proc``.

No session and no worker has anything to do with it, unless stacks are asked for: then the node server passes a
descriptor on to the sessions, which write there what they find. A session that does not get to it costs its own
stacks, and two seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.host.cgroups import read
from rpcdataloader.host.cpus import available_cpus
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import WORK, Seen, View
from rpcdataloader.server.events import StackPiece, TellsStatus, WantsStacks
from rpcdataloader.server.link import Link
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.status import ClientStatus, NodeStatus, StatusRequest, WorkerStatus

# A session answers within one second, even if a worker does not, unless it is busy building.
STACK_TIMEOUT = 2.0

# Of a stack, per message to the gate: with every character escaped it still fits into one.
PIECE_CHARS = 1200


def serve_status(channel: Channel, node: Link, context: ServerContext) -> None:
    """Answer an authenticated status connection until its client has gone.

    Args:
        node: Link to the node server, which is told that this is no gate any more.

    Raises:
        RPCError: The connection broke, or something else than a question came.
    """
    node.send(TellsStatus())
    while (message := channel.recv()) is not None:
        if message.type != MessageType.STATS:
            raise RemoteProtocolError(f"message type {message.type} has no place on a status connection")
        request = StatusRequest.decode(message.payload)
        stacks = ask_for_stacks(node) if request.stacks else None
        view = context.counters.look()
        status = describe(view, time.monotonic_ns(), context, see_process, see_unread() if view.workers else {}, stacks)
        channel.send(MessageType.STATS, message.request_id, status.encode())


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What the kernel says of a process."""

    state: str = ""
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


def see_process(pid: int) -> ProcessUse:
    """State, CPU time and resident memory of a process; nothing of one that has gone."""
    text = read(f"/proc/{pid}/stat")
    # The name of the program, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 22:
        return ProcessUse()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(fields[0], ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def see_unread() -> dict[int, int]:
    """Bytes that the kernel holds for the processes that own TCP sockets, by inode."""
    unread = {}
    for name in "tcp", "tcp6":
        for line in read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            unread[int(fields[9])] = int(fields[4].partition(":")[2], 16)
    return unread


def describe(
    view: View,
    now: int,
    context: ServerContext,
    see: Callable[[int], ProcessUse],
    unread: dict[int, int],
    stacks: dict[int, str] | None,
) -> NodeStatus:
    """What is told of the node.

    Args:
        view: Of the counters.
        now: CLOCK_MONOTONIC in nanoseconds.
        see: What the kernel says of a process.
        unread: Bytes that it holds for sockets, by inode.
        stacks: By process id of a worker; None if they were not asked for.
    """
    node = view.node
    clients = []
    for session in view.sessions:
        seen = [worker for worker in view.workers if worker.session == session.place]
        last = max([session, *seen], key=lambda row: row.failed)
        workers = [_describe_worker(worker, now, see(worker.pid), unread, stacks) for worker in seen]
        host, _, pid = session.client.rpartition(":")
        clients.append(
            ClientStatus(
                host=host,
                pid=int(pid) if pid.isdecimal() else 0,
                rank=None if session.rank < 0 else session.rank,
                job=session.job,
                session_pid=session.pid,
                state=_state_of(session),
                state_seconds=_seconds(now, session.since),
                age_seconds=_seconds(now, session.started),
                last_error=last.error or None,
                last_error_seconds=_seconds(now, last.failed) if last.error else None,
                workers=sorted(workers, key=lambda worker: worker.number),
                **_sum(session, *seen),
            )
        )
    memory = {name: 1024 * int(size) for name, size in re.findall(r"(\w+): +(\d+) kB", read("/proc/meminfo"))}
    return NodeStatus(
        host=context.node,
        pid=node.pid,
        uptime_seconds=_seconds(now, node.started),
        draining=bool(node.draining),
        num_workers=node.num_workers,
        max_connections=None if node.max_connections < 0 else node.max_connections,
        cpus=available_cpus(),
        load_average=os.getloadavg()[0],
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        ended_workers=node.ended_workers + sum(session.ended_workers for session in view.sessions),
        refused_connections=node.refused,
        clients=clients,
        **_sum(node, *view.sessions, *view.workers),
    )


def _sum(*rows: Seen) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in WORK}


def _describe_worker(
    worker: Seen, now: int, use: ProcessUse, unread: dict[int, int], stacks: dict[int, str] | None
) -> WorkerStatus:
    return WorkerStatus(
        number=worker.number,
        pid=worker.pid,
        state=_state_of(worker),
        state_seconds=_seconds(now, worker.since),
        draining=bool(worker.draining),
        process_state=use.state,
        age_seconds=_seconds(now, worker.started),
        queued=max(0, worker.unanswered - worker.running),
        unread_bytes=unread.get(worker.socket),
        cpu_seconds=use.cpu_seconds,
        memory_bytes=use.memory_bytes,
        stack=None if stacks is None else stacks.get(worker.pid, _NO_STACK),
        **_sum(worker),
    )


_NO_STACK = f"no stack: its session did not answer within {STACK_TIMEOUT:g} s, perhaps as it is busy building"


def _state_of(seen: Seen) -> str:
    return "running" if seen.running else "idle"


def _seconds(now: int, then: int) -> float:
    return max(0, now - then) / 1e9


def ask_for_stacks(node: Link) -> dict[int, str]:
    """The stacks of the workers of all sessions, by process id; only of those whose session answers in time."""
    ours, theirs = Link.pair()
    with contextlib.closing(ours):
        with contextlib.closing(theirs):
            node.send(WantsStacks(), [theirs.fileno()])
        stacks: dict[int, str] = {}
        poll = select.poll()
        poll.register(ours.fileno(), select.POLLIN)
        deadline = time.monotonic() + STACK_TIMEOUT
        while (remaining := deadline - time.monotonic()) > 0:
            if not poll.poll(remaining * 1000 + 1):
                break
            received = ours.recv(wait=False)
            if received is None:  # every session has answered
                break
            event, _descriptors = received
            if isinstance(event, StackPiece):
                stacks[event.pid] = stacks.get(event.pid, "") + event.text
        return stacks


class StacksAsked:
    """Seen from a session: somebody wants the stacks of all of its workers.

    Args:
        link: Where they go; closed when all have gone. Its other end may be slow, which nobody waits for.
        numbers: Of the workers that are there.
    """

    def __init__(self, link: Link, numbers: set[int]) -> None:
        self._link = link
        self._waiting = numbers
        self._has_unsent = False

    def waits_for(self, number: int) -> bool:
        """Whether the stack of that worker is wanted."""
        return number in self._waiting

    def tell(self, number: int, pid: int, text: str) -> None:
        """It is ``text``; or the worker has ended, which that says."""
        self._waiting.discard(number)
        for start in range(0, len(text), PIECE_CHARS):
            self._link.post(StackPiece(pid, text[start : start + PIECE_CHARS]))
        self.flush()

    def flush(self) -> None:
        """Send on what has had no room."""
        self._has_unsent = not self._link.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return self._has_unsent

    @property
    def is_over(self) -> bool:
        """Whether everything has been said."""
        return not self._waiting and not self._has_unsent

    def close(self) -> None:
        """Give the descriptor back."""
        self._link.close()
