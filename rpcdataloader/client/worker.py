"""A worker as its client sees it: one connection, opened while its node has room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.client.exchange import BusyError, ClientSettings, log_from_server, read_welcome, reference_of
from rpcdataloader.client.refs import RRef
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError, SerializationError
from rpcdataloader.wire.buffers import BlockBytes
from rpcdataloader.wire.channel import Channel, local_identity, open_channel
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.messages import Call, Exited, Goaway
from rpcdataloader.wire.pickling import dumps
from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.transport import Deadline

if TYPE_CHECKING:
    from rpcdataloader.client.session import RemoteSession

logger = logging.getLogger("rpcdataloader.client")


class WorkerOwner:
    """A worker's owner; the worker's receiver thread calls every method. Methods do nothing here."""

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
        retired: True if it ends because it has done its share of work; its session goes on.
    """

    def __init__(
        self, session: RemoteSession, owner: WorkerOwner, keep_waiting: Callable[[], bool], settings: ClientSettings
    ) -> None:
        self.session = session
        self.name = f"worker on {session.name}"
        self.pid = 0
        self.number = 0
        self.was_refused = False
        self.retired = False
        self.exited: Exited | None = None
        self._draining = False
        self._owner = owner
        self._keep_waiting = keep_waiting
        self._settings = settings
        self._deadline: Deadline | None = None  # for waiting for room, once the node is busy
        self._try = Deadline(settings.connect_timeout)  # for connecting; ended with the session
        self.connection = Connection(session.name, self._open, self, settings.allocator)

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests, or may still become ready."""
        return not self._draining and not self.connection.has_ended

    def call(
        self, call: Call, complete: Callable[[Message | RPCError], None], allocator: Allocator | None = None
    ) -> int:
        """Send a request; returns its number on this connection.

        Raises:
            SerializationError: A part of the call cannot be pickled.
            LocalProtocolError: The call refers to an object of another worker.
            ConnectionLostError: The worker has ended, or the one that held an object of the call.
        """
        try:
            encoded = dumps(call.fields(), persistent_id=self._reference_of)
        except SerializationError:
            # Again, part by part, so that the error names the part as the caller knows it.
            for name in ("func", "args", "kwargs"):
                dumps(getattr(call, name), persistent_id=self._reference_of, name=name)
            raise
        return self.submit(encoded.payload, encoded.buffers, complete, allocator)

    def submit(
        self,
        payload: bytes,
        buffers: Sequence[BlockBytes],
        complete: Callable[[Message | RPCError], None],
        allocator: Allocator | None = None,
        *,
        cancellable: bool = False,
    ) -> int:
        """Send a CALL that is already pickled; returns its number on this connection."""
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

    def retire(self) -> None:
        """Take no further requests: the session has been asked to end it."""
        self._draining = True

    def close(self, error: RPCError | None = None) -> None:
        """End the worker; its requests fail with ``error``, if one is given."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.connection.close(error)
        self._try.cancel()

    # --- its connection (receiver thread)

    def _open(self) -> Channel:
        welcome = self.session.wait()
        identity = local_identity("client", self._settings.rank)
        credentials = self._settings.credentials(self.session.address)
        tls = self._settings.tls_for(self.session.address)
        pause, reported = 0.05, False
        while True:
            limit = self._try = Deadline(self._settings.connect_timeout)
            if self.connection.has_ended:
                limit.cancel()
            try:
                channel = open_channel(
                    self.session.address, credentials, identity, bytes.fromhex(welcome.session), limit, tls=tls
                )
                answer = read_welcome(channel, limit)
            except BusyError as exc:
                deadline = self._deadline = self._deadline or Deadline(self._settings.connect_timeout)
                if self.connection.has_ended or not self._keep_waiting() or not deadline.pause(pause):
                    self.was_refused = True
                    raise ConnectError(f"{self.session.name} is busy: {exc}") from None
                if not reported:
                    reported = True
                    logger.warning("waiting for %s, which is busy: %s", self.session.name, exc)
                pause = min(2 * pause, 1.0)
                continue
            except ConnectError:
                # The session answers when its build ends. If it is idle, its node is unreachable.
                if limit.remaining() or not self.session.is_busy or self.connection.has_ended:
                    raise
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
        if exited is None:
            # Chance decides which connection of a lost node breaks first; the message is the same.
            what = f"{self.name} is lost" if self.session.is_ready else f"{self.session.name} is gone"
            return ConnectionLostError(f"{what}: {error}")
        return ConnectionLostError(f"{self.name} {exited.reason}")

    def lost(self, error: RPCError) -> None:
        # First of all: until the session has forgotten this worker, its thread is joined at the end.
        self._owner.worker_lost(self, error)
        self.session.worker_ended(self)
        # Worker and connection refer to each other. The owner, and its objects, must not wait for the collector.
        del self._owner, self._keep_waiting
