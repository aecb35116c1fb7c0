"""Measures the requests of a worker that ask for it: at most some 50 per second, whatever the others are."""

from __future__ import annotations

import collections
import contextlib
import os
import time

from rpcdataloader.wire.stages import Stages
from rpcdataloader.wire.transport import Stream


class Meter:
    """The stages of one request at a time, in the worker's main thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._schedstat: int | None = None  # descriptor; -1 where the kernel does not tell
        self._idle = self._cpu = self._runqueue = self._encode = 0.0
        self._sending = self._peer_limited = 0.0  # at the measured reply before
        self._reply = 0.0  # seconds of the one before
        self._leaving: collections.deque[float] = collections.deque()  # since when measured replies wait to be written

    def begin(self, idle: float) -> None:
        """A request that is measured begins.

        Args:
            idle: Seconds that the worker has waited for it; 0 if it was there.
        """
        self._idle = idle
        self._runqueue = self._read_runqueue()
        self._cpu = time.process_time()

    def encodes(self) -> None:
        """The result is there, and is pickled now."""
        self._encode = time.perf_counter()

    def end(self) -> bytes:
        """The reply is made, and will be sent now; returns its stages."""
        encode = time.perf_counter() - self._encode
        cpu, runqueue = time.process_time() - self._cpu, self._read_runqueue() - self._runqueue
        sending, peer_limited = self._stream.sending_times()
        stages = Stages(
            idle=self._idle,
            encode=encode,
            reply=self._reply,
            cpu=cpu,
            runqueue=runqueue,
            sending=sending - self._sending,
            peer_limited=peer_limited - self._peer_limited,
        )
        self._sending, self._peer_limited = sending, peer_limited
        self._leaving.append(time.perf_counter())
        return stages.pack()

    def left(self) -> None:
        """The first of the measured replies that wait was written; in whichever thread has done so."""
        self._reply = time.perf_counter() - self._leaving.popleft()

    def _read_runqueue(self) -> float:
        """Seconds that the main thread has waited for a CPU (sched-stats, "/proc/<pid>/schedstat")."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._schedstat is None:
                self._schedstat = -1
                self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            if self._schedstat >= 0:
                return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9
        return 0.0
