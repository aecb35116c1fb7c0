"""A forked worker and its connection: authenticate, decode, execute, reply.

Threads: the main thread receives requests, runs them one after the other, and sends small replies itself. A sender
sends large replies while the next request is computed, and is started for the first of them. A watcher notices, in the
middle of a task, a drain or the end of the client or session, and tells the stacks of all threads when asked.

No thread only reads: between two tasks the main thread takes in everything that has arrived. So a cancelled request is
not begun, and a small task costs no change of thread. A call begins once the reply before it is sent, and a client
sends no more than :data:`~rpcdataloader.wire.outbox.WINDOW_BYTES` without answers.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import logging
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RPCError, RPCTimeoutError, SerializationError
from rpcdataloader.fetch.remote import close_loader, load, share_batches
from rpcdataloader.fetch.samples import OTHER_PART, keep_whereabouts
from rpcdataloader.host.parts import follow
from rpcdataloader.server.datasets import DatasetTable
from rpcdataloader.server.events import Drain, GaveUp, Link, Row, Stacks, WantsStacks, WorkerConnection
from rpcdataloader.server.logs import forward_warnings, redirect_output
from rpcdataloader.server.processes import (
    Life,
    ended_after,
    give_back_freed_memory,
    keep_freed_memory,
    name_process,
    prefer_for_oom,
    start_thread,
)
from rpcdataloader.server.requests import Meter
from rpcdataloader.server.settings import ServerContext
from rpcdataloader.server.stacks import stacks
from rpcdataloader.wire import transport as sockets
from rpcdataloader.wire.channel import Channel, Outgoing, accept_channel, local_identity
from rpcdataloader.wire.exceptions import add_state, dumps_exception, summarize
from rpcdataloader.wire.frames import Flag, Message, MessageType
from rpcdataloader.wire.messages import (
    Busy,
    Call,
    Goaway,
    Log,
    Reference,
    Welcome,
    pack_handles,
    unpack_blocks,
    unpack_handles,
)
from rpcdataloader.wire.outbox import Outbox
from rpcdataloader.wire.pickling import Encoded, dumps_reply, loads
from rpcdataloader.wire.shared import Lender
from rpcdataloader.wire.slabs import PageablePool, give_back_free_memory
from rpcdataloader.wire.transport import Transport

logger = logging.getLogger("rpcdataloader.worker")

# Nanoseconds between two looks for new requests and cancellations while requests are at hand: a look is a system call,
# a good part of a task of a hundred microseconds.
LOOK_PERIOD_NS = 1_000_000

# Seconds without a request after which a worker gives back its free memory. It may be that of a loader between epochs.
IDLE_SECONDS = 5.0

# Seconds in which a worker whose client or session has gone ends its task, and lets user code clean up.
END_TIMEOUT = 2.0

# Larger replies are left to the sender. To wake it costs two changes of the interpreter lock's holder, which is more
# than a small reply does. The kernels' buffers have room for that, as a client always reads.
MAX_SENT_NOW_BYTES = 4096


def admit(
    transport: Transport,
    output: Sequence[int],
    node: Link,
    context: ServerContext,
    connection: WorkerConnection,
    row: Row,
) -> Channel | None:
    """Begin to serve a connection as a worker; None if its client gets none. The caller limits the time.

    Args:
        output: The pipe for this process's output, unless the client is refused.
    """
    name_process("rpcdl-worker")
    prefer_for_oom()
    keep_freed_memory()
    try:
        channel = accept_channel(transport, context.credentials, local_identity("server"), context.tls)
        if connection.refusal is not None:
            channel.send(MessageType.BUSY, payload=Busy(connection.refusal).encode())
            channel.transport.finish()
            return None
        redirect_output(*output)
        node.close()
        row.since[0], row.pid[0] = time.monotonic_ns(), os.getpid()
        welcome = Welcome(context.node, os.getpid(), context.num_workers, connection.worker)
        channel.send(MessageType.WELCOME, payload=welcome.encode())
    except ConnectionLostError:
        # The pass was over before its last worker had started.
        return None
    except RPCError as exc:
        node.send(context.refusal(connection.peer, exc))
        # It has had its word in the log, however long it stays.
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        transport.linger()
        return None
    keep_whereabouts(row.batch, row.sample)
    channel.transport.count_in(row.traffic)
    return channel


class Worker:
    """The threads of one worker, and their shared state."""

    def __init__(
        self,
        channel: Channel,
        session: Link,
        datasets: DatasetTable,
        number: int,
        context: ServerContext,
        row: Row,
    ) -> None:
        self._channel = channel
        self._session = session
        self._datasets = datasets
        self._context = context
        self._row = row
        self._where = f"worker {number} (pid {os.getpid()}) on {context.node}"
        # Objects of the client by handle: a counter, not an address, as one object may be held many times.
        self._held: dict[int, Any] = {}
        self._last_handle = 0
        pool = PageablePool()
        channel.allocate_with(lambda _id, sizes: [pool.allocate(size) for size in sizes])
        channel.transport.read_ahead()
        # Of the main thread, as all that follows but the outbox: received requests that are not begun, in order, and
        # the number of calls among them.
        self._inbox: collections.deque[Message] = collections.deque()
        self._num_calls = 0
        self._last_request = self._last_begun = 0  # numbers of the last call received, and begun
        self._cancelled: set[int] = set()  # calls of the inbox that the client has given up
        self._next_look = 0
        self._has_given_back = False  # free memory, since the last request
        self._idle = 0  # measured wait for the first request of the inbox, in nanoseconds
        self._next_idle = 0
        self._meter = Meter()
        self._life = Life.SERVING
        self._num_tasks = 0  # answered
        # A batch is sent while the next one is computed: a loader limits its own requests. Of remote calls, a script
        # can make thousands at once, with results of any size, so each result is sent before the next call.
        self._outbox = Outbox("rpcdl-send", self._sending_failed, channel)
        # Written by the watcher on a drain, and when it notices that client or session have gone.
        self._is_over = False
        self._drain_read, self._drain_write = os.pipe()
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._drain_read, select.POLLIN)
        self._broken: RPCError | None = None  # error of a look
        self._lender: Lender | None = None
        if channel.transport.is_local:
            self._lender = Lender(self._announce, self._look)
            share_batches(self._lender)

    def run(self) -> None:
        """Serve until a drain or a retirement, or until the client goes."""
        if (limit := self._context.open_files) is not None:
            _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(ValueError):  # a dataset has set lower ones
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if not self._context.is_local:
            forward_warnings(lambda fields: self._outbox.put(Outgoing(MessageType.LOG, payload=Log(**fields).encode())))
        start_thread("rpcdl-watch", self._watch)
        try:
            while self._life is Life.SERVING or self._inbox:
                self._receive()
                if not self._inbox:
                    continue
                message = self._inbox.popleft()
                if message.type == MessageType.RELEASE:
                    for handle in unpack_handles(message.payload):  # destructors run here
                        self._held.pop(handle, None)
                else:
                    if message.type == MessageType.CALL:
                        self._look()  # the client may have given it up
                    self._call(message)
                    if message.type == MessageType.CALL and not self._outbox.is_idle:
                        # The next one may change what the result refers to, or be cancelled meanwhile.
                        while not self._outbox.join(sockets.CUT_OFF_PERIOD):
                            self._is_unacknowledged()
                    self._num_calls -= 1
                del message  # this frame must not keep it while it waits
            goaway = Goaway(self._last_request, self._life is Life.RETIRING)
            self._outbox.put(Outgoing(MessageType.GOAWAY, payload=goaway.encode()))
            self._outbox.join()
            # Closing with unread input would reset the connection and lose replies that the client has not read yet.
            self._channel.transport.finish()
            while self._channel.recv() is not None:
                pass
        except ConnectionLostError:
            pass  # the client has gone, or its session
        except RPCError as exc:
            logger.warning("%s: %s", self._where, exc)
            # The client gets it on its control connection.
            self._session.send(GaveUp(str(exc)))
        self._leave()

    def _leave(self) -> None:
        """Let user code clean up: its stream, the datasets and objects of this process, and its exit functions."""
        self._inbox.clear()
        steps = self._held.clear, close_loader, self._datasets.drop_own, gc.collect, atexit._run_exitfuncs
        with ended_after(END_TIMEOUT):
            for step in steps:
                try:
                    step()
                except BaseException:
                    logger.warning("%s has raised an exception at its end", self._where, exc_info=True)

    # --- the main thread receives

    def _receive(self) -> None:
        """Receive what has arrived; wait only while there is nothing to do."""
        if self._broken is not None:
            raise self._broken
        transport = self._channel.transport
        now = time.monotonic_ns()
        if self._inbox and now < self._next_look:
            return
        self._next_look = now + LOOK_PERIOD_NS
        if not self._inbox:
            self._row.since[0], self._row.running[0], self._row.unanswered[0] = now, 0, 0
        ready = dict(self._poll.poll(0)) if self._inbox or transport.has_unread else self._wait(now)
        if self._drain_read in ready:
            if self._is_over:
                raise ConnectionLostError("the session has ended")
            self._begin_drain(Life.DRAINING)
        else:
            if ready:
                self._take()
            while transport.has_unread:
                self._take()

    def _wait(self, now: int) -> dict[int, int]:
        """Wait for input; returns the ready descriptors.

        A wait that begins with a look also measures its own length.
        """
        looks = now >= self._next_idle
        ready = dict(self._poll.poll(0)) if looks else {}
        if not ready:
            ready = dict(self._poll.poll(sockets.CUT_OFF_PERIOD * 1000)) or self._wait_long()
            if looks:
                self._idle = time.monotonic_ns() - now
        if looks:
            self._next_idle = now + LOOK_PERIOD_NS
        return ready

    def _wait_long(self) -> dict[int, int]:
        """Wait for input, and look at the connection while the client's host has not acknowledged all replies."""
        while self._is_unacknowledged():
            if ready := dict(self._poll.poll(sockets.CUT_OFF_PERIOD * 1000)):
                return ready
        if not self._has_given_back:
            if ready := dict(self._poll.poll(IDLE_SECONDS * 1000)):
                return ready
            self._give_back()
        return dict(self._poll.poll(None))

    def _is_unacknowledged(self) -> bool:
        """Whether replies are under way.

        Raises:
            RPCTimeoutError: Data no longer gets through.
        """
        transport = self._channel.transport
        if not transport.count_unacknowledged():
            return False
        if transport.is_cut_off():
            raise RPCTimeoutError("its connection no longer carries data")
        return True

    def _give_back(self) -> None:
        """Give back free memory, once until the next request: workers of another loader may need it."""
        self._has_given_back = True
        give_back_free_memory()
        give_back_freed_memory()
        if self._lender is not None:
            self._lender.give_back()

    def _begin_drain(self, life: Life) -> None:
        """Begin to drain: receive what has arrived, since the client is told the last request that gets an answer."""
        self._take_all()
        self._life = life
        self._row.draining[0] = 1
        self._poll.unregister(self._drain_read)

    def _take_all(self) -> None:
        """Receive what has arrived."""
        transport = self._channel.transport
        while transport.has_unread or transport.has_input():
            self._take()

    def _look(self) -> None:
        """Receive what has arrived in the middle of a task: perhaps memory that the client has returned."""
        if threading.current_thread() is threading.main_thread() and self._broken is None:
            try:
                self._take_all()
            except RPCError as error:
                self._broken = error  # of the connection, and not of the task

    def _take(self) -> None:
        message = self._channel.recv()
        if message is None:
            raise ConnectionLostError("the client has gone")
        if message.type in (MessageType.CALL, MessageType.LOAD):
            if self._life is not Life.SERVING:
                # Above the last request of the GOAWAY to come: the client gives it to another worker then. Accepting it
                # would let a busy client keep this worker from ending.
                return
            self._last_request = message.request_id
            self._num_calls += 1
            self._inbox.append(message)
        elif message.type == MessageType.RELEASE:
            # In the order of the requests: destructors run in this thread, too.
            self._inbox.append(message)
        elif message.type == MessageType.CANCEL and self._last_begun < message.request_id <= self._last_request:
            self._cancelled.add(message.request_id)
        elif self._lender is not None and message.type == MessageType.MAPPING:
            for number in unpack_handles(message.payload):
                self._lender.mapped(number, bool(message.flags & Flag.REGISTERED))
        elif self._lender is not None and message.type == MessageType.RETURN:
            self._lender.returned(unpack_blocks(message.payload))

    def _announce(self, mapping: int, descriptor: int) -> None:
        with contextlib.suppress(RPCError):  # the main thread sees the same error
            message = Outgoing(MessageType.MAPPING, payload=pack_handles([mapping]), descriptor=os.dup(descriptor))
            self._outbox.put(message, now=True)

    # --- the sender

    def _sending_failed(self, error: BaseException) -> None:
        if isinstance(error, RPCError):  # the client left while we wrote
            self._broken = error
            self._outbox.drop()
        else:
            logger.error("%s: the sender failed", self._where, exc_info=error)
            os._exit(1)

    # --- requests

    def _call(self, message: Message) -> None:
        """Run a call, and reply."""
        request_id = self._last_begun = message.request_id
        self._has_given_back = False
        idle, self._idle = self._idle, 0
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            self._send_reply(MessageType.ERROR, request_id, self._error(RPCTimeoutError("the caller has given up")))
            return
        is_task = message.type == MessageType.LOAD
        try:
            content = loads(message.payload, message.blocks, persistent_load=self._resolve, adopt_main=True)
            call = Call(load, content, {}) if is_task else Call(*content)
            is_counted = not is_task or len(content) < 4 or content[3] != OTHER_PART
        except BaseException as exc:
            self._reply_error(request_id, exc)
            return
        measured = bool(message.flags) and is_task
        if measured:
            self._meter.begin(idle / 1e9)
        del message, content
        counter = self._row.tasks if is_task else self._row.calls
        self._execute(request_id, call, measured, counter if is_counted else None)
        if is_task and is_counted:
            self._num_tasks += 1
            if self._num_tasks == self._context.settings.max_tasks_per_worker and self._life is Life.SERVING:
                self._begin_drain(Life.RETIRING)

    def _execute(self, request_id: int, call: Call, measured: bool, counter: memoryview | None) -> None:
        # The idle time is noted when nothing more is there, which costs less than after each request.
        row = self._row
        row.since[0], row.running[0], row.unanswered[0] = time.monotonic_ns(), 1, self._num_calls
        try:
            result = call.func(*call.args, **call.kwargs)
            if call.keep:
                self._last_handle += 1
                self._held[self._last_handle] = result
                result = self._last_handle
            if measured:
                self._meter.encodes()
            try:
                encoded = dumps_reply(result)
            except SerializationError as exc:
                if call.func is load:
                    add_state(exc, result[-1])  # the stream is past this batch
                raise
            del result  # so that a batch without other references can be lent as it is
            if self._lender is not None and encoded.buffers:
                self._lender.lend(encoded.buffers)
        except BaseException as exc:
            # Also SystemExit and KeyboardInterrupt: without a reply the client would wait without limit.
            self._reply_error(request_id, exc)
            return
        if measured:
            encoded.payload += self._meter.end()
        # Before the client has the answer, so that it finds it counted.
        if counter is not None:
            counter[0] += 1
        self._send_reply(MessageType.REPLY, request_id, encoded, Flag.MEASURED if measured else 0)

    def _resolve(self, reference: Reference) -> Any:
        kind, number, path = reference
        return follow(self._held[number] if kind == "handle" else self._datasets.get(number), path)

    def _error(self, error: BaseException) -> Encoded:
        return Encoded(dumps_exception(error, self._where), [])

    def _reply_error(self, request_id: int, error: BaseException) -> None:
        row = self._row
        row.errors[0] += 1
        text = " ".join(summarize(error).split())
        row.error, row.failed[0] = text, time.monotonic_ns()
        self._send_reply(MessageType.ERROR, request_id, self._error(error))

    def _send_reply(self, type: MessageType, request_id: int, encoded: Encoded, flags: int = 0) -> None:
        self._row.unanswered[0] = self._num_calls - 1
        payload, buffers = encoded.payload, encoded.buffers
        size_bytes = encoded.size_bytes if buffers else len(payload)
        message = Outgoing(type, request_id, payload, buffers, flags)
        try:
            try:
                self._outbox.put(message, now=size_bytes <= MAX_SENT_NOW_BYTES)
            except RuntimeError:  # the system has no room for a thread
                self._outbox.put(message, now=True)
        except RPCError:
            return  # the next receive sees the same error and ends this process

    # --- the watcher

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._session.fileno(), select.POLLIN)
        # Only the end of the connection, never its data, so this thread sleeps while requests come in.
        poll.register(self._channel.fileno(), select.POLLRDHUP)
        while True:
            for descriptor, _events in poll.poll():
                received = self._session.recv() if descriptor == self._session.fileno() else None
                if received is None:
                    # The main thread may be in the middle of a task, and has this time for that and for its end.
                    self._is_over = True
                    os.write(self._drain_write, b".")
                    time.sleep(END_TIMEOUT)
                    self._session.send(GaveUp("its end took too long"))
                    os._exit(1)
                match received[0]:
                    case Drain():
                        os.write(self._drain_write, b".")
                    case WantsStacks():
                        self._session.send(Stacks(stacks()))
