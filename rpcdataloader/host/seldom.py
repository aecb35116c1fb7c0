"""Log lines about what lasts, or comes again and again: each cause once per minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

PERIOD = 60.0


class Seldom:
    """Which causes were told within the last :data:`PERIOD` seconds; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[Hashable, float] = {}  # when, with the lock

    def is_due(self, cause: Hashable) -> bool:
        """Whether to tell of ``cause`` now; if so, it counts as told."""
        now = time.monotonic()
        with self._lock:
            self._told = {each: at for each, at in self._told.items() if now - at < PERIOD}
            if cause in self._told:
                return False
            self._told[cause] = now
            return True
