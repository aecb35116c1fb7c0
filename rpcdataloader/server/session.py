"""One client on this node: imports its modules, builds its datasets once, forks its workers.

A session has one thread, so that its forks are safe, and serves its control connection in order. While it builds, new
workers wait, as they want the dataset anyway. It ends when the control connection does: at end of file, or killed by
the node server, which watches the connection even while user code runs here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.server.connections import Origin, TrafficCounters
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.counters import Row
from rpcdataloader.server.datasets import DatasetTable, Recipe, kind_of, length_of
from rpcdataloader.server.link import Link
from rpcdataloader.server.output import redirect_output, tell_client, tell_nobody
from rpcdataloader.server.processes import Process, fork, name_process
from rpcdataloader.server.stacks import STACK_LOOK_INTERVAL, StackPipe, StackReader, dump_stacks_on_signal
from rpcdataloader.server.statistics import StacksAsked
from rpcdataloader.server.worker import run_worker_process
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.credentials import TOKEN_VARIABLE
from rpcdataloader.wire.frames import Flag, Message, MessageType
from rpcdataloader.wire.messages import Build, Call, Exited, Log, Stack, Welcome, unpack_handles
from rpcdataloader.wire.pickling import dumps_exception, dumps_reply, loads
from rpcdataloader.wire.preamble import PREAMBLE_SIZE, Preamble
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.server")

# A forked worker has this many seconds to authenticate its client, and only so many may be at it at the same time:
# session ids travel in the clear, so anybody who listens on the network can make a session fork. More than the workers
# that a client asks for at once: the oldest has to go.
HANDSHAKE_TIMEOUT = 10.0
MAX_UNAUTHENTICATED = 256

# Seconds until another try when somebody who wants stacks has not read those before.
STACK_RETRY_PAUSE = 0.05


@dataclass(slots=True)
class _Forked:
    """A worker as its session sees it.

    Attributes:
        peer: Address at the other end of its connection.
        deadline: When it must have authenticated its client; None when it has, or is being ended.
        failure: Why it gave up, in its own words.
    """

    number: int
    peer: str
    process: Process
    link: Link
    stack: StackReader
    deadline: float | None
    authenticated: bool = False
    failure: str = ""


def run_session(channel: Channel, node: Link, context: ServerContext, peer: str, counters: TrafficCounters) -> None:
    """Serve an authenticated control connection until it ends.

    Args:
        peer: Address at the other end.
        counters: For the traffic of its workers.
    """
    # With --insecure, or in the embedded pool, nobody has read and removed it.
    os.environ.pop(TOKEN_VARIABLE, None)
    name_process("rpcdl-session")
    # Of its own group, so that user code that signals its group does not end the node server and everybody's work.
    os.setpgid(0, 0)
    session_id = os.urandom(16)
    output = redirect_output()
    origin = asdict(Origin.of(channel.peer))
    node.send("session", [output], id=session_id.hex(), name=channel.name, peer=peer, origin=origin)
    os.close(output)
    # Into the log: a constructor of a dataset may hang as well.
    dump_stacks_on_signal(2)
    # The node server knows the session before the client does, so that no worker connection can come too early.
    received = node.recv()
    if received is None:
        return
    welcome = Welcome(context.node, os.getpid(), session_id.hex(), context.num_workers)
    try:
        channel.send(MessageType.WELCOME, payload=welcome.encode())
        Session(channel, node, context, counters, context.counters.row(received[0]["row"])).serve()
    except ConnectionLostError as exc:
        logger.info("the session ends: %s", exc)
    except RPCError as exc:
        # Somebody on the way altered what the client sent, for example. The client hears of it as well.
        logger.warning("the session ends: %s", exc)


def _has_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


class Session:
    """The single-threaded loop of a session."""

    def __init__(
        self, channel: Channel, node: Link, context: ServerContext, counters: TrafficCounters, row: Row
    ) -> None:
        self._counters = counters
        self._row = row
        self._channel = channel
        self._node = node
        self._context = context
        self._where = f"the session (pid {os.getpid()}) on {context.node}"
        self._datasets = DatasetTable()
        pool = PageablePool()
        channel.allocate_with(lambda _id, sizes: [pool.allocate(size) for size in sizes])
        self._workers: dict[int, _Forked] = {}
        self._next_number = 0
        self._draining = False
        self._finished = False
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._logs: deque[dict[str, Any]] = deque()
        # Requests for stacks that are under way, by request id.
        self._stack_requests: dict[int, Stack] = {}
        # Those who want the stacks of all workers.
        self._stacks_asked: list[StacksAsked] = []

    def serve(self) -> None:
        """Run until the client has gone, or until a drain is over.

        Raises:
            RPCError: The connection ended otherwise.
        """
        if self._context.tells_clients:
            tell_client(self._tell_client)
        self._watch(self._channel.fileno(), self._on_control)
        self._watch(self._node.fileno(), self._on_node)
        while not self._finished:
            for descriptor, _events in self._poll.poll(self._poll_timeout()):
                # An earlier handler of this round may have dropped it, or even used its number again.
                if handler := self._handlers.get(descriptor):
                    handler()
            self._end_late_handshakes()
            self._finish_stacks()
            self._flush_logs()

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)

    # --- the control connection

    def _tell_client(self, fields: dict[str, Any]) -> None:
        self._logs.append(fields)
        # The loop sees for itself when the client is gone; user code that warns has nothing to do with that.
        with contextlib.suppress(RPCError):
            self._flush_logs()

    def _flush_logs(self) -> None:
        # A warning may come from a finalizer, in the middle of a message that this very thread sends: it waits then.
        while self._logs and not self._channel.is_sending:
            with contextlib.suppress(IndexError):  # another thread was faster
                log = Log(**self._logs.popleft())
                self._channel.send(MessageType.LOG, payload=log.encode(), flags=Flag.OPTIONAL)

    def _on_control(self) -> None:
        self._receive()
        # Over TLS, what came with it would not wake this loop again.
        while not self._finished and self._channel.stream.has_unread:
            self._receive()

    def _receive(self) -> None:
        message = self._channel.recv()
        if message is None:
            self._finished = True
        elif message.type == MessageType.BUILD:
            self._answer(message, self._build)
        elif message.type == MessageType.CALL:
            self._answer(message, self._call)
        elif message.type == MessageType.STACK:
            self._begin_stack(message)
        elif message.type == MessageType.RELEASE:
            self._datasets.release(unpack_handles(message.payload))
        # CANCEL: what arrived before it has been answered already.

    def _answer(self, message: Message, serve: Callable[[Message], Any]) -> None:
        """One reply per request, whatever happens in it."""
        self._row.runs(time.monotonic_ns())
        try:
            encoded = dumps_reply(serve(message))
        except BaseException as exc:
            error = dumps_exception(exc, self._where)
            self._channel.send(MessageType.ERROR, message.request_id, error)
        else:
            self._channel.send(MessageType.REPLY, message.request_id, encoded.payload, encoded.buffers)
        finally:
            self._row.rests(time.monotonic_ns())

    def _build(self, message: Message) -> dict[str, Any]:
        build = Build.decode(message.payload)
        recipe = Recipe(build.name, build.generators, build.pickled, message.blocks)
        dataset, reason = self._datasets.add(build.key, recipe, shared=build.shared)
        if reason is not None:
            logger.warning(
                "dataset %s is built in every worker instead of once on %s: %s; build='worker' says so on purpose",
                build.name,
                self._context.node,
                reason,
            )
        if dataset is None:
            return {"shared": False, "length": None}
        return {"shared": True, "length": length_of(dataset), "kind": kind_of(dataset)}

    def _call(self, message: Message) -> Any:
        call = Call(*loads(message.payload, message.blocks, persistent_load=self._resolve, adopt_main=True))
        return call.func(*call.args, **call.kwargs)

    def _resolve(self, reference: tuple[str, int]) -> Any:
        _kind, key = reference
        return self._datasets.get(key)

    # --- the node server

    def _on_node(self) -> None:
        try:
            received = self._node.recv(wait=False)
        except BlockingIOError:
            return
        except OSError as exc:
            # No descriptor left for a connection: its client sees it closed.
            logger.warning("cannot take a connection: %s", exc)
            return
        if received is None:
            # The node server was killed; its children end with it.
            self._finished = True
            return
        event, descriptors = received
        if event["event"] == "connection":
            self._fork_worker(descriptors[0], event["source"], bytes.fromhex(event["preamble"]))
        elif event["event"] == "admitted":
            if worker := self._workers.get(event["worker"]):
                worker.link.send("admitted", reason=event["reason"], row=event["row"])
        elif event["event"] == "stacks":
            self._begin_stacks(descriptors[0])
        elif event["event"] == "drain":
            self._draining = True
            self._channel.send(MessageType.GOAWAY)
            for worker in self._workers.values():
                worker.link.send("drain")
            self._finish_drain()

    def _finish_drain(self) -> None:
        if self._draining and not self._workers:
            self._finished = True
            self._channel.stream.linger()

    # --- workers

    def _fork_worker(self, descriptor: int, source: str, preamble: bytes) -> None:
        waiting = [worker for worker in self._workers.values() if worker.deadline is not None]
        if len(waiting) >= MAX_UNAUTHENTICATED:
            self._refuse(waiting[0], "too many unauthenticated connections")
        self._next_number += 1
        number = self._next_number
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
            sock = stack.enter_context(socket.socket(fileno=descriptor))
            if _has_hung_up(sock):
                # Session ids travel in clear: strangers' connections must not cost a fork each.
                return
            try:
                ours, theirs = Link.pair()
                failed.callback(ours.close)
                stack.callback(theirs.close)
                read_end, write_end = os.pipe()
                stack.callback(os.close, read_end)
                stack.callback(os.close, write_end)
                stacks = StackPipe()
                failed.callback(stacks.close)

                def run() -> None:
                    os.dup2(write_end, 1)
                    os.dup2(write_end, 2)
                    os.close(read_end)
                    os.close(write_end)
                    stacks.become_worker()
                    self._forget_in_child()
                    ours.close()
                    traffic = self._counters.of(number)
                    traffic[0], traffic[1] = PREAMBLE_SIZE, 0  # what the gate has read
                    stream = Stream(sock, source, traffic)
                    run_worker_process(stream, Preamble.decode(preamble), theirs, self._datasets, number, self._context)

                process = fork(run)
            except OSError as exc:
                logger.warning("cannot fork a worker: %s", exc)
                return
            failed.pop_all()
            self._node.send("worker", [read_end], worker=number)
        reader = StackReader(process.pid, stacks.become_session())
        worker = _Forked(number, source, process, ours, reader, time.monotonic() + HANDSHAKE_TIMEOUT)
        self._workers[number] = worker
        self._watch(ours.fileno(), lambda: self._on_worker(worker))
        self._watch(reader.fileno(), lambda: self._on_stack(worker))
        self._watch(process.fileno(), lambda: self._on_worker_end(worker))

    def _forget_in_child(self) -> None:
        """Close, in a forked worker, what belongs to the session."""
        tell_nobody()
        self._channel.stream.close()
        self._node.close()
        for asked in self._stacks_asked:
            asked.close()
        for worker in self._workers.values():
            worker.link.close()
            worker.stack.close()
            os.close(worker.process.fileno())

    def _on_worker(self, worker: _Forked) -> None:
        try:
            received = worker.link.recv(wait=False)
        except BlockingIOError:
            return
        if received is None:
            self._unwatch(worker.link.fileno())
            worker.link.close()
            return
        event, _descriptors = received
        if event["event"] == "authenticated":
            worker.authenticated = True
            worker.deadline = None
            self._node.send(
                "admit", worker=worker.number, pid=worker.process.pid, peer=worker.peer, origin=event["origin"]
            )
            if self._draining:
                worker.link.send("drain")
        elif event["event"] == "failed":
            worker.failure = event["reason"]

    def _on_worker_end(self, worker: _Forked) -> None:
        descriptor = worker.process.fileno()
        reason = worker.process.reap()
        if reason is None:
            return
        self._unwatch(descriptor)
        if worker.link.fileno() >= 0:
            # Its last words may have come in the same round.
            self._on_worker(worker)
        if worker.failure:
            reason = f"gave up: {worker.failure}"
        if worker.link.fileno() >= 0:
            self._unwatch(worker.link.fileno())
            worker.link.close()
        self._forget_stack(worker)
        for asked in self._stacks_asked:
            if asked.waits_for(worker.number):
                asked.tell(worker.number, worker.process.pid, "it has ended")
        del self._workers[worker.number]
        self._node.send("ended", worker=worker.number, reason=reason, admitted=worker.authenticated)
        if worker.authenticated:
            exited = Exited(worker.number, worker.process.pid, reason)
            self._channel.send(MessageType.EXITED, payload=exited.encode())
        self._finish_drain()

    # --- stacks of workers

    def _begin_stack(self, message: Message) -> None:
        request = Stack.decode(message.payload)
        self._stack_requests[message.request_id] = request
        if worker := self._workers.get(request.worker):
            worker.stack.ask()

    def _begin_stacks(self, descriptor: int) -> None:
        """Somebody looks at the whole node."""
        self._node.send("looked")
        asked = StacksAsked(Link(socket.socket(fileno=descriptor)), set(self._workers))
        self._stacks_asked.append(asked)
        for worker in self._workers.values():
            worker.stack.ask()

    def _on_stack(self, worker: _Forked) -> None:
        if not worker.stack.read():
            # Its code has closed the pipe, or it ends.
            self._unwatch(worker.stack.fileno())
        elif not worker.stack.is_asked:
            worker.stack.expect()

    def _finish_stacks(self) -> None:
        """Answer, without waiting for anybody, what has got its stack or will get none."""
        for worker in self._workers.values():
            if worker.stack.is_asked and worker.stack.is_done():
                self._tell_stack(
                    worker.number, f"worker {worker.number} (pid {worker.process.pid}): {worker.stack.take()}"
                )
        for number in {request.worker for request in self._stack_requests.values()} - self._workers.keys():
            ended = 0 < number <= self._next_number
            self._tell_stack(number, f"worker {number} has ended" if ended else f"there is no worker {number}")
        for asked in self._stacks_asked:
            asked.flush()
            if asked.is_over:
                asked.close()
        self._stacks_asked = [asked for asked in self._stacks_asked if not asked.is_over]

    def _tell_stack(self, number: int, text: str) -> None:
        requests = {id: request for id, request in self._stack_requests.items() if request.worker == number}
        looks = [asked for asked in self._stacks_asked if asked.waits_for(number)]
        for asked in looks:
            asked.tell(number, self._workers[number].process.pid, text)
        if not requests and not looks:
            # Somebody on this node wanted to know: into its log.
            os.write(1, f"{text}\n".encode())
        for id, request in requests.items():
            del self._stack_requests[id]
            if request.end_because is not None and number in self._workers:
                # It may outlive this for a while, if it waits in the kernel. Nobody waits for it.
                self._workers[number].process.kill(request.end_because)
            self._channel.send(MessageType.REPLY, id, dumps_reply(text).payload)

    def _forget_stack(self, worker: _Forked) -> None:
        if worker.stack.fileno() in self._handlers:
            self._unwatch(worker.stack.fileno())
        worker.stack.close()

    def _poll_timeout(self) -> float | None:
        if any(worker.stack.is_asked for worker in self._workers.values()):
            return STACK_LOOK_INTERVAL * 1000
        if self._stacks_asked:  # somebody is slow to read them
            return STACK_RETRY_PAUSE * 1000
        deadlines = [worker.deadline for worker in self._workers.values() if worker.deadline is not None]
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1

    def _end_late_handshakes(self) -> None:
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.deadline is not None and now > worker.deadline:
                self._refuse(worker, f"no handshake within {HANDSHAKE_TIMEOUT:g} s")

    def _refuse(self, worker: _Forked, reason: str) -> None:
        """End a worker whose client has not proved anything."""
        self._context.log_refusal(worker.peer, reason, "worker")
        worker.deadline = None
        worker.process.kill(reason)
