"""One row per process of a node server, in shared memory: its identity, present work and past work.

The node server maps the memory before its first fork. It alone assigns rows, and frees them when their process has
ended. Each process writes its own row, one aligned word at a time: counting takes no lock and no system call. Readers
copy the rows without disturbing any process.

A copy may show a row in the middle of a change, such as a request counted both as answered and as running. Totals never
decrease: the counts of an ended process move to the row of its session, and then to that of the node server. A sequence
counter tells readers to copy again if rows moved meanwhile.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from rpcdataloader.wire.status import MAX_REPORT_BYTES

# Untouched memory takes no room.
NUM_ROWS = 8192

FREE, NODE, GATE, SESSION, WORKER = range(5)

# Counts that move to the row above when a process has ended.
TOTALS = ("tasks", "calls", "errors", "traffic", "ended_workers")

# All numbers have 8 bytes, so that readers never see half a store. Texts are cut at their length in bytes. Times are
# CLOCK_MONOTONIC in nanoseconds, the same for all processes of a machine.
ROW = np.dtype(
    [
        # Written by the node server:
        ("kind", "i8"),
        ("pid", "i8"),  # kept in a freed row, to see whether the process has gone
        ("started", "i8"),
        ("session", "i8"),  # place of a worker's session; 0, the place of the node server, for all others
        ("number", "i8"),  # of a worker in its session
        ("rank", "i8"),  # of a session's client in a distributed job; -1 outside of one
        ("client", "S264"),  # host and process id
        ("job", "S64"),  # of Slurm
        # Written by the owner:
        ("running", "i8"),  # running requests
        ("since", "i8"),  # time at which running changed last
        ("unanswered", "i8"),  # received requests without a reply, including running ones
        ("draining", "i8"),  # 1 if new requests are declined
        ("batch", "i8"),  # present batch of a loader's worker,
        ("sample", "i8"),  # and its sample: see fetch/samples.py
        # Work of a worker; in a row above, that of its ended processes:
        ("tasks", "i8"),
        ("calls", "i8"),
        ("errors", "i8"),
        ("traffic", "i8", 2),  # bytes received and sent
        ("ended_workers", "i8"),
        ("failed", "i8"),  # time of the last error; 0 without one
        ("error", "S192"),
        ("num_reports", "i8"),  # of a client; the parity selects the half with the last one
        # Used in the first row only, that of the node server:
        ("generation", "i8"),  # odd while rows are moved about
        ("num_used", "i8"),  # rows up to the last one ever used
        ("refused", "i8"),  # connections
    ]
)

# After this many attempts, a reader takes rows that are still moving.
_MAX_TRIES = 100


# A row: for its owner, with a view of each field under its name (``row.tasks[0] += 1``); in a reader's copy, with plain
# values.
Row = SimpleNamespace


# Each client has memory for two reports, of which one is whole at any time.
_REPORT = np.dtype([("time", "i8"), ("size", "i8"), ("payload", f"V{MAX_REPORT_BYTES}")])


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


class CounterTable:
    """The rows. Created before the first fork; only the creating process assigns and frees them.

    Args:
        num_rows: Number of rows, and so of processes, this one included.
        is_gone: Function that tells whether a process id is unused. Workers outlive a killed session for a moment, and
            keep their rows until then.
    """

    def __init__(self, num_rows: int = NUM_ROWS, is_gone: Callable[[int], bool] = _is_gone) -> None:
        self._rows: Any = np.frombuffer(mmap.mmap(-1, num_rows * ROW.itemsize), ROW)
        self._reports: Any = np.frombuffer(mmap.mmap(-1, num_rows * 2 * _REPORT.itemsize), _REPORT).reshape(-1, 2)
        self._is_gone = is_gone
        self._free = list(range(num_rows - 1, 0, -1))
        self._head = self._rows[0]
        self.describe(0, kind=NODE, pid=os.getpid(), started=time.monotonic_ns(), num_used=1)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._head["generation"] += 1
        try:
            yield
        finally:
            self._head["generation"] += 1

    # --- the node server

    def open(self, kind: int, pid: int, now: int, **values: int) -> int:
        """Assign a row, with further known fields, to a process; returns its place. Raises ``OSError`` without one."""
        for position in range(len(self._free) - 1, -1, -1):
            place = self._free[position]
            before = int(self._rows[place]["pid"])
            if before in (0, pid) or self._is_gone(before):
                del self._free[position]
                self._rows[place] = np.zeros((), ROW)
                self._head["num_used"] = max(self._head["num_used"], place + 1)
                self.describe(place, pid=pid, started=now, since=now, **values, kind=kind)
                return place
        raise OSError(errno.ENOSPC, f"at most {len(self._rows) - 1} processes can serve connections")

    def describe(self, place: int, **values: int | str) -> None:
        """Fill in fields of the process at ``place``."""
        row = self._rows[place]
        with self._changing():
            for name, value in values.items():
                row[name] = value.encode(errors="replace") if isinstance(value, str) else value

    def close(self, place: int) -> None:
        """Free the row of an ended process and, for a session, those of its workers."""
        with self._changing():
            used = self._rows[: self._head["num_used"]]
            for worker in np.flatnonzero((used["kind"] == WORKER) & (used["session"] == place)).tolist():
                self._fold(worker)
            self._fold(place)

    def _fold(self, place: int) -> None:
        row = self._rows[place]
        above = self._rows[row["session"]]
        for name in TOTALS:
            above[name] += row[name]
        above["ended_workers"] += row["kind"] == WORKER
        if row["failed"] > above["failed"]:
            above["failed"], above["error"] = row["failed"], row["error"]
        row["kind"] = FREE
        self._free.append(place)

    # --- every process

    def row(self, place: int) -> Row:
        """The row at ``place``, for its owner; only one thread may write at a time.

        A store through a view of a number takes a tenth of the time of a store by name.
        """
        row = self._rows[place : place + 1]
        views = {name: row[name].reshape(-1) for name in ROW.fields or ()}
        fields = {name: memoryview(view) if view.dtype == "i8" else view for name, view in views.items()}
        return Row(place=place, **fields)

    def report(self, place: int, payload: bytes | bytearray | memoryview, now: int) -> None:
        """Keep a client's last report, for its session at ``place``; longer ones than fit are dropped."""
        if len(payload) <= MAX_REPORT_BYTES:
            row = self._rows[place]
            # Readers use the previous report until this one is whole.
            number = row["num_reports"] + 1
            self._reports[place, number % 2] = now, len(payload), bytes(payload)
            row["num_reports"] = number

    def refused(self) -> None:
        """Count a refused connection."""
        self._head["refused"] += 1

    def look(self) -> list[Row]:
        """Return the rows in use; the first is that of the node server.

        Each has its ``place`` and its ``report`` (empty without one) with the time ``reported``.
        """
        for _ in range(_MAX_TRIES):
            generation = self._head["generation"]
            rows = self._rows[: self._head["num_used"]].copy()
            if generation % 2 == 0 and self._head["generation"] == generation:
                break
        places = np.flatnonzero(rows["kind"] != FREE)
        found = zip(places.tolist(), rows[places].tolist(), strict=True)
        names = rows.dtype.names
        looked = [Row(place=place, **dict(zip(names, map(_plain, row), strict=True))) for place, row in found]
        for row in looked:
            row.reported, row.report = self._report_of(row.place) if row.num_reports else (0, b"")
        return looked

    def _report_of(self, place: int) -> tuple[int, bytes]:
        row = self._rows[place]
        for _ in range(_MAX_TRIES):
            if not (number := int(row["num_reports"])):
                break
            reported, size, payload = self._reports[place, number % 2].tolist()
            # Otherwise two newer reports may have come meanwhile.
            if row["num_reports"] == number:
                return reported, payload[:size]
        return 0, b""


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="ignore")
    return value.tolist() if isinstance(value, np.ndarray) else value
