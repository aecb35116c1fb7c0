"""The listening socket of a node server, which does not listen while there is no room for another connection."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable

from rpcdataloader.server.loop import Loop


class Door:
    """Watches for connections.

    Args:
        listener: Owned by this object.
        loop: Where it is watched.
        on_connection: Called when there may be one.

    Attributes:
        due: When to :meth:`open` it again.
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
        """Take connections; idempotent."""
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
        """Take no more connections at all; idempotent."""
        self._unwatch()
        self._is_closed = True
        self.due = math.inf
        self.listener.close()
