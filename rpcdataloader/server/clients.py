"""The node server's view of its clients: their sessions and workers, a cap on workers, output, logging and clean-up."""

from __future__ import annotations

import contextlib
import logging
import os
import sched
import secrets
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rpcdataloader.host.seldom import Seldom
from rpcdataloader.server import events
from rpcdataloader.server.events import RETRY_PAUSE, Event, Link, Row
from rpcdataloader.server.logs import Forwarding, LimitedLog, OutputReader
from rpcdataloader.server.processes import Loop, Process
from rpcdataloader.server.refusals import PEER_GONE
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.wire import transport
from rpcdataloader.wire.handshake import Identity, Tickets
from rpcdataloader.wire.messages import printable

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a session whose client has gone lets its workers end, which takes up to 2 s, and cleans up after its
# datasets. One that runs user code ends with its workers, and at once if it has none.
END_TIMEOUT = 4.0
WORKER_END_TIMEOUT = 2.5

# Other clients that the reason of a full node names.
MAX_NAMED = 4

# Seconds for which a connection that its session has not served yet holds a place that other clients may want.
YOUTH = 1.0

# Seconds for the removal of a folder at the end of the node server; it goes on afterwards.
REMOVAL_TIMEOUT = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class ClientRecord:
    """A client, and its session here."""

    process: Process
    link: Link
    sock: socket.socket  # its control connection, kept to see it leave while the session is busy
    tickets: Tickets  # of connections for its workers
    name: str
    identity: Identity
    folder: str  # for modules of the session
    row: Row  # of the session
    workers: dict[int, Row] = field(default_factory=dict)  # by number, from the hand-over of their connections on
    last_number: int = 0
    coming: dict[socket.socket, str] = field(default_factory=dict)  # connections that wait for the session; their peers
    retry: sched.Event | None = None  # the next look whether the session has room for these
    work: Counter[str] = field(default_factory=Counter)  # of ended workers, with their number
    failed: int = 0  # time of their last error, in nanoseconds; 0 without one
    error: str = ""
    report: str = ""  # JSON of its last report
    reported: int = 0  # time of that
    forwarding: Forwarding | None = None  # of output; None if the client wants none
    has_folder: bool = False  # True once the session has announced that
    is_gone: bool = False

    def forget(self, number: int) -> None:
        """Add the work of a worker that has ended to that of all such workers, if it had begun."""
        row = self.workers.pop(number)
        if not row.pid[0]:
            return
        self.work.update(row.work(), ended_workers=1)
        if row.failed[0] > self.failed:
            self.failed, self.error = row.failed[0], row.error


class Clients:
    """The clients of a node server.

    Attributes:
        work: Work for clients that have gone, with the number of their workers.
        is_draining: True if further clients and workers are refused.
    """

    def __init__(self, context: ServerContext, loop: Loop, strangers: LimitedLog) -> None:
        self._context = context
        self._counters = context.counters
        self._loop = loop
        self._strangers = strangers
        self._seldom = Seldom()
        self._readers: set[OutputReader] = set()
        self._by_pid: dict[int, ClientRecord] = {}  # of sessions
        self.is_draining = False
        self.work: Counter[str] = Counter()
        with contextlib.suppress(FileNotFoundError):
            tempfile.gettempdir()  # which tries folders, once: their file servers may hang later
        self._look_for_vanished()

    def __iter__(self) -> Iterator[ClientRecord]:
        return iter(self._by_pid.values())

    def __len__(self) -> int:
        return len(self._by_pid)

    def find(self, session: int) -> ClientRecord | None:
        """The client with this session, if it is here."""
        return self._by_pid.get(session)

    def begin(
        self,
        process: Process,
        link: Link,
        sock: socket.socket,
        peer: str,
        row: Row,
        begun: events.SessionBegun,
        output: int,
    ) -> ClientRecord:
        """Register a gate that has become a session; ``output`` is the pipe of its output."""
        client = ClientRecord(
            process=process,
            link=link,
            sock=sock,
            tickets=Tickets(bytes.fromhex(begun.ticket_key), process.pid),
            name=printable(begun.name),
            identity=begun.client,
            folder=_name_folder(),
            row=row,
        )
        job = f" of job {printable(begun.client.job)}" if begun.client.job else ""
        logger.info("%s%s has come from %s", client.name, job, peer)
        self._by_pid[process.pid] = client
        self._add_output(client, output, "session")
        # The session ends with its client, even while it is busy with user code.
        self._loop.watch(sock.fileno(), lambda: self._on_client_gone(client), PEER_GONE)
        client.link.post(events.SessionKnown(client.folder))
        if self.is_draining:
            client.link.post(events.Drain())
        return client

    def receive(self, client: ClientRecord, event: Event) -> None:
        match event:
            case events.WantsOutput():
                client.forwarding = client.forwarding or Forwarding(client.link, self._loop)
            case events.HasFolder():
                client.has_folder = True
            case events.WorkerEnded():
                self._worker_ended(client, event)
            case events.Reported():
                client.report, client.reported = event.report, time.monotonic_ns()
            case events.Refused():
                self._strangers.refused(event)

    # --- output

    def _add_output(self, client: ClientRecord, descriptor: int, name: str) -> None:
        """Log what a pipe of a session brings, and forward it to the client."""
        prefix = f"[{self._context.node} {client.name}{'' if name == 'session' else ' ' + name}]"

        def take(line: str) -> None:
            if client.forwarding is not None:
                client.forwarding.take(line, name)
            self._context.log.write(f"{prefix} {line}\n")

        reader = OutputReader(descriptor, take)
        self._readers.add(reader)
        self._loop.watch(descriptor, lambda: self._on_output(reader))

    def _on_output(self, reader: OutputReader) -> None:
        if not reader.read():
            self._loop.unwatch(reader.fileno())
            self._readers.discard(reader)

    # --- workers

    def hand_over(self, client: ClientRecord, sock: socket.socket, peer: str) -> None:
        """Pass the connection of a future worker to its session, once that has room for it, in the order of coming."""
        if not client.coming and self._offer(client, sock, peer):
            sock.close()
            return
        client.coming[sock] = peer
        self._loop.watch(sock.fileno(), lambda: self._let_go(client, sock), PEER_GONE)
        if client.retry is None:
            client.retry = self._loop.call_after(RETRY_PAUSE, lambda: self._hand_over_later(client))

    def _hand_over_later(self, client: ClientRecord) -> None:
        client.retry = None
        while client.coming:
            sock, peer = next(iter(client.coming.items()))
            if not self._offer(client, sock, peer):
                client.retry = self._loop.call_after(RETRY_PAUSE, lambda: self._hand_over_later(client))
                return
            self._let_go(client, sock)

    def _let_go(self, client: ClientRecord, sock: socket.socket) -> None:
        """Close this process's side of a connection: its session has it, or its peer has gone."""
        del client.coming[sock]
        self._loop.unwatch(sock.fileno())
        sock.close()

    def _offer(self, client: ClientRecord, sock: socket.socket, peer: str) -> bool:
        """Pass one connection to its session; returns False while that has no room for it.

        A worker takes its place before it has authenticated its client, so that nothing waits for a decision.
        """
        number = client.last_number + 1
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as handed:
            row, descriptors = self._counters.row(0), [sock.fileno()]
            reason = "the node server is draining" if self.is_draining else self._busy(client)
            if reason is None:
                try:
                    output, theirs = os.pipe()
                    failed.callback(os.close, output)
                    handed.callback(os.close, theirs)
                    row = self._counters.open()
                    failed.callback(self._counters.close, row)
                    descriptors.append(theirs)
                except OSError as exc:
                    reason = str(exc.strerror)
            if not client.link.offer(events.WorkerConnection(number, row.number, peer, reason), descriptors):
                return False
            client.last_number = number
            if reason is None:
                failed.pop_all()
                client.workers[number] = row
                self._add_output(client, output, f"worker {number}")
                logger.debug("worker %d of %s has come from %s", number, client.name, peer)
            # While it waits, it asks every second; who holds the other connections changes meanwhile.
            elif self._seldom.is_due(f"{client.name}: {'busy' if self._busy(client) else reason}"):
                self._strangers.log(logging.INFO, "%s gets no further worker: %s", client.name, reason)
            return True

    def _busy(self, client: ClientRecord) -> str | None:
        """The reason for which the client gets no further worker; None if it gets one."""
        limit, own = self._context.max_connections, len(client.workers)
        young = time.monotonic_ns() - YOUTH * 1e9
        # While a session builds, its client may give up connections and make others: all of them wait there.
        held: Counter[str] = Counter()
        for each in self:
            if each is not client:  # which may have other sessions, of the same name, by other addresses of the server
                held[each.name] += sum(row.pid[0] > 0 or row.begun[0] > young for row in each.workers.values())
        others = held.total()
        if own + others < limit:
            return None
        text = f"all {limit} connections are in use (--max-connections)"
        most = [f"{name} ({number})" for name, number in held.most_common(MAX_NAMED) if number]
        return f"{text}, {others} of them by other clients: {', '.join(most)}" if others else text

    def _worker_ended(self, client: ClientRecord, event: events.WorkerEnded) -> None:
        row = client.workers[event.worker]
        client.forget(event.worker)
        self._counters.close(row)
        if not row.pid[0]:
            return
        received, sent = row.traffic  # also of a worker that was killed
        level = logging.DEBUG if event.reason == "exited with status 0" else logging.WARNING
        text = "worker %d of %s %s; it received %d bytes and sent %d"
        logger.log(level, text, event.worker, client.name, event.reason, received, sent)

    def ask_for_stacks(self, descriptors: list[int]) -> None:
        """Let sessions write the stacks of their workers to the first of two descriptors; busy ones would be late."""
        for client in self:
            if not client.row.running[0]:
                client.link.offer(events.WantsStacks(), descriptors)

    # --- the end

    def _on_client_gone(self, client: ClientRecord) -> None:
        self._loop.unwatch(client.sock.fileno())
        client.is_gone = True
        reason = "its client has gone"
        timeout = END_TIMEOUT
        if client.row.running[0]:
            timeout = WORKER_END_TIMEOUT if any(row.pid[0] for row in client.workers.values()) else 0.0
        self._loop.call_after(timeout, lambda: client.process.kill(reason))

    def _look_for_vanished(self) -> None:
        """End the sessions of clients whose host vanished while data was under way to it; otherwise keep-alive does."""
        for client in self:
            if not client.is_gone and transport.is_cut_off(client.sock):
                transport.shut_down(client.sock)
        self._loop.call_after(transport.CUT_OFF_PERIOD, self._look_for_vanished)

    def disconnect(self) -> None:
        """End all sessions, as if their clients had gone."""
        for client in self:
            transport.shut_down(client.sock)

    def drain(self) -> None:
        """Let sessions drain."""
        for client in self:
            for sock in list(client.coming):
                self._let_go(client, sock)
            client.link.post(events.Drain())

    def close(self) -> None:
        """Clean up after sessions whose end was not reported, and log the last output, which is still in pipes."""
        for client in self:
            _remove_folder(client.folder, wait=True)
        for reader in self._readers:
            reader.finish()

    def forget_in_child(self) -> None:
        for reader in self._readers:
            os.close(reader.fileno())
        for client in self:
            for sock in client.coming:
                sock.close()

    def ended(self, client: ClientRecord, reason: str) -> None:
        """Clean up after an ended session and its workers; ``reason`` is the end of its process."""
        del self._by_pid[client.process.pid]
        self._loop.cancel(client.retry)
        self._loop.unwatch(client.sock.fileno())
        if client.has_folder:
            _remove_folder(client.folder)
        if client.forwarding is not None:
            client.forwarding.close()
        client.forwarding = None  # the last lines of its workers go to the log only
        level = logging.WARNING
        if client.is_gone or reason == "exited with status 0":
            level = logging.INFO
            reason = "ended: " + ("the node server is draining" if self.is_draining else "the client has gone")
        for number, row in list(client.workers.items()):
            client.forget(number)
            self._counters.close(row)
        self.work.update(client.work)
        seconds = (time.monotonic_ns() - client.row.begun[0]) / 1e9
        text = "session of %s %s after %.1f s; its workers received %d bytes and sent %d"
        received, sent = client.work["received_bytes"], client.work["sent_bytes"]
        logger.log(level, text, client.name, reason, seconds, received, sent)


def _name_folder() -> str:
    """A path for the modules of one session, which creates that folder; empty without a place for temporary files."""
    try:
        return os.path.join(tempfile.gettempdir(), f"rpcdataloader-{secrets.token_hex(16)}")
    except FileNotFoundError:
        return ""


def _remove_folder(path: str, *, wait: bool = False) -> None:
    """Remove the folder of an ended session, if it exists.

    A program does the work, as the client may have put any number of files there, at any depth, and as its file server
    may hang. The shell itself looks at no other folder, such as that of ``PWD``.
    """
    if path:
        command = ["/bin/sh", "-c", 'exec >/dev/null 2>&1; rm -rf -- "$1"' + ("" if wait else " &"), "sh", path]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=os.sep, env={}).wait(REMOVAL_TIMEOUT)
