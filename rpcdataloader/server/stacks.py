"""The Python stacks of a worker, even while it hangs.

The watcher, a thread of the worker, writes the stacks into a file that it shares with its session. It holds the
interpreter lock then, so no frame moves. A signal handler holds no lock: it may find half-made frames, and once in some
hundred times ends the process by SIGSEGV.

But C code may keep the lock. If the watcher has often asked for it without success, a signal handler of
``faulthandler`` writes the stacks, in the watcher: frames do not move while that C code runs. A stopped process runs no
handler; the session then reports the state that the kernel gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

from rpcdataloader.host.resources import process_use, read
from rpcdataloader.server.events import Link, WantsStacks
from rpcdataloader.wire.copies import memory_file

# Sent by the session where C code keeps the interpreter lock. The last real-time signal: libraries that need one start
# from the first.
LOCKED_SIGNAL = signal.SIGRTMAX

# A worker writes its stacks in less than a millisecond of its own time.
STACK_TIMEOUT = 1.0

# Seconds for which the lock must be kept, and how often the watcher must have asked for it meanwhile: it does so every
# 5 ms, as far as the machine lets it run.
LOCK_TIMEOUT = 0.5
MIN_ATTEMPTS = 10

# Seconds between two looks whether a worker is done, as it may never tell.
STACK_LOOK_PERIOD = 0.005

# Marks around the stacks that the watcher writes; faulthandler writes ASCII.
_BEGIN, _END = b"\xfe", b"\xff"

# Most bytes that are read of a file.
_MAX_DUMP = 1 << 20

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_libc = ctypes.CDLL(None)


class WorkerStacks:
    """The stacks of one worker: made by its session before the fork, and used on both sides of it."""

    def __init__(self) -> None:
        self._file = memory_file("rpcdl-stacks")
        # Both sides write at the end, wherever that is.
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)

    # --- the worker

    def write_when_locked(self) -> None:
        """Let a signal write them, too."""
        faulthandler.register(LOCKED_SIGNAL, self._file, all_threads=True)

    def write(self) -> None:
        """Write the stacks of all threads; in the watcher."""
        with contextlib.suppress(OSError):  # closed by user code
            os.write(self._file, _BEGIN)
            faulthandler.dump_traceback(self._file)
            os.write(self._file, _END)

    # --- the session

    def watch(self, pid: int, number: int, link: Link) -> None:
        """Read those of worker ``number``, a child of this process that only this process reaps."""
        self.pid = pid
        self._name = f"worker {number} (pid {pid})"
        self._link = link
        self._takers: list[Callable[[str], None]] = []
        self._deadline: float | None = None  # of the pending request
        self._is_signalled = False
        self._state = ""
        self._num_attempts = 0

    @property
    def is_asked(self) -> bool:
        """Whether a request is pending."""
        return self._deadline is not None

    def ask(self, take: Callable[[str], None]) -> None:
        """Request the stacks for ``take``; a pending request serves this one, too."""
        self._takers.append(take)
        if self.is_asked:
            return
        self._deadline = time.monotonic() + STACK_TIMEOUT
        os.ftruncate(self._file, 0)
        self._is_signalled = False
        self._state = _describe(self.pid)
        self._num_attempts = _num_waits(self.pid, _watcher(self.pid))
        self._link.offer(WantsStacks())

    def finish(self) -> None:
        """Answer requests if the stacks are complete or hopeless, send the signal if it takes long; never waits."""
        if self._deadline is None:
            return
        dump = os.pread(self._file, _MAX_DUMP, 0)
        letter, remaining = process_use(self.pid).state or "X", self._deadline - time.monotonic()
        _before, begin, rest = dump.rpartition(_BEGIN)
        written, end, _after = rest.partition(_END)
        if not (begin and end):
            if remaining >= 0 and letter not in "TtZX":
                if remaining < STACK_TIMEOUT - LOCK_TIMEOUT and not self._is_signalled:
                    self._is_signalled = self._signal()
                return
            written = dump
        self._deadline = None
        # A fork inherits the main thread's identifier from its parent.
        stacks = arrange(written.decode("ascii", "replace"), threading.get_ident(), _PACKAGE)
        self.answer(f"{self._name}: state: {self._state}\n{stacks or 'no Python stack: ' + _explain(letter)}")

    def answer(self, text: str) -> None:
        """Answer all requests."""
        takers, self._takers = self._takers, []
        for take in takers:
            take(text)

    def _signal(self) -> bool:
        """Let the watcher's signal handler write the stacks, if the watcher has asked for the lock all the time."""
        watcher = _watcher(self.pid)
        if _num_waits(self.pid, watcher) < self._num_attempts + MIN_ATTEMPTS:
            return False  # the machine is slow
        # Without a handler the signal would end the worker.
        if not int(_status(self.pid, watcher).get("SigCgt", "0"), 16) >> (LOCKED_SIGNAL - 1) & 1:
            return False
        if hasattr(_libc, "tgkill"):  # glibc 2.30
            _libc.tgkill(self.pid, watcher, int(LOCKED_SIGNAL))
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, LOCKED_SIGNAL)
        return True

    def close(self) -> None:
        os.close(self._file)


class StackFile:
    """A status gate's request for the stacks of all workers: a line for each in ``file``, until ``pipe`` is closed."""

    def __init__(self, workers: Sequence[WorkerStacks], file: int, pipe: int) -> None:
        self._file, self._pipe = file, pipe
        self._num_missing = len(workers)
        for worker in workers:
            worker.ask(functools.partial(self._write, worker.pid))
        if not workers:
            self.close()

    def _write(self, pid: int, text: str) -> None:
        with contextlib.suppress(OSError):  # a limit on file sizes costs a stack, not the session
            os.write(self._file, json.dumps([pid, text]).encode() + b"\n")
        self._num_missing -= 1
        if not self._num_missing:
            self.close()

    def close(self) -> None:
        os.close(self._file)
        os.close(self._pipe)


def _explain(letter: str) -> str:
    if letter in "ZX":
        return "it has ended"
    if letter in "Tt":
        return "it is stopped until it gets SIGCONT"
    return f"it did not let another of its threads run within {STACK_TIMEOUT:g} s"


def _watcher(pid: int) -> int:
    """The first thread that a worker starts; 0 when it has gone."""
    threads: list[int] = []
    with contextlib.suppress(OSError):
        threads = list(map(int, os.listdir(f"/proc/{pid}/task")))
    return min((thread for thread in threads if thread != pid), default=0)


def _num_waits(pid: int, thread: int) -> int:
    """How often a thread has waited for something."""
    return int(_status(pid, thread).get("voluntary_ctxt_switches", "0"))


def _status(pid: int, thread: int) -> dict[str, str]:
    """The fields that the kernel has for a thread; none when the thread is gone."""
    lines = read(f"/proc/{pid}/task/{thread}/status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _describe(pid: int) -> str:
    """State of the main thread and, where the kernel shows it, the function in which it waits."""
    state = _status(pid, pid).get("State", "gone")
    function = read(f"/proc/{pid}/wchan")
    return state if function in ("", "0") else f"{state} in {function}"


# Recursion in many threads fills pages; the important part comes first.
MAX_CHARACTERS = 16384

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:\n", re.MULTILINE)


def arrange(dump: str, main: int, package: str) -> str:
    """Put the main thread first; leave out threads without user code, and frames below user code in the others.

    ``main`` is the identifier of the main thread, ``package`` the folder of this package.
    """
    own = re.escape(package)
    base = re.compile(rf'^  File "{own}/server/.*(?:\n|\Z)', re.MULTILINE)
    # Any line but a frame of this package or of the standard library's ``threading``.
    user_code = re.compile(rf'^(?!  File "(?:{own}/|.*/threading\.py", line )).', re.MULTILINE)
    # The text before the first header, then for each thread its identifier and lines.
    _before, *parts = _HEADER.split(dump)
    stacks = [(int(ident, 16), lines) for ident, lines in zip(parts[::2], parts[1::2], strict=True)]
    # Threads come youngest first.
    stacks.sort(key=lambda stack: stack[0] != main)
    arranged = []
    for ident, lines in stacks:
        if ident == main or user_code.search(lines):
            # One frame of the server stays: the caller of user code, or the one that waits for work.
            kept = lines[: found.end()] if (found := base.search(lines)) else lines
            title = "Main thread" if ident == main else f"Thread 0x{ident:x}"
            arranged.append(f"{title} (most recent call first):\n{kept.rstrip()}")
    text = "\n\n".join(arranged)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n... (cut here)"
