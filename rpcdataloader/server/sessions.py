"""The node server's view of its sessions: their events, a cap on workers, counting, logging and clean-up."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rpcdataloader.host.output import Output
from rpcdataloader.server import events
from rpcdataloader.server.counters import SESSION, WORKER
from rpcdataloader.server.events import Event, Link
from rpcdataloader.server.logs import OutputReader
from rpcdataloader.server.processes import Loop, Process
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.wire import transport
from rpcdataloader.wire.messages import MAX_CHARS, LineLimit, escaped

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a session whose client has gone cleans up after its datasets. One that runs user code ends at once.
END_TIMEOUT = 2.0

_CLIENT_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


@dataclass(slots=True, eq=False)
class Connection:
    """A connection that a gate has, or that it had when it became a session."""

    sock: socket.socket  # kept to see the peer leave while the process is busy
    source: str
    peer: str
    row: int
    deadline: float  # time by which its gate must have become something else; infinite once it has, or is being ended
    is_refused: bool = False  # True once it was refused, and its gate waits for the peer to close
    wanted: events.IsForWorker | None = None  # the session that it is for, while that session has no room for it


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSession:
    """A session."""

    process: Process
    link: Link
    connection: Connection
    id: str
    client: str
    folder: str
    started: float
    # Limit on the printed lines that are sent to its client; None if the client wants no output.
    output: LineLimit | None = None
    workers: dict[int, int] = field(default_factory=dict)  # number of each, and its row of counters
    is_client_gone: bool = False
    end_by: float = math.inf  # time at which it is killed
    is_asked: bool = False  # True while a request for stacks is unread

    def disconnect(self) -> None:
        """End its control connection, as its client does when it goes."""
        with contextlib.suppress(OSError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, eq=False)
class Child:
    """A process of the node server: a gate, or what it has become."""

    process: Process
    link: Link
    connection: Connection | None = None  # None for a gate that waits for one
    session: ClientSession | None = None  # its session, once it is one

    def end(self, reason: str) -> None:
        if self.connection is not None:
            self.connection.deadline = math.inf
        self.process.kill(reason)

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""
        self.link.close()
        if self.connection is not None:
            self.connection.sock.close()

    def forget_in_child(self) -> None:
        self.close()
        os.close(self.process.fileno())


class Sessions:
    """The sessions of a node server."""

    def __init__(self, context: ServerContext, loop: Loop, log: Output) -> None:
        self._context = context
        self._counters = context.counters
        self._loop = loop
        self._log = log
        self._readers: set[OutputReader] = set()
        self._folders = Folders()
        self._by_id: dict[str, ClientSession] = {}
        self._is_draining = False
        self._look_at = 0.0  # time to look for vanished clients

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, gate: Child, connection: Connection, begun: events.SessionBegun, output: int) -> ClientSession:
        """Register a gate that has become a session; ``output`` is the pipe of its output."""
        origin = begun.origin
        rank = -1 if origin.rank is None else origin.rank
        self._counters.describe(connection.row, kind=SESSION, client=origin.client, rank=rank, job=origin.job)
        session = ClientSession(
            process=gate.process,
            link=gate.link,
            connection=connection,
            id=begun.id,
            client=escaped(begun.name),
            folder=self._folders.name(),
            started=time.monotonic(),
        )
        job = f" of job {escaped(origin.job)}" if origin.job else ""
        logger.info("%s%s has come from %s", session.client, job, connection.peer)
        self._by_id[session.id] = session
        connection.deadline = math.inf
        self._add_output(session, output, "session")
        # The session ends with its client, even while it is busy with user code.
        self._loop.watch(connection.sock.fileno(), lambda: self._on_client_gone(session), _CLIENT_GONE)
        session.link.post(events.SessionKnown(session.folder))
        if self._is_draining:
            session.link.post(events.Drain())
        return session

    def receive(self, session: ClientSession, event: Event, descriptors: list[int]) -> None:
        match event:
            case events.WantsOutput():
                session.output = LineLimit(lambda note: session.link.offer(events.Printed(note, "")))
            case events.WantsRoom():
                if descriptors:
                    self._add_output(session, descriptors[0], f"worker {event.worker}")
                self._decide(session, event, None if descriptors else os.strerror(errno.EMFILE))
            case events.WorkerEnded():
                self._worker_ended(session, event)
            case events.StacksBegun():
                session.is_asked = False
            case events.Refused():
                self._context.log_refusal(event)

    def _add_output(self, session: ClientSession, descriptor: int, name: str) -> None:
        """Log what a pipe of a session brings, and tell its client."""
        prefix = f"[{self._context.node} {session.client}{'' if name == 'session' else ' ' + name}]"

        def take(line: str) -> None:
            if session.output is not None:
                # A progress bar rewrites its line: only its last state counts.
                text = line.rstrip("\r").rpartition("\r")[2][:MAX_CHARS]
                # The session may be busy, and the node server never waits for it.
                printed = events.Printed(text, name)
                if session.output.admits(text, time.monotonic()) and not session.link.offer(printed):
                    session.output.leave_out()
                # The log of an embedded pool is its client's terminal, which would show the line twice.
                if self._context.embedded:
                    return
            self._log.write(f"{prefix} {line}\n")

        reader = OutputReader(descriptor, take)
        self._readers.add(reader)
        self._loop.watch(descriptor, lambda: self._on_output(reader))

    def _on_output(self, reader: OutputReader) -> None:
        if not reader.read():
            self._loop.unwatch(reader.fileno())
            self._readers.discard(reader)

    def _decide(self, session: ClientSession, event: events.WantsRoom, reason: str | None = None) -> None:
        row = 0
        if reason is None:
            reason = "the node server is draining" if self._is_draining else self._busy(session)
        if reason is None:
            try:
                now = time.monotonic_ns()
                row = self._counters.open(WORKER, event.pid, now, session=session.connection.row, number=event.worker)
            except OSError as exc:
                reason = str(exc.strerror)
        if reason is None:
            session.workers[event.worker] = row
            logger.debug("worker %d of %s has come from %s", event.worker, session.client, event.peer)
        else:
            self._context.log_within_limits(logging.INFO, "%s gets no further worker: %s", session.client, reason)
        session.link.post(events.Decided(event.worker, reason, row))

    def _busy(self, session: ClientSession) -> str | None:
        """The reason for which the session gets no further worker; None if it gets one."""
        limit, total = self._context.max_connections, sum(len(each.workers) for each in self)
        if limit is None or total < limit:
            return None
        others = total - len(session.workers)
        text = f"all {limit} connections are in use (--max-connections)"
        return f"{text}, {others} of them by other clients" if others else text

    def _worker_ended(self, session: ClientSession, event: events.WorkerEnded) -> None:
        row = session.workers.pop(event.worker, None)
        if row is None:  # it was not admitted
            return
        received, sent = self._counters.row(row).traffic  # also of a worker that was killed
        self._counters.close(row)
        # The log of an embedded pool is the trainer's terminal, and the trainer reports this itself.
        level = logging.INFO if self._context.embedded else logging.WARNING
        if event.reason == "exited with status 0":
            level = logging.DEBUG
        text = "worker %d of %s %s; it received %d bytes and sent %d"
        logger.log(level, text, event.worker, session.client, event.reason, received, sent)

    def hand_over(self, gate: Link, connection: Connection, wanted: events.IsForWorker) -> bool:
        """Pass the connection of a gate to its session; later, while the session has no room.

        Returns:
            True if the session has it.
        """
        connection.wanted = None
        session = self._by_id.get(wanted.session)
        if session is None:
            logger.debug("there is no session for a connection from %s", connection.peer)
            connection.is_refused = True
            gate.post(events.UnknownSession())
        elif session.link.offer(events.WorkerConnection(connection.peer, wanted.preamble), [connection.sock.fileno()]):
            return True
        else:
            connection.wanted = wanted
        return False

    def ask_for_stacks(self, descriptors: list[int]) -> None:
        """Let every session write the stacks of its workers to one descriptor."""
        try:
            for session in self:
                # A busy session would accumulate requests. Without descriptors, there is no room for them here.
                if descriptors and not session.is_asked:
                    session.is_asked = session.link.offer(events.WantsStacks(), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_client_gone(self, session: ClientSession) -> None:
        self._loop.unwatch(session.connection.sock.fileno())
        session.is_client_gone = True
        is_busy = self._counters.row(session.connection.row).running[0]
        session.end_by = time.monotonic() + (0.0 if is_busy else END_TIMEOUT)
        self._kill_late(session)

    def _kill_late(self, session: ClientSession) -> None:
        if time.monotonic() >= session.end_by:
            session.process.kill("its client has gone")

    def do_what_is_due(self, now: float) -> None:
        """Tell clients how much of their output was left out, and end the sessions of clients whose host vanished."""
        is_looking = now > self._look_at
        if is_looking:
            self._look_at = now + transport.LOOK_INTERVAL
        for session in self:
            if session.output is not None:
                session.output.tell(now)
            # While data was under way to the host; otherwise keep-alive notices.
            if is_looking and not session.is_client_gone and transport.is_cut_off(session.connection.sock):
                session.disconnect()
            self._kill_late(session)

    def disconnect(self) -> None:
        """End all sessions, as if their clients had gone."""
        for session in self:
            session.disconnect()

    def drain(self) -> None:
        """Refuse further clients and workers, and let sessions drain."""
        self._is_draining = True
        for session in self:
            session.link.post(events.Drain())

    def close(self) -> None:
        """Clean up after sessions whose end was not reported, and log the last output, which is still in pipes."""
        for session in self:
            self._folders.remove(session.folder, wait=True)
        for reader in self._readers:
            reader.finish()

    def forget_in_child(self) -> None:
        for reader in self._readers:
            os.close(reader.fileno())

    def ended(self, session: ClientSession, reason: str) -> None:
        """Clean up after an ended session and its workers; ``reason`` is the end of its process."""
        del self._by_id[session.id]
        self._folders.remove(session.folder)
        session.output = None  # the last lines of its workers go to the log only
        level = logging.WARNING
        if session.is_client_gone or reason == "exited with status 0":
            level = logging.INFO
            reason = "ended: " + ("the node server is draining" if self._is_draining else "the client has gone")
        for row in session.workers.values():
            self._counters.close(row)
        received, sent = self._counters.row(session.connection.row).traffic
        text = "session of %s %s after %.1f s; its workers received %d bytes and sent %d"
        logger.log(level, text, session.client, reason, time.monotonic() - session.started, received, sent)


class Folders:
    """The folders in which the sessions of a node server keep modules of their clients.

    A session that gets modules creates its folder. The node server names it, and removes it after the session's end.
    """

    def __init__(self) -> None:
        self._ended: set[str] = set()

    def name(self) -> str:
        """Return a path for one session; empty if there is no place for temporary files."""
        try:
            return os.path.join(tempfile.gettempdir(), f"rpcdataloader-{secrets.token_hex(16)}")
        except FileNotFoundError:
            return ""

    def remove(self, path: str, *, wait: bool = False) -> None:
        """Remove the folder of an ended session, if it exists.

        A program does the work, as the client may have put any number of files there, at any depth. An orphaned worker
        may write until the kernel has ended it: what is left then goes with the next folder.
        """
        self._ended = {folder for folder in {*self._ended, path} if _is_ours(folder)}
        if self._ended:
            command = 'exec >/dev/null 2>&1; rm -rf -- "$@"' + ("" if wait else " &")
            with contextlib.suppress(OSError):
                subprocess.run(["sh", "-c", command, "sh", *self._ended], stdin=subprocess.DEVNULL, check=False)


def _is_ours(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False
