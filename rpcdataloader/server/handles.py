"""The objects that a worker holds for its client, by handle.

Handles are counters, never addresses: one object may be held many times, and a stale handle finds nothing instead of
something else. The table belongs to one worker and ends with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from rpcdataloader.errors import LocalProtocolError


class HandleTable:
    """Objects by handle; used by every thread of a worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, value: object) -> int:
        """Hold ``value``; returns its new handle."""
        with self._lock:
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
        """Let go of objects. Their destructors run here, in the calling thread, and outside the lock."""
        with self._lock:
            released = [self._objects.pop(handle, None) for handle in handles]
        released.clear()
