"""Trace files: ``RPCDATALOADER_TRACE=trace.json``, and ``loader.trace("trace.json")``.

A file is a JSON array that lacks its last bracket until it is closed. Only whole events are written, so the file of a
killed script can be opened, too. Problems with a file are logged once, and never end a training.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
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

# Size at which a new file begins; its predecessor is kept: 100 MB in all.
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
        self._descriptor: int | None = None
        self._buffer = bytearray()
        self._size_bytes, self._write_at = 0, 0.0  # of the file, and time of the next write
        try:
            self._begin_file()
            self._before.unlink(missing_ok=True)
        except OSError as error:
            raise type(error)(error.errno, f"cannot write a trace: {error.strerror}", str(self.path)) from None
        self._pid = os.getpid()

    @property
    def _before(self) -> Path:
        """The predecessor of this file."""
        return self.path.with_name(f"{self.path.stem}.before{self.path.suffix}")

    def __call__(self, probe: Probe, setup: Setup, worker: int) -> None:
        """Add a batch that the calling thread was delivered."""
        with self._lock, self._never_failing():
            if self._descriptor is None or os.getpid() != self._pid:
                return
            consumer = f"consumer ({threading.current_thread().name})"
            for event in self._tracks.events_of(probe, setup, worker, consumer):
                self._buffer += b",\n" + event.encode()
            now = time.monotonic()
            if len(self._buffer) >= _BUFFER_BYTES or now >= self._write_at:
                self._write_at = now + _BUFFER_SECONDS
                self._write_buffer(self._descriptor)

    def close(self) -> None:
        """Write pending events; idempotent."""
        with self._lock, self._never_failing():
            if self._descriptor is not None and os.getpid() == self._pid:
                self._buffer += _END
                self._write_buffer(self._descriptor)
                self._close_file()

    @contextlib.contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Close the file for good at the first failure in the block."""
        try:
            yield
        except Exception as error:
            logger.warning("the trace %s ends here, and the training goes on: %r", self.path, error)
            self._close_file()

    def _begin_file(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # A second process would write into the middle.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            self._close_file()
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(error.errno, "another process writes it") from None
            raise
        self._size_bytes, self._write_at = 0, 0.0
        self._buffer = bytearray(b"[\n" + ",\n".join(self._tracks.names).encode())

    def _write_buffer(self, descriptor: int) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        try:
            _write(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, self._size_bytes)  # without half an event
            raise
        self._size_bytes += len(data)
        if self._size_bytes >= MAX_FILE_BYTES:
            _write(descriptor, _END)
            self._close_file()
            self.path.replace(self._before)
            self._begin_file()

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


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
        return _open(path, os.getpid()) if path else None


@functools.cache
def _open(path: str, _pid: int) -> Trace | None:
    try:
        trace = Trace(path)
    except (OSError, ValueError) as error:
        logger.warning("cannot write the trace of %s=%s: %s", VARIABLE, path, error)
        return None
    atexit.register(trace.close)
    return trace
