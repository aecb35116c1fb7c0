"""A session serves one client on this node: imports its modules, builds its datasets once, forks its workers.

It begins as a gate, which the node server forks for a connection without a ticket. A gate reads the preamble and
authenticates the client; then it becomes a session, or serves the node's status. What arrives before the secret is
proved is read here, or by a worker, and never in the node server, except the preamble. The node server ends slow gates.

A session has one thread, so that its forks are safe, and serves its control connection in order. New workers wait while
it builds, as they need the dataset anyway. It ends with the control connection: at end of file, or killed by the node
server, which watches the connection even while user code runs here.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import multiprocessing.process
import multiprocessing.util
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.environment import prepare_session
from rpcdataloader.host.parts import follow
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.server import events
from rpcdataloader.server.datasets import DatasetTable, Parts, parts_of
from rpcdataloader.server.events import RETRY_PAUSE, Link, Row, fork_linked
from rpcdataloader.server.logs import forward_warnings, redirect_output
from rpcdataloader.server.processes import (
    Leads,
    Life,
    Loop,
    end_with,
    ended_after,
    name_process,
    name_threads,
    num_threads,
    number_process,
)
from rpcdataloader.server.refusals import Refusals
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.server.stacks import ForkedWorker, StackFile
from rpcdataloader.server.status import serve_status
from rpcdataloader.server.worker import END_TIMEOUT, Worker, admit
from rpcdataloader.wire.channel import Channel, accept_channel, local_identity
from rpcdataloader.wire.credentials import TOKEN_VARIABLE
from rpcdataloader.wire.exceptions import dumps_exception
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.handshake import STATUS_TICKET, UnavailableError
from rpcdataloader.wire.messages import Exited, Log, Reference, StackRequest, Welcome, unpack_handles
from rpcdataloader.wire.pickling import Build, dumps_reply, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.status import MAX_REPORT_BYTES, Report
from rpcdataloader.wire.transport import Transport

logger = logging.getLogger("rpcdataloader.server")

# Seconds in which a worker must have authenticated its client, and one that was refused must have gone. A client that
# starts hundreds of workers may take long, and gives up by itself, but tickets can be stolen on their way.
HANDSHAKE_TIMEOUT = 60.0


def run_gate(sock: socket.socket, peer: str, node: Link, context: ServerContext, row: Row) -> None:
    """Serve a connection; ``row`` is that of the session to come."""
    name_process("rpcdl-gate")
    transport = Transport(sock, peer)
    try:
        channel = accept_channel(transport, context.credentials, local_identity("server"), context.tls)
    except ConnectionLostError as exc:
        logger.debug("%s", exc)
    except RPCError as exc:
        node.send(context.refusal(peer, exc))
    else:
        if channel.ticket == STATUS_TICKET:
            serve_status(channel, node)
        else:
            run_session(channel, node, context, row)
        return
    transport.linger()


def run_session(channel: Channel, node: Link, context: ServerContext, row: Row) -> None:
    """Serve an authenticated control connection until it ends."""
    # Code of the client, and programs that it starts, must not see the secret of the server.
    os.environ.pop(TOKEN_VARIABLE, None)
    name_process("rpcdl-session")
    # A session of its own, so that user code that signals its process group does not end the node server, and so that
    # the node server finds what user code has started.
    os.setsid()
    end_with(context.life)
    output, theirs = os.pipe()
    redirect_output(theirs)
    context.log.close()  # or what user code forks would keep it open for its readers
    node.send(events.SessionBegun(channel.name, channel.peer, channel.ticket_key.hex()), [output])
    os.close(output)
    # The node server knows the session before the client does, so that no worker connection comes too early.
    received = node.recv()
    if received is None or not isinstance(received[0], events.SessionKnown):
        return
    wants_output, has_folder = events.WantsOutput(), events.HasFolder()
    prepare_session(
        received[0].folder, lambda: node.send(wants_output), lambda: node.send(has_folder), channel.ticket_key
    )
    welcome = Welcome(context.node, os.getpid(), context.num_workers)
    forget_inherited_exits()
    session = Session(channel, node, context, row)
    try:
        channel.send(MessageType.WELCOME, payload=welcome.encode())
        session.serve()
    except ConnectionLostError as exc:
        logger.info("the session ends: %s", exc)
    except RPCError as exc:
        # For example, the client's data was altered on the way. The client gets this warning, too.
        logger.warning("the session ends: %s", exc)
    # The node server has set a time limit.
    session.close()
    atexit._run_exitfuncs()


# Finalizers of the processes from which this one was forked.
_forgotten: list[object] = []


def forget_inherited_exits() -> None:
    """Forget the exit functions of a session's or worker's parents, which run at their own ends."""
    atexit._clear()
    # A temporary directory of theirs would be removed, and a child process of theirs ended. Nothing is taken apart: to
    # free the thousand finalizers of torch would copy as many pages of the parent.
    _forgotten.append(weakref.finalize._registry)  # type: ignore[attr-defined]
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _has_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


class Session:
    """The single-threaded loop of a session."""

    def __init__(self, channel: Channel, node: Link, context: ServerContext, row: Row) -> None:
        self._row = row
        self._channel = channel
        self._node = node
        self._context = context
        self._where = f"the session (pid {os.getpid()}) on {context.node}"
        self._datasets = DatasetTable()
        # Not from a pool: what a dataset was built from is not used again, and every fork would inherit it.
        channel.allocate_with(
            lambda _id, sizes: [Block(torch.empty(size, dtype=torch.uint8, device="cpu")) for size in sizes]
        )
        self._workers: dict[int, ForkedWorker] = {}
        self._has_warned = False  # of threads
        self._life = Life.SERVING
        self._loop = Loop()
        self._refusals = Refusals(self._loop)
        self._seldom = Seldom()
        self._logs: deque[Log] = deque()
        self._stack_files: weakref.WeakSet[StackFile] = weakref.WeakSet()

    def serve(self) -> None:
        """Run until the client has gone, or a drain is over; raises the error of a connection that ends otherwise."""
        if not self._context.is_local:
            forward_warnings(self._tell_client)
        self._loop.watch(self._channel.fileno(), self._on_control)
        self._loop.watch(self._node.fileno(), self._on_node)
        while self._life is not Life.ENDED:
            # The queue of a stopped worker may be full, and must not hold up the others.
            unsent = [worker for worker in self._workers.values() if not worker.link.flush()]
            self._loop.wait(RETRY_PAUSE if unsent else None)
            self._flush_logs()

    def close(self) -> None:
        """End the workers, then let the datasets go, whose finalizers may remove what workers use."""
        for worker in self._workers.values():
            worker.link.close()
        deadline = time.monotonic() + END_TIMEOUT
        for worker in self._workers.values():
            if worker.process.reap(wait=deadline - time.monotonic()) is None:
                worker.process.kill("its session ends")
                worker.process.reap(wait=1.0)
        self._datasets.clear()

    # --- the control connection

    def _tell_client(self, fields: dict[str, Any]) -> None:
        self._logs.append(Log(**fields))
        # The loop itself notices that the client is gone; code that warns must not fail from it.
        with contextlib.suppress(RPCError):
            self._flush_logs()

    def _flush_logs(self) -> None:
        # A finalizer may warn in the middle of a message that this thread sends: that warning waits.
        while self._logs and not self._channel.is_sending:
            with contextlib.suppress(IndexError):  # another thread was faster
                log = self._logs.popleft()
                self._channel.send(MessageType.LOG, payload=log.encode())

    def _on_control(self) -> None:
        self._receive()
        # Over TLS, later messages of the same record would not wake this loop.
        while self._life is not Life.ENDED and self._channel.transport.has_unread:
            self._receive()

    def _receive(self) -> None:
        message = self._channel.recv()
        if message is None:
            self._life = Life.ENDED
        elif message.type == MessageType.BUILD:
            self._answer(message, self._build)
        elif message.type == MessageType.CALL:
            self._answer(message, self._call)
        elif message.type == MessageType.STACK:
            self._ask_for_stack(message.request_id, StackRequest.decode(message.payload))
        elif message.type == MessageType.RELEASE:
            self._datasets.release(unpack_handles(message.payload))
        elif message.type == MessageType.REPORT:
            self._pass_on(bytes(message.payload))
        # CANCEL: requests before it are answered already.

    def _pass_on(self, report: bytes) -> None:
        """Pass a report to the node server, if it is one; clients may send anything."""
        with contextlib.suppress(RemoteProtocolError):
            if len(report) <= MAX_REPORT_BYTES and report.isascii() and Report.decode(report):
                self._node.send(events.Reported(report.decode()))

    def _ask_for_stack(self, request_id: int, request: StackRequest) -> None:
        def reply(text: str) -> None:
            if request.end_because is not None and worker is not None:
                # A worker that waits in the kernel may outlive this look for a while. Nothing waits for it.
                worker.process.kill(request.end_because)
            self._channel.send(MessageType.REPLY, request_id, dumps_reply(text).payload)

        worker = self._workers.get(request.worker)
        if worker is not None:
            worker.ask(reply)
        else:
            reply(f"worker {request.worker} has ended")

    def _answer(self, message: Message, serve: Callable[[Message], Any]) -> None:
        """Send exactly one reply to a request."""
        self._row.since[0], self._row.running[0] = time.monotonic_ns(), 1
        try:
            encoded = dumps_reply(serve(message))
        except BaseException as exc:
            error = dumps_exception(exc, self._where)
            self._channel.send(MessageType.ERROR, message.request_id, error)
        else:
            self._channel.send(MessageType.REPLY, message.request_id, encoded.payload, encoded.buffers)
        finally:
            self._row.since[0], self._row.running[0] = time.monotonic_ns(), 0

    def _build(self, message: Message) -> dict[str, Any]:
        build = Build.decode(message.payload)
        return self._datasets.add(build, self._parts_of(build, message.blocks))

    def _parts_of(self, build: Build, blocks: Sequence[Block]) -> Parts:  # noqa: ARG002
        return functools.partial(parts_of, blocks)

    def _call(self, message: Message) -> Any:
        func, args, kwargs, _keep = loads(
            message.payload, message.blocks, persistent_load=self._resolve, adopt_main=True
        )
        return func(*args, **kwargs)

    def _resolve(self, reference: Reference) -> Any:
        _kind, key, path = reference
        return follow(self._datasets.get(key), path)

    # --- the node server

    def _on_node(self) -> None:
        self._refusals.make_room()
        try:
            self._receive_event()
        finally:
            self._refusals.keep_room()

    def _receive_event(self) -> None:
        try:
            received = self._node.recv(wait=False)
        except BlockingIOError:
            return
        if received is None:
            # The node server was killed; its children end with it.
            self._life = Life.ENDED
            return
        event, descriptors = received
        match event:
            case events.WorkerConnection():
                if (problem := self._fork_worker(event, descriptors)) is not None:
                    self._not_forked(event, problem)
            case events.Printed():
                self._logs.append(Log(0, "", event.text, event.printed_by))  # sent in the loop's next round
            case events.WantsStacks():
                if descriptors:
                    self._stack_files.add(StackFile(self._workers.values(), *descriptors))
            case events.Drain():
                self._life = Life.DRAINING
                self._channel.send(MessageType.GOAWAY)
                for worker in self._workers.values():
                    worker.link.post(event)
                self._finish_drain()

    def _finish_drain(self) -> None:
        if self._life is Life.DRAINING and not self._workers:
            self._life = Life.ENDED
            self._channel.transport.linger()

    # --- workers

    def _fork_worker(self, event: events.WorkerConnection, descriptors: list[int]) -> str | None:
        """Fork a worker for a connection; returns why that failed, which its client is told, too."""
        if not descriptors:
            logger.warning("cannot accept a connection: %s", os.strerror(errno.EMFILE))
            return "there was no descriptor for its connection"
        with contextlib.ExitStack() as ours:
            sock = ours.enter_context(socket.socket(fileno=descriptors[0]))
            for output in descriptors[1:]:
                ours.callback(os.close, output)
            if _has_hung_up(sock):
                # It may have given up several connections while this session was busy.
                return "its client has gone"
            row = None
            try:
                row = self._row_of(event)
                self._warn_of_threads()

                def run(link: Link) -> None:
                    os.setpgid(0, 0)  # for what user code starts, which ends with the worker
                    end_with(self._context.life)
                    self._forget_in_child()
                    forget_inherited_exits()
                    number_process(event.worker)
                    transport = Transport(sock, event.peer)
                    if (channel := self._admit(transport, descriptors[1:], event, row)) is not None:
                        Worker(channel, link, self._datasets, event.worker, self._context, row).run()

                process, link = fork_linked(run)
                process.leads = Leads.GROUP
            except OSError as exc:
                if row is not None:
                    self._close_row(row)
                reason = f"no worker can be forked: {exc.strerror}"
                if self._seldom.is_due(reason):
                    logger.warning("%s", reason)
                self._refusals.add(socket.socket(fileno=sock.detach()), UnavailableError(reason))
                return reason
        worker = ForkedWorker(event.worker, event.peer, process, link, row, self._loop)
        self._workers[event.worker] = worker
        self._loop.watch(link.fileno(), lambda: self._on_link(worker))
        self._loop.watch(process.fileno(), lambda: self._on_worker_end(worker))
        return None

    def _row_of(self, event: events.WorkerConnection) -> Row:
        return self._context.counters.row(event.row)

    def _close_row(self, row: Row) -> None:
        """Nothing: the node server does so as it hears of the end of the worker, or of none."""

    def _admit(
        self, transport: Transport, output: Sequence[int], event: events.WorkerConnection, row: Row
    ) -> Channel | None:
        """Begin a worker's conversation, in its process; None if its client gets none."""
        # The kernel ends the process if it takes longer: the session may be busy.
        with ended_after(HANDSHAKE_TIMEOUT):
            return admit(transport, output, self._node, self._context, event, row)

    def _not_forked(self, event: events.WorkerConnection, problem: str) -> None:
        if event.row:
            self._node.send(events.WorkerEnded(event.worker, problem))

    def _free_row(self, worker: ForkedWorker, reason: str) -> None:
        """Let another worker have the row and the place of one that has ended."""
        if worker.row.number:
            self._node.send(events.WorkerEnded(worker.number, reason))

    def _warn_of_threads(self) -> None:
        if not self._has_warned and num_threads() > 1 and (names := name_threads()):  # else they have ended meanwhile
            self._has_warned = True
            logger.warning(
                "workers are forked from a session that has threads of its own (%s): they lack these, and locks that "
                "these hold stay locked in them; start threads on first use",
                names,
            )

    def _forget_in_child(self) -> None:
        """Close the session's descriptors in a forked worker, but for the link to the node server."""
        self._channel.transport.close()
        self._refusals.close()
        for file in self._stack_files:
            file.close()
        for worker in self._workers.values():
            worker.close()
            os.close(worker.process.fileno())

    def _on_link(self, worker: ForkedWorker) -> bool:
        """Handle one event of a worker; returns False without one."""
        with contextlib.suppress(ValueError):  # its code may have written to a descriptor of ours
            try:
                match worker.link.recv(wait=False):
                    case events.GaveUp(why), []:
                        worker.gave_up = f"gave up: {why}"
                        return True
                    case events.Stacks(text), []:
                        worker.told(text)
                        return True
            except BlockingIOError:
                return False
        self._loop.unwatch(worker.link.fileno())
        return False

    def _on_worker_end(self, worker: ForkedWorker) -> None:
        if (reason := worker.process.reap()) is None:
            return
        self._loop.unwatch(worker.process.fileno())
        while self._on_link(worker):  # its last events
            pass
        reason = worker.gave_up or reason
        self._loop.unwatch(worker.link.fileno())
        worker.close()
        del self._workers[worker.number]
        row = worker.row
        has_begun = bool(row.pid[0])
        exited = Exited(worker.number, worker.process.pid, reason, row.batch[0] - 1, row.sample[0])
        self._free_row(worker, reason)  # first, as the client may ask for the place at once
        if has_begun:
            self._channel.send(MessageType.EXITED, payload=exited.encode())
        elif reason.startswith("was killed by SIGALRM"):
            late = f"no handshake within {HANDSHAKE_TIMEOUT:g} s"
            self._node.send(events.Refused(worker.peer, late, logging.INFO))
        worker.answer(f"worker {worker.number} has ended")
        self._finish_drain()
