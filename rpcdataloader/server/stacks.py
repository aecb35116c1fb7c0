"""Where the Python code of a worker is, also while it hangs.

A thread of the worker waits until the session asks, and writes the stacks into a pipe that the session reads. It has
the interpreter lock then, so no frame moves. A signal handler has no lock. It may find frames that are half made, also
those of its own thread, and ends the process by SIGSEGV once in some hundred times.

C code may keep the lock, though. When the thread has waited long for it, a signal handler of ``faulthandler`` writes
the stacks after all: no frame moves as long as that C code runs. A stopped process runs no handler; the session tells
what the kernel says of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import operator
import os
import re
import signal
import threading
import time

# By hand: the stacks go into the log. It means the same to a Java or Go program, and neither torch nor multiprocessing
# uses it.
STACK_SIGNAL = signal.SIGQUIT

# What the session sends where C code keeps the interpreter lock. The last of the real-time signals: libraries that want
# one for themselves begin with the first.
LOCKED_SIGNAL = signal.SIGRTMAX

# A worker writes its stacks in less than a millisecond, once the kernel lets it run.
STACK_TIMEOUT = 1.0

# For so long the lock must be kept: Python code hands it on after 5 ms when another thread waits.
LOCK_TIMEOUT = 0.5

# How often to see whether a worker is done (in seconds), as nothing says that it never will be.
STACK_LOOK_INTERVAL = 0.005

# What is kept of one dump, and as much as a pipe holds.
MAX_DUMP = 65536

# Around the stacks that the thread writes; faulthandler writes ASCII, and signals have smaller numbers.
_BEGIN, _END = b"\xfe", b"\xff"

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_libc = ctypes.CDLL(None)


def dump_stacks_on_signal(descriptor: int) -> None:
    """Let this process, a session, write its stacks to ``descriptor`` when it gets the signal.

    It has no second thread, so this is for Python code, and for system calls that Python makes.
    """
    signal.signal(STACK_SIGNAL, lambda *_: faulthandler.dump_traceback(descriptor))
    # Somebody above us may have blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])


class StackPipe:
    """What a worker and its session need for the stacks; made before the fork.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        self._request = os.eventfd(0)
        try:
            self._read_end, self._write_end = os.pipe()
        except OSError:
            os.close(self._request)
            raise
        # Neither side ever waits: what the pipe does not hold is lost.
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def become_worker(self) -> None:
        """In the fork: write there from now on."""
        os.close(self._read_end)
        faulthandler.register(LOCKED_SIGNAL, self._write_end, all_threads=True)
        # The number of the signal goes into the pipe, without the lock, and the session asks then. The handler does
        # nothing. It is in C, as a Python function would stand in the stack.
        signal.signal(STACK_SIGNAL, operator.is_)
        signal.siginterrupt(STACK_SIGNAL, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL, LOCKED_SIGNAL])
        threading.Thread(target=self._answer, name="rpcdl-stacks", daemon=True).start()

    def _answer(self) -> None:
        while True:
            os.eventfd_read(self._request)
            # The pipe may be full, or closed by code that closes what it does not know.
            with contextlib.suppress(OSError):
                os.write(self._write_end, _BEGIN)
                faulthandler.dump_traceback(self._write_end)
                os.write(self._write_end, _END)

    def become_session(self, pid: int) -> StackReader:
        """In the parent: read what the worker ``pid`` writes."""
        os.close(self._write_end)
        return StackReader(pid, self._read_end, self._request)

    def close(self) -> None:
        """Close everything, if there was no fork."""
        for descriptor in self._request, self._read_end, self._write_end:
            os.close(descriptor)


class StackReader:
    """The session's view of one worker's stacks.

    Args:
        pid: Process id of the worker, a child of this process that only this process reaps.
        descriptor: The end of the pipe that is read; owned by this object.
        request: The eventfd that the worker waits for; owned by this object.
    """

    def __init__(self, pid: int, descriptor: int, request: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._request = request
        self._dump = bytearray()
        self._deadline: float | None = None  # of the dump under way
        self._is_signalled = False
        self._ticks: dict[int, int] = {}  # of each thread, when it was asked
        self._is_closed = False
        self._state = ""

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._descriptor

    @property
    def is_asked(self) -> bool:
        """Whether a dump is under way."""
        return self._deadline is not None

    def ask(self) -> None:
        """Let the worker write its stacks, unless it is at it."""
        if self.is_asked:
            return
        self._deadline = time.monotonic() + STACK_TIMEOUT
        self.read()
        self._dump.clear()
        self._is_signalled = False
        self._state = _describe(self._pid)
        self._ticks = {thread: _ticks(self._pid, thread) for thread in _threads(self._pid)}
        os.eventfd_write(self._request, 1)

    def read(self) -> bool:
        """Take what is in the pipe, perhaps a request made by hand; False when it is closed at the other end."""
        try:
            data = os.read(self._descriptor, MAX_DUMP)
        except BlockingIOError:
            return True
        self._dump += data[: MAX_DUMP - len(self._dump)]
        self._is_closed = not data
        if STACK_SIGNAL in data:
            self.ask()
        return bool(data)

    def is_done(self) -> bool:
        """Whether there is no more to come. Asks the kernel for help if the worker takes long."""
        assert self._deadline is not None
        self.read()
        remaining = self._deadline - time.monotonic()
        if self._written() is not None or self._is_closed or remaining < 0:
            return True
        if remaining < STACK_TIMEOUT - LOCK_TIMEOUT and not self._is_signalled:
            self._is_signalled = self._signal()
        return _letter(_status(self._pid, self._pid)) in "TtZX"

    def take(self) -> str:
        """What the worker does, as text: its state, and the stacks or why there are none."""
        self._deadline = None
        dump = self._written() or self._dump
        # A fork has the main thread's identifier from its parent.
        stacks = arrange(dump.decode("ascii", "replace"), threading.get_ident(), _PACKAGE)
        return f"state: {self._state}\n{stacks or 'no Python stack: ' + self._explain()}"

    def _written(self) -> bytearray | None:
        """What the worker's thread has written last; None if that is not all."""
        _before, begin, rest = self._dump.rpartition(_BEGIN)
        stacks, end, _after = rest.partition(_END)
        return stacks if begin and end else None

    def _explain(self) -> str:
        letter = _letter(_status(self._pid, self._pid))
        if letter in "ZX":
            return "it has ended"
        if letter in "Tt":
            return "it is stopped, and runs nothing before it gets SIGCONT"
        if self._is_closed:
            return "its code has closed the pipe"
        if letter == "D":
            return "it waits in the kernel, and no signal reaches it"
        return f"it did not let another of its threads run within {STACK_TIMEOUT:g} s"

    def _signal(self) -> bool:
        """Let a signal handler write the stacks; returns False if it is not safe now, or no thread runs one.

        If one thread has run since the worker was asked, it has the lock, and stays in its C code while its handler
        runs. If two have, the lock may go from one to the other, and the machine is slow. If none has, the one with the
        lock sleeps. It may be unable to run a handler, as when it waits for a file server that does not answer; then
        any other will do.
        """
        threads = {thread: _status(self._pid, thread) for thread in _threads(self._pid)}
        busy = [
            thread
            for thread, status in threads.items()
            if _letter(status) == "R" or _ticks(self._pid, thread) > self._ticks.get(thread, 0) + 1
        ]
        if len(busy) > 1:
            return False
        for thread in busy or threads:
            status = threads[thread]
            # Without a handler the signal would end it.
            if _letter(status) != "D" and _has_signal(status, "SigCgt") and not _has_signal(status, "SigBlk"):
                _send_to_thread(self._pid, thread)
                return True
        return False

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._descriptor)
        os.close(self._request)


def _threads(pid: int) -> list[int]:
    """Oldest first, but the main one last, which runs user code; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread == pid, thread))
    return []


def _status(pid: int, thread: int) -> dict[str, str]:
    """What the kernel says of a thread; empty when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status", errors="replace") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {}


def _ticks(pid: int, thread: int) -> int:
    """CPU time of a thread, in units of mostly 10 ms: a thread that only waits for the lock takes less than two."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", errors="replace") as file:
        fields = file.read().rpartition(") ")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def _letter(status: dict[str, str]) -> str:
    return status.get("State", "X")[0]


def _has_signal(status: dict[str, str], field: str) -> bool:
    return bool(int(status.get(field, "0"), 16) >> (LOCKED_SIGNAL - 1) & 1)


def _describe(pid: int) -> str:
    """State of the main thread and, where the kernel says so, the function in which it waits."""
    state = _status(pid, pid).get("State", "gone")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/wchan") as file:
        function = file.read().strip()
        if function not in ("", "0"):
            return f"{state} in {function}"
    return state


def _send_to_thread(pid: int, thread: int) -> None:
    if hasattr(_libc, "tgkill"):  # glibc 2.30
        _libc.tgkill(pid, thread, int(LOCKED_SIGNAL))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, LOCKED_SIGNAL)


# A recursion in every one of many threads fills pages; what matters stands in front.
MAX_CHARACTERS = 16384

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line ')


def arrange(dump: str, main: int, package: str) -> str:
    """Put the main thread first; leave out threads that run no user code, and what lies below user code in the others.

    Args:
        dump: Of all threads, each with its most recent call first.
        main: Identifier of the main thread (:func:`threading.get_ident`).
        package: Folder of this package, as it stands in file names.
    """
    # The text before the first header, then an identifier and the lines below it for each thread.
    _before, *parts = _HEADER.split(dump)
    stacks = [
        (int(ident, 16), text.strip("\n").split("\n")) for ident, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    # Threads come youngest first.
    stacks.sort(key=lambda stack: stack[0] != main)
    arranged = []
    for ident, lines in stacks:
        if ident == main:
            title = "Main thread"
        elif _shows_nothing(lines, package):
            continue
        else:
            title = f"Thread 0x{ident:x}"
        arranged.append("\n".join([f"{title} (most recent call first):", *_without_base(lines, package)]))
    text = "\n\n".join(arranged)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n... (cut here)"


def _file(line: str) -> str:
    match = _FRAME.match(line)
    return match[1] if match else ""


def _shows_nothing(lines: list[str], package: str) -> bool:
    """Whether a thread has no code in it but this package's and that of the standard library's ``threading``."""
    files = [_file(line) for line in lines]
    return all(file.startswith(f"{package}/") or file.endswith("/threading.py") for file in files)


def _without_base(lines: list[str], package: str) -> list[str]:
    """Keep one frame of the server, the one that has called user code or waits for something to do."""
    for position, line in enumerate(lines):
        if _file(line).startswith(f"{package}/server/"):
            return lines[: position + 1]
    return lines
