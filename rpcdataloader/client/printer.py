"""``forward_output=``: prints the workers' output on standard error, with the origin in front of each line."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque

from rpcdataloader.wire.lines import MAX_CHARS, LineLimit, escaped

# Most lines that wait while standard error blocks, as on a stopped terminal.
MAX_WAITING = 1000

# Workers' output for the last batch comes after it. At the end, the client waits until no line has come for this long.
QUIET_SECONDS = 0.1
LINGER_SECONDS = 1.0


class Printer:
    """Prints from its own thread, which may have to wait; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._lines: deque[str] = deque()
        self._limit = LineLimit(self._note)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, origin: str, text: str, *, is_note: bool = False) -> None:
        """Queue a line, or leave it out; never blocks.

        Args:
            is_note: True for a node server's own count of lines left out, at most one per second.
        """
        line = f"({escaped(origin[:MAX_CHARS])}) {escaped(text[:MAX_CHARS])}\n"
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpcdl-print", daemon=True)
                self._thread.start()
            if is_note or self._limit.admits(line, time.monotonic()):
                if len(self._lines) < MAX_WAITING:
                    self._lines.append(line)
                else:
                    self._limit.leave_out()
            self._changed.notify_all()

    def linger(self) -> None:
        """Wait until no line has come for a moment."""
        end = time.monotonic() + LINGER_SECONDS
        with self._changed:
            while self._changed.wait(QUIET_SECONDS) and time.monotonic() < end:
                pass

    def close(self) -> None:
        """Print the waiting lines, and end the thread; does not wait for a blocked one."""
        with self._changed:
            self._limit.tell(math.inf)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LINGER_SECONDS)

    def _note(self, text: str) -> bool:
        self._lines.append(f"(rpcdataloader) {text}\n")
        return True

    def _run(self) -> None:
        while text := self._next():
            # Standard error may be closed, or be an object of the user.
            with contextlib.suppress(Exception):
                sys.stderr.write(text)
                sys.stderr.flush()

    def _next(self) -> str:
        """Wait for lines; empty once closed."""
        with self._changed:
            while not self._lines and not self._closed:
                pause = self._limit.due - time.monotonic()
                self._changed.wait(None if pause == math.inf else max(pause, 0.0))
                self._limit.tell(time.monotonic())
            text = "".join(self._lines)
            self._lines.clear()
            return text
