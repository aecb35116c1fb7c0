"""Deadlines of many requests, watched by one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("rpcdataloader.client")

# Nearly all calls are answered long before their deadline. Fewer cancelled ones than this may wait for it.
MAX_CANCELLED = 1000


class Timer:
    """A function that waits for its deadline."""

    __slots__ = ("_alarm", "function")

    def __init__(self, alarm: Alarm, function: Callable[[], None]) -> None:
        self._alarm = alarm
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Drop the function, unless it has been called; idempotent, from any thread."""
        self._alarm._cancel(self)


class Alarm:
    """Calls functions at their deadlines; the first one starts the thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # Guarded by the condition: (time, tie-break, timer), and the number of cancelled ones.
        self._heap: list[tuple[float, int, Timer]] = []
        self._num_cancelled = 0
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def call_after(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call ``function``, which must not block, in the alarm's thread after ``seconds``."""
        timer = Timer(self, function)
        entry = (time.monotonic() + seconds, next(self._order), timer)
        with self._condition:
            if self._closed:
                return timer
            heapq.heappush(self._heap, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpcdl-alarm", daemon=True)
                self._thread.start()
            if self._heap[0] is entry:
                self._condition.notify()
        return timer

    def _cancel(self, timer: Timer) -> None:
        with self._condition:
            if timer.function is None:
                return
            timer.function = None
            self._num_cancelled += 1
            if self._num_cancelled > max(MAX_CANCELLED, len(self._heap) // 2):
                self._heap = [entry for entry in self._heap if entry[2].function is not None]
                heapq.heapify(self._heap)
                self._num_cancelled = 0

    def close(self) -> None:
        """End the thread, and drop all functions."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (function := self._next()) is not None:
            try:
                function()
            except Exception:
                logger.exception("a function called at a deadline failed")
            # Its objects must not live on until the next deadline.
            del function

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next function; None when the alarm is closed."""
        with self._condition:
            while not self._closed:
                seconds = self._heap[0][0] - time.monotonic() if self._heap else threading.TIMEOUT_MAX
                if seconds > 0:
                    self._condition.wait(min(seconds, threading.TIMEOUT_MAX))
                    continue
                _time, _order, timer = heapq.heappop(self._heap)
                function, timer.function = timer.function, None
                if function is not None:
                    return function
                self._num_cancelled -= 1
            return None
