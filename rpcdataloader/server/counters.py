"""One row of numbers per session and worker, in shared memory: what it does, and what it has done.

The node server maps the memory before its first fork, and alone assigns rows. Each process writes its own row, one
aligned word at a time: counting takes no lock and no system call. So the node server can tell what a process does that
hangs, and what one did that was killed.
"""

from __future__ import annotations

import errno
import mmap
from collections import Counter, deque

# Untouched memory takes no room.
NUM_ROWS = 8192

# Bytes of the text of the last error.
_ERROR_BYTES = 192

_NUM_NUMBERS = 13
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
        """Assign a row of zeros; raises ``OSError`` without one."""
        if not self._free:
            raise OSError(errno.ENOSPC, "no room for another process")
        number = self._free.popleft()
        self._memory[number * _ROW_BYTES : (number + 1) * _ROW_BYTES] = bytes(_ROW_BYTES)
        return self.row(number)

    def close(self, row: Row) -> None:
        """Free the row of a process that has ended."""
        self._free.append(row.number)

    def row(self, number: int) -> Row:
        """The row with a number."""
        return Row(number, self._memory[number * _ROW_BYTES : (number + 1) * _ROW_BYTES])
