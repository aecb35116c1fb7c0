"""What a worker has to say and its sender has not sent: replies, warnings, the goodbye.

A loader never comes near the limit: what it asks for is limited on its side. The limit is for remote calls, of which a
script can make thousands at once with results of any size.
"""

from __future__ import annotations

import queue
import threading

from rpcdataloader.wire.channel import Outgoing


class Outbox:
    """Messages for the sender thread, in order; thread-safe.

    One message may wait whatever its size, so that a reply of any size is sent while the next one is computed.

    Args:
        max_bytes: While more than this waits, in more than one message, there is no room.

    Attributes:
        num_waiting: Messages that were put here and are not sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        # With a lock that its thread may take twice: a destructor may run anywhere, and warn.
        self._changed = threading.Condition(threading.RLock())
        self.num_waiting = 0
        self._waiting_bytes = 0

    def put(self, message: Outgoing) -> None:
        """Let a message be sent; never blocks."""
        with self._changed:
            self.num_waiting += 1
            self._waiting_bytes += message.size_bytes
            self._messages.put(message)

    def close(self) -> None:
        """Nothing more will be put here."""
        self._messages.put(None)

    def get(self) -> Outgoing | None:
        """Wait for the next message; None when there will be none. For the sender."""
        return self._messages.get()

    def sent(self, message: Outgoing) -> None:
        """It waits no more."""
        with self._changed:
            self.num_waiting -= 1
            self._waiting_bytes -= message.size_bytes
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        return self.num_waiting > 1 and self._waiting_bytes > self._max_bytes

    def wait(self) -> None:
        """Wait until there is room for more."""
        with self._changed:
            while self.is_full:
                self._changed.wait()
