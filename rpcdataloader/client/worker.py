"""A worker as its client sees it: one connection, opened while its node has room.

What it has in common with the connection of its session stands first: settings, the welcome, references in requests,
replies, and log records.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rpcdataloader.client.background import Alarm, Printer
from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.client.discovery import Resolver
from rpcdataloader.client.modules import SharedAdditions
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    LocalProtocolError,
    RPCError,
    RPCTimeoutError,
)
from rpcdataloader.host.locks import Condition
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import Channel, local_identity, open_channel
from rpcdataloader.wire.credentials import Credentials, client_credentials
from rpcdataloader.wire.definitions import Have
from rpcdataloader.wire.exceptions import loads_exception
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.handshake import UnavailableError, UnknownSessionError, refusal_in
from rpcdataloader.wire.messages import Busy, Call, Exited, Goaway, Log, Reference, Welcome
from rpcdataloader.wire.picklers import Frozen, PersistentId
from rpcdataloader.wire.pickling import Encoded, dumps_named, result_of
from rpcdataloader.wire.register import LOOK_TIMEOUT
from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.tls import TlsFiles
from rpcdataloader.wire.transport import Deadline

if TYPE_CHECKING:
    from rpcdataloader.client.session import RemoteSession

# First and longest back-off in seconds before a node is asked again that cannot serve a connection now.
FIRST_PAUSE = 0.05
MAX_PAUSE = 1.0

logger = logging.getLogger("rpcdataloader.client")
worker_logger = logging.getLogger("rpcdataloader.worker")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of all connections of this client."""

    connect_timeout: float  # seconds to wait for a node server that is starting, or has no room
    rank: int | None  # rank of a distributed trainer, for the server's log
    allocator: Allocator
    alarm: Alarm
    tls: TlsFiles | None = None  # files for TLS of TCP connections; None without TLS
    waits_for_servers: bool = True  # True if a server that refuses connections may be about to start
    additions: SharedAdditions = field(default_factory=SharedAdditions)
    printer: Printer = field(default_factory=Printer)
    proven: dict[Address, Credentials] = field(default_factory=dict)  # those of the last handshake with each server
    hosts: dict[Address, str] = field(default_factory=dict)  # the IP addresses of the same
    resolvers: dict[Address, Resolver] = field(default_factory=dict)
    seldom: Seldom = field(default_factory=Seldom)  # for warnings of waits
    # Guards what sessions have been told; notified when a session is ready or lost, or its worker ends.
    changed: Condition = field(default_factory=Condition)

    def open(
        self, address: Address, make_ticket: Callable[[], bytes], deadline: Deadline, **options: Any
    ) -> tuple[Channel, Welcome]:
        """Connect, and read the welcome; takes the arguments of :func:`~rpcdataloader.wire.channel.open_channel`.

        The secret that the server has accepted before comes first: the folder of its file may be away, or hang.
        """
        proven = self.proven.get(address)
        credentials = proven or client_credentials(address)
        identity = local_identity("client", self.rank)
        tls = None if address.is_unix else self.tls  # a Unix socket cannot be listened in on
        try:
            channel = open_channel(address, credentials, identity, make_ticket(), deadline, tls=tls, **options)
        except AuthenticationError:
            if proven is None or (credentials := client_credentials(address)) == proven:
                raise
            channel = open_channel(address, credentials, identity, make_ticket(), deadline, tls=tls, **options)
        welcome = read_welcome(channel, deadline)
        self.proven[address] = credentials
        return channel, welcome

    def find_host(self, address: Address) -> str:
        """The IP address of the last session there, while no resolver tells it anew; otherwise empty."""
        host = self.hosts.get(address, "")
        if host in ("", address.host):  # none is known, or needed
            return host
        resolver = self.resolvers.setdefault(address, Resolver(address))
        resolver.look(LOOK_TIMEOUT)
        return host if resolver.problems else ""


class BusyError(UnavailableError):
    """The server answered BUSY: it has no room for another worker now."""


class FailedStartError(Exception):
    """The session could not be made of what it was born with."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def read_welcome(channel: Channel, deadline: Deadline) -> Welcome:
    """Read the server's first message; closes the connection unless a welcome comes in time."""
    try:
        channel.transport.limit(deadline)
        message = channel.recv()
        if message is None:
            raise ConnectionLostError(f"{channel.name} closed the connection instead of sending WELCOME")
        if message.type == MessageType.BUSY:
            is_busy = f"{channel.name} is busy"
            raise BusyError(f"{is_busy}: {Busy.decode(message.payload).reason}", is_busy)
        if message.type == MessageType.REFUSED:
            raise refusal_in(message, "session")
        if message.type == MessageType.ERROR:
            raise FailedStartError(loads_exception(message.payload))
        welcome: Welcome = Welcome.decode(message.payload)
        channel.transport.limit(Deadline(None))
        return welcome
    except BaseException as exc:
        channel.transport.close()
        if isinstance(exc, RPCTimeoutError):
            raise ConnectError(f"{channel.name} accepted the connection, but sent no WELCOME in time") from exc
        raise


class RRef:
    """Handle of an object that lives in a worker.

    Anywhere inside the arguments of a call to the same worker it becomes the object itself. The worker releases the
    object when its last RRef is collected. Copies made by :mod:`copy` are the same RRef.

    Attributes:
        handle: Number of the object on its worker.
        owner: The object's worker.
    """

    __slots__ = ("__weakref__", "handle", "owner")

    def __init__(self, owner: RemoteWorker, handle: int, release: Callable[[int], None]) -> None:
        self.owner = owner
        self.handle = handle
        # A finalizer may run in any thread, inside any lock, so release only enqueues. At exit, the connection's end
        # releases everything.
        weakref.finalize(self, release, handle).atexit = False

    def __repr__(self) -> str:
        return f"RRef({self.handle} in {self.owner.name})"

    def __copy__(self) -> RRef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RRef:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise LocalProtocolError(f"{self!r} has a meaning only in this process and in calls to its own worker")


class DatasetRef:
    """Stands for a dataset in a request to a session or worker that has it; the key is the same on every node.

    Also for what else a session of this machine is born with.
    """

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise LocalProtocolError("a dataset reference has a meaning only in calls to a node that has the dataset")


def reference_of(value: Any) -> Reference | None:
    """The persistent id of a dataset; None for other objects, which are pickled."""
    return ("dataset", value.key, ()) if isinstance(value, DatasetRef) else None


def freeze(
    parts: Mapping[str, Any],
    *,
    persistent_id: PersistentId | None = None,
    have: Have | None = None,
    names: Set[str] = frozenset(),
    with_patches: bool = False,
    with_told: bool = False,
) -> Frozen:
    """Pickle ``parts`` as they are now, for messages that are sent later; raises as :func:`dumps_named`."""
    options: dict[str, Any] = {"have": have, "names": names, "with_patches": with_patches, "with_told": with_told}
    encoded = dumps_named(parts, parts, persistent_id=persistent_id, in_band=True, **options)
    return Frozen(encoded.payload, encoded.modules, encoded.definitions)


class PendingReply(concurrent.futures.Future["Message | RPCError"]):
    """A request's answer, for a thread that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # in place of its own, which Ctrl-C may leave locked

    def complete(self, reply: Message | RPCError) -> None:
        """Take the first reply; the ``complete`` of a ``Request``."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_result(reply)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result; raises the exception of a request that failed, or has no reply in time."""
        with self._condition:
            # Not by the error of `result`: a signal handler of the script may raise a TimeoutError, too.
            if not self._condition.wait_for(self.done, timeout):
                raise RPCTimeoutError(f"no answer within {timeout:g} s")
        return result_of(self.result())

    def stack(self) -> str:
        """Wait for a stack; returns the reason if none comes."""
        try:
            return str(self.wait())
        except RPCError as exc:
            return f"no stack: {exc}"


def log_from_server(name: str, message: Message, printer: Printer) -> None:
    """Pass a worker's warning or log record on to this process's logging, and a line of its output to the printer."""
    log: Log = Log.decode(message.payload)
    if log.printed_by is not None:
        printer.put(f"{name} {log.printed_by}".rstrip(), log.text)
        return
    worker_logger.log(log.level, "%s: %s: %s", name, log.logger, log.text)


class WorkerOwner:
    """A worker's owner; the worker's receiver thread calls every method. Methods do nothing here.

    Attributes:
        sends_now: True if its callers may send small requests themselves: Ctrl-C in the middle ends the worker.
        purpose: What the worker is for, for a message: a dataset's name.
    """

    sends_now = False
    purpose = "calls"

    def worker_ready(self, worker: RemoteWorker) -> None:
        """The worker takes requests; earlier ones have waited for this moment."""

    def worker_draining(self, worker: RemoteWorker) -> None:
        """The worker answers the requests it has received, takes no more, and then ends."""

    def worker_lost(self, worker: RemoteWorker, error: RPCError) -> None:
        """The worker has ended or never started; its requests have failed with ``error``."""


class RemoteWorker:
    """A worker of a session: one connection.

    Attributes:
        name: Name in messages, such as ``worker 3 (pid 123) on node07:6543``.
        machine: Name that its machine gives itself; empty before it is ready.
        purpose: See :class:`WorkerOwner`.
        refusal: Why its node had no room for it, without details that change; empty if it had.
        draining: True if it takes no further requests, and ends.
        retired: True if it ends because it has done its share of work; its session goes on.
    """

    def __init__(
        self, session: RemoteSession, owner: WorkerOwner, keep_waiting: Callable[[], bool], settings: ClientSettings
    ) -> None:
        self.session = session
        self.name = f"worker on {session.name}"
        self.machine = ""
        self.pid = 0
        self.number = 0
        self.refusal = ""
        self.retired = False
        self.exited: Exited | None = None
        self.draining = False
        self._owner = owner
        self.purpose = owner.purpose
        self._keep_waiting = keep_waiting
        self._settings = settings
        self._wait = Deadline(None)  # for the present wait, to connect or for room
        known = session.connection.inherited()
        self.connection = Connection(session.name, self, known, sends_now=owner.sends_now)

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests, or may still become ready."""
        return not self.draining and not self.connection.has_ended

    def call(
        self,
        call: Call,
        complete: Callable[[Message | RPCError], None],
        allocator: Allocator | None = None,
        names: Set[str] = frozenset(),
    ) -> int:
        """Send a request; returns its number on this connection.

        Args:
            names: Names of the script that it needs besides those that it mentions.

        Raises:
            SerializationError: A part of the call cannot be pickled.
            LocalProtocolError: The call refers to an object of another worker.
            ConnectionLostError: The worker has ended, or the one that held an object of the call.
        """
        parts = {"func": call.func, "args": call.args, "kwargs": call.kwargs}
        encoded = dumps_named(tuple(call), parts, persistent_id=self._reference_of, have=self.session.has, names=names)
        return self.submit(encoded, complete, allocator)

    def submit(
        self, encoded: Encoded, complete: Callable[[Message | RPCError], None], allocator: Allocator | None = None
    ) -> int:
        """Send a CALL that is already pickled; returns its number on this connection."""
        request = Request(complete, allocator or self._settings.allocator)
        return self.connection.submit(MessageType.CALL, encoded, request)

    def _reference_of(self, value: Any) -> Reference | None:
        if isinstance(value, RRef):
            if not value.owner.is_usable:
                raise ConnectionLostError(f"the object behind {value!r} was lost with its worker")
            if value.owner is not self:
                raise LocalProtocolError(
                    f"this object lives in {value.owner.name}, and cannot be used by {self.name}: "
                    "run the call where the object is"
                )
            return ("handle", value.handle, ())
        return reference_of(value)

    def close(self, error: RPCError | None = None) -> None:
        """End the worker; its requests fail with ``error``, if one is given."""
        if not self.number and not self.connection.has_ended:  # one that was refused has no place
            self.session.left_early()
        self.connection.close(error)
        self._wait.cancel()

    # --- its connection (receiver thread)

    def open(self) -> Channel:
        self.session.wait()
        room: Deadline | None = None
        pause = FIRST_PAUSE
        while True:
            num_exited = self.session.num_exited  # before the node is asked, which hears of an end first
            limit = self._wait = Deadline(self._settings.connect_timeout)
            if self.connection.has_ended:
                limit.cancel()
            try:
                address, ticket = self.session.address, self.session.make_ticket
                channel, answer = self._settings.open(address, ticket, limit, find_host=lambda: self.session.host)
            except UnavailableError as exc:
                is_wanted = not self.connection.has_ended
                is_coming = is_wanted and self.session.has_room_soon(num_exited)
                self._wait = room = room or Deadline(self._settings.connect_timeout)
                reason = f"{exc}; {self.session.held()}" if isinstance(exc, BusyError) else str(exc)
                if not (is_wanted and (is_coming or self._keep_waiting()) and self._wait.pause(pause)):
                    self.refusal = exc.cause
                    raise UnavailableError(reason) from None
                if not is_coming:
                    self._tell(reason, exc.cause)
                pause = min(2 * pause, MAX_PAUSE)
            except UnknownSessionError as exc:
                # Of a session that has ended while the network was cut: the control connection does not know that yet.
                lost = ConnectionLostError(str(exc))
                self.session.connection.close(lost)
                raise lost from None
            except ConnectError:
                # The session answers when its build ends. If it is idle, its node is unreachable.
                if limit.remaining() or not self.session.is_busy or self.connection.has_ended:
                    raise
            else:
                self._admitted(answer)
                return channel

    def _tell(self, reason: str, cause: str) -> None:
        if self._settings.seldom.is_due(cause):
            logger.warning("waiting for a worker: %s", reason)

    def _admitted(self, answer: Welcome) -> None:
        self.number, self.pid, self.machine = answer.worker, answer.pid, answer.node
        self.name = f"worker {answer.worker} (pid {answer.pid}) on {self.session.name}"
        self.connection.rename(f"{self.session.name}/{answer.worker}")
        self.session.admitted(self)

    def lacks_thread(self, reason: str) -> None:
        reason = f"{self.session.name}: {reason}"
        self._tell(reason, reason)

    def ready(self) -> None:
        self._owner.worker_ready(self)

    def received(self, message: Message) -> None:
        if message.type == MessageType.GOAWAY:
            self.draining = True
            goaway: Goaway = Goaway.decode(message.payload)
            self.retired = goaway.retired
            reason = "it has retired (--max-tasks-per-worker)" if goaway.retired else "its node server ends"
            error = ConnectionLostError(f"{self.name} has not begun this request: {reason}")
            self.connection.fail_above(goaway.last_request, error)
            self._owner.worker_draining(self)
        elif message.type == MessageType.LOG:
            log_from_server(self.name, message, self._settings.printer)

    def explain(self, error: RPCError) -> RPCError:
        if not isinstance(error, ConnectionLostError) or not self.number:
            return error
        exited = self.exited = self.session.fate(self.number)
        if exited is not None:
            return ConnectionLostError(f"{self.name} {exited.reason}")
        # Chance decides which connection of a lost node breaks first; the message is the same.
        return ConnectionLostError(str(self.session.connection.error or f"{self.name} is lost: {error}"))

    def lost(self, error: RPCError) -> None:
        # First of all: until the session has forgotten this worker, its thread is joined at the end.
        self._owner.worker_lost(self, error)
        self.session.workers.discard(self)
        # Worker and connection refer to each other. The owner, and its objects, must not wait for the collector.
        del self._owner, self._keep_waiting
