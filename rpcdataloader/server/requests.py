"""What a worker has for its client: requests that are not answered, messages that are not sent, and objects."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable
from typing import Any

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.wire.channel import Outgoing

# Bytes of requests that were received and of messages that are not sent, each: nothing against the memory of a node
# with many workers, and more than a network needs to be kept busy.
MAX_WAITING_BYTES = 64 << 20


class Requests:
    """Requests by their ids; any thread.

    A request is *unanswered* until its one reply is chosen, and *kept* until it has been run: after the time limit of
    the node server, a request is answered with an error while it is still being run.
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
        """Requests without a reply."""
        return len(self._unanswered)

    @property
    def is_full(self) -> bool:
        """Whether the worker keeps so much that it receives nothing more; a request of any size may wait alone."""
        return self._kept_bytes > MAX_WAITING_BYTES and self._num_kept > 1

    def received(self, request_id: int, size_bytes: int) -> None:
        """A request has come."""
        with self._lock:
            self._num_kept += 1
            self._kept_bytes += size_bytes
            self._unanswered.add(request_id)

    def cancel(self, request_id: int) -> None:
        """The client has given up a request, which may be answered already."""
        with self._lock:
            if request_id in self._unanswered:
                self._cancelled.add(request_id)

    def is_cancelled(self, request_id: int) -> bool:
        """Whether the client has given it up; without the lock, as looking into a set is one operation."""
        return request_id in self._cancelled

    def answer(self, request_id: int) -> bool | None:
        """Choose the one reply to a request.

        Returns:
            Whether the client still wants it; None if the request was answered before.
        """
        with self._lock:
            if request_id not in self._unanswered:
                return None
            self._unanswered.discard(request_id)
            is_wanted = request_id not in self._cancelled
            self._cancelled.discard(request_id)
            return is_wanted

    def has_run(self, size_bytes: int) -> None:
        """A request has been run, and is not kept any more."""
        with self._lock:
            self._num_kept -= 1
            self._kept_bytes -= size_bytes
            self._has_run.notify()

    def wait_for_room(self) -> None:
        """Wait, in the one thread that receives, while :attr:`is_full`."""
        with self._has_run:
            self._has_run.wait_for(lambda: not self.is_full)


class Outbox:
    """Messages for the sender thread, in order: replies, warnings, the goodbye; thread-safe.

    One message may wait whatever its size, so that a reply of any size is sent while the next one is computed. A loader
    never comes near the limit: what it asks for is limited on its side. The limit is for remote calls, of which a
    script can make thousands at once with results of any size.

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


class HandleTable:
    """The objects that a worker holds for its client, by handle; used by every thread, as each step is atomic.

    Handles are counters, never addresses: one object may be held many times, and a stale handle finds nothing instead
    of something else.
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
        """The object behind ``handle``.

        Raises:
            LocalProtocolError: There is none (any more).
        """
        try:
            return self._objects[handle]
        except KeyError:
            raise LocalProtocolError(f"there is no object with handle {handle} on this worker") from None

    def release(self, handles: Iterable[int]) -> None:
        """Let go of objects. Their destructors run here, in the calling thread."""
        for handle in handles:
            self._objects.pop(handle, None)
