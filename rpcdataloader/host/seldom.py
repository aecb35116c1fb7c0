"""Log lines about what lasts, or comes repeatedly: each cause once per minute."""

from __future__ import annotations

import time
from collections.abc import Hashable

PERIOD = 60.0


class Seldom:
    """Which causes were told within the last :data:`PERIOD` seconds. It has no lock: two threads may both tell one."""

    def __init__(self) -> None:
        self._told: dict[Hashable, float] = {}  # when

    def is_due(self, cause: Hashable) -> bool:
        """Whether to tell of ``cause`` now; if so, it counts as told."""
        now = time.monotonic()
        told = {each: at for each, at in self._told.copy().items() if now - at < PERIOD}
        is_due = cause not in told
        if is_due:
            told[cause] = now
        self._told = told
        return is_due
