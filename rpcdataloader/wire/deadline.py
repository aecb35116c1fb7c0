"""A limit of time that several steps share, and that another thread can end early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def _do_nothing() -> None:
    pass


class Deadline:
    """A point in time that bounds several steps together.

    Args:
        timeout: Seconds from now, or None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout
        self._cancelled = threading.Event()
        self._interrupt: Callable[[], None] = _do_nothing

    def remaining(self) -> float | None:
        """Seconds left, never negative; None when there is no limit."""
        if self._cancelled.is_set():
            return 0.0
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def cancel(self) -> None:
        """Let the time be over now, and end pauses and waits of others; from any thread, idempotent."""
        self._cancelled.set()
        self._interrupt()

    def when_cancelled(self, interrupt: Callable[[], None]) -> None:
        """Have a wait of another kind ended by :meth:`cancel`, or now if that was called already.

        Args:
            interrupt: Replaces the one before. May be called twice.
        """
        self._interrupt = interrupt
        if self._cancelled.is_set():
            interrupt()

    def pause(self, seconds: float) -> bool:
        """Wait for ``seconds``; returns False at once if that would be beyond the limit, or when cancelled."""
        remaining = self.remaining()
        if remaining is not None and remaining <= seconds:
            return False
        return not self._cancelled.wait(seconds)
