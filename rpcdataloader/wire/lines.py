"""Lines of others, fit for a terminal and a log: without what could do something to these, and not too many. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

# What workers print for people to read; a loop that prints in every sample reaches it.
MAX_BYTES_PER_SECOND = 64 << 10

# A line is cut here. With what a line costs besides its text, no more than a thousand pass in a second.
MAX_CHARS = 1000
_LINE_BYTES = 64


class LineLimit:
    """A limit on lines that are passed on, in bytes per second, and a count of the others.

    After the first line that is left out, all are until the second is over, so that the note stands in their place.

    Args:
        emit: Takes the note of how many were left out; returns whether it could.

    Attributes:
        due: When to call :meth:`tell`; infinite if nothing was left out.
    """

    def __init__(self, emit: Callable[[str], bool]) -> None:
        self.due = math.inf
        self._emit = emit
        self._end = -math.inf
        self._room = 0
        self._num_left_out = 0

    def admits(self, text: str, now: float) -> bool:
        """Whether there is room for a line at this time, in seconds."""
        self.tell(now)
        if now >= self._end:
            self._end, self._room = now + 1.0, MAX_BYTES_PER_SECOND
        self._room -= len(text.encode(errors="replace")) + _LINE_BYTES
        if self._room < 0:
            self.leave_out()
        return self._room >= 0

    def leave_out(self) -> None:
        """The line that was just admitted is left out after all."""
        self._room = -1
        self._num_left_out += 1
        self.due = min(self.due, self._end)

    def tell(self, now: float) -> None:
        """Say how many lines were left out, if it is time for that."""
        if now < self.due or not self._num_left_out:
            return
        if self._emit(f"{self._num_left_out} lines left out"):
            self._num_left_out, self.due = 0, math.inf
        else:
            self.due = now + 1.0


def printable(text: str, keep: str = "") -> str:
    """``text`` without what could do something to a terminal, or begin a line: a question mark is in its place.

    Args:
        keep: Characters to leave as they are.
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def escaped(text: str) -> str:
    """``text`` with what could do something to a terminal written as in ``\\x1b``; tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in text)
