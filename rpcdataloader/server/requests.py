"""A worker's state for its client: unanswered requests, unsent messages, and objects."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.wire.channel import Outgoing

# Limit in bytes of received requests, and of unsent messages: little against the memory of a node with many workers,
# and enough to keep a network busy.
MAX_WAITING_BYTES = 64 << 20


class Requests:
    """Requests by their ids; thread-safe.

    A request is *unanswered* until its one reply is chosen, and *kept* until it has run: past the node server's time
    limit, a request is answered with an error while it still runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_run = threading.Condition(self._lock)
        self._unanswered: set[int] = set()
        self._cancelled: set[int] = set()
        self._num_kept = 0
        self._kept_bytes = 0

    @property
    def num_unanswered(self) -> int:
        """Number of requests without a reply."""
        return len(self._unanswered)

    @property
    def is_full(self) -> bool:
        """Whether the worker stops receiving because of the requests it keeps; a request of any size may wait alone."""
        return self._kept_bytes > MAX_WAITING_BYTES and self._num_kept > 1

    def received(self, request_id: int, size_bytes: int) -> None:
        """Note a received request."""
        with self._lock:
            self._num_kept += 1
            self._kept_bytes += size_bytes
            self._unanswered.add(request_id)

    def cancel(self, request_id: int) -> None:
        """Note that the client gave up a request, which may be answered already."""
        with self._lock:
            if request_id in self._unanswered:
                self._cancelled.add(request_id)

    def is_cancelled(self, request_id: int) -> bool:
        """Whether the client gave it up; without the lock, as one look into a set is atomic."""
        return request_id in self._cancelled

    def answer(self, request_id: int) -> bool | None:
        """Choose the one reply to a request.

        Returns:
            True if the client still wants it; None if the request was answered before.
        """
        with self._lock:
            if request_id not in self._unanswered:
                return None
            self._unanswered.discard(request_id)
            is_wanted = request_id not in self._cancelled
            self._cancelled.discard(request_id)
            return is_wanted

    def has_run(self, size_bytes: int) -> None:
        """Note that a request has run and is no longer kept."""
        with self._lock:
            self._num_kept -= 1
            self._kept_bytes -= size_bytes
            self._has_run.notify()

    def wait_for_room(self) -> None:
        """Wait while :attr:`is_full`; for the one thread that receives."""
        with self._has_run:
            self._has_run.wait_for(lambda: not self.is_full)


class Outbox:
    """Messages for the sender thread, in order: replies, warnings, the last GOAWAY; thread-safe.

    A message of any size may wait alone, so that it is sent while the next one is computed. A loader stays far below
    the limit, as it limits its own requests. The limit is for remote calls: a script can make thousands at once, with
    results of any size.

    Args:
        max_bytes: Limit above which more than one message may not wait.

    Attributes:
        num_waiting: Messages that were put here and are not yet sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        # The lock is reentrant: a destructor may run anywhere, and warn.
        self._changed = threading.Condition(threading.RLock())
        self.num_waiting = 0
        self._waiting_bytes = 0

    def put(self, message: Outgoing) -> None:
        """Queue a message; never blocks."""
        with self._changed:
            self.num_waiting += 1
            self._waiting_bytes += message.size_bytes
            self._messages.put(message)

    def close(self) -> None:
        """End the queue after the present messages."""
        self._messages.put(None)

    def get(self) -> Outgoing | None:
        """Wait for the next message; None at the end of the queue. For the sender."""
        return self._messages.get()

    def sent(self, message: Outgoing) -> None:
        """Note that a message was sent."""
        with self._changed:
            self.num_waiting -= 1
            self._waiting_bytes -= message.size_bytes
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another message."""
        return self.num_waiting > 1 and self._waiting_bytes > self._max_bytes

    def wait(self) -> None:
        """Wait until there is room for another message."""
        with self._changed:
            while self.is_full:
                self._changed.wait()


class HandleTable:
    """Objects that a worker holds for its client, by handle; thread-safe, as each step is atomic.

    Handles are counters, not addresses: one object may be held many times, and a stale handle finds nothing.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, value: object) -> int:
        """Hold ``value``; returns its new handle."""
        handle = next(self._numbers)
        self._objects[handle] = value
        return handle

    def get(self, handle: int) -> Any:
        """Return the object behind ``handle``.

        Raises:
            LocalProtocolError: The handle is unknown or was released.
        """
        try:
            return self._objects[handle]
        except KeyError:
            raise LocalProtocolError(f"there is no object with handle {handle} on this worker") from None

    def release(self, handles: Iterable[int]) -> None:
        """Release objects. Their destructors run in the calling thread."""
        for handle in handles:
            self._objects.pop(handle, None)
