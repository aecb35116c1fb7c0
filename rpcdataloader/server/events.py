"""What the processes of one node tell each other over links: one class per event.

The comments say who tells whom; a descriptor that goes with an event stands there too. Nothing that came from the
network travels here.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
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
    """Gate to node server, with the pipe of its output: it has become a session."""

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


MAX_MESSAGE = 16384
MAX_DESCRIPTORS = 4

# What a full queue, or too many descriptors under way, look like.
_NO_ROOM = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class Link:
    """One end of a socketpair that keeps message boundaries, so that several processes may write to it.

    A closed other end reads as None; writing to it does nothing.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: deque[bytes] = deque()

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends, not inherited by programs that are executed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._sock.fileno()

    def send(self, event: Event, descriptors: Sequence[int] = ()) -> bool:
        """Send one event; waits while the other end is busy and its queue is full.

        Returns:
            Whether the event is on its way: somebody has the other end open, and the system has room for it.
        """
        return self._send(encode(event), descriptors, 0) is None

    def post(self, event: Event) -> bool:
        """Send one event without ever waiting: what has no room now goes with a later :meth:`flush`.

        Returns:
            Whether all that was posted has gone.
        """
        self._unsent.append(encode(event))
        return self.flush()

    def offer(self, event: Event, descriptors: Sequence[int]) -> bool:
        """Send one event with descriptors if there is room for it now; returns whether it is on its way."""
        return self.flush() and self._send(encode(event), descriptors, socket.MSG_DONTWAIT) is None

    def flush(self) -> bool:
        """Send what was posted, as far as there is room; returns whether all of it has gone."""
        while self._unsent:
            if self._send(self._unsent[0], (), socket.MSG_DONTWAIT) in _NO_ROOM:
                return False
            self._unsent.popleft()
        return True

    def _send(self, data: bytes, descriptors: Sequence[int], flags: int) -> int | None:
        # Not socket.send_fds and socket.recv_fds: in Python up to 3.13 they ignore the flags.
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            self._sock.sendmsg([data], ancillary, flags)
        except OSError as exc:
            if not isinstance(exc, ConnectionError) and exc.errno not in _NO_ROOM:
                raise
            return exc.errno
        return None

    def recv(self, *, wait: bool = True) -> tuple[Event, list[int]] | None:
        """The next event and its descriptors, which the caller owns; None when the other end is closed.

        Raises:
            BlockingIOError: There is none yet.
            OSError: This process has no room for the descriptors; the event is lost.
            ValueError: What came is no event; its descriptors are closed.
        """
        # Closed when another program is executed: what user code starts must not hold the sockets of clients.
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        try:
            data, ancillary, flags, _address = self._sock.recvmsg(MAX_MESSAGE, space, how)
        except ConnectionError:
            return None
        descriptors = array("i")
        for _level, _type, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not data:
            return None
        try:
            return decode(data), list(descriptors)
        except ValueError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()
