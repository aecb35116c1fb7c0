"""One thread that sends for all connections of a client, so that a peer that takes nothing holds up none of the others.

A connection sends what it can itself. It wakes the sender for the rest: messages from callers that must not be
interrupted while they send, those of finalizers, and what a kernel has had no room for.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import threading
from collections import deque
from typing import Protocol


class Outlet(Protocol):
    """What has messages to send."""

    def fileno(self) -> int:
        """The descriptor of its socket; -1 once that is closed."""

    def flush(self) -> bool:
        """Send what the kernel takes without a wait; returns False if it has no room for the rest. Never raises."""


class Sender:
    """A thread that flushes outlets."""

    def __init__(self) -> None:
        self._outlets: deque[Outlet] = deque()  # woken, and not flushed since
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._woken, self._waker = io.FileIO(reading), io.FileIO(writing, "w")
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="rpcdl-send", daemon=True)
                self._thread.start()

    def wake(self, outlet: Outlet) -> None:
        """Let the thread flush ``outlet``; also for finalizers: never blocks, takes no lock."""
        self._outlets.append(outlet)
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed
            self._waker.write(b"\0")  # None if the pipe is full

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._write()
            thread.join()
        self.forget()

    def forget(self) -> None:
        """Close the descriptors; for a fork, in the child."""
        self._waker.close()
        self._woken.close()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        blocked: list[Outlet] = []
        while not self._closed:
            self._wait(blocked)
            woken = dict.fromkeys([*blocked, *(self._outlets.popleft() for _ in range(len(self._outlets)))])
            blocked = [outlet for outlet in woken if not outlet.flush()]
            woken.clear()  # this frame must not keep them while it waits

    def _wait(self, blocked: list[Outlet]) -> None:
        """Wait until :meth:`wake` was called, or a kernel has room."""
        # Made anew each time: receivers close the sockets, whose numbers may then be those of others. Such a wait ends
        # early, and nothing else happens.
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        for descriptor in [outlet.fileno() for outlet in blocked]:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLOUT)
        poll.poll()
        self._woken.read(4096)  # None if nothing is there
