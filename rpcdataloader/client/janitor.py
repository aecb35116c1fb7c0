"""A thread that closes what nobody refers to any more.

A finalizer may run in any thread and inside any lock, so it must not close a connection itself; it hands that over
here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("rpcdataloader.client")


class Janitor:
    """Runs functions one after the other in a thread of its own, which starts at once."""

    def __init__(self) -> None:
        # Its put may be interrupted by another put of the same thread.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rpcdl-janitor", daemon=True)
        self._thread.start()

    def leave(self, function: Callable[[], None]) -> None:
        """Have ``function`` called soon; never blocks and takes no lock."""
        self._queue.put(function)

    def close(self) -> None:
        """Finish what was left, and end the thread."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception:
                logger.exception("cleaning up failed")
            del function
