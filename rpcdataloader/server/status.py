"""The status of a node: what its server knows, written down at once, and passed on by a gate.

The node server describes its clients from its own memory and the rows of their processes. A gate adds what ``/proc``
says of the workers. Sessions and workers are involved only if stacks are requested: the node server then passes the
sessions a file to which they write them. A session that is too busy costs its own stacks, and two seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import select
import tempfile
import time
from collections import Counter
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.resources import available_cpus, memory_bytes, process_use
from rpcdataloader.server import events
from rpcdataloader.server.clients import ClientRecord, Clients
from rpcdataloader.server.events import Link, Row
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.memory import memory_file
from rpcdataloader.wire.status import ClientStatus, NodeStatus, Report, StatusRequest, WorkerStatus

logger = logging.getLogger("rpcdataloader.server")

# A session that is not busy building answers within one second, even if a worker does not.
ANSWER_TIMEOUT = 2.0

# Seconds after which a client's last report is too old. Clients report every 5 s.
MAX_REPORT_AGE = 30.0


# --- the node server


def describe_node(clients: Clients, context: ServerContext, started: int, refused_connections: int) -> NodeStatus:
    """Return the status of the node, without what ``/proc`` says; ``started`` is when the server began."""
    now = time.monotonic_ns()
    described = [_describe_client(client, now) for client in clients]
    work = sum((_work_of(client) for client in clients), clients.work)
    memory = memory_bytes()
    return NodeStatus(
        host=context.node,
        pid=os.getpid(),
        uptime_seconds=_seconds(now, started),
        num_workers=context.num_workers,
        max_connections=context.max_connections,
        cpus=available_cpus(),
        load_average=os.getloadavg()[0],
        memory_total_bytes=memory.get("MemTotal", 0),
        memory_available_bytes=memory.get("MemAvailable", 0),
        ended_workers=work["ended_workers"],
        refused_connections=refused_connections,
        clients=described,
        **_fields(work),
    )


def _describe_client(client: ClientRecord, now: int) -> ClientStatus:
    rows = client.workers.values()
    failed, error = max([(client.failed, client.error), *((row.failed[0], row.error) for row in rows)])
    return ClientStatus(
        host=client.identity.host,
        pid=client.identity.pid,
        rank=client.identity.rank,
        job=client.identity.job,
        session_pid=client.process.pid,
        age_seconds=_seconds(now, client.row.begun[0]),
        last_error=error or None,
        last_error_seconds=_seconds(now, failed) if error else None,
        workers=[_describe_worker(*item, now) for item in sorted(client.workers.items()) if item[1].pid[0]],
        **_loops(client, now),
        **_state(client.row, now),
        **_fields(_work_of(client)),
    )


def _describe_worker(number: int, row: Row, now: int) -> WorkerStatus:
    return WorkerStatus(
        number=number,
        pid=row.pid[0],
        draining=bool(row.draining[0]),
        process_state="",
        age_seconds=_seconds(now, row.begun[0]),
        queued=max(0, row.unanswered[0] - row.running[0]),
        cpu_seconds=0.0,
        memory_bytes=0,
        **_state(row, now),
        **_fields(row.work()),
    )


def _state(row: Row, now: int) -> dict[str, Any]:
    return {"state": "running" if row.running[0] else "idle", "state_seconds": _seconds(now, row.since[0])}


def _loops(client: ClientRecord, now: int) -> dict[str, Any]:
    age = _seconds(now, client.reported)
    with contextlib.suppress(RemoteProtocolError):  # user code may write to a descriptor of ours
        if client.report and age <= MAX_REPORT_AGE:
            return {"loops": Report.decode(client.report.encode()).loops, "loops_seconds": age}
    return {}


def _work_of(client: ClientRecord) -> Counter[str]:
    return sum((row.work() for row in client.workers.values()), client.work)


def _fields(work: Counter[str]) -> dict[str, Any]:
    return {name: work[name] for name in ("tasks", "calls", "errors", "received_bytes", "sent_bytes")}


def _seconds(now: int, then: int) -> float:
    return max(0, now - then) / 1e9


# --- the gate


def serve_status(channel: Channel, node: Link) -> None:
    """Answer the question of an authenticated status connection."""
    try:
        if (message := channel.recv()) is not None:
            if message.type != MessageType.STATS:
                raise RemoteProtocolError(f"unexpected message type {message.type} on a status connection")
            status = ask_node(node, stacks=StatusRequest.decode(message.payload).stacks)
            channel.send(MessageType.STATS, message.request_id, status.encode())
    except RPCError as exc:
        logger.info("the status connection of %s ended: %s", channel.name, exc)


def ask_node(node: Link, *, stacks: bool) -> NodeStatus:
    """Return the status of the node, with the stacks of those sessions that answer in time.

    It comes in a file in memory, so that neither the node server nor a session waits for its reader.
    """
    file = _make_file()
    ended, open_while_written = os.pipe()
    try:
        try:
            node.send(events.WantsStatus(stacks), [file, open_while_written])
        finally:
            os.close(open_while_written)
        poll = select.poll()
        poll.register(ended)
        poll.poll(ANSWER_TIMEOUT * 1000 if stacks else None)
        # A late session is still writing after the last line feed.
        first, *lines = os.pread(file, os.fstat(file).st_size, 0).split(b"\n")[:-1] or [b""]
        if not first:
            raise ConnectionLostError("the node server does not answer")
        status: NodeStatus = NodeStatus.decode(first)
        return _with_processes(status, dict(map(json.loads, lines)) if stacks else None)
    finally:
        os.close(file)
        os.close(ended)


def _make_file() -> int:
    """A new file, for several processes: each writes at the end, wherever that is."""
    try:
        file = memory_file("rpcdl-status")
    except OSError:  # a sandbox does not allow that
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


_NO_STACK = f"no stack: its session is building a dataset, or did not answer within {ANSWER_TIMEOUT:g} s"


def _with_processes(status: NodeStatus, stacks: dict[int, str] | None) -> NodeStatus:
    """Add what ``/proc`` says of the workers, and their stacks, by process id."""

    def observe(worker: WorkerStatus) -> WorkerStatus:
        use = process_use(worker.pid)
        stack = None if stacks is None else stacks.get(worker.pid, _NO_STACK)
        return dataclasses.replace(
            worker, process_state=use.state, cpu_seconds=use.cpu_seconds, memory_bytes=use.memory_bytes, stack=stack
        )

    clients = [dataclasses.replace(client, workers=list(map(observe, client.workers))) for client in status.clients]
    return dataclasses.replace(status, clients=clients)
