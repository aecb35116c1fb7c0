"""The status of a node: what its server knows, written down at once; a gate that passes it on; and stacks of workers.

The node server describes its clients from its own memory and the rows of their processes. A gate adds what ``/proc``
says of the workers. Sessions and workers are involved only if stacks are requested: the node server then passes the
sessions a file to which they write them. A session that is too busy costs its own stacks, and two seconds.

The watcher, a thread of a worker, writes the Python stacks into a file that it shares with its session. It holds the
interpreter lock then, so no frame moves. A signal handler holds no lock: it may find half-made frames, and once in some
hundred times ends the process by SIGSEGV. Where C code keeps the lock, or the process is stopped, the session reports
the state that the kernel gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import functools
import json
import logging
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.resources import available_cpus, memory_bytes, process_use, read
from rpcdataloader.server import events
from rpcdataloader.server.clients import ClientRecord, Clients
from rpcdataloader.server.events import Link, Row, WantsStacks
from rpcdataloader.server.processes import Process
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.copies import memory_file
from rpcdataloader.wire.frames import MessageType
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
    work = sum((_work_of(client) for client in clients), Counter(clients.work))
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
        ended_workers=clients.num_ended + sum(client.num_ended for client in clients),
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
    return sum((row.work() for row in client.workers.values()), Counter(client.work))


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
    file = stack_file("rpcdl-status")
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


# --- stacks: sessions and workers

# A worker writes its stacks in less than a millisecond of its own time.
STACK_TIMEOUT = 1.0

# Seconds between two looks whether a worker is done, as it may never tell.
STACK_LOOK_PERIOD = 0.005

# Marks around the stacks that the watcher writes; faulthandler writes ASCII.
_BEGIN, _END = b"\xfe", b"\xff"

# Most bytes that are read of a file.
_MAX_DUMP = 1 << 20

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def stack_file(name: str) -> int:
    """A new file in memory, for several processes: each writes at the end, wherever that is."""
    file = memory_file(name)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def write_stacks(file: int) -> None:
    """Write the stacks of all threads of this process; in a worker's watcher."""
    with contextlib.suppress(OSError):  # closed by user code
        os.write(file, _BEGIN)
        faulthandler.dump_traceback(file)
        os.write(file, _END)


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A session's view of one worker, a child that only the session reaps."""

    number: int
    peer: str
    process: Process
    link: Link
    row: Row
    stacks: int  # file for its stacks
    _takers: list[Callable[[str], None]] = field(default_factory=list)  # of the stacks, which were requested
    _deadline: float = 0.0  # of that request
    _state: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether a request for the stacks is pending."""
        return bool(self._takers)

    def ask(self, take: Callable[[str], None]) -> None:
        """Request the stacks for ``take``; a pending request serves this one, too."""
        self._takers.append(take)
        if len(self._takers) == 1:
            self._deadline = time.monotonic() + STACK_TIMEOUT
            os.ftruncate(self.stacks, 0)
            self._state = _describe(self.process.pid)
            self.link.offer(WantsStacks())

    def look(self) -> None:
        """Answer requests if the stacks are complete or hopeless; never waits."""
        if not self._takers:
            return
        dump = os.pread(self.stacks, _MAX_DUMP, 0)
        letter = process_use(self.process.pid).state or "X"
        written, end, _after = dump.rpartition(_BEGIN)[2].partition(_END)
        if not end or _BEGIN not in dump:
            if time.monotonic() <= self._deadline and letter not in "TtZX":
                return
            written = b""
        # A fork inherits the main thread's identifier from its parent.
        text = arrange(written.decode("ascii", "replace"), threading.get_ident(), _PACKAGE)
        name = f"worker {self.number} (pid {self.process.pid})"
        self.answer(f"{name}: state: {self._state}\n{text or 'no Python stack: ' + _explain(letter)}")

    def answer(self, text: str) -> None:
        """Answer all requests."""
        takers, self._takers = self._takers, []
        for take in takers:
            take(text)

    def close(self) -> None:
        """Close this process's descriptors, but for that of the process."""
        self.link.close()
        os.close(self.stacks)


class StackFile:
    """A status gate's request for the stacks of all workers: a line for each in ``file``, until ``pipe`` is closed."""

    def __init__(self, workers: Collection[ForkedWorker], file: int, pipe: int) -> None:
        self._file, self._pipe = file, pipe
        self._num_missing = len(workers)
        for worker in workers:
            worker.ask(functools.partial(self._write, worker.process.pid))
        if not workers:
            self.close()

    def _write(self, pid: int, text: str) -> None:
        with contextlib.suppress(OSError):  # a limit on file sizes costs a stack, not the session
            os.write(self._file, json.dumps([pid, text]).encode() + b"\n")
        self._num_missing -= 1
        if not self._num_missing:
            self.close()

    def close(self) -> None:
        os.close(self._file)
        os.close(self._pipe)


def _explain(letter: str) -> str:
    if letter in "ZX":
        return "it has ended"
    if letter in "Tt":
        return "it is stopped until it gets SIGCONT"
    return f"it did not let another of its threads run within {STACK_TIMEOUT:g} s"


def _describe(pid: int) -> str:
    """State of the main thread and, where the kernel shows it, the function in which it waits."""
    found = re.search(r"^State:\t(.*)$", read(f"/proc/{pid}/status"), re.MULTILINE)
    state, function = found[1] if found else "gone", read(f"/proc/{pid}/wchan")
    return state if function in ("", "0") else f"{state} in {function}"


# Recursion in many threads fills pages; the important part comes first.
MAX_CHARACTERS = 16384

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:\n", re.MULTILINE)


def arrange(dump: str, main: int, package: str) -> str:
    """Put the main thread first; leave out threads without user code, and frames below user code in the others.

    ``main`` is the identifier of the main thread, ``package`` the folder of this package.
    """
    own = re.escape(package)
    base = re.compile(rf'^  File "{own}/server/.*(?:\n|\Z)', re.MULTILINE)
    # Any line but a frame of this package or of the standard library's ``threading``.
    user_code = re.compile(rf'^(?!  File "(?:{own}/|.*/threading\.py", line )).', re.MULTILINE)
    # The text before the first header, then for each thread its identifier and lines.
    _before, *parts = _HEADER.split(dump)
    stacks = [(int(ident, 16), lines) for ident, lines in zip(parts[::2], parts[1::2], strict=True)]
    # Threads come youngest first.
    stacks.sort(key=lambda stack: stack[0] != main)
    arranged = []
    for ident, lines in stacks:
        if ident == main or user_code.search(lines):
            # One frame of the server stays: the caller of user code, or the one that waits for work.
            kept = lines[: found.end()] if (found := base.search(lines)) else lines
            title = "Main thread" if ident == main else f"Thread 0x{ident:x}"
            arranged.append(f"{title} (most recent call first):\n{kept.rstrip()}")
    text = "\n\n".join(arranged)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n... (cut here)"
