"""What control and worker connections have in common: the welcome, references in requests, results, log records."""

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
    """What all connections of this client share.

    Attributes:
        connect_timeout: Seconds to wait for a node server that is not there yet, or has no room.
        rank: Of a distributed trainer, for the server's log.
        changed: Guards what sessions are told, and is notified when one of them is there, or lost, or its worker ends.
        waits_for_servers: Whether one that refuses connections may be about to start.
        tls: For TCP connections; None to do without.
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
        """What to speak TLS with to ``address``; None for a Unix socket, where nobody can listen."""
        return None if address.is_unix else self.tls


class BusyError(Exception):
    """The server answered BUSY."""


def read_welcome(channel: Channel, deadline: Deadline | None = None) -> Welcome:
    """Read the first message of the server; closes the connection if that is no welcome, or none in time."""
    try:
        channel.stream.limit(deadline or Deadline(None))
        message = channel.recv()
        if message is None:
            raise ConnectionLostError(f"{channel.name} closed the connection instead of welcoming us")
        if message.type == MessageType.BUSY:
            raise BusyError(Busy.decode(message.payload).reason)
        welcome: Welcome = Welcome.decode(message.payload)
        channel.stream.limit(Deadline(None))
    except RPCTimeoutError as exc:
        channel.stream.close()
        raise ConnectError(f"{channel.name} took the connection and did not welcome us in time") from exc
    except BaseException:
        channel.stream.close()
        raise
    return welcome


def reference_of(value: Any) -> tuple[str, int] | None:
    """The persistent id of a dataset; None for everything that is pickled."""
    return ("dataset", value.key) if isinstance(value, DatasetRef) else None


class PendingReply:
    """The answer to a request, for a thread that waits for it."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._arrived = threading.Event()
        self._reply: Message | RPCError | None = None

    def complete(self, reply: Message | RPCError) -> None:
        """Take the reply (what a ``Request`` calls)."""
        self._reply = reply
        self._arrived.set()

    def wait(self) -> Any:
        """Wait for the result.

        Raises:
            Exception: What the request raised, or why there is no reply.
        """
        self._arrived.wait()
        assert self._reply is not None
        return result_of(self._reply, self._allocator)

    def stack(self) -> str:
        """Wait for a stack; returns why there is none if it does not come."""
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
