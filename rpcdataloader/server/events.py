"""What the processes of one node tell each other: events, and rows of numbers in shared memory.

There is one class per event, whose docstring names sender and receiver, and the descriptor that travels with it. Bytes
from the network never travel here.

A session or worker says in its row what it does, and what it has done. The node server maps the memory before its first
fork, and alone assigns rows. Each process writes its own row, one aligned word at a time: counting takes no lock and no
system call. So the node server can tell what a process does that hangs, and what one did that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import socket
import termios
import time
from array import array
from collections import Counter, deque
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
    is_ours: bool = False  # True if the reason is this node's, and the same for all peers


@dataclass(frozen=True)
class SessionBegun(Event):
    """Gate to node server, with the pipe of its output: the gate is a session now."""

    name: str
    client: Identity
    ticket_key: str  # hexadecimal


@dataclass(frozen=True)
class SessionKnown(Event):
    """Node server to session: worker connections may come."""

    folder: str  # for modules


@dataclass(frozen=True)
class HasFolder(Event):
    """Session to node server: the folder of modules is about to be there, and the node server removes it in the end."""


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
    """Worker to session, before it exits."""

    reason: str


@dataclass(frozen=True)
class Stacks(Event):
    """Worker to session: the Python stacks of its threads, in words."""

    text: str


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
    """Node server to session: write the stacks of all workers. Session to worker: tell your own.

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


# A report of a client, or the stacks of a worker, each of whose characters may be escaped, has 16 KiB.
MAX_MESSAGE = 36864
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
        sock.settimeout(None)  # user code may have set a default timeout
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

    @property
    def is_half_full(self) -> bool:
        """Whether half of the room for events is taken by those that the other end has not read yet."""
        unread = array("i", [0])
        fcntl.ioctl(self._sock, termios.TIOCOUTQ, unread)
        return 2 * unread[0] >= self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

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


# Untouched memory takes no room.
NUM_ROWS = 8192

# Bytes of the text of the last error.
_ERROR_BYTES = 192

_NUM_NUMBERS = 14
_ROW_BYTES = 8 * _NUM_NUMBERS + _ERROR_BYTES


class Row:
    """Views of the fields of a row: ``row.tasks[0] += 1``. Only one thread of its owner may write at a time.

    Times are CLOCK_MONOTONIC in nanoseconds, the same for all processes of a machine.
    """

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number  # in its table
        numbers = memory[: 8 * _NUM_NUMBERS].cast("q")
        self.pid = numbers[0:1]  # of a worker, once its client has authenticated itself; 0 before
        self.running = numbers[1:2]  # 1 while a request runs
        self.since = numbers[2:3]  # time at which that changed
        self.unanswered = numbers[3:4]  # received requests without a reply, including a running one
        self.draining = numbers[4:5]  # 1 if new requests are declined
        self.batch = numbers[5:6]  # present batch of a loader's worker,
        self.sample = numbers[6:7]  # and its sample: see fetch/samples.py
        self.tasks = numbers[7:8]
        self.calls = numbers[8:9]
        self.errors = numbers[9:10]
        self.traffic = numbers[10:12]  # bytes received and sent
        self.failed = numbers[12:13]  # time of the last error; 0 without one
        self.begun = numbers[13:14]  # time at which the row was assigned: the process, or its connection, came
        self._error = memory[8 * _NUM_NUMBERS :]

    @property
    def error(self) -> str:
        """The text of the last error, as far as it fits."""
        return bytes(self._error).rstrip(b"\0").decode(errors="ignore")

    @error.setter
    def error(self, text: str) -> None:
        self._error[:] = text.encode(errors="replace")[:_ERROR_BYTES].ljust(_ERROR_BYTES, b"\0")

    def work(self) -> Counter[str]:
        """The counts, under the names of :class:`~rpcdataloader.wire.status.Work`."""
        return Counter(
            tasks=self.tasks[0],
            calls=self.calls[0],
            errors=self.errors[0],
            received_bytes=self.traffic[0],
            sent_bytes=self.traffic[1],
        )


class CounterTable:
    """The rows; row 0 is that of refused workers."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self._memory = memoryview(mmap.mmap(-1, num_rows * _ROW_BYTES))
        # First in, first out: the workers of a killed session may still be about to end when its rows are freed.
        self._free = deque(range(1, num_rows))

    def open(self) -> Row:
        """Assign a row of zeros, but for its times; raises ``OSError`` without one."""
        if not self._free:
            raise OSError(errno.ENOSPC, "no room for another process")
        number = self._free.popleft()
        self._memory[number * _ROW_BYTES : (number + 1) * _ROW_BYTES] = bytes(_ROW_BYTES)
        row = self.row(number)
        row.begun[0] = row.since[0] = time.monotonic_ns()
        return row

    def close(self, row: Row) -> None:
        """Free the row of a process that has ended."""
        self._free.append(row.number)

    def row(self, number: int) -> Row:
        """The row with a number."""
        return Row(number, self._memory[number * _ROW_BYTES : (number + 1) * _ROW_BYTES])
