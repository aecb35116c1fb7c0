"""What every process of a node server is doing, in memory that all of them share: one row each.

The node server makes the table before it forks, gives rows out, and takes them back when it hears that their process
has ended; it alone does. What changes all the time in a row is written by the process that it belongs to, as aligned
8-byte stores, so that counting takes no lock and no system call. Whoever looks copies the whole table, and disturbs
nobody. He may see a row in the middle of a change, such as a request that is counted as answered and as running;
counters never go backwards, because what was done by processes that have ended is kept in the row above theirs, and a
copy in the middle of that is thrown away.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Memory that nobody has touched is not there.
NUM_ROWS = 8192

# A row, in 8-byte cells: 24 numbers, then names. "Owner" is the process that a row belongs to; all else is written by
# the node server. The first row is the server's own.
_KIND = 0
_PID = 1
_STARTED = 2  # CLOCK_MONOTONIC in nanoseconds, as all times here; it is the same for all processes of a machine
_SINCE = 3  # owner: of the last change of _RUNNING
_RUNNING = 4  # owner: requests under way
_UNANSWERED = 5  # owner: requests that were received, those under way included
_DRAINING = 6  # owner
_NUMBER = 7  # of a worker in its session
_SESSION = 8  # row of a worker's session
_RANK = 9
# The work of a worker is written by its owner; that of a session or the server is what is over, of what was below it.
TASKS = 10
CALLS = 11
ERRORS = 12
_RECEIVED = 13
_SENT = 14
_ENDED = 15  # workers
_SOCKET = 21  # owner: inode of its connection
# Of the server only:
_GENERATION = 16  # odd while rows are moved about
_NUM_USED = 17  # rows up to the last one that was ever used
_NUM_WORKERS = 18
_MAX_CONNECTIONS = 19
_REFUSED = 20

_WORK = slice(TASKS, _SENT + 1)
_TRAFFIC = slice(_RECEIVED, _SENT + 1)
_NUM_CELLS = 24
_CLIENT_BYTES = 256
_JOB_BYTES = 64
_ROW_BYTES = 8 * _NUM_CELLS + _CLIENT_BYTES + _JOB_BYTES
_NONE = 2**64 - 1

_FREE, _NODE, _SESSION_KIND, _WORKER = range(4)

# A reader that never finds the table at rest takes it as it is.
_MAX_TRIES = 100


class Row:
    """The cells of one process. Its owner calls these methods, one thread at a time."""

    __slots__ = ("_cells", "traffic")

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self.traffic = cells[_TRAFFIC]

    @classmethod
    def private(cls) -> Row:
        """One that nobody sees, for a process that has got none."""
        return cls(memoryview(bytearray(8 * _NUM_CELLS)).cast("Q"))

    def connected(self, inode: int) -> None:
        """Its connection is the socket of that inode."""
        self._cells[_SOCKET] = inode

    def runs(self, now: int, num_running: int = 1, num_unanswered: int = 1) -> None:
        """So many requests are being run from now on, of those that were received."""
        cells = self._cells
        cells[_SINCE] = now
        cells[_RUNNING] = num_running
        cells[_UNANSWERED] = num_unanswered

    def rests(self, now: int) -> None:
        """There is nothing to do from now on."""
        cells = self._cells
        cells[_SINCE] = now
        cells[_RUNNING] = 0
        cells[_UNANSWERED] = 0

    def answered(self, what: int | None, num_unanswered: int) -> None:
        """A request was answered.

        Args:
            what: One of ``TASKS``, ``CALLS`` and ``ERRORS``; None for nothing that counts.
            num_unanswered: Requests that were received and are left.
        """
        cells = self._cells
        cells[_UNANSWERED] = num_unanswered
        if what is not None:
            cells[what] += 1

    def drain(self) -> None:
        """No further requests are taken."""
        self._cells[_DRAINING] = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """What was done, as the fields of :class:`~rpcdataloader.wire.status.Work`."""

    tasks: int
    calls: int
    errors: int
    received_bytes: int
    sent_bytes: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tasks + other.tasks,
            self.calls + other.calls,
            self.errors + other.errors,
            self.received_bytes + other.received_bytes,
            self.sent_bytes + other.sent_bytes,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A row, as somebody who looks sees it. Times are in nanoseconds, ``session`` is the place of a row.

    Attributes:
        place: Of this row.
    """

    place: int
    pid: int
    started: int
    since: int
    running: int
    unanswered: int
    draining: bool
    socket: int
    number: int
    session: int
    rank: int | None
    counts: Counts
    ended_workers: int
    client: str
    job: str


@dataclass(frozen=True, slots=True)
class View:
    """The table at one moment.

    Attributes:
        node: Row of the node server.
        sessions: In the order in which they began.
        workers: In the order in which they began.
    """

    node: Seen
    num_workers: int
    max_connections: int | None
    refused: int
    sessions: list[Seen]
    workers: list[Seen]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class CounterTable:
    """The table. Made once, before the first fork; only the process that made it gives rows out and takes them back.

    Args:
        num_rows: How many processes have room, this one included.
        is_gone: Whether there is no process of that number. The workers of a session that was killed end by
            themselves, a moment later; their rows are not given to others before.
    """

    def __init__(self, num_rows: int = NUM_ROWS, is_gone: Callable[[int], bool] = _is_gone) -> None:
        self._shared = memoryview(mmap.mmap(-1, num_rows * _ROW_BYTES))
        self._is_gone = is_gone
        self._free = list(range(num_rows - 1, 0, -1))
        self._head = self._cells(0)
        self._head[_KIND] = _NODE
        self._head[_NUM_USED] = 1
        self._head[_RANK] = self._head[_MAX_CONNECTIONS] = _NONE

    def _cells(self, place: int) -> memoryview:
        start = place * _ROW_BYTES
        return self._shared[start : start + 8 * _NUM_CELLS].cast("Q")

    # --- the node server

    def begin(self, pid: int, now: int, num_workers: int, max_connections: int | None) -> None:
        """The node server listens from now on."""
        self._head[_PID] = pid
        self._head[_STARTED] = now
        self._head[_NUM_WORKERS] = num_workers
        self._head[_MAX_CONNECTIONS] = _NONE if max_connections is None else max_connections

    def drain(self) -> None:
        """It takes no clients any more."""
        self._head[_DRAINING] = 1

    def open_session(self, pid: int, now: int, client: str, rank: int | None, job: str) -> int | None:
        """A row for a session; None if no room is left, in which case nobody sees it.

        Args:
            client: Host and process id of the client, ``"gpu01:2304"``; cut if it is far too long.
            rank: In a distributed job; None outside of one.
            job: Of Slurm.
        """
        with self._changing():
            place = self._take(pid)
            if place is not None:
                cells = self._cells(place)
                cells[_PID], cells[_STARTED], cells[_SINCE] = pid, now, now
                cells[_RANK] = _NONE if rank is None or not 0 <= rank < _NONE else rank
                names = place * _ROW_BYTES + 8 * _NUM_CELLS
                # The number at the end tells processes of a host apart.
                host, _, number = client.rpartition(":")
                host = _cut(host, _CLIENT_BYTES - len(number.encode(errors="replace")) - 1)
                _write(self._shared[names : names + _CLIENT_BYTES], f"{host}:{number}")
                _write(self._shared[names + _CLIENT_BYTES : names + _CLIENT_BYTES + _JOB_BYTES], job)
                cells[_KIND] = _SESSION_KIND
            return place

    def open_worker(self, session: int | None, number: int, pid: int, now: int) -> int | None:
        """A row for a worker of the session in row ``session``; None if no room is left."""
        if session is None:
            return None
        with self._changing():
            place = self._take(pid)
            if place is not None:
                cells = self._cells(place)
                cells[_PID], cells[_STARTED], cells[_SINCE] = pid, now, now
                cells[_NUMBER], cells[_SESSION] = number, session
                cells[_RANK] = _NONE
                cells[_KIND] = _WORKER
            return place

    def close_worker(self, place: int | None) -> None:
        """The worker has ended; what it has done counts for its session from now on."""
        if place is None:
            return
        with self._changing():
            self._fold(place, self._cells(self._cells(place)[_SESSION]))

    def close_session(self, place: int | None) -> None:
        """The session has ended, and with it all of its workers; what they have done counts for the node server."""
        if place is None:
            return
        with self._changing():
            for other in range(1, self._head[_NUM_USED]):
                cells = self._cells(other)
                if cells[_KIND] == _WORKER and cells[_SESSION] == place:
                    self._fold(other, self._cells(place))
            self._fold(place, self._head)

    def _fold(self, place: int, above: memoryview) -> None:
        cells = self._cells(place)
        for cell in range(_WORK.start, _WORK.stop):
            above[cell] += cells[cell]
        above[_ENDED] += cells[_ENDED] + (cells[_KIND] == _WORKER)
        cells[_KIND] = _FREE
        # It keeps the pid, for the next one to see that this one has gone.
        self._free.append(place)

    def _take(self, pid: int) -> int | None:
        for position in range(len(self._free) - 1, -1, -1):
            place = self._free[position]
            before = self._cells(place)[_PID]
            if before in (0, pid) or self._is_gone(before):
                del self._free[position]
                start = place * _ROW_BYTES
                self._shared[start : start + _ROW_BYTES] = bytes(_ROW_BYTES)
                self._head[_NUM_USED] = max(self._head[_NUM_USED], place + 1)
                return place
        return None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._head[_GENERATION] += 1
        try:
            yield
        finally:
            self._head[_GENERATION] += 1

    # --- everybody

    def row(self, place: int | None) -> Row:
        """The row at ``place``, for its owner."""
        return Row.private() if place is None else Row(self._cells(place))

    def refused(self) -> None:
        """A connection was refused. Any process: those that do so at the same instant may overlook one another."""
        self._head[_REFUSED] += 1

    def look(self) -> View:
        """The table at this moment, from any process that was forked from the one that made it."""
        for _ in range(_MAX_TRIES):
            generation = self._head[_GENERATION]
            data = bytes(self._shared[: self._head[_NUM_USED] * _ROW_BYTES])
            if generation % 2 == 0 and self._head[_GENERATION] == generation:
                break
        return decode(data)


def decode(data: bytes) -> View:
    """Read a copy of the rows that are used. Pure."""
    rows = [data[start : start + _ROW_BYTES] for start in range(0, len(data), _ROW_BYTES)]
    cells = [memoryview(row)[: 8 * _NUM_CELLS].cast("Q") for row in rows]
    head = cells[0]

    def read(kind: int) -> list[Seen]:
        found = [_see(place, cells[place], row) for place, row in enumerate(rows) if cells[place][_KIND] == kind]
        return sorted(found, key=lambda seen: (seen.started, seen.place))

    return View(
        node=_see(0, head, rows[0]),
        num_workers=head[_NUM_WORKERS],
        max_connections=None if head[_MAX_CONNECTIONS] == _NONE else head[_MAX_CONNECTIONS],
        refused=head[_REFUSED],
        sessions=read(_SESSION_KIND),
        workers=read(_WORKER),
    )


def _see(place: int, cells: memoryview, row: bytes) -> Seen:
    client, job = row[8 * _NUM_CELLS : -_JOB_BYTES], row[-_JOB_BYTES:]
    return Seen(
        place=place,
        pid=cells[_PID],
        started=cells[_STARTED],
        since=cells[_SINCE],
        running=cells[_RUNNING],
        unanswered=cells[_UNANSWERED],
        draining=bool(cells[_DRAINING]),
        socket=cells[_SOCKET],
        number=cells[_NUMBER],
        session=cells[_SESSION],
        rank=None if cells[_RANK] == _NONE else cells[_RANK],
        counts=Counts(*cells[_WORK]),
        ended_workers=cells[_ENDED],
        client=_read(client),
        job=_read(job),
    )


def _cut(text: str, num_bytes: int) -> str:
    return text.encode(errors="replace")[: max(0, num_bytes)].decode(errors="ignore")


def _write(place: memoryview, text: str) -> None:
    data = _cut(text, len(place)).encode()
    place[: len(data)] = data


def _read(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
