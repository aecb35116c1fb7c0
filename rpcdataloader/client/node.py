"""One node server as a client sees it: its session there, and the workers of that session.

A session is one control connection; when that is lost, the session and all its workers are. The next use of the node
starts another one, which knows nothing of the first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.client.refs import DatasetRef, RRef
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError, SerializationError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import Channel, open_channel
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.environment import collect, install
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.identity import local_identity
from rpcdataloader.wire.messages import Busy, Call, Exited, Goaway, Log, Welcome
from rpcdataloader.wire.pickling import dumps, loads, loads_exception
from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")
worker_logger = logging.getLogger("rpcdataloader.worker")

_NO_SESSION = bytes(16)

# How long a lost worker connection waits for its session to say how the worker ended. The session is a neighbour of
# the worker and hears of it from the kernel; this is only reached when the session is busy building.
FATE_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What all connections of this client share.

    Attributes:
        credentials: Finds the secret for an address.
        connect_timeout: Seconds to wait for a node server that is not there yet, or has no room.
        rank: Of a distributed trainer, for the server's log.
        allocator: Pageable receive buffers.
    """

    credentials: Callable[[Address], Credentials]
    connect_timeout: float
    rank: int | None
    allocator: Allocator


class WorkerOwner(Protocol):
    """Who asked for a worker; called from its receiver thread."""

    def worker_ready(self, worker: Worker) -> None:
        """The worker takes requests (earlier ones have waited for this moment)."""

    def worker_draining(self, worker: Worker, last_request: int) -> None:
        """The worker answers no request above ``last_request`` and ends then."""

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        """The worker has ended or never came to be; its requests have failed with ``error``."""


def result_of(message: Message | RPCError, allocator: Allocator) -> Any:
    """The result that a reply carries.

    Raises:
        Exception: What the request raised, or why there is no reply.
    """
    if not isinstance(message, Message):
        raise message
    if message.type == MessageType.ERROR:
        raise loads_exception(message.payload)
    return loads(message.payload, message.blocks, allocator=allocator)


class Session:
    """This client's session on one node: the control connection.

    Attributes:
        name: Address of the node server.
    """

    def __init__(self, address: Address, settings: ClientSettings) -> None:
        self.address = address
        self.name = str(address)
        self.welcome: Welcome | None = None
        self._welcome: Welcome | None = None  # until the session is ready
        self._settings = settings
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._exited: dict[int, Exited] = {}
        self._lost: RPCError | None = None
        self.draining = False
        self._deadline = Deadline(settings.connect_timeout)
        self._connection = Connection(self.name, self._open, self, settings.allocator)
        self._workers: set[Worker] = set()

    def start(self) -> None:
        """Begin to connect."""
        self._connection.start()

    @property
    def is_usable(self) -> bool:
        """Whether it is there, or may still come."""
        return not self.draining and not self._connection.has_ended

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it."""
        return self._lost is not None and not self._workers

    @property
    def num_workers(self) -> int:
        """What the node server advertises; call :meth:`wait` before."""
        assert self.welcome is not None
        return self.welcome.num_workers

    def wait(self) -> Welcome:
        """Wait until the session is there.

        Raises:
            RPCError: It never came to be, or has ended.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.welcome is not None or self._lost is not None)
            if self._lost is not None:
                raise self._lost
            assert self.welcome is not None
            return self.welcome

    def submit(
        self, type: MessageType, payload: bytes, buffers: list[memoryview], complete: Callable[[Any], None]
    ) -> None:
        """Send a request to the session itself.

        Raises:
            ConnectionLostError: The session has ended.
        """
        self._connection.submit(type, payload, buffers, Request(complete, self._settings.allocator))

    def call(self, func: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Run ``func(*args)`` in the session; returns a function that waits for the result."""
        encoded = dumps(Call(func, args, {}).fields(), persistent_id=reference_of)
        return self._wait_for(MessageType.CALL, encoded.payload, encoded.buffers)

    def build(self, payload: bytes, buffers: list[memoryview], finished: Callable[[], None]) -> Callable[[], Any]:
        """Send a BUILD request; returns a function that waits for the result.

        Args:
            finished: Called from the receiver thread when there is one.
        """
        return self._wait_for(MessageType.BUILD, payload, buffers, finished)

    def release(self, key: int) -> None:
        """Let a dataset go; never blocks."""
        self._connection.release(key)

    def _wait_for(
        self,
        type: MessageType,
        payload: bytes,
        buffers: list[memoryview],
        finished: Callable[[], None] = lambda: None,
    ) -> Callable[[], Any]:
        condition = threading.Condition()
        replies: list[Message | RPCError] = []

        def complete(reply: Message | RPCError) -> None:
            finished()
            with condition:
                replies.append(reply)
                condition.notify()

        def wait() -> Any:
            with condition:
                condition.wait_for(lambda: replies)
            return result_of(replies[0], self._settings.allocator)

        self.submit(type, payload, buffers, complete)
        return wait

    def fate(self, worker: int) -> Exited | None:
        """How a worker of this session ended; waits a little for the news. None if they do not come."""
        with self._condition:
            self._condition.wait_for(lambda: worker in self._exited or self._lost is not None, FATE_TIMEOUT)
            return self._exited.get(worker)

    def open_worker(self, owner: WorkerOwner, keep_waiting: Callable[[], bool] = lambda: True) -> Worker:
        """Ask for a worker; it is there, or not, when ``owner`` is told.

        Args:
            keep_waiting: Asked while the node is busy; False gives up.
        """
        worker = Worker(self, owner, keep_waiting, self._settings)
        self._workers.add(worker)
        worker.connection.start()
        return worker

    def worker_ended(self, worker: Worker) -> None:
        """Forget a worker."""
        self._workers.discard(worker)

    def close(self) -> None:
        """End the session and its workers."""
        self._deadline.cancel()
        for worker in list(self._workers):
            worker.close()
        self._connection.close()

    def connections(self) -> list[Connection]:
        """Every connection of the session."""
        return [self._connection, *(worker.connection for worker in list(self._workers))]

    # --- the control connection (receiver thread)

    def _open(self) -> Channel:
        channel = open_channel(
            self.address,
            self._settings.credentials(self.address),
            local_identity("client", self._settings.rank),
            _NO_SESSION,
            self._deadline,
            retry=True,
        )
        self._welcome = _read_welcome(channel)
        if channel.differences:
            logger.warning("%s differs from this client: %s", self.name, "; ".join(channel.differences))
        return channel

    def ready(self) -> None:
        encoded = dumps(Call(install, (collect(),), {}).fields())
        # First of all, so that the modules of the training script are found by everything that follows.
        self._connection.submit(
            MessageType.CALL, encoded.payload, encoded.buffers, Request(self._installed, self._settings.allocator)
        )
        with self._condition:
            self.welcome = self._welcome
            self._condition.notify_all()

    def _installed(self, reply: Message | RPCError) -> None:
        try:
            result_of(reply, self._settings.allocator)
        except Exception as exc:
            logger.warning("%s could not take over the import path: %s", self.name, exc)

    def received(self, message: Message) -> None:
        if message.type == MessageType.EXITED:
            exited = Exited.decode(message.payload)
            with self._condition:
                self._exited[exited.worker] = exited
                self._condition.notify_all()
        elif message.type == MessageType.GOAWAY:
            self.draining = True
        elif message.type == MessageType.LOG:
            log_from_server(self.name, message)

    def explain(self, error: RPCError) -> RPCError:
        return error

    def lost(self, error: RPCError) -> None:
        with self._condition:
            self._lost = error
            self._condition.notify_all()
        # The node has ended these already, or will when it notices; a host that vanished never tells us.
        never_came = self.welcome is None
        for worker in list(self._workers):
            worker.connection.close(error if never_came else ConnectionLostError(f"{self.name} is gone: {error}"))


class Worker:
    """A worker of a session: one connection.

    Attributes:
        name: For messages, such as ``worker 3 (pid 123) on node07:6543``.
    """

    def __init__(
        self, session: Session, owner: WorkerOwner, keep_waiting: Callable[[], bool], settings: ClientSettings
    ) -> None:
        self.session = session
        self.name = f"worker on {session.name}"
        self.pid = 0
        self.number = 0
        self._draining = False
        self._owner = owner
        self._keep_waiting = keep_waiting
        self._settings = settings
        self._deadline: Deadline | None = None  # of waiting for room, once the node is busy
        self.connection = Connection(session.name, self._open, self, settings.allocator)

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests, or may still come."""
        return not self._draining and not self.connection.has_ended

    def call(
        self, call: Call, complete: Callable[[Message | RPCError], None], allocator: Allocator | None = None
    ) -> int:
        """Send a request; returns its number on this connection.

        Raises:
            SerializationError: Something in it cannot be pickled.
            LocalProtocolError: It refers to an object of another worker.
            ConnectionLostError: The worker has ended, or the one that held an object of the request.
        """
        try:
            encoded = dumps(call.fields(), persistent_id=self._reference_of)
        except SerializationError:
            # Again, part by part, for an error that calls each by the name that the caller knows.
            for name in ("func", "args", "kwargs"):
                dumps(getattr(call, name), persistent_id=self._reference_of, name=name)
            raise
        return self.submit(encoded.payload, encoded.buffers, complete, allocator)

    def submit(
        self,
        payload: bytes,
        buffers: list[memoryview],
        complete: Callable[[Message | RPCError], None],
        allocator: Allocator | None = None,
        *,
        cancellable: bool = False,
    ) -> int:
        """Send a CALL that is pickled already; returns its number on this connection."""
        request = Request(complete, allocator or self._settings.allocator, cancellable)
        return self.connection.submit(MessageType.CALL, payload, buffers, request)

    def _reference_of(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, RRef):
            if not value.owner.is_usable:
                raise ConnectionLostError(f"the object behind {value!r} was lost with its worker")
            if value.owner is not self:
                raise LocalProtocolError(
                    f"this object lives in {value.owner.name}, and cannot be used by {self.name}: "
                    "run the call where the object is"
                )
            return ("handle", value.handle)
        return reference_of(value)

    def close(self) -> None:
        """End the worker."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.connection.close()

    # --- its connection (receiver thread)

    def _open(self) -> Channel:
        welcome = self.session.wait()
        identity = local_identity("client", self._settings.rank)
        credentials = self._settings.credentials(self.session.address)
        pause, reported = 0.05, False
        while True:
            # Without a limit: the session answers when it has built what it builds, and its end is the end of this.
            channel = open_channel(
                self.session.address, credentials, identity, bytes.fromhex(welcome.session), Deadline(None)
            )
            try:
                answer = _read_welcome(channel)
            except _BusyError as exc:
                deadline = self._deadline = self._deadline or Deadline(self._settings.connect_timeout)
                if self.connection.has_ended or not self._keep_waiting() or not deadline.pause(pause):
                    raise ConnectError(f"{self.session.name} is busy: {exc}") from None
                if not reported:
                    reported = True
                    logger.warning("waiting for %s, which is busy: %s", self.session.name, exc)
                pause = min(2 * pause, 1.0)
                continue
            self.number, self.pid = answer.worker, answer.pid
            self.name = f"worker {answer.worker} (pid {answer.pid}) on {self.session.name}"
            self.connection.rename(f"{self.session.name}/{answer.worker}")
            return channel

    def ready(self) -> None:
        self._owner.worker_ready(self)

    def received(self, message: Message) -> None:
        if message.type == MessageType.GOAWAY:
            self._draining = True
            self._owner.worker_draining(self, Goaway.decode(message.payload).last_request)
        elif message.type == MessageType.LOG:
            log_from_server(self.name, message)

    def explain(self, error: RPCError) -> RPCError:
        if not isinstance(error, ConnectionLostError) or not self.number:
            return error
        exited = self.session.fate(self.number)
        if exited is None:
            return ConnectionLostError(f"{self.name} is lost: {error}")
        return ConnectionLostError(f"{self.name} {exited.reason}")

    def lost(self, error: RPCError) -> None:
        self.session.worker_ended(self)
        self._owner.worker_lost(self, error)
        # Worker and connection refer to each other. The owner, and what it holds, must not wait for the collector.
        del self._owner, self._keep_waiting


class Node:
    """A node server at an address, with the session that this client has there now.

    Thread-safe.
    """

    def __init__(self, address: Address, settings: ClientSettings) -> None:
        self.address = address
        self._settings = settings
        self._lock = threading.Lock()
        # Guarded by the lock. The last session is the current one; those before it still drain.
        self._sessions: list[Session] = []
        self._rpc_worker: Worker | None = None

    def session(self) -> Session:
        """The current session, begun now if there is none; it may still be connecting."""
        with self._lock:
            return self._current_session()

    def _current_session(self) -> Session:
        if not self._sessions or not self._sessions[-1].is_usable:
            self._sessions = [session for session in self._sessions if not session.is_over]
            self._sessions.append(Session(self.address, self._settings))
            self._sessions[-1].start()
        return self._sessions[-1]

    def rpc_worker(self) -> Worker:
        """The worker that serves ``rpc_async`` calls of this client, begun now if there is none."""
        with self._lock:
            if self._rpc_worker is None or not self._rpc_worker.is_usable:
                self._rpc_worker = self._current_session().open_worker(_RpcOwner())
            return self._rpc_worker

    def close(self) -> None:
        """End the session, and those that still drain."""
        for session in self._sessions:
            session.close()

    def connections(self) -> list[Connection]:
        """Every connection to this node."""
        return [connection for session in self._sessions for connection in session.connections()]


class _RpcOwner:
    """Nothing to do: the requests themselves are told when their worker is lost."""

    def worker_ready(self, worker: Worker) -> None:
        pass

    def worker_draining(self, worker: Worker, _last_request: int) -> None:
        # It answers what it has, and ends when we do; objects that it holds are lost then.
        if worker.connection.num_pending == 0:
            worker.close()

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        pass


class _BusyError(Exception):
    """The server answered BUSY."""


def _read_welcome(channel: Channel) -> Welcome:
    """Read the first message of the server; closes the connection if that is no welcome."""
    try:
        message = channel.recv()
        if message is None:
            raise ConnectionLostError(f"{channel.name} closed the connection instead of welcoming us")
        if message.type == MessageType.BUSY:
            raise _BusyError(Busy.decode(message.payload).reason)
        welcome: Welcome = Welcome.decode(message.payload)
    except BaseException:
        channel.stream.close()
        raise
    return welcome


def reference_of(value: Any) -> tuple[str, int] | None:
    """The persistent id of a dataset; None for everything that is pickled."""
    return ("dataset", value.key) if isinstance(value, DatasetRef) else None


def log_from_server(name: str, message: Message) -> None:
    """Pass a worker's warning or log record on to this process's logging."""
    log: Log = Log.decode(message.payload)
    worker_logger.log(log.level, "%s: %s: %s", name, log.logger, log.text)
