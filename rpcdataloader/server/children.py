"""A node server's view of its forked processes that have a connection: one class per kind."""

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
    """A process with a connection; this class itself is for one that serves the node's status.

    Attributes:
        sock: The connection, kept to see the peer leave while the process is busy.
        has_unsent: True while a posted event waits for room.
    """

    process: Process
    link: Link
    sock: socket.socket
    source: str
    peer: str
    row: int
    has_unsent: bool = False

    def post(self, event: Event) -> None:
        """Send an event, now or when the link has room."""
        self.has_unsent = not self.link.post(event)

    def end(self, reason: str) -> None:
        """End the process."""
        self.process.kill(reason)

    def close(self) -> None:
        """Close the descriptors of a process that has ended."""
        self.link.close()
        self.sock.close()

    def forget_in_child(self) -> None:
        """Close the node server's descriptors in a fork."""
        self.close()
        os.close(self.process.fileno())


@dataclass(slots=True, kw_only=True, eq=False)
class OpenGate(Child):
    """A gate whose connection is still undecided.

    Attributes:
        deadline: Time by which the gate must have become something else; None while it is being ended.
        is_refused: True once it has refused its connection and waits for the peer to close.
        wanted: The session that its connection is for, while that session has no room for it.
    """

    deadline: float | None
    is_refused: bool = False
    wanted: IsForWorker | None = None

    def end(self, reason: str) -> None:
        self.deadline = None
        self.process.kill(reason)


@dataclass(frozen=True, slots=True)
class AdmittedWorker:
    """An admitted worker."""

    connection: AcceptedConnection
    row: int


@dataclass(slots=True, kw_only=True, eq=False)
class ClientSession(Child):
    """A session.

    Attributes:
        folder: Path for modules of its client.
        output: Limit on the printed lines that are sent to its client; None if the client wants no output.
        is_asked: True while a request for stacks is unread.
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
    """Turn a gate into another kind of child: the same process and connection."""
    return kind(**{each.name: getattr(gate, each.name) for each in fields(Child)}, **more)
