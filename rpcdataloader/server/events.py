"""What the processes of one node tell each other over links: one class per event.

The comments say who tells whom; a descriptor that goes with an event stands there too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rpcdataloader.server.connections import Origin
from rpcdataloader.wire import plain
from rpcdataloader.wire.plain import Json


@dataclass(frozen=True)
class Event:
    """What one process tells another."""


@dataclass(frozen=True)
class Accepted(Event):
    """Node server to gate, with the connection: it is yours."""

    peer: str
    row: int


@dataclass(frozen=True)
class Refused(Event):
    """Gate to node server: the connection was refused, and its other end is expected to close."""


@dataclass(frozen=True)
class TellsStatus(Event):
    """Gate to node server: the connection asks for the status, and nothing waits for its end."""


@dataclass(frozen=True)
class WantsStacks(Event):
    """Status gate to node server, and node server to session: write the stacks of all workers.

    With it come a file, for a line per worker, which is a :class:`WorkerStack`; and the end of a pipe, which the
    session closes when it has written all lines.
    """


@dataclass(frozen=True, slots=True)
class WorkerStack(Json):
    """What there is to say of the worker with this process id."""

    pid: int
    text: str


@dataclass(frozen=True)
class StacksBegun(Event):
    """Session to node server: it has looked at :class:`WantsStacks`, and can be asked again."""


@dataclass(frozen=True)
class IsForWorker(Event):
    """Gate to node server: the connection belongs to a session. Its id and the preamble are hexadecimal."""

    session: str
    preamble: str


@dataclass(frozen=True)
class HandedOver(Event):
    """Node server to gate: the session has the connection."""


@dataclass(frozen=True)
class UnknownSession(Event):
    """Node server to gate: there is no such session."""


@dataclass(frozen=True)
class SessionBegun(Event):
    """Gate to node server, with the pipe of its output: it has become a session.

    Attributes:
        id: Hexadecimal.
        name: Of the client, for messages.
    """

    id: str
    name: str
    peer: str
    origin: Origin


@dataclass(frozen=True)
class SessionKnown(Event):
    """Node server to session: worker connections may come.

    Attributes:
        folder: Where it may put modules of its client; the node server removes it.
    """

    folder: str


@dataclass(frozen=True)
class WorkerConnection(Event):
    """Node server to session, with the connection of a worker to be. ``peer`` is the address at its other end."""

    peer: str
    preamble: str


@dataclass(frozen=True)
class WantsOutput(Event):
    """Session to node server: its client wants to see what it and its workers print."""


@dataclass(frozen=True)
class Printed(Event):
    """Node server to session: a line for its client; as :class:`~rpcdataloader.wire.messages.Log` says."""

    text: str
    printed_by: str


@dataclass(frozen=True)
class WorkerForked(Event):
    """Session to node server, with the pipe of its output."""

    worker: int


@dataclass(frozen=True)
class Authenticated(Event):
    """Worker to session: its client has proved that it knows the secret."""

    origin: Origin


@dataclass(frozen=True)
class WantsRoom(Event):
    """Session to node server: may this worker serve?"""

    worker: int
    pid: int
    peer: str
    origin: Origin


@dataclass(frozen=True)
class Decided(Event):
    """Node server to session, and session to worker.

    Attributes:
        reason: Why there is no room; None if there is.
        row: Place of the worker among the counters; 0 if there is no room.
    """

    worker: int
    reason: str | None
    row: int


@dataclass(frozen=True)
class GaveUp(Event):
    """Worker to session, as its last words."""

    reason: str


@dataclass(frozen=True)
class WorkerEnded(Event):
    """Session to node server."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Drain(Event):
    """Node server to session, and session to worker: answer what you have, and end."""


_CLASSES = {kind.__name__: kind for kind in Event.__subclasses__()}


def encode(event: Event) -> bytes:
    """The event as JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)}).encode()


def decode(data: bytes) -> Event:
    """The event again.

    Raises:
        ValueError: It is none.
    """
    fields = plain.load(data)
    kind = _CLASSES.get(str(fields.get("event")))
    if kind is None:
        raise ValueError(f"{fields.get('event')!r} is not an event")
    return plain.make(kind, fields)
