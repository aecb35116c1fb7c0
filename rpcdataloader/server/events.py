"""What the processes of one node tell each other over links: one class per event.

The comments say who tells whom; a descriptor that goes with an event stands there too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rpcdataloader.server.connections import Origin
from rpcdataloader.wire import plain
from rpcdataloader.wire.plain import Json


@dataclass(frozen=True, slots=True)
class Accepted:
    """Node server to gate, with the connection: it is yours."""

    peer: str
    row: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Gate to node server: the connection was refused, and its other end is expected to close."""


@dataclass(frozen=True, slots=True)
class TellsStatus:
    """Gate to node server: the connection asks for the status, and nothing waits for its end."""


@dataclass(frozen=True, slots=True)
class WantsStacks:
    """Status gate to node server, and node server to session: write the stacks of all workers.

    With it come a file, for a line per worker, which is a :class:`WorkerStack`; and the end of a pipe, which the
    session closes when it has written all lines.
    """


@dataclass(frozen=True, slots=True)
class WorkerStack(Json):
    """What there is to say of the worker with this process id."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class StacksBegun:
    """Session to node server: it has looked at :class:`WantsStacks`, and can be asked again."""


@dataclass(frozen=True, slots=True)
class IsForWorker:
    """Gate to node server: the connection belongs to a session. Its id and the preamble are hexadecimal."""

    session: str
    preamble: str


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Node server to gate: the session has the connection."""


@dataclass(frozen=True, slots=True)
class UnknownSession:
    """Node server to gate: there is no such session."""


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """Gate to node server, with the pipe of its output: it has become a session.

    Attributes:
        id: Hexadecimal.
        name: Of the client, for messages.
    """

    id: str
    name: str
    peer: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class SessionKnown:
    """Node server to session: worker connections may come.

    Attributes:
        folder: Where it may put modules of its client; the node server removes it.
    """

    folder: str


@dataclass(frozen=True, slots=True)
class WorkerConnection:
    """Node server to session, with the connection of a worker to be. ``peer`` is the address at its other end."""

    peer: str
    preamble: str


@dataclass(frozen=True, slots=True)
class WantsOutput:
    """Session to node server: its client wants to see what it and its workers print."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Node server to session: a line for its client; as :class:`~rpcdataloader.wire.messages.Log` says."""

    text: str
    printed_by: str


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """Session to node server, with the pipe of its output."""

    worker: int


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Worker to session: its client has proved that it knows the secret."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class WantsRoom:
    """Session to node server: may this worker serve?"""

    worker: int
    pid: int
    peer: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Decided:
    """Node server to session, and session to worker.

    Attributes:
        reason: Why there is no room; None if there is.
        row: Place of the worker among the counters; 0 if there is no room.
    """

    worker: int
    reason: str | None
    row: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Worker to session, as its last words."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """Session to node server."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Node server to session, and session to worker: answer what you have, and end."""


Event = (
    Accepted
    | Refused
    | TellsStatus
    | WantsStacks
    | StacksBegun
    | IsForWorker
    | HandedOver
    | UnknownSession
    | SessionBegun
    | SessionKnown
    | WorkerConnection
    | WantsOutput
    | Printed
    | WorkerForked
    | Authenticated
    | WantsRoom
    | Decided
    | GaveUp
    | WorkerEnded
    | Drain
)

_CLASSES: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__args__}


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
