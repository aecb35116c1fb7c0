"""Gates: processes that wait for a connection and decide what becomes of it.

Some are forked in advance. A gate reads the preamble of its connection, then becomes a session, hands the socket to a
session, or serves the node's status. Everything that arrives before the secret is proved is read here and never in the
node server. Only after 32 bytes for a session, of which it keeps nothing, does a gate take another connection: a pass
with many workers needs no fork for each of their gates. The node server ends slow gates, so gates need no clock. A gate
may be older than the present sessions, and knows none of them.

A gate answers questions for the status from shared memory and ``/proc``. Sessions and workers are involved only if
stacks are requested: the node server then passes the sessions a descriptor to which they write them. A session that is
too busy costs its own stacks, and two seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.resources import available_cpus, memory_bytes, process_use
from rpcdataloader.server import events
from rpcdataloader.server.counters import SESSION, WORKER, Row
from rpcdataloader.server.events import Link
from rpcdataloader.server.processes import name_process
from rpcdataloader.server.session import run_session
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.wire.channel import Channel, accept_channel, local_identity, recv_preamble
from rpcdataloader.wire.frames import MessageType, encode
from rpcdataloader.wire.handshake import STATUS_ID, Preamble
from rpcdataloader.wire.status import ClientStatus, NodeStatus, Report, StatusRequest, WorkerStatus
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.server")


def run_gate(node: Link, context: ServerContext) -> None:
    """Wait for connections from the node server, and serve the first one that is not handed over."""
    name_process("rpcdl-spare")
    while _serve(node, context):
        name_process("rpcdl-spare")


def _serve(node: Link, context: ServerContext) -> bool:
    """Serve a connection, or let the node server hand it over; returns True if this gate is free again."""
    received = node.recv()
    if received is None:
        return False
    event, descriptors = received
    if not isinstance(event, events.Accepted):
        raise TypeError(f"a gate expects its connection, got {event}")
    name_process("rpcdl-gate")
    peer = event.peer
    row = context.counters.row(event.row)
    stream = Stream(socket.socket(fileno=descriptors[0]), peer)
    try:
        preamble = recv_preamble(stream)
        if preamble is None:
            return False
        if any(preamble.session_id) and preamble.session_id != STATUS_ID:
            return _hand_over(stream, preamble, node)
        channel = accept_channel(stream, preamble, context.credentials, local_identity("server"), context.tls)
    except ConnectionLostError as exc:
        logger.debug("%s", exc)
    except RPCError as exc:
        node.send(context.refusal(peer, exc))
    else:
        if preamble.session_id == STATUS_ID:
            serve_status(channel, node, context)
        else:
            run_session(channel, node, context, row)
        return False
    stream.linger()
    return False


def _hand_over(stream: Stream, preamble: Preamble, node: Link) -> bool:
    node.send(events.IsForWorker(preamble.session_id.hex(), preamble.encode().hex()))
    received = node.recv()
    if received is None:
        return False
    if isinstance(received[0], events.HandedOver):
        stream.close()
        return True
    text = "there is no such session on this node server: it ended, or the server was restarted"
    refusal = json.dumps({"code": "protocol", "text": text}).encode()
    stream.send(encode(None, MessageType.REFUSED, payload=refusal))
    stream.linger()
    return False


# A session that is not busy building answers within one second, even if a worker does not.
STACK_TIMEOUT = 2.0

# Seconds after which a client's last report is too old. Clients report every 5 s.
MAX_REPORT_AGE = 30.0


def serve_status(channel: Channel, node: Link, context: ServerContext) -> None:
    """Answer an authenticated status connection until its client has gone."""
    node.send(events.TellsStatus())
    try:
        while (message := channel.recv()) is not None:
            if message.type != MessageType.STATS:
                raise RemoteProtocolError(f"unexpected message type {message.type} on a status connection")
            request = StatusRequest.decode(message.payload)
            stacks = ask_for_stacks(node) if request.stacks else None
            status = describe_node(context.counters.look(), time.monotonic_ns(), context, stacks)
            channel.send(MessageType.STATS, message.request_id, status.encode())
    except RPCError as exc:
        logger.info("the status connection of %s ended: %s", channel.name, exc)


def describe_node(rows: Sequence[Row], now: int, context: ServerContext, stacks: dict[int, str] | None) -> NodeStatus:
    """Return the status of the node.

    Args:
        rows: Rows of the processes, first that of the node server.
        now: CLOCK_MONOTONIC in nanoseconds.
        stacks: Stacks by process id of the worker; None if they were not requested.
    """
    node, memory = rows[0], memory_bytes()
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
                    _describe_worker(worker, now, stacks) for worker in sorted(workers, key=lambda row: row.number)
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


def _describe_worker(worker: Row, now: int, stacks: dict[int, str] | None) -> WorkerStatus:
    use = process_use(worker.pid)
    return WorkerStatus(
        number=worker.number,
        pid=worker.pid,
        draining=bool(worker.draining),
        process_state=use.state,
        queued=max(0, worker.unanswered - worker.running),
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
    # Or sessions that write at the same time would overwrite each other: the kernel does not lock the offset.
    fcntl.fcntl(told, fcntl.F_SETFL, os.O_APPEND)
    ended, open_while_told = os.pipe()
    try:
        try:
            node.send(events.WantsStacks(), [told, open_while_told])
        finally:
            os.close(open_while_told)
        poll = select.poll()
        poll.register(ended)
        poll.poll(STACK_TIMEOUT * 1000)
        # A late session is still writing after the last line feed.
        lines = os.pread(told, os.fstat(told).st_size, 0).split(b"\n")[:-1]
        return dict(map(json.loads, lines))
    finally:
        os.close(told)
        os.close(ended)
