"""Whether the owner of a node server is still there: the one at the other end of its standard input."""

from __future__ import annotations

import math
import os
import time

# Seconds after which an owner that has written to the lifeline must have written again: one whose machine has vanished
# does not close it.
LIFELINE_SILENCE = 60.0


class Lifeline:
    """A descriptor that the owner holds open.

    Its end of file means that the owner has gone. So does silence for ``LIFELINE_SILENCE`` seconds, once something has
    come from it.

    Attributes:
        deadline: When the owner counts as gone, on the clock of :func:`time.monotonic`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.deadline = math.inf

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._descriptor

    def read(self) -> None:
        """Take what the owner has written."""
        try:
            has_written = bool(os.read(self._descriptor, 4096))
        except OSError:  # a terminal that was closed
            has_written = False
        self.deadline = time.monotonic() + LIFELINE_SILENCE if has_written else -math.inf
