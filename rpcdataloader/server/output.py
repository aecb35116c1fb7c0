"""Where standard output, warnings and log records of sessions and workers go.

Output goes through a pipe to the node server, which writes it to its log with the origin in front of every line. The
descriptors themselves are replaced, so that C libraries are caught. Warnings, and log records of that level and
above, also go to the client that they belong to.
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
from typing import Any, TextIO

from rpcdataloader.server.loop import Loop

# A line of output is cut here, so that a worker without line feeds cannot grow the node server.
MAX_LINE = 8192

# What is taken from a pipe after the end of whoever was meant to write to it; more than it holds by default.
MAX_LEFT_BYTES = 1 << 20

# What a client is told of its workers' warnings: each text once, and this many different ones per ten seconds.
MAX_RECORDS = 20
RECORDS_PERIOD = 10.0
MAX_REMEMBERED = 1000


def redirect_output() -> int:
    """Send this process's standard output and error into a new pipe; returns its read end, which the caller owns."""
    read_end, write_end = os.pipe()
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # not if somebody replaced it
    return read_end


class OutputReader:
    """The node server's end of such a pipe.

    Args:
        descriptor: Read end; owned by this object.
        take: Takes each finished line, without its line feed.
    """

    def __init__(self, descriptor: int, take: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._take = take
        self._rest = b""
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._descriptor

    def read(self) -> bool:
        """Take what is there; returns False, and closes the pipe, once all writers have closed theirs."""
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
        """Take what has been written so far and close, whoever still holds the other end."""
        with contextlib.suppress(BlockingIOError):
            # As much as a pipe holds, and no more: there may be somebody who never stops.
            for _ in range(MAX_LEFT_BYTES // 65536):
                self._rest += os.read(self._descriptor, 65536)
        for line in self._rest.splitlines():
            self._take(line[:MAX_LINE].decode(errors="replace"))
        os.close(self._descriptor)


class Outputs:
    """The pipes of all sessions and workers of a node server."""

    def __init__(self, loop: Loop, write: Callable[[str], None]) -> None:
        self._loop = loop
        self._write_line = write
        self._readers: set[OutputReader] = set()

    def add(self, descriptor: int, prefix: str, forward: Callable[[str], bool] = lambda _line: False) -> None:
        """Read from a pipe, which is owned by this object from now on, until its other end is closed.

        Args:
            prefix: Put in front of every line.
            forward: Asked for every line before it is written; True for one that is not to be.
        """
        reader = OutputReader(descriptor, lambda line: None if forward(line) else self._write(f"{prefix} {line}\n"))
        self._readers.add(reader)
        self._loop.watch(descriptor, lambda: self._on_output(reader))

    def _on_output(self, reader: OutputReader) -> None:
        if not reader.read():
            self._loop.unwatch(reader.fileno())
            self._readers.discard(reader)

    def _write(self, line: str) -> None:
        # A full disk, or a terminal that is gone, must not take the datasets of all clients with it.
        with contextlib.suppress(OSError, ValueError):
            self._write_line(line)

    def finish(self) -> None:
        """Write what was printed last, which is still in the pipes of those that have ended."""
        for reader in self._readers:
            reader.finish()

    def forget_in_child(self) -> None:
        """Close, in a fork, what belongs to the node server."""
        for reader in self._readers:
            os.close(reader.fileno())


class SharedLimit:
    """A limit on how often something is done, shared with every process that is forked from here on.

    There is no lock: processes that count at the same instant may overlook one another, which a limit can bear.

    Args:
        period: Seconds.
    """

    def __init__(self, count: int, period: float) -> None:
        self._count = count
        self._period = period
        # Anonymous memory, which forks do not copy: start of the period, and how often was asked in it.
        self._shared = memoryview(mmap.mmap(-1, 16)).cast("d")

    def take(self) -> int | None:
        """Ask to do it once: None for no, else how often the answer has been no in the period before."""
        start, num_asked = self._shared
        now = time.monotonic()
        num_refused = 0
        if now - start > self._period:
            num_refused = max(0, int(num_asked) - self._count)
            self._shared[0], num_asked = now, 0
        self._shared[1] = num_asked + 1
        return num_refused if num_asked < self._count else None


class ClientHandler(logging.Handler):
    """Passes records of warning level and above to the client, each text once and not too many at a time.

    Args:
        send: Takes the fields of one LOG message; called from any thread and must not block.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._seen: set[tuple[str, str]] = set()
        self._limit = SharedLimit(MAX_RECORDS, RECORDS_PERIOD)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass ``record`` on, unless it was seen before or the limit is reached."""
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
    """Pass on warnings and log records of this process from now on; ``send`` as in :class:`ClientHandler`.

    Called again, it replaces what was set up before.
    """
    tell_nobody()
    logging.getLogger().addHandler(ClientHandler(send))
    warnings.showwarning = _show_warning


def tell_nobody() -> None:
    """Undo :func:`tell_client`: in a fork, whose connection is another one."""
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
