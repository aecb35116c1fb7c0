"""Log lines about what lasts, or comes repeatedly: each cause once per minute."""

from __future__ import annotations

import time

PERIOD = 60.0

# Causes that are remembered; strangers may give any number of them.
MAX_CAUSES = 1000


class Seldom:
    """Which causes were told within the last :data:`PERIOD` seconds. It has no lock: two threads may both tell one."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # when, the oldest first

    def is_due(self, cause: str) -> bool:
        """Whether to tell of a cause now; if so, it counts as told.

        Args:
            cause: Text without details that change while it lasts, such as how many connections others hold.
        """
        now = time.monotonic()
        told = {each: at for each, at in self._told.copy().items() if now - at < PERIOD}
        is_due = cause not in told
        if is_due:
            told[cause] = now
            if len(told) > MAX_CAUSES:
                del told[next(iter(told))]
        self._told = told
        return is_due
