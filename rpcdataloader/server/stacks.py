"""The Python stacks of a worker, even while it hangs.

A thread of the worker waits for the session's request, and writes the stacks into a pipe to the session. It holds the
interpreter lock then, so no frame moves. A signal handler holds no lock: it may find half-made frames, even of its own
thread, and once in some hundred times ends the process by SIGSEGV.

But C code may keep the lock. After a long wait of the thread, a signal handler of ``faulthandler`` writes the stacks:
frames do not move while that C code runs. A stopped process runs no handler; the session then reports the state that
the kernel gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

from rpcdataloader.host.resources import process_use, read

# Sent by the session where C code keeps the interpreter lock. The last real-time signal: libraries that need one start
# from the first.
LOCKED_SIGNAL = signal.SIGRTMAX

# A worker writes its stacks in less than a millisecond of its own time.
STACK_TIMEOUT = 1.0

# Seconds for which the lock must be kept: Python code hands it on after 5 ms when another thread waits.
LOCK_TIMEOUT = 0.5

# The kernel counts in units of mostly 10 ms, and a thread that only waits for the lock takes less than two.
LOCK_WAIT_CPU_SECONDS = 0.015

# Seconds between two looks whether a worker is done, as it may never tell.
STACK_LOOK_INTERVAL = 0.005

# Size of one dump, and of a pipe.
MAX_DUMP = 65536

# Marks around the stacks of the thread; faulthandler writes ASCII, and signals have smaller numbers.
_BEGIN, _END = b"\xfe", b"\xff"

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_libc = ctypes.CDLL(None)


class StackPipe:
    """A worker's stacks: created by its session before the fork, and used on both sides of it."""

    def __init__(self) -> None:
        self._request = os.eventfd(0)
        try:
            self._read_end, self._write_end = os.pipe()
        except OSError:
            os.close(self._request)
            raise
        # Neither side ever waits: excess output is lost.
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # In the session:
        self.pid = 0
        self._name = ""
        self._tellers: list[Callable[[str], None]] = []
        self._dump = bytearray()
        self._deadline: float | None = None  # of the pending dump
        self._is_signalled = False
        self._cpu_seconds: dict[int, float] = {}  # of each thread, at the request
        self._is_closed = False
        self._state = ""

    # --- the worker

    def become_worker(self) -> None:
        """Write to the pipe from now on, in the fork."""
        os.close(self._read_end)
        faulthandler.register(LOCKED_SIGNAL, self._write_end, all_threads=True)
        threading.Thread(target=self._answer, name="rpcdl-stacks", daemon=True).start()

    def _answer(self) -> None:
        while True:
            os.eventfd_read(self._request)
            # The pipe may be full, or closed by user code.
            with contextlib.suppress(OSError):
                os.write(self._write_end, _BEGIN)
                faulthandler.dump_traceback(self._write_end)
                os.write(self._write_end, _END)

    # --- the session

    def become_session(self, pid: int, number: int) -> None:
        """Read the output of worker ``number``, a child of this process that only this process reaps."""
        os.close(self._write_end)
        self._write_end = -1
        self.pid = pid
        self._name = f"worker {number} (pid {pid})"

    def fileno(self) -> int:
        return self._read_end

    @property
    def is_asked(self) -> bool:
        """Whether a dump is pending."""
        return self._deadline is not None

    def ask(self, tell: Callable[[str], None]) -> None:
        """Request the worker's stacks for ``tell``; a pending request serves this one, too."""
        self._tellers.append(tell)
        if self.is_asked:
            return
        self._deadline = time.monotonic() + STACK_TIMEOUT
        self.read()
        self._dump.clear()
        self._is_signalled = False
        self._state = _describe(self.pid)
        self._cpu_seconds = {thread: process_use(self.pid, thread).cpu_seconds for thread in _threads(self.pid)}
        os.eventfd_write(self._request, 1)

    def read(self) -> bool:
        """Read the pipe; False when it is closed at the other end."""
        try:
            data = os.read(self._read_end, MAX_DUMP)
        except BlockingIOError:
            return True
        self._dump += data[: MAX_DUMP - len(self._dump)]
        self._is_closed = not data
        return bool(data)

    def finish(self) -> None:
        """Answer requests if the dump is complete or hopeless, send the signal if it takes long; never waits."""
        if self._deadline is None:
            return
        self.read()
        letter, remaining = process_use(self.pid).state or "X", self._deadline - time.monotonic()
        written = self._written()
        if written is None and not self._is_closed and remaining >= 0 and letter not in "TtZX":
            if remaining < STACK_TIMEOUT - LOCK_TIMEOUT and not self._is_signalled:
                self._is_signalled = self._signal()
            return
        self._deadline = None
        dump = written or self._dump
        # A fork inherits the main thread's identifier from its parent.
        stacks = arrange(dump.decode("ascii", "replace"), threading.get_ident(), _PACKAGE)
        self.tell(f"{self._name}: state: {self._state}\n{stacks or 'no Python stack: ' + self._explain(letter)}")

    def tell(self, text: str) -> None:
        """Answer all requests."""
        tellers, self._tellers = self._tellers, []
        for tell in tellers:
            tell(text)

    def _written(self) -> bytearray | None:
        """The last stacks of the worker's thread; None if they are incomplete."""
        _before, begin, rest = self._dump.rpartition(_BEGIN)
        stacks, end, _after = rest.partition(_END)
        return stacks if begin and end else None

    def _explain(self, letter: str) -> str:
        if letter in "ZX":
            return "it has ended"
        if letter in "Tt":
            return "it is stopped until it gets SIGCONT"
        if self._is_closed:
            return "its code has closed the pipe"
        if letter == "D":
            return "it waits in the kernel, out of reach of signals"
        return f"it did not let another of its threads run within {STACK_TIMEOUT:g} s"

    def _signal(self) -> bool:
        """Let a signal handler write the stacks; returns False if that is unsafe now, or no thread can run one.

        If one thread has run since the request, it has the lock, and stays in its C code while its handler runs. If two
        have, the machine is slow, and the lock may pass between them. If none has, the thread with the lock sleeps. It
        may be unable to run a handler, for example while it waits for a file server; then any other thread will do.
        """
        threads = {thread: _status(self.pid, thread) for thread in _threads(self.pid)}
        uses = {thread: process_use(self.pid, thread) for thread in threads}
        busy = [
            thread
            for thread, use in uses.items()
            if use.state == "R" or use.cpu_seconds > self._cpu_seconds.get(thread, 0.0) + LOCK_WAIT_CPU_SECONDS
        ]
        if len(busy) > 1:
            return False
        for thread in busy or threads:
            status = threads[thread]
            # Without a handler the signal would end the worker.
            if uses[thread].state != "D" and _has_signal(status, "SigCgt") and not _has_signal(status, "SigBlk"):
                _send_to_thread(self.pid, thread)
                return True
        return False

    def close(self) -> None:
        for descriptor in self._request, self._read_end, self._write_end:
            if descriptor >= 0:
                os.close(descriptor)


class StackFile:
    """A status gate's request for the stacks of all workers: a line for each in ``file``, until ``pipe`` is closed."""

    def __init__(self, stacks: Sequence[StackPipe], file: int, pipe: int) -> None:
        self._file, self._pipe = file, pipe
        self._num_missing = len(stacks)
        for stack in stacks:
            stack.ask(functools.partial(self._write, stack.pid))
        if not stacks:
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


def _threads(pid: int) -> list[int]:
    """Threads, oldest first but the main one last, which runs user code; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread == pid, thread))
    return []


def _status(pid: int, thread: int) -> dict[str, str]:
    """The fields that the kernel has for a thread; none when the thread is gone."""
    lines = read(f"/proc/{pid}/task/{thread}/status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _has_signal(status: dict[str, str], field: str) -> bool:
    return bool(int(status.get(field, "0"), 16) >> (LOCKED_SIGNAL - 1) & 1)


def _describe(pid: int) -> str:
    """State of the main thread and, where the kernel shows it, the function in which it waits."""
    state = _status(pid, pid).get("State", "gone")
    function = read(f"/proc/{pid}/wchan")
    return state if function in ("", "0") else f"{state} in {function}"


def _send_to_thread(pid: int, thread: int) -> None:
    if hasattr(_libc, "tgkill"):  # glibc 2.30
        _libc.tgkill(pid, thread, int(LOCKED_SIGNAL))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, LOCKED_SIGNAL)


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
