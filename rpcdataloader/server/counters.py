"""What every process of a node server is doing, in memory that all of them share: one row each.

The node server makes the table before it forks, gives rows out, and takes them back when it hears that their process
has ended; it alone does. What changes all the time in a row is written by the process that it belongs to, its owner, as
aligned 8-byte stores, so that counting takes no lock and no system call. Whoever looks copies the whole table, and
disturbs nobody. A copy may show a row in the middle of a change, such as a request that is counted as answered and as
running; counters never go backwards, because what was done by processes that have ended is kept in the row above
theirs, and a copy in the middle of that is thrown away.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from rpcdataloader.wire.status import Work

# Memory that nobody has touched is not there.
NUM_ROWS = 8192

# What is counted, in this order in each row.
WORK = tuple(field.name for field in fields(Work))


class Seen(NamedTuple):
    """A row, as it is in the table and in a copy of it.

    Times are those of CLOCK_MONOTONIC in nanoseconds, which is the same for all processes of a machine. The node server
    writes what no other process is named for. The work of a worker is written by its owner; that of a session or of the
    node server is what is over, of what was below it.

    Attributes:
        kind: Whose row it is, or that it is free.
        place: Of this row; the first row is the node server's.
        since: Time of the last change of ``running``; by the owner.
        running: Requests under way; by the owner.
        unanswered: Requests that were received, those under way included; by the owner.
        draining: 1 if no further requests are taken; by the owner.
        socket: Inode of a worker's connection; by the owner.
        number: Of a worker in its session.
        session: Place of a worker's session.
        rank: Of a session's client in a distributed job; -1 outside of one.
        ended_workers: How many have ended.
        failed: Time of the last error; 0 if there was none. By the owner, as the counts and the error.
        client: Host and process id.
        job: Of Slurm.
        error: Text of the last error.
        generation: Of the table, in the first row as all below: odd while rows are moved about.
        num_used: Rows up to the last one that was ever used.
        num_workers: What the node server offers.
        max_connections: Cap on workers; -1 for no cap.
        refused: Connections.
    """

    kind: int
    place: int
    pid: int
    started: int
    since: int
    running: int
    unanswered: int
    draining: int
    socket: int
    number: int
    session: int
    rank: int
    tasks: int
    calls: int
    errors: int
    received_bytes: int
    sent_bytes: int
    ended_workers: int
    failed: int
    generation: int
    num_used: int
    num_workers: int
    max_connections: int
    refused: int
    client: str
    job: str
    error: str


_TEXT_BYTES = {"client": 256, "job": 64, "error": 192}
_ROW = np.dtype([(name, f"S{_TEXT_BYTES[name]}" if name in _TEXT_BYTES else "i8") for name in Seen._fields])
_NUM_CELLS = len(Seen._fields) - len(_TEXT_BYTES)

# Cells of a row. Storing by number costs a fifth of storing by name.
_SINCE, _RUNNING, _UNANSWERED, _DRAINING, _SOCKET, TASKS, CALLS, ERRORS, _RECEIVED, _SENT, _FAILED = map(
    Seen._fields.index,
    ("since", "running", "unanswered", "draining", "socket", *WORK, "failed"),
)

_FREE, _NODE, _SESSION, _WORKER = range(4)

# A reader that never finds the table at rest takes it as it is.
_MAX_TRIES = 100


class Row:
    """The cells of one process. Its owner calls these methods, one thread at a time."""

    __slots__ = ("_cells", "_row", "traffic")

    def __init__(self, row: Any) -> None:
        self._row = row
        self._cells = memoryview(row.view(np.uint8))[: 8 * _NUM_CELLS].cast("q")
        self.traffic = self._cells[_RECEIVED : _SENT + 1]

    @classmethod
    def private(cls) -> Row:
        """One that nobody sees, for a process that has got none."""
        return cls(np.zeros(1, _ROW))

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
        cells[_RUNNING] = cells[_UNANSWERED] = 0

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

    def failed(self, error: str) -> None:
        """The last error is ``error``; a copy that is made meanwhile may have parts of the one before."""
        self._row["error"] = _cut(error, _TEXT_BYTES["error"])
        self._cells[_FAILED] = time.monotonic_ns()

    def drain(self) -> None:
        """No further requests are taken."""
        self._cells[_DRAINING] = 1


class View(NamedTuple):
    """The table at one moment: the row of the node server, and the others in the order in which they began."""

    node: Seen
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
        self._rows: Any = np.frombuffer(mmap.mmap(-1, num_rows * _ROW.itemsize), _ROW)
        self._is_gone = is_gone
        self._free = list(range(num_rows - 1, 0, -1))
        self._head = self._rows[0]
        self._write(0, kind=_NODE, num_used=1, rank=-1, max_connections=-1)

    def _write(self, place: int, /, **values: int | bytes) -> None:
        row = self._rows[place]
        for name, value in values.items():
            row[name] = value

    # --- the node server

    def begin(self, pid: int, now: int, num_workers: int, max_connections: int | None) -> None:
        """The node server listens from now on."""
        most = -1 if max_connections is None else max_connections
        self._write(0, pid=pid, started=now, num_workers=num_workers, max_connections=most)

    def drain(self) -> None:
        """It takes no clients any more."""
        self._head["draining"] = 1

    def open_session(self, pid: int, now: int, client: str, rank: int | None, job: str) -> int | None:
        """A row for a session; None if no room is left, in which case nobody sees it.

        Args:
            client: Host and process id of the client, ``"gpu01:2304"``; cut if it is far too long.
            rank: In a distributed job; None outside of one.
            job: Of Slurm.
        """
        # The number at the end tells processes of a host apart.
        host, _, number = client.rpartition(":")
        most = _TEXT_BYTES["client"]
        name = _cut(host, most - len(number.encode(errors="replace")) - 1) + _cut(f":{number}", most)
        known = -1 if rank is None or not 0 <= rank < 2**63 else rank
        return self._open(_SESSION, pid, now, client=name[:most], rank=known, job=_cut(job, _TEXT_BYTES["job"]))

    def open_worker(self, session: int | None, number: int, pid: int, now: int) -> int | None:
        """A row for a worker of the session in row ``session``; None if no room is left."""
        return None if session is None else self._open(_WORKER, pid, now, number=number, session=session, rank=-1)

    def _open(self, kind: int, pid: int, now: int, **values: int | bytes) -> int | None:
        for position in range(len(self._free) - 1, -1, -1):
            place = self._free[position]
            before = int(self._rows[place]["pid"])
            if before in (0, pid) or self._is_gone(before):
                del self._free[position]
                with self._changing():
                    self._rows[place] = np.zeros((), _ROW)
                    self._head["num_used"] = max(self._head["num_used"], place + 1)
                    self._write(place, place=place, pid=pid, started=now, since=now, **values, kind=kind)
                return place
        return None

    def close_worker(self, place: int | None) -> None:
        """The worker has ended; what it has done counts for its session from now on."""
        if place is not None:
            with self._changing():
                self._fold(place, self._rows[place]["session"])

    def close_session(self, place: int | None) -> None:
        """The session has ended, and with it all of its workers; what they have done counts for the node server."""
        if place is None:
            return
        with self._changing():
            used = self._rows[: self._head["num_used"]]
            for worker in np.flatnonzero((used["kind"] == _WORKER) & (used["session"] == place)).tolist():
                self._fold(worker, place)
            self._fold(place, 0)

    def _fold(self, place: int, above: int) -> None:
        row, total = self._rows[place], self._rows[above]
        for name in (*WORK, "ended_workers"):
            total[name] += row[name]
        total["ended_workers"] += row["kind"] == _WORKER
        if row["failed"] > total["failed"]:
            self._write(above, failed=row["failed"], error=row["error"])
        row["kind"] = _FREE
        # It keeps the pid, for the next one to see that this one has gone.
        self._free.append(place)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._head["generation"] += 1
        try:
            yield
        finally:
            self._head["generation"] += 1

    # --- everybody

    def row(self, place: int | None) -> Row:
        """The row at ``place``, for its owner."""
        return Row.private() if place is None else Row(self._rows[place : place + 1])

    def refused(self) -> None:
        """A connection was refused. Any process: those that do so at the same instant may overlook one another."""
        self._head["refused"] += 1

    def look(self) -> View:
        """The table at this moment, from any process that was forked from the one that made it."""
        for _ in range(_MAX_TRIES):
            generation = self._head["generation"]
            rows = self._rows[: self._head["num_used"]].copy()
            if generation % 2 == 0 and self._head["generation"] == generation:
                break
        return decode(rows)


def decode(rows: Any) -> View:
    """Read a copy of the rows that are used. Pure."""
    seen = [
        Seen._make(value.decode(errors="replace") if isinstance(value, bytes) else value for value in row)
        for row in rows.tolist()
    ]
    others = sorted(seen[1:], key=lambda row: (row.started, row.place))
    sessions, workers = ([row for row in others if row.kind == kind] for kind in (_SESSION, _WORKER))
    return View(seen[0], sessions, workers)


def _cut(text: str, num_bytes: int) -> bytes:
    return text.encode(errors="replace")[: max(0, num_bytes)].decode(errors="ignore").encode()
