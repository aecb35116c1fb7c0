"""Deadlines of many requests, watched by one thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls functions when their time has come; the thread is started by the first one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # Guarded by the condition: (time, tie-break, function).
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call ``function``, which must not block, in the alarm's thread after ``seconds``."""
        entry = (time.monotonic() + seconds, next(self._order), function)
        with self._condition:
            heapq.heappush(self._heap, entry)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="rpcdl-alarm", daemon=True)
                self._thread.start()
            if self._heap[0] is entry:
                self._condition.notify()

    def close(self) -> None:
        """End the thread; what has not come yet never does."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._condition.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if self._closed:
                    return
                _time, _order, function = heapq.heappop(self._heap)
            function()
