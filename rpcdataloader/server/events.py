"""Messages between the processes of one node: one class per event.

Each docstring names sender and receiver, and the descriptor that travels with the event. Bytes from the network never
travel here.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from rpcdataloader.server.processes import Process, fork
from rpcdataloader.wire.handshake import Identity
from rpcdataloader.wire.messages import from_json, read_json


@dataclass(frozen=True)
class Event:
    """A message from one process to another."""


@dataclass(frozen=True)
class Refused(Event):
    """Gate, session or worker to node server, for the log: a peer failed authentication, TLS or the protocol.

    From a gate, it also says that the peer is expected to close its connection.
    """

    peer: str
    reason: str
    level: int


@dataclass(frozen=True)
class SessionBegun(Event):
    """Gate to node server, with the pipe of its output: the gate is a session now."""

    id: str
    name: str
    client: Identity


@dataclass(frozen=True)
class SessionKnown(Event):
    """Node server to session: worker connections may come. The node server removes the folder of modules in the end."""

    folder: str


@dataclass(frozen=True)
class WorkerConnection(Event):
    """Node server to session, with the connection of a future worker and, unless it is refused, a pipe for its output.

    ``peer`` is its remote address.
    """

    worker: int  # its number
    row: int  # number of its row of counters; 0 if it is refused
    peer: str
    refusal: str | None  # what to tell its client in place of a welcome


@dataclass(frozen=True)
class WorkerEnded(Event):
    """Session to node server, once for each :class:`WorkerConnection` that was not refused."""

    worker: int
    reason: str


@dataclass(frozen=True)
class GaveUp(Event):
    """Worker to session, as its only event, before it exits."""

    reason: str


@dataclass(frozen=True)
class Reported(Event):
    """Session to node server: the training loops of its client, as the JSON of a ``Report``."""

    report: str


@dataclass(frozen=True)
class WantsStatus(Event):
    """Status gate to node server: write a line of JSON with the status of the node, and let sessions write stacks.

    Its descriptors are those of :class:`WantsStacks`.
    """

    stacks: bool


@dataclass(frozen=True)
class WantsStacks(Event):
    """Node server to session: write the stacks of all workers. Session to worker: write its own.

    Descriptors, for a session: a file, for one line of JSON per worker, with its process id and its stacks, and the end
    of a pipe, which the session closes when it has written all lines.
    """


@dataclass(frozen=True)
class WantsOutput(Event):
    """Session to node server: the client wants the output of the session and its workers."""


@dataclass(frozen=True)
class Printed(Event):
    """Node server to session: a line for its client; fields as in :class:`~rpcdataloader.wire.messages.Log`."""

    text: str
    printed_by: str


@dataclass(frozen=True)
class Drain(Event):
    """Node server to session, and session to worker: answer pending requests, then end."""


_CLASSES = {kind.__name__: kind for kind in Event.__subclasses__()}


def encode(event: Event) -> bytes:
    return json.dumps({"event": type(event).__name__, **asdict(event)}).encode()


def decode(data: bytes) -> Event:
    """Return the event; raises ``ValueError`` for other data."""
    fields = read_json(data)
    kind = _CLASSES.get(str(fields.get("event")))
    if kind is None:
        raise ValueError(f"unknown event {fields.get('event')!r}")
    return from_json(kind, fields)


# A report of a client, each of whose characters may be escaped twice, has 16 KiB.
MAX_MESSAGE = 32768
MAX_DESCRIPTORS = 4

# Seconds between two attempts to send an event for which the other end's queue had no room.
RETRY_PAUSE = 0.05

# Errors of a full queue, or of too many descriptors in transit.
_NO_ROOM = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class Link:
    """One end of a socketpair that keeps message boundaries; several processes may write to it.

    Reading yields None once the other end is closed; writing to it then does nothing.

    Attributes:
        unsent: Posted events that wait for room.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.unsent: deque[bytes] = deque()

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends, which executed programs do not inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, event: Event, descriptors: Sequence[int] = ()) -> bool:
        """Send one event; waits while the other end's queue is full. Returns True if the event is on its way."""
        return self._send(encode(event), descriptors, 0) is None

    def post(self, event: Event) -> bool:
        """Send one event, now or with a later :meth:`flush`; returns True if every posted event has gone."""
        self.unsent.append(encode(event))
        return self.flush()

    def offer(self, event: Event, descriptors: Sequence[int] = ()) -> bool:
        """Send one event with descriptors if there is room for it now; returns True if it is on its way."""
        return self.flush() and self._send(encode(event), descriptors, socket.MSG_DONTWAIT) is None

    def flush(self) -> bool:
        """Send posted events as far as there is room; returns True if all have gone."""
        while self.unsent:
            if self._send(self.unsent[0], (), socket.MSG_DONTWAIT) in _NO_ROOM:
                return False
            self.unsent.popleft()
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
        """Return the next event and its descriptors, which the caller owns; None when the other end is closed.

        Without room in this process, an event comes without its descriptors.

        Raises:
            BlockingIOError: No event has come yet.
            ValueError: The message is not an event; its descriptors are closed.
        """
        # Closed on exec: programs that user code starts must not hold the sockets of clients.
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        try:
            data, ancillary, flags, _address = self._sock.recvmsg(MAX_MESSAGE, space, how)
        except ConnectionError:
            return None
        descriptors = array("i")
        for _level, _type, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        try:
            event = decode(data) if data else None
        except ValueError:
            _close_all(descriptors)
            raise
        if flags & socket.MSG_CTRUNC:
            _close_all(descriptors)
            del descriptors[:]
        return None if event is None else (event, list(descriptors))

    def close(self) -> None:
        self._sock.close()


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def fork_linked(run: Callable[[Link], None]) -> tuple[Process, Link]:
    """Run ``run`` in a fork, with a link to this process; raises ``OSError`` as :func:`fork`."""
    ours, theirs = Link.pair()

    def run_linked() -> None:
        ours.close()
        run(theirs)

    try:
        return fork(run_linked), ours
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
