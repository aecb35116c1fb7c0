"""Trace files: ``RPCDATALOADER_TRACE=trace.json``, and ``loader.trace("trace.json")``.

A file is a JSON array that lacks its last bracket until it is closed. Only whole events are written, so the file of a
killed script can be opened, too. A problem with a file is logged once, and never ends a training. At its end, the trace
says how many batches it lacks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import io
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rpcdataloader.client.sharing import Partition, current_partition
from rpcdataloader.diagnosis.records import Probe, Setup
from rpcdataloader.diagnosis.trace import Tracks

logger = logging.getLogger("rpcdataloader.loader")

VARIABLE = "RPCDATALOADER_TRACE"

# Most bytes of a file. Then a new one begins, and its predecessor is kept: 100 MB in all.
MAX_FILE_BYTES = 50_000_000

# Bytes of pending events, or seconds since the last write, after which events are written.
_BUFFER_BYTES = 1 << 16
_BUFFER_SECONDS = 0.5

_END = b"\n]\n"


class Trace:
    """A trace file. Thread-safe.

    Args:
        path: Path of the file, in which ``{rank}`` stands for the rank of this process.

    Raises:
        ValueError: Several ranks have the same ``path``.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        partition = current_partition()
        self.path = _of_rank(os.fspath(path), partition)
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._tracks = Tracks(f"{partition.label}trainer (pid {os.getpid()})", time.monotonic())
        self._buffer: bytearray
        self._write_at: float  # time of the next write
        self._num_unwritten = 0  # batches since the last write
        self._begin_file()
        with contextlib.suppress(OSError):
            self._before.unlink()
        self._pid = os.getpid()

    @property
    def _before(self) -> Path:
        """The predecessor of this file."""
        return self.path.with_name(f"{self.path.stem}.before{self.path.suffix}")

    def __call__(self, probe: Probe, setup: Setup, worker: int) -> None:
        """Add a batch that the calling thread was delivered."""
        with self._lock, self._never_failing():
            self._num_unwritten += 1
            if self._file.closed or os.getpid() != self._pid:
                return
            consumer = f"consumer ({threading.current_thread().name})"
            for event in self._tracks.events_of(probe, setup, worker, consumer):
                self._buffer += b",\n" + event.encode()
            now = time.monotonic()
            if len(self._buffer) >= _BUFFER_BYTES or now >= self._write_at:
                self._write_at = now + _BUFFER_SECONDS
                self._write_buffer()

    def close(self) -> None:
        """Write pending events; idempotent."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            with self._never_failing():
                if not self._file.closed:
                    self._buffer += _END
                    self._write_buffer()
                    self._file.close()
            if self._num_unwritten:
                logger.warning("the trace %s lacks the last %d batches", self.path, self._num_unwritten)
                self._num_unwritten = 0

    @contextlib.contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Close the file for good at the first failure in the block."""
        try:
            yield
        except Exception as error:
            logger.warning("the trace %s ends here, and the training goes on: %r", self.path, error)
            with contextlib.suppress(OSError):
                self._file.close()

    def _begin_file(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        try:
            # A second trace would write into the middle.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
        except OSError as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, "another trace is being written there") from None
            raise
        self._size_bytes, self._write_at = 0, 0.0
        self._buffer = bytearray(b"[\n" + ",\n".join(self._tracks.names).encode())

    def _write_buffer(self) -> None:
        if self._size_bytes + len(self._buffer) + len(_END) > MAX_FILE_BYTES:
            _write(self._file, _END)
            self._file.close()
            self.path.replace(self._before)
            events = self._buffer
            self._begin_file()
            self._buffer += events
        try:
            _write(self._file, bytes(self._buffer))
        except OSError:
            self._file.truncate(self._size_bytes)  # without half an event
            raise
        self._size_bytes += len(self._buffer)
        self._buffer.clear()
        self._num_unwritten = 0


def _write(file: io.FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _of_rank(path: str, partition: Partition) -> Path:
    if partition.world_size > 1 and "{rank}" not in path:
        raise ValueError(
            f"all {partition.world_size} ranks would write the trace {path}: put {{rank}} into its name, as in "
            f"{Path(path).stem}-{{rank}}{Path(path).suffix}"
        )
    return Path(path.replace("{rank}", str(partition.rank)))


_opening = threading.Lock()


def trace_of_process() -> Trace | None:
    """The environment's trace, the same for all loaders; None without one, or after a failure."""
    path = os.environ.get(VARIABLE)
    with _opening:
        return _begin_once(path, os.getpid()) if path else None


@functools.cache
def _begin_once(path: str, _pid: int) -> Trace | None:
    trace = begin_trace(path)
    if trace is not None:
        atexit.register(trace.close)
    return trace


def begin_trace(path: str | os.PathLike[str]) -> Trace | None:
    """Begin a trace; None, with a warning, if its file cannot be written, or is that of several ranks."""
    try:
        return Trace(path)
    except (OSError, ValueError) as error:
        logger.warning("cannot write the trace %s, and the training goes on without it: %s", path, error)
        return None
