"""Common parts of control and worker connections: the welcome, references in requests, results, log records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rpcdataloader.client.alarm import Alarm
from rpcdataloader.client.printer import Printer
from rpcdataloader.client.refs import DatasetRef
from rpcdataloader.errors import ConnectError, ConnectionLostError, RPCError, RPCTimeoutError
from rpcdataloader.host.additions import SharedAdditions
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.certificates import TlsCredentials
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.credentials import Credentials
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.messages import Busy, Log, Welcome
from rpcdataloader.wire.pickling import result_of
from rpcdataloader.wire.slabs import Allocator
from rpcdataloader.wire.transport import Deadline

worker_logger = logging.getLogger("rpcdataloader.worker")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of all connections of this client.

    Attributes:
        connect_timeout: Seconds to wait for a node server that is starting, or has no room.
        rank: Rank of a distributed trainer, for the server's log.
        changed: Guards what sessions have been told; notified when a session is ready or lost, or its worker ends.
        waits_for_servers: True if a server that refuses connections may be about to start.
        tls: TLS credentials for TCP connections; None without TLS.
    """

    credentials: Callable[[Address], Credentials]
    connect_timeout: float
    rank: int | None
    allocator: Allocator
    alarm: Alarm
    tls: TlsCredentials | None = None
    waits_for_servers: bool = True
    additions: SharedAdditions = field(default_factory=SharedAdditions)
    printer: Printer = field(default_factory=Printer)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tls_for(self, address: Address) -> TlsCredentials | None:
        """TLS credentials for ``address``; None for a Unix socket, which cannot be listened in on."""
        return None if address.is_unix else self.tls


class BusyError(Exception):
    """The server answered BUSY."""


def read_welcome(channel: Channel, deadline: Deadline | None = None) -> Welcome:
    """Read the server's first message; closes the connection unless a welcome comes in time."""
    try:
        channel.stream.limit(deadline or Deadline(None))
        message = channel.recv()
        if message is None:
            raise ConnectionLostError(f"{channel.name} closed the connection instead of sending WELCOME")
        if message.type == MessageType.BUSY:
            raise BusyError(Busy.decode(message.payload).reason)
        welcome: Welcome = Welcome.decode(message.payload)
        channel.stream.limit(Deadline(None))
    except RPCTimeoutError as exc:
        channel.stream.close()
        raise ConnectError(f"{channel.name} accepted the connection, but sent no WELCOME in time") from exc
    except BaseException:
        channel.stream.close()
        raise
    return welcome


def reference_of(value: Any) -> tuple[str, int] | None:
    """The persistent id of a dataset; None for other objects, which are pickled."""
    return ("dataset", value.key) if isinstance(value, DatasetRef) else None


class PendingReply:
    """A request's answer, for a thread that waits for it."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._arrived = threading.Event()
        self._reply: Message | RPCError | None = None

    def complete(self, reply: Message | RPCError) -> None:
        """Take the reply; the ``complete`` of a ``Request``."""
        self._reply = reply
        self._arrived.set()

    def wait(self) -> Any:
        """Wait for the result.

        Raises:
            Exception: The request failed, or has no reply.
        """
        self._arrived.wait()
        assert self._reply is not None
        return result_of(self._reply, self._allocator)

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
        printer.put(f"{name} {log.printed_by}".rstrip(), log.text, is_note=not log.printed_by)
        return
    worker_logger.log(log.level, "%s: %s: %s", name, log.logger, log.text)
