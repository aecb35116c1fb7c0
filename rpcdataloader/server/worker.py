"""What a forked worker does with its connection: authenticate, decode, execute, reply.

Threads: the main thread runs user code, one request after the other; a reader only reads, so that a cancelled
request, a drain and the end of the client are seen during a task; a sender only sends, while the next request is
computed; a watcher waits for word from the session. With ``parallel`` above 1, requests of ``rpc_async`` run in a
pool of threads and may overtake each other.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rpcdataloader.errors import AuthenticationError, RPCError, RPCTimeoutError
from rpcdataloader.server.context import ServerContext
from rpcdataloader.server.datasets import DatasetTable
from rpcdataloader.server.handles import HandleTable
from rpcdataloader.server.link import Link
from rpcdataloader.server.output import tell_client
from rpcdataloader.server.processes import keep_freed_memory, prefer_for_oom
from rpcdataloader.wire.channel import Channel, accept_channel
from rpcdataloader.wire.frames import Flag, Message, MessageType, Preamble
from rpcdataloader.wire.identity import local_identity
from rpcdataloader.wire.messages import Busy, Call, Goaway, Log, Welcome, unpack_handles
from rpcdataloader.wire.pickling import Encoded, dumps_exception, dumps_reply, loads
from rpcdataloader.wire.slabs import PageablePool
from rpcdataloader.wire.transport import Stream

logger = logging.getLogger("rpcdataloader.worker")


def run_worker_process(
    stream: Stream, preamble: Preamble, session: Link, datasets: DatasetTable, number: int, context: ServerContext
) -> None:
    """Serve one worker connection until its client has gone; the session limits the time of the handshake.

    Args:
        preamble: What the gate read from ``stream``.
        session: Link to the session, which asks the node server whether there is room.
        datasets: What the session has built or knows how to build.
        number: Of this worker in its session, from 1.
    """
    prefer_for_oom()
    keep_freed_memory()
    try:
        channel = accept_channel(stream, preamble, context.credentials, local_identity("server"))
    except AuthenticationError as exc:
        logger.warning(
            "refused %s: %s (this server's secret: %s, fingerprint %s)",
            stream.name,
            exc,
            context.credentials.source,
            context.credentials.fingerprint,
        )
        return
    except RPCError as exc:
        logger.info("refused %s: %s", stream.name, exc)
        return
    session.send("authenticated")
    draining = False
    while True:
        received = session.recv()
        if received is None:
            return
        event, _descriptors = received
        draining = draining or event["event"] == "drain"
        if event["event"] == "admitted":
            break
    if draining or event["reason"]:
        reason = "the node server is draining" if draining else event["reason"]
        channel.send(MessageType.BUSY, payload=Busy(reason).encode())
        channel.stream.finish()
        return
    welcome = Welcome(context.node, os.getpid(), preamble.session_id.hex(), context.num_workers, number)
    channel.send(MessageType.WELCOME, payload=welcome.encode())
    Worker(channel, session, datasets, number, context).run()


class Worker:
    """The threads of one worker, and what they share."""

    def __init__(
        self, channel: Channel, session: Link, datasets: DatasetTable, number: int, context: ServerContext
    ) -> None:
        self._channel = channel
        self._session = session
        self._datasets = datasets
        self._context = context
        self._where = f"worker {number} (pid {os.getpid()}) on {context.node}"
        self._handles = HandleTable()
        pool = PageablePool()
        channel.allocate_with(lambda _id, sizes: [pool.allocate(size) for size in sizes])
        channel.stream.read_ahead()
        # Reader to main thread: messages, and None at the end of a drain.
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        # Everybody to sender: arguments of Channel.send, and None for the end.
        self._outbox: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(context.parallel, "rpcdl-call") if context.parallel > 1 else None
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._unanswered: set[int] = set()
        self._cancelled: set[int] = set()
        self._last_request = 0
        self._draining = False

    def run(self) -> None:
        """Serve; returns after a drain. The process ends from another thread when the client goes."""
        tell_client(lambda fields: self._outbox.put((MessageType.LOG, 0, Log(**fields).encode(), (), Flag.OPTIONAL)))
        sender = threading.Thread(target=self._send, name="rpcdl-send", daemon=True)
        reader = threading.Thread(target=self._read, name="rpcdl-recv", daemon=True)
        watcher = threading.Thread(target=self._watch, name="rpcdl-watch", daemon=True)
        for thread in (sender, reader, watcher):
            thread.start()
        while (message := self._inbox.get()) is not None:
            self._serve(message)
            # What the request held must not live on until the next one comes.
            del message
        if self._pool is not None:
            self._pool.shutdown()
        self._outbox.put(None)
        sender.join()
        # Closing with unread input would reset the connection and lose what the client has not read yet.
        self._channel.stream.finish()
        reader.join()

    # --- threads

    def _read(self) -> None:
        try:
            while (message := self._channel.recv()) is not None:
                self._receive(message)
                del message
        except RPCError as exc:
            logger.warning("%s: %s", self._where, exc)
        with self._lock:
            draining = self._draining
        if not draining or self._unanswered:
            # The client is gone, and with it everybody who could want what the main thread computes.
            os._exit(0)

    def _receive(self, message: Message) -> None:
        if message.type == MessageType.CALL:
            with self._lock:
                if self._draining:
                    return
                self._last_request = message.request_id
                self._unanswered.add(message.request_id)
            self._inbox.put(message)
        elif message.type == MessageType.RELEASE:
            # In the order of the requests, and in the main thread, where destructors expect to run.
            self._inbox.put(message)
        elif message.type == MessageType.CANCEL:
            with self._lock:
                if message.request_id in self._unanswered:
                    self._cancelled.add(message.request_id)

    def _send(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._channel.send(*item)
                del item
        except RPCError:
            # Gone while we wrote: the reader sees the same.
            os._exit(0)
        except BaseException:
            logger.exception("%s: the sender failed", self._where)
            os._exit(1)

    def _watch(self) -> None:
        while (received := self._session.recv()) is not None:
            event, _descriptors = received
            if event["event"] == "drain":
                with self._lock:
                    self._draining = True
                    goaway = Goaway(self._last_request)
                self._outbox.put((MessageType.GOAWAY, 0, goaway.encode()))
                self._inbox.put(None)
        os._exit(0)

    # --- requests

    def _serve(self, message: Message) -> None:
        if message.type == MessageType.RELEASE:
            self._handles.release(unpack_handles(message.payload))
            return
        request_id = message.request_id
        try:
            call = Call.decode(
                loads(message.payload, message.blocks, persistent_load=self._resolve, adopt_main=True)  # type: ignore[arg-type]  # blocks are the pool's
            )
        except BaseException as exc:
            self._reply_error(request_id, exc)
            return
        timer = self._limit(request_id) if call.limited and self._context.timeout > 0 else None
        if self._pool is None or call.ordered:
            self._execute(request_id, call, timer)
        else:
            self._pool.submit(self._execute, request_id, call, timer)

    def _execute(self, request_id: int, call: Call, timer: threading.Timer | None) -> None:
        handle = None
        try:
            self._check_wanted(request_id)
            result = call.func(*call.args, **call.kwargs)
            self._check_wanted(request_id)
            if call.keep:
                result = handle = self._handles.add(result)
            encoded = dumps_reply(result)
        except BaseException as exc:
            # Also SystemExit and KeyboardInterrupt: a request that gets no reply is a client that waits for ever.
            self._reply_error(request_id, exc)
        else:
            if not self._reply(request_id, MessageType.REPLY, encoded) and handle is not None:
                self._handles.release([handle])
        finally:
            if timer is not None:
                timer.cancel()

    def _check_wanted(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._cancelled:
                raise RPCTimeoutError("the caller has given up")

    def _resolve(self, reference: tuple[str, int]) -> Any:
        kind, number = reference
        return self._handles.get(number) if kind == "handle" else self._datasets.get(number)

    def _limit(self, request_id: int) -> threading.Timer:
        seconds = self._context.timeout
        error = RPCTimeoutError(f"the call took longer than {seconds:g} s, the limit of the node server (--timeout)")
        timer = threading.Timer(seconds, self._reply_error, (request_id, error))
        timer.daemon = True
        timer.start()
        return timer

    def _reply_error(self, request_id: int, error: BaseException) -> None:
        self._reply(request_id, MessageType.ERROR, Encoded(dumps_exception(error, self._where), []))

    def _reply(self, request_id: int, type: MessageType, encoded: Encoded) -> bool:
        """Answer a request, once; returns False if it was answered before, by the time limit."""
        with self._lock:
            if request_id not in self._unanswered:
                return False
            self._unanswered.discard(request_id)
            self._cancelled.discard(request_id)
        if not self._outbox.empty() or not self._send_now(type, request_id, encoded):
            self._outbox.put((type, request_id, encoded.payload, encoded.buffers))
        return True

    def _send_now(self, type: MessageType, request_id: int, encoded: Encoded) -> bool:
        try:
            return self._channel.send_now(type, request_id, encoded.payload, encoded.buffers)
        except RPCError:
            # The reader sees the same and ends this process.
            return True
