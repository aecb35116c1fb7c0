"""How much may wait in a worker: requests that were received, or replies that are not sent.

A loader never comes near: what it asks for is limited on its side. This is for remote calls, of which a script can make
thousands at once with arguments and results of any size.
"""

from __future__ import annotations

import threading


class Room:
    """Counts bytes that wait; thread-safe.

    One message may wait whatever its size, so that a reply of any size is sent while the next one is computed.

    Args:
        max_bytes: While more than this waits, in more than one message, there is no room.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # With a lock that its thread may take twice: a destructor may run anywhere, and write to the log.
        self._changed = threading.Condition(threading.RLock())
        self._num_waiting = 0
        self._waiting_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Something waits; never blocks."""
        with self._changed:
            self._num_waiting += 1
            self._waiting_bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """It waits no more."""
        with self._changed:
            self._num_waiting -= 1
            self._waiting_bytes -= size_bytes
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        return self._num_waiting > 1 and self._waiting_bytes > self._max_bytes

    def wait(self) -> None:
        """Wait until there is room for more."""
        with self._changed:
            while self.is_full:
                self._changed.wait()
