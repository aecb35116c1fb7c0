"""The threads of a client that serve all of its connections, each started when it is first needed.

The alarm calls functions at the deadlines of requests, the janitor closes objects without references, the callers run
callbacks of the user, and the printer prints the output of workers (``forward_output=``).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rpcdataloader.host.locks import Condition, Lock
from rpcdataloader.host.signals import is_interrupt, signals_held, signals_let_through
from rpcdataloader.wire.messages import MAX_CHARS, printable
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")


def _started(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a thread.

    Raises:
        RuntimeError: No thread can be started: in Python from 3.12 on, none can while the interpreter ends.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


# Seconds between two attempts to start a thread, the first and the most.
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 1.0


def start_when_there_is_room(
    start: Callable[[], None], deadline: Deadline | None, lacking: Callable[[str], None]
) -> None:
    """Start a thread, once there is room for it; raises the ``RuntimeError`` of the last attempt.

    Args:
        lacking: Function that takes the reason before each further attempt.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            return start()
        except RuntimeError as exc:
            if deadline is None or "shutdown" in str(exc):  # of the interpreter, from Python 3.12 on
                raise
            lacking(f"this process has no room for a thread ({exc})")
            with signals_let_through():
                if not deadline.pause(pause):
                    raise
        pause = min(2 * pause, _MAX_PAUSE)


# Nearly all calls are answered long before their deadline. Fewer cancelled ones than this may wait for it.
MAX_CANCELLED = 1000


@dataclass(slots=True)
class Timer:
    """A function that waits for its deadline."""

    function: Callable[[], None] | None

    def cancel(self) -> None:
        """Drop the function, unless it has been called; idempotent, from any thread."""
        self.function = None


class Alarm:
    """Calls functions at their deadlines; the first one starts the thread.

    Of several threads, and so not by ``sched``, as in a server's loop: nothing there wakes who waits for a later time.
    """

    def __init__(self) -> None:
        self._condition = Condition()
        # Guarded by the condition: (time, tie-break, timer), and their number when cancelled ones were dropped last.
        self._heap: list[tuple[float, int, Timer]] = []
        self._num_kept = 0
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def call_after(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call ``function``, which must not block, in the alarm's thread after ``seconds``."""
        timer = Timer(function)
        entry = (time.monotonic() + seconds, next(self._order), timer)
        with self._condition:
            if self._closed:
                return timer
            if len(self._heap) >= self._num_kept + max(MAX_CANCELLED, self._num_kept):
                self._heap = [other for other in self._heap if other[2].function is not None]
                heapq.heapify(self._heap)
                self._num_kept = len(self._heap)
            heapq.heappush(self._heap, entry)
            self._start()
            if self._heap[0] is entry:
                self._condition.notify()
        return timer

    def retry(self) -> None:
        """Start the thread now, if functions wait for it and there was no room for it."""
        with self._condition:
            if self._heap:
                self._start()

    def _start(self) -> None:
        if self._thread is None:
            with contextlib.suppress(RuntimeError):  # the next call tries again
                self._thread = _started("rpcdl-alarm", self._run)

    def close(self) -> None:
        """End the thread, and drop all functions."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _run_all(self._next, "a function called at a deadline failed")

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
            return None


# Seconds of a wait after which the user is told what it is for, and seconds between two such lines.
FIRST_TOLD, NEXT_TOLD = 3.0, 10.0


class Waiting:
    """A wait that the user is told of, from its beginning until :meth:`end` or the end of a ``with`` block.

    Args:
        describe: Function for the object of the wait, with the last known reason; None to say nothing now. The alarm's
            thread calls it, or that of :meth:`poll`.
        label: Beginning of the lines.
    """

    def __init__(self, alarm: Alarm, describe: Callable[[], str | None], label: str = "") -> None:
        self._alarm = alarm
        self._describe = describe
        self._label = label
        self._began = time.monotonic()
        self._due = self._began + FIRST_TOLD  # time of the next line
        self._has_ended = False
        self._timer = alarm.call_after(FIRST_TOLD, self._tell)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> None:
        """Say nothing more; idempotent."""
        self._has_ended = True
        self._timer.cancel()

    def poll(self) -> None:
        """Tell now what is due: where this process has no room for a thread, the alarm may have none either."""
        self._alarm.retry()
        self._tell_if_due()

    def _tell(self) -> None:
        self._tell_if_due()
        if not self._has_ended:
            self._timer = self._alarm.call_after(self._due - time.monotonic(), self._tell)

    def _tell_if_due(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + NEXT_TOLD
        if (text := self._describe()) is not None and not self._has_ended:
            logger.warning("%sstill waiting after %.0f s for %s", self._label, now - self._began, text)


class Janitor:
    """A thread that closes objects without references, one after the other.

    A finalizer may run in any thread and inside any lock, so it must not close a connection itself; it hands that over.
    """

    def __init__(self) -> None:
        # Another put of the same thread may interrupt a put.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = _started("rpcdl-janitor", self._run)

    def leave(self, function: Callable[[], None]) -> None:
        """Queue ``function``; never blocks and takes no lock."""
        self._queue.put(function)

    def close(self) -> None:
        """Run what is queued, and end the thread."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        _run_all(self._queue.get, "cleaning up failed")


# Callbacks that run at a time. Many calls may end at once, and a thread for each would be thousands.
MAX_CALLERS = 64


class Callers:
    """Runs callbacks of the user, which may wait, in threads that end when there is nothing left to run."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = Lock()
        self._threads: set[threading.Thread] = set()  # guarded by the lock

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` in a thread; or in :meth:`close`, if no thread can be started."""
        self._waiting.append(function)
        with self._lock, contextlib.suppress(RuntimeError):
            if len(self._threads) < MAX_CALLERS:  # each of them may be waiting
                with signals_held():
                    self._threads.add(_started("rpcdl-call", self._run))

    def close(self, timeout: float) -> None:
        """Wait for the threads; callbacks that run after ``timeout`` seconds, or wait for these, are left alone."""
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            self._run_waiting()

    def _run(self) -> None:
        # Its parent may be a receiver, which blocks all of them; so would the programs that a callback starts.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        while True:
            self._run_waiting()
            with self._lock:
                if not self._waiting:  # now, with no thread more for it
                    self._threads.discard(threading.current_thread())
                    return

    def _run_waiting(self) -> None:
        _run_all(self._next, "a callback of a future failed")

    def _next(self) -> Callable[[], None] | None:
        with contextlib.suppress(IndexError):
            return self._waiting.popleft()
        return None


def _run_all(following: Callable[[], Callable[[], None] | None], failure: str) -> None:
    """Run functions until None follows."""
    while (function := following()) is not None:
        try:
            function()
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception(failure)
        # Its objects must not live on while the next one is awaited.
        del function


# Most lines that wait while standard error blocks, as on a stopped terminal; the oldest are dropped.
MAX_WAITING = 1000

# Workers' output for the last batch comes after it. At the end, the client waits until no line has come for this long.
QUIET_SECONDS = 0.3
LINGER_SECONDS = 1.0


class Printer:
    """Prints from its own thread, which may have to wait; thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        # Guarded by the condition:
        self._lines: deque[str] = deque(maxlen=MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, origin: str, text: str) -> None:
        """Queue a line; never blocks."""
        shown = printable(text[:MAX_CHARS], keep="\t")
        line = f"({printable(origin[:MAX_CHARS])}) {shown}\n"
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                with contextlib.suppress(RuntimeError):  # close() prints it
                    self._thread = _started("rpcdl-print", self._run)
            self._lines.append(line)
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
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LINGER_SECONDS)
        elif self._lines:
            self._run()

    def _run(self) -> None:
        while text := self._next():
            # Standard error may be closed, or be an object of the user.
            with contextlib.suppress(Exception):
                sys.stderr.write(text)
                sys.stderr.flush()

    def _next(self) -> str:
        """Wait for lines; empty once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            text = "".join(self._lines)
            self._lines.clear()
            return text
