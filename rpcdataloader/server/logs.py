"""The output and warnings of sessions and workers.

Output goes through a pipe to the node server, which logs each line with its origin in front. The descriptors themselves
are replaced, so that output of C libraries is caught. Warnings, and log records of that level and above, also go to the
client.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from rpcdataloader.host.output import Output
from rpcdataloader.wire.handshake import Identity

# Longest line of output, so that a worker without line feeds cannot grow the node server.
MAX_LINE = 8192

# Bytes read from a pipe after the end of its process; more than a pipe holds by default.
MAX_LEFT_BYTES = 1 << 20

# Limit on the warnings that a client gets: each text once, and this many different ones per ten seconds.
MAX_RECORDS = 20
RECORDS_PERIOD = 10.0
MAX_REMEMBERED = 1000


def redirect_output() -> int:
    """Send this process's output, and its log, into a new pipe; returns the read end, which the caller owns."""
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not if user code replaced it
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, Output):
            handler.setStream(sys.stderr)
    return read_end


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


class SharedLimit:
    """A rate limit, shared with all processes that are forked from here on.

    It has no lock: processes that count at the same instant may miss each other, which a limit can bear.
    """

    def __init__(self, count: int, period: float) -> None:
        self._count = count
        self._period = period
        # Anonymous memory, which forks share: start of the period, and number of requests in it.
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("d")

    def take(self) -> int | None:
        """Request one turn: None if it is refused, else the number of refusals in the period before."""
        start, num_asked = self._shared
        now = time.monotonic()
        num_refused = 0
        if now - start > self._period:
            num_refused = max(0, int(num_asked) - self._count)
            self._shared[0], num_asked = now, 0
        self._shared[1] = num_asked + 1
        return num_refused if num_asked < self._count else None


class ClientHandler(logging.Handler):
    """Passes records of warning level and above to the client: each text once, and within a rate limit.

    ``send`` takes the fields of one LOG message. It is called from any thread, and must not block.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._seen: set[tuple[str, str]] = set()
        self._limit = SharedLimit(MAX_RECORDS, RECORDS_PERIOD)

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


def tell_client(send: Callable[[dict[str, Any]], None]) -> None:
    """Pass this process's warnings and log records to the client (see :class:`ClientHandler`), and to no other one."""
    tell_nobody()
    logging.getLogger().addHandler(ClientHandler(send))
    warnings.showwarning = _show_warning


def tell_nobody() -> None:
    """Undo :func:`tell_client`, in a fork with another connection."""
    for handler in _client_handlers():
        logging.getLogger().removeHandler(handler)


def _client_handlers() -> list[ClientHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, ClientHandler)]


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    stream = sys.stderr if file is None else file
    if stream is not None:
        stream.write(warnings.formatwarning(message, category, filename, lineno, line))
    text = f"{category.__name__}: {message} ({filename}:{lineno})"
    for handler in _client_handlers():
        handler.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, text, (), None))


@dataclass(frozen=True, slots=True)
class Origin:
    """A client, in its own words."""

    client: str  # host and process id, ``"gpu01:2304"``
    rank: int | None  # rank in a distributed job; None outside of one
    job: str  # Slurm job; empty outside of one

    @classmethod
    def of(cls, identity: Identity) -> Origin:
        """The origin of an authenticated peer."""
        return cls(f"{identity.host}:{identity.pid}", identity.rank, identity.job)
