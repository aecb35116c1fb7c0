"""A status connection: the gate that took it answers, from memory that all processes share and from ``/proc``.

No session and no worker has anything to do with it, unless stacks are asked for: then the node server passes a
descriptor on to the sessions, which write there what they find. A session that does not get to it costs its own
stacks, and two seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from typing import Any

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.host.resources import available_cpus, memory_bytes, process_use, unread_bytes
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import SESSION, WORKER, Row
from rpcdataloader.server.events import Link, TellsStatus, WantsStacks, WorkerStack
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.status import ClientStatus, NodeStatus, Report, StatusRequest, WorkerStatus

# A session answers within one second, even if a worker does not, unless it is busy building.
STACK_TIMEOUT = 2.0

# Seconds after which the last report of a client says nothing any more. One comes every 5 s.
MAX_REPORT_AGE = 30.0


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
        status = describe(context.counters.look(), time.monotonic_ns(), context, stacks)
        channel.send(MessageType.STATS, message.request_id, status.encode())


def describe(rows: Sequence[Row], now: int, context: ServerContext, stacks: dict[int, str] | None) -> NodeStatus:
    """What is told of the node.

    Args:
        rows: Rows of the processes, that of the node server first.
        now: CLOCK_MONOTONIC in nanoseconds.
        stacks: By process id of a worker; None if they were not asked for.
    """
    node, memory, unread = rows[0], memory_bytes(), unread_bytes()
    clients = []
    for session in sorted((row for row in rows if row.kind == SESSION), key=lambda row: row.started):
        workers = [row for row in rows if row.kind == WORKER and row.session == session.place]
        last = max([session, *workers], key=lambda row: row.failed)
        host, _, pid = session.client.rpartition(":")
        clients.append(
            ClientStatus(
                host=host,
                pid=int(pid) if pid.isdecimal() else 0,
                rank=None if session.rank < 0 else session.rank,
                job=session.job,
                session_pid=session.pid,
                last_error=last.error or None,
                last_error_seconds=_seconds(now, last.failed) if last.error else None,
                workers=[
                    _describe_worker(worker, now, unread, stacks)
                    for worker in sorted(workers, key=lambda row: row.number)
                ],
                **_loops(session, now),
                **_state(session, now),
                **_work([session, *workers]),
            )
        )
    return NodeStatus(
        host=context.node,
        pid=node.pid,
        uptime_seconds=_seconds(now, node.started),
        draining=bool(node.draining),
        num_workers=context.num_workers,
        max_connections=context.max_connections,
        cpus=available_cpus(),
        load_average=os.getloadavg()[0],
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        ended_workers=sum(row.ended_workers for row in rows),
        refused_connections=node.refused,
        clients=clients,
        **_work(rows),
    )


def _describe_worker(worker: Row, now: int, unread: dict[int, int], stacks: dict[int, str] | None) -> WorkerStatus:
    use = process_use(worker.pid)
    return WorkerStatus(
        number=worker.number,
        pid=worker.pid,
        draining=bool(worker.draining),
        process_state=use.state,
        queued=max(0, worker.unanswered - worker.running),
        unread_bytes=unread.get(worker.socket),
        cpu_seconds=use.cpu_seconds,
        memory_bytes=use.memory_bytes,
        stack=None if stacks is None else stacks.get(worker.pid, _NO_STACK),
        **_state(worker, now),
        **_work([worker]),
    )


_NO_STACK = f"no stack: its session did not answer within {STACK_TIMEOUT:g} s, perhaps as it is busy building"


def _state(row: Row, now: int) -> dict[str, Any]:
    return {
        "state": "running" if row.running else "idle",
        "state_seconds": _seconds(now, row.since),
        "age_seconds": _seconds(now, row.started),
    }


def _loops(session: Row, now: int) -> dict[str, Any]:
    """What the client has reported of its loops. It may be anything, and is told only if it is well-formed."""
    age = _seconds(now, session.reported)
    with contextlib.suppress(RemoteProtocolError):
        if session.report and age <= MAX_REPORT_AGE:
            return {"loops": Report.decode(session.report).loops, "loops_seconds": age}
    return {}


def _work(rows: Sequence[Row]) -> dict[str, Any]:
    counts = {name: sum(getattr(row, name) for row in rows) for name in ("tasks", "calls", "errors")}
    received, sent = (sum(row.traffic[direction] for row in rows) for direction in range(2))
    return {**counts, "received_bytes": received, "sent_bytes": sent}


def _seconds(now: int, then: int) -> float:
    return max(0, now - then) / 1e9


def ask_for_stacks(node: Link) -> dict[int, str]:
    """The stacks of the workers of all sessions, by process id, as far as their sessions answer in time.

    They come in a file in memory, so that no session ever waits for its reader.
    """
    told = os.memfd_create("rpcdl-stacks")
    ended, open_while_told = os.pipe()
    try:
        try:
            node.send(WantsStacks(), [told, open_while_told])
        finally:
            os.close(open_while_told)
        poll = select.poll()
        poll.register(ended)
        poll.poll(STACK_TIMEOUT * 1000)
        # Behind the last line feed is what a late session is writing now.
        lines = os.pread(told, os.fstat(told).st_size, 0).split(b"\n")[:-1]
        return {stack.pid: stack.text for stack in map(WorkerStack.decode, lines)}
    finally:
        os.close(told)
        os.close(ended)
