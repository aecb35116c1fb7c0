"""Stacks of workers, as their session asks for them and they tell them.

The watcher, a thread of a worker, sends the Python stacks of all threads to its session. It holds the interpreter lock
while it looks at them, so no frame moves. A signal handler holds no lock: it may find half-made frames, and once in
some hundred times ends the process by SIGSEGV. Where C code keeps the lock, or the process is stopped, the session
reports the state that the kernel gives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import FrameType

from rpcdataloader.host.resources import process_use, read
from rpcdataloader.server.events import MAX_MESSAGE, Link, Row, WantsStacks
from rpcdataloader.server.processes import Loop, Process

# A worker tells its stacks in less than a millisecond of its own time.
STACK_TIMEOUT = 1.0

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@dataclass(slots=True, eq=False)
class ForkedWorker:
    """A session's view of one worker, a child that only the session reaps."""

    number: int
    peer: str
    process: Process
    link: Link
    row: Row
    loop: Loop
    gave_up: str = ""  # why, if it has said so
    _takers: list[Callable[[str], None]] = field(default_factory=list)  # of the stacks, which were requested
    _num_answered: int = 0
    _state: str = ""

    def ask(self, take: Callable[[str], None]) -> None:
        """Request the stacks for ``take``; a pending request serves this one, too."""
        self._takers.append(take)
        if len(self._takers) > 1:
            return
        self._state = _describe(self.process.pid)
        if _letter(self.process.pid) in "TtZX":
            self._explain()
            return
        number = self._num_answered
        self.link.offer(WantsStacks())
        self.loop.call_after(STACK_TIMEOUT, lambda: self._explain() if number == self._num_answered else None)

    def told(self, stacks: str) -> None:
        """Answer requests with the stacks, which have come."""
        self.answer(f"{self._name}: state: {self._state}\n{stacks}")

    def _explain(self) -> None:
        """Answer requests with the reason why no stacks have come."""
        self.answer(f"{self._name}: state: {self._state}\nno Python stack: {_explain(_letter(self.process.pid))}")

    @property
    def _name(self) -> str:
        return f"worker {self.number} (pid {self.process.pid})"

    def answer(self, text: str) -> None:
        """Answer all requests."""
        takers, self._takers = self._takers, []
        self._num_answered += bool(takers)
        for take in takers:
            take(text)

    def close(self) -> None:
        """Close this process's descriptors, but for that of the process."""
        self.link.close()


class StackFile:
    """A status gate's request for the stacks of all workers: a line for each in ``file``, until ``pipe`` is closed."""

    def __init__(self, workers: Collection[ForkedWorker], file: int, pipe: int) -> None:
        self._file = file
        self._pipe = pipe
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


def _letter(pid: int) -> str:
    return process_use(pid).state or "X"


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

# They travel in an event, where a character may be escaped.
MAX_JSON_BYTES = MAX_MESSAGE - 1024


def stacks() -> str:
    """The Python stacks of this process, a worker, in words, the main thread's first.

    Leaves out threads without user code, and in the others frames below user code.
    """
    main = threading.main_thread().ident
    told = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        lines = list(_lines(frame))
        if ident == main or any(is_users for _line, is_users in lines):
            title = "Main thread" if ident == main else f"Thread 0x{ident:016x}"
            told.append("\n".join([f"{title} (most recent call first):", *(line for line, _is_users in lines)]))
    # Names of files may have bytes that are no text.
    text = "\n\n".join(told).encode(errors="backslashreplace").decode()
    shown = text[:MAX_CHARACTERS]
    while len(json.dumps(shown)) > MAX_JSON_BYTES:
        shown = shown[: len(shown) * 3 // 4]
    return shown if shown == text else f"{shown}\n... (cut here)"


def _lines(frame: FrameType | None) -> Iterator[tuple[str, bool]]:
    """The frames of a thread, youngest first, and whether each is user code.

    One frame of the server stays, as the last: the caller of user code, or the one that waits for work.
    """
    server = os.path.join(_PACKAGE, "server", "")
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        is_own = file.startswith(os.path.join(_PACKAGE, "")) or file.endswith("/threading.py")
        yield f'  File "{file}", line {frame.f_lineno} in {name}', not is_own
        if file.startswith(server):
            break
        frame = frame.f_back
