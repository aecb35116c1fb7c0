"""The requests that a worker has received and not answered, and the tally of them that other threads may wait for."""

from __future__ import annotations

import threading

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
