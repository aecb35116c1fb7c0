"""Timing of those requests of a worker that ask for it: about 50 per second at most."""

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
        self._sending = self._peer_limited = 0.0  # at the previous measured reply
        self._reply = 0.0  # seconds of the previous one
        self._leaving: collections.deque[float] = collections.deque()  # times since which measured replies wait

    def begin(self, idle: float) -> None:
        """Start timing a request.

        Args:
            idle: Seconds that the worker has waited for the request; 0 if it was already here.
        """
        self._idle = idle
        self._runqueue = self._read_runqueue()
        self._cpu = time.process_time()

    def encodes(self) -> None:
        """Note that the result is ready to be pickled."""
        self._encode = time.perf_counter()

    def end(self) -> bytes:
        """Return the stages of a reply that is ready to be sent."""
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
        """Note that the oldest waiting measured reply was written, in any thread."""
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
