"""A status connection: its gate answers from shared memory and ``/proc``.

Sessions and workers are involved only if stacks are requested: the node server then passes the sessions a descriptor to
which they write them. A session that is too busy costs its own stacks, and two seconds.
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

# A session that is not busy building answers within one second, even if a worker does not.
STACK_TIMEOUT = 2.0

# Seconds after which a client's last report is too old. Clients report every 5 s.
MAX_REPORT_AGE = 30.0


def serve_status(channel: Channel, node: Link, context: ServerContext) -> None:
    """Answer an authenticated status connection until its client has gone.

    Args:
        node: Link to the node server, which stops treating this process as a gate.

    Raises:
        RPCError: The connection broke, or another message than a question came.
    """
    node.send(TellsStatus())
    while (message := channel.recv()) is not None:
        if message.type != MessageType.STATS:
            raise RemoteProtocolError(f"unexpected message type {message.type} on a status connection")
        request = StatusRequest.decode(message.payload)
        stacks = ask_for_stacks(node) if request.stacks else None
        status = describe(context.counters.look(), time.monotonic_ns(), context, stacks)
        channel.send(MessageType.STATS, message.request_id, status.encode())


def describe(rows: Sequence[Row], now: int, context: ServerContext, stacks: dict[int, str] | None) -> NodeStatus:
    """Return the status of the node.

    Args:
        rows: Rows of the processes, first that of the node server.
        now: CLOCK_MONOTONIC in nanoseconds.
        stacks: Stacks by process id of the worker; None if they were not requested.
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


_NO_STACK = f"no stack: its session did not answer within {STACK_TIMEOUT:g} s (perhaps it is building a dataset)"


def _state(row: Row, now: int) -> dict[str, Any]:
    return {
        "state": "running" if row.running else "idle",
        "state_seconds": _seconds(now, row.since),
        "age_seconds": _seconds(now, row.started),
    }


def _loops(session: Row, now: int) -> dict[str, Any]:
    """Return the loops that the client has reported, if its report is well-formed; clients may send anything."""
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
    """Return the stacks of the workers of all sessions that answer in time, by process id.

    They come in a file in memory, so that no session waits for its reader.
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
        # A late session is still writing after the last line feed.
        lines = os.pread(told, os.fstat(told).st_size, 0).split(b"\n")[:-1]
        return {stack.pid: stack.text for stack in map(WorkerStack.decode, lines)}
    finally:
        os.close(told)
        os.close(ended)
