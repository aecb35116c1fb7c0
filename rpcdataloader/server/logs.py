"""The output and warnings of sessions and workers.

Output goes through a pipe to the node server, which logs each line with its origin in front. The descriptors themselves
are replaced, so that output of C libraries is caught. Warnings, and log records of that level and above, also go to the
client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sched
import sys
import time
from collections.abc import Callable
from typing import Any

from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.output import JournalFormatter, Output
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.server import events
from rpcdataloader.server.events import Link
from rpcdataloader.server.processes import Loop
from rpcdataloader.wire.messages import MAX_CHARS, printable

logger = logging.getLogger("rpcdataloader.server")

# Longest line of output, so that a worker without line feeds cannot grow the node server.
MAX_LINE = 8192

# Bytes read from a pipe after the end of its process; more than a pipe holds by default.
MAX_LEFT_BYTES = 1 << 20

# Limit on the lines that are forwarded to a client: a loop that prints in every sample reaches it. With a line's
# overhead, at most a thousand pass in a second.
MAX_BYTES_PER_SECOND = 64 << 10
_LINE_BYTES = 64

# Limit on the log lines about strangers, who can be refused at any rate: a number per period, in seconds.
MAX_REFUSALS = 20
REFUSALS_PERIOD = 10.0

# What tells processes apart in a reason.
_PID = re.compile(r" \(pid \d+\)")

# Limit on the warnings that a client gets: each text once, and this many different ones per ten seconds.
MAX_RECORDS = 20
RECORDS_PERIOD = 10.0
MAX_REMEMBERED = 1000


def redirect_output(write_end: int) -> None:
    """Send this process's output, and its log, into a pipe, whose descriptor is closed."""
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not if user code replaced it
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, Output):
            handler.setStream(sys.stderr)
            if isinstance(handler.formatter, JournalFormatter):  # the origin comes first, which a dataset cannot forge
                handler.setFormatter(logging.Formatter(handler.formatter._fmt))


class OutputReader:
    """The node server's end of an output pipe.

    Args:
        descriptor: Read end; owned by this object.
        take: Function that takes each finished line, without its line feed.
    """

    def __init__(self, descriptor: int, take: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._take = take
        self._rest = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Read what is there; returns False, and closes the pipe, once all writers have closed theirs."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_LINE):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._take(line[:MAX_LINE].decode(errors="replace"))
        if not data:
            os.close(self._descriptor)
        return bool(data)

    def finish(self) -> None:
        """Read what has been written so far and close, even while other processes hold the other end."""
        # No more than a pipe holds: a writer may never stop.
        for _ in range(MAX_LEFT_BYTES // 65536):
            if not self.read():
                return
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
        os.close(self._descriptor)


class Forwarding:
    """Forwards lines of output to a client, as events for its session, within a limit of bytes per second.

    After the first line left out, all are until the second is over, so that the note stands in their place.
    """

    def __init__(self, session: Link, loop: Loop) -> None:
        self._session = session
        self._loop = loop
        self._end = 0.0  # of the present second
        self._room = 0
        self._num_left_out = 0
        self._timer: sched.Event | None = None  # of the note

    def take(self, line: str, name: str) -> None:
        """Forward a line of ``name``, such as ``worker 3``, or count it."""
        # A progress bar rewrites its line: only its last state counts.
        text = line.rstrip("\r").rpartition("\r")[2][:MAX_CHARS]
        now = time.monotonic()
        if now >= self._end and not self._num_left_out:
            self._end, self._room = now + 1.0, MAX_BYTES_PER_SECOND
        self._room -= len(text.encode(errors="replace")) + _LINE_BYTES
        # The session may be busy, and the node server neither waits for it nor fills the queue, which has other uses.
        if self._room >= 0 and not self._session.is_half_full and self._session.offer(events.Printed(text, name)):
            return
        self._room = -1
        self._num_left_out += 1
        if self._num_left_out == 1:
            self._timer = self._loop.call_after(self._end - now, self._note)

    def _note(self) -> None:
        if self._session.offer(events.Printed(f"{self._num_left_out} lines left out", "")):
            self._num_left_out = 0
        else:
            self._timer = self._loop.call_after(1.0, self._note)

    def close(self) -> None:
        """Forward nothing more: the session has ended."""
        self._loop.cancel(self._timer)


class RateLimit:
    """A number of turns per period, in seconds."""

    def __init__(self, count: int, period: float) -> None:
        self._count = count
        self._period = period
        self._start = 0.0
        self._num_asked = 0

    def take(self) -> int | None:
        """Request one turn: None if it is refused, else the number of refusals in the period before."""
        now = time.monotonic()
        num_refused = 0
        if now - self._start > self._period:
            num_refused = max(0, self._num_asked - self._count)
            self._start, self._num_asked = now, 0
        self._num_asked += 1
        return num_refused if self._num_asked <= self._count else None


class LimitedLog:
    """The node server's lines that strangers, or a client that tries repeatedly, could cause at any rate.

    Attributes:
        num_refused: Number of connections refused so far.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        self._limit = RateLimit(MAX_REFUSALS, REFUSALS_PERIOD)
        self._seldom = Seldom()

    def refused(self, refused: events.Refused) -> None:
        """Count a refused connection, and log it."""
        self.num_refused += 1
        # One that tries again has another port, and perhaps another process id.
        host = "" if refused.is_ours else refused.peer.rpartition(":")[0]
        if self._seldom.is_due(f"{host} {_PID.sub('', refused.reason)}"):
            self.log(refused.level, "refused %s: %s", refused.peer, printable(refused.reason))

    def closed(self, peer: str, reason: str) -> None:
        """Count a connection that has made room for others, and log it."""
        self.num_refused += 1
        self.log(logging.INFO, "closed a connection from %s: %s", peer, reason)

    def log(self, level: int, text: str, *values: object) -> None:
        """Log a line, or count it."""
        num_left_out = self._limit.take()
        if num_left_out is None:
            return
        if num_left_out:
            logger.info("left %d lines about connections out of this log", num_left_out)
        logger.log(level, text, *values)


class ClientHandler(logging.Handler):
    """Passes records of warning level and above to the client: each text once, and within a rate limit.

    ``send`` takes the fields of one LOG message. It is called from any thread, and must not block.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._seen: set[tuple[str, str]] = set()
        self._limit = RateLimit(MAX_RECORDS, RECORDS_PERIOD)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
        except Exception:
            self.handleError(record)
            return
        text = text[:MAX_LINE]
        key = (record.name, text)
        if key in self._seen or self._limit.take() is None:
            return
        if len(self._seen) >= MAX_REMEMBERED:
            self._seen.clear()
        self._seen.add(key)
        self._send({"level": record.levelno, "logger": record.name, "text": text})


def forward_warnings(send: Callable[[dict[str, Any]], None]) -> None:
    """Pass this process's warnings and log records to the client (see :class:`ClientHandler`), and to no other one."""
    _stop_forwarding()
    logging.getLogger().addHandler(ClientHandler(send))
    logging.captureWarnings(True)


def _stop_forwarding() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ClientHandler)]:
        root.removeHandler(handler)


# A fork lacks the connection, and the thread that sends over it, which may hold its lock.
at_fork(Part.LOGS, in_child=_stop_forwarding)
