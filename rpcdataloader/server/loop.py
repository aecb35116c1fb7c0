"""The event loop of a single-threaded process, and a node server's descriptors other than its children."""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable


class Loop:
    """Waits for descriptors, in a node server or a session."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def watch(self, descriptor: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        """Call ``handler`` on any of ``events``. The handler must cope with finding nothing to read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop calling its handler; idempotent. Call this before the descriptor is closed."""
        if self._handlers.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def wait(self, timeout: float | None) -> None:
        """Wait for events, and call their handlers.

        Args:
            timeout: Seconds; None for no limit.
        """
        for descriptor, _events in self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000 + 1):
            # An earlier handler of this round may have dropped the descriptor, or even reused its number.
            if handler := self._handlers.get(descriptor):
                handler()


class Door:
    """The listening socket of a node server, unwatched while there is no room for another connection.

    Args:
        listener: Owned by this object.

    Attributes:
        due: Time of the next :meth:`open`.
    """

    def __init__(self, listener: socket.socket, loop: Loop, on_connection: Callable[[], object]) -> None:
        # A connection may go away between poll and accept.
        listener.setblocking(False)
        self.listener = listener
        self._loop = loop
        self._on_connection = on_connection
        self._is_open = self._is_closed = False
        self.due = math.inf

    def open(self) -> None:
        """Accept connections; idempotent."""
        self.due = math.inf
        if not self._is_open and not self._is_closed:
            self._is_open = True
            self._loop.watch(self.listener.fileno(), self._on_connection)

    def pause(self, seconds: float) -> None:
        """Leave connections in the kernel's queue for a while."""
        self.due = time.monotonic() + seconds
        self._unwatch()

    def _unwatch(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self.listener.fileno())

    def close(self) -> None:
        """Stop accepting for good; idempotent."""
        self._unwatch()
        self._is_closed = True
        self.due = math.inf
        self.listener.close()


# Seconds of silence after which an owner that writes to the lifeline counts as gone: a machine that vanished does not
# close it.
LIFELINE_SILENCE = 60.0


class Lifeline:
    """A descriptor that the owner of a node server holds open: the write end of the server's standard input.

    End of file means that the owner has gone. So does silence for ``LIFELINE_SILENCE`` seconds after a first byte.

    Attributes:
        deadline: Time at which the owner counts as gone, on the clock of :func:`time.monotonic`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.deadline = math.inf

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._descriptor

    def read(self) -> None:
        """Read what the owner has written."""
        try:
            has_written = bool(os.read(self._descriptor, 4096))
        except OSError:  # a terminal that was closed
            has_written = False
        self.deadline = time.monotonic() + LIFELINE_SILENCE if has_written else -math.inf
