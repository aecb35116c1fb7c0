"""Standard output and error, without waiting for their readers.

A terminal that Ctrl-S has stopped, or a full pipe, would block a process in the middle of its next line.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import time

# A reader that is slow for a moment loses nothing; one that has stopped costs no more memory than this.
MAX_WAITING_BYTES = 1 << 20

# The least level of a record, and its priority: see syslog(3).
_PRIORITIES = (logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6)


def is_journal(descriptor: int) -> bool:
    """Whether a descriptor is a stream of systemd's journal, which puts time and origin in front of each line."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class JournalFormatter(logging.Formatter):
    """Puts the priority of a record in front of each of its lines, as the journal takes it: see sd-daemon(3)."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        level = record.levelno
        number = next((each for least, each in _PRIORITIES if level >= least), 7)
        return f"<{number}>" + super().format(record).replace("\n", f"\n<{number}>")


class Output:
    """Writes to a descriptor of this process; never waits. For one thread.

    Text that finds no room waits for the next call. Beyond a limit, lines are left out, and a line says how many once
    there is room.

    Args:
        descriptor: 1 or 2; nothing is written if the process was started without it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _open_again(descriptor)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._waiting = bytearray()
        self._num_left_out = 0

    def fileno(self) -> int:
        return self._descriptor

    @property
    def is_waiting(self) -> bool:
        """Whether text waits for room."""
        return bool(self._waiting)

    def write(self, text: str) -> None:
        """Write lines, now or with a later call; errors, such as a full disk, lose them."""
        self.flush()
        if self._num_left_out or len(self._waiting) > MAX_WAITING_BYTES:
            self._num_left_out += text.count("\n")
            return
        self._waiting += text.encode(errors="backslashreplace")
        self.flush()

    def flush(self) -> None:
        """Write waiting text as far as there is room."""
        try:
            # A pipe with any room takes this much. A terminal may take less.
            while self._waiting and self._poll.poll(0):
                del self._waiting[: os.write(self._descriptor, self._waiting[: select.PIPE_BUF])]
        except BlockingIOError:
            return
        except OSError:
            self._waiting.clear()
        if self._num_left_out and not self._waiting:
            num_left_out, self._num_left_out = self._num_left_out, 0
            self.write(f"rpcdataloader: left {num_left_out} lines out here, as they were not read in time\n")

    def finish(self, seconds: float = 1.0) -> None:
        """Write waiting text, for at most that many seconds."""
        deadline = time.monotonic() + seconds
        self.flush()
        while self._waiting and (remaining := deadline - time.monotonic()) > 0:
            self._poll.poll(remaining * 1000)
            self.flush()

    def forget(self) -> None:
        """Drop waiting text, in a fork: its parent writes that."""
        self._waiting.clear()
        self._num_left_out = 0

    def close(self) -> None:
        """Close it, in a fork with its own standard streams: a server without one may have taken its descriptor."""
        if self._descriptor > 2:
            os.close(self._descriptor)


def _open_again(descriptor: int) -> int:
    if (sys.__stdout__, sys.__stderr__)[descriptor - 1] is None:
        return os.open(os.devnull, os.O_WRONLY)
    # Not to wait is a property of an open file, and this one belongs to our starter as well. So pipes and terminals are
    # opened anew. Sockets cannot be, and another user's files may not: they get little at a time, if there is room.
    # Regular files never wait.
    if stat.S_ISFIFO(mode := os.fstat(descriptor).st_mode) or stat.S_ISCHR(mode):
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            pass
    return os.dup(descriptor)
