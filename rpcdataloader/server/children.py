"""What a node server knows of the processes that it has forked, and that have a connection: one class per kind."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rpcdataloader.server.connections import AcceptedConnection
from rpcdataloader.server.events import Event, IsForWorker, Link
from rpcdataloader.server.processes import Process
from rpcdataloader.wire.lines import LineLimit


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A process with a connection; by itself, one that tells somebody the status of this node.

    Attributes:
        sock: The connection. It is kept to see the other end go away while the process is busy.
        has_unsent: Whether something was posted to it that had no room.
    """

    process: Process
    link: Link
    sock: socket.socket
    source: str
    peer: str
    row: int
    has_unsent: bool = False

    def post(self, event: Event) -> None:
        """Tell it something, now or when it has room."""
        self.has_unsent = not self.link.post(event)

    def end(self, reason: str) -> None:
        """End the process."""
        self.process.kill(reason)

    def close(self) -> None:
        """Give the descriptors back of one that has ended."""
        self.link.close()
        self.sock.close()

    def forget_in_child(self) -> None:
        """Close, in a fork, what belongs to the node server."""
        self.close()
        os.close(self.process.fileno())


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGate(Child):
    """A gate whose connection has not become anything yet.

    Attributes:
        deadline: When it must have become something else; None when it is being ended.
        is_refused: Whether it has refused its connection, and waits for the other end to close.
        wanted: The session that its connection is for, and that has no room for it now.
    """

    deadline: float | None
    is_refused: bool = False
    wanted: IsForWorker | None = None

    def end(self, reason: str) -> None:
        self.deadline = None
        self.process.kill(reason)


@dataclass(frozen=True, slots=True)
class AdmittedWorker:
    """A worker that counts."""

    connection: AcceptedConnection
    row: int


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSession(Child):
    """A session.

    Attributes:
        folder: Where it may put modules of its client.
        output: Limits the lines of it and its workers that are sent to its client; None if that wants none.
        is_asked: Whether it was asked for stacks, and has not looked at that yet.
    """

    id: str
    client: str
    connection: AcceptedConnection
    folder: str
    output: LineLimit | None = None
    workers: dict[int, AdmittedWorker] = field(default_factory=dict)
    is_client_gone: bool = False
    is_asked: bool = False


_Kind = TypeVar("_Kind", bound=Child)


def become(gate: OpenGate, kind: type[_Kind], **more: Any) -> _Kind:
    """The same process, as what its gate has become."""
    return kind(**{each.name: getattr(gate, each.name) for each in fields(Child)}, **more)
