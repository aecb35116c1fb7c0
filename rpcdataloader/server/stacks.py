"""Stacks of workers, as their session asks for them and they write them down.

The watcher, a thread of a worker, writes the Python stacks into a file that it shares with its session. It holds the
interpreter lock then, so no frame moves. A signal handler holds no lock: it may find half-made frames, and once in some
hundred times ends the process by SIGSEGV. Where C code keeps the lock, or the process is stopped, the session reports
the state that the kernel gives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rpcdataloader.host.resources import process_use, read
from rpcdataloader.server.events import Link, Row, WantsStacks
from rpcdataloader.server.processes import Process
from rpcdataloader.wire.memory import memory_file

# A worker writes its stacks in less than a millisecond of its own time.
STACK_TIMEOUT = 1.0

# Seconds between two looks whether a worker is done, as it may never tell.
STACK_LOOK_PERIOD = 0.005

# Marks around the stacks that the watcher writes; faulthandler writes ASCII.
_BEGIN, _END = b"\xfe", b"\xff"

# Most bytes that are read of a file.
_MAX_DUMP = 1 << 20

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def stack_file(name: str) -> int:
    """A new file in memory, for several processes: each writes at the end, wherever that is."""
    file = memory_file(name)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def write_stacks(file: int) -> None:
    """Write the stacks of all threads of this process; in a worker's watcher."""
    with contextlib.suppress(OSError):  # closed by user code
        os.write(file, _BEGIN)
        faulthandler.dump_traceback(file)
        os.write(file, _END)


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A session's view of one worker, a child that only the session reaps."""

    number: int
    peer: str
    process: Process
    link: Link
    row: Row
    stacks: int  # file for its stacks
    _takers: list[Callable[[str], None]] = field(default_factory=list)  # of the stacks, which were requested
    _deadline: float = 0.0  # of that request
    _state: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether a request for the stacks is pending."""
        return bool(self._takers)

    def ask(self, take: Callable[[str], None]) -> None:
        """Request the stacks for ``take``; a pending request serves this one, too."""
        self._takers.append(take)
        if len(self._takers) == 1:
            self._deadline = time.monotonic() + STACK_TIMEOUT
            os.ftruncate(self.stacks, 0)
            self._state = _describe(self.process.pid)
            self.link.offer(WantsStacks())

    def look(self) -> None:
        """Answer requests if the stacks are complete or hopeless; never waits."""
        if not self._takers:
            return
        dump = os.pread(self.stacks, _MAX_DUMP, 0)
        letter = process_use(self.process.pid).state or "X"
        written, end, _after = dump.rpartition(_BEGIN)[2].partition(_END)
        if not end or _BEGIN not in dump:
            if time.monotonic() <= self._deadline and letter not in "TtZX":
                return
            written = b""
        # A fork inherits the main thread's identifier from its parent.
        text = arrange(written.decode("ascii", "replace"), threading.get_ident(), _PACKAGE)
        name = f"worker {self.number} (pid {self.process.pid})"
        self.answer(f"{name}: state: {self._state}\n{text or 'no Python stack: ' + _explain(letter)}")

    def answer(self, text: str) -> None:
        """Answer all requests."""
        takers, self._takers = self._takers, []
        for take in takers:
            take(text)

    def close(self) -> None:
        """Close this process's descriptors, but for that of the process."""
        self.link.close()
        os.close(self.stacks)


class StackFile:
    """A status gate's request for the stacks of all workers: a line for each in ``file``, until ``pipe`` is closed."""

    def __init__(self, workers: Collection[ForkedWorker], file: int, pipe: int) -> None:
        self._file, self._pipe = file, pipe
        self._num_missing = len(workers)
        for worker in workers:
            worker.ask(functools.partial(self._write, worker.process.pid))
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


def _describe(pid: int) -> str:
    """State of the main thread and, where the kernel shows it, the function in which it waits."""
    found = re.search(r"^State:\t(.*)$", read(f"/proc/{pid}/status"), re.MULTILINE)
    state, function = found[1] if found else "gone", read(f"/proc/{pid}/wchan")
    return state if function in ("", "0") else f"{state} in {function}"


# Recursion in many threads fills pages; the important part comes first.
MAX_CHARACTERS = 16384

# faulthandler writes other characters than ASCII so, in the names of folders, files and functions. Surrogates stand for
# bytes that are no text, and cannot be sent as such.
_ESCAPE = re.compile(r"\\(?:x[89a-f][\da-f]|u(?!d[89a-f])[\da-f]{4}|U[\da-f]{8})")

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:\n", re.MULTILINE)


def arrange(dump: str, main: int, package: str) -> str:
    """Put the main thread first; leave out threads without user code, and frames below user code in the others.

    ``main`` is the identifier of the main thread, ``package`` the folder of this package.
    """
    own, library = (
        re.escape(path.encode("ascii", "backslashreplace").decode()) for path in (package, threading.__file__)
    )
    base = re.compile(rf'^  File "{own}/server/.*(?:\n|\Z)', re.MULTILINE)
    # Any line but a frame of this package or of the standard library's ``threading``.
    user_code = re.compile(rf'^(?!  File "(?:{own}/|{library}", line )).', re.MULTILINE)
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
    text = _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), "\n\n".join(arranged))
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n... (cut here)"
