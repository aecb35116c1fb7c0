"""Lines from other processes, made safe for a terminal and a log, and limited in number. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

# Workers print for users to read; a loop that prints in every sample reaches this limit.
MAX_BYTES_PER_SECOND = 64 << 10

# Longer lines are cut. With a line's overhead, at most a thousand pass in a second.
MAX_CHARS = 1000
_LINE_BYTES = 64


class LineLimit:
    """A limit on forwarded lines, in bytes per second, and a count of the others.

    After the first line left out, all are until the second is over, so that the note stands in their place.

    Args:
        emit: Function that takes the note of how many were left out; returns whether it could.

    Attributes:
        due: Time to call :meth:`tell`; infinite if nothing was left out.
    """

    def __init__(self, emit: Callable[[str], bool]) -> None:
        self.due = math.inf
        self._emit = emit
        self._end = -math.inf
        self._room = 0
        self._num_left_out = 0

    def admits(self, text: str, now: float) -> bool:
        """Whether a line fits at this time, in seconds."""
        self.tell(now)
        if now >= self._end:
            self._end, self._room = now + 1.0, MAX_BYTES_PER_SECOND
        self._room -= len(text.encode(errors="replace")) + _LINE_BYTES
        if self._room < 0:
            self.leave_out()
        return self._room >= 0

    def leave_out(self) -> None:
        """Leave out the line that was just admitted."""
        self._room = -1
        self._num_left_out += 1
        self.due = min(self.due, self._end)

    def tell(self, now: float) -> None:
        """Emit the number of lines left out, if it is time."""
        if now < self.due or not self._num_left_out:
            return
        if self._emit(f"{self._num_left_out} lines left out"):
            self._num_left_out, self.due = 0, math.inf
        else:
            self.due = now + 1.0


def printable(text: str, keep: str = "") -> str:
    """``text`` with a question mark for each character that could affect a terminal, or begin a line.

    Args:
        keep: Characters to leave as they are.
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def escaped(text: str) -> str:
    """``text`` with characters that could affect a terminal written as in ``\\x1b``; tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)
