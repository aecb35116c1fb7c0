"""Where the Python code of a worker is, also while it hangs.

``faulthandler`` writes the stacks from a signal handler in C, so no thread of the worker has to get on, and none needs
the interpreter lock. They go into a pipe that the session reads. A process that is stopped runs no handler; of that
one, and of one whose code has taken the signal, the session can tell what the kernel says.

The signal is SIGQUIT, which means the same to a Java or Go program. Neither torch nor multiprocessing uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time

from rpcdataloader.server.tracebacks import arrange

STACK_SIGNAL = signal.SIGQUIT

# A worker writes its stacks in less than a millisecond, once the kernel lets it run.
STACK_TIMEOUT = 1.0

# How often to see whether a worker has finished writing (in seconds); nothing says so by itself.
STACK_LOOK_INTERVAL = 0.005

# How often nothing must be under way, as far as the kernel says, before that is believed: between taking a signal off
# the pending ones and blocking it for its handler, a thread looks as if it had never got one.
QUIET_LOOKS = 2
QUIET_LOOKS_WITHOUT_DUMP = 20

# What is kept of one dump, and as much as a pipe holds.
MAX_DUMP = 65536

_STOPPED = ("T", "t")

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_libc = ctypes.CDLL(None)


def dump_stacks_on_signal(descriptor: int) -> None:
    """Let this process write the stacks of all threads to ``descriptor`` when it gets the signal."""
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=True)
    # Somebody above us may have blocked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])


class StackPipe:
    """A pipe for the stacks of one worker; made before the fork.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        # Neither side ever waits: what the pipe does not hold is lost.
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def become_worker(self) -> None:
        """In the fork: write there from now on."""
        os.close(self._read_end)
        dump_stacks_on_signal(self._write_end)

    def become_session(self) -> int:
        """In the parent: keep the end that is read, which the caller owns then."""
        os.close(self._write_end)
        return self._read_end

    def close(self) -> None:
        """Close both ends, if there was no fork."""
        os.close(self._read_end)
        os.close(self._write_end)


class StackReader:
    """The session's view of one worker's stacks.

    Args:
        pid: Process id of the worker, a child of this process that only this process reaps.
        descriptor: The end of the pipe that is read; owned by this object.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._dump = bytearray()
        self._deadline: float | None = None  # of the dump under way
        self._num_quiet = 0  # looks in a row
        self._thread = pid  # the one that writes it
        self._why_none = ""
        self._state = ""

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._descriptor

    @property
    def is_asked(self) -> bool:
        """Whether a dump is under way."""
        return self._deadline is not None

    def ask(self) -> None:
        """Send the signal, unless a dump is under way."""
        if self.is_asked:
            return
        self.read()
        self._dump.clear()
        self.expect()
        self._thread = self._choose_thread()
        status = _status(self._pid, self._thread)
        if not _has_signal(status, "SigCgt"):
            # Without a handler the signal would end it.
            self._why_none = f"its code has removed the handler of {STACK_SIGNAL.name}"
        else:
            _send_to_thread(self._pid, self._thread)

    def expect(self) -> None:
        """Somebody else has sent the signal, by hand."""
        self._deadline = time.monotonic() + STACK_TIMEOUT
        self._num_quiet = 0
        self._thread = self._pid
        self._why_none = ""
        # Now, as a signal wakes it up for a moment.
        self._state = _describe(self._pid)

    def read(self) -> bool:
        """Take what is in the pipe; returns False when nobody can write to it any more."""
        try:
            data = os.read(self._descriptor, MAX_DUMP)
        except BlockingIOError:
            return True
        self._dump += data[: MAX_DUMP - len(self._dump)]
        return bool(data)

    def is_done(self) -> bool:
        """Whether there is no more to come."""
        assert self._deadline is not None
        if self._why_none or time.monotonic() > self._deadline:
            return True
        status = _status(self._pid, self._thread)
        if not status or _letter(status) in _STOPPED:
            return True
        # While a handler runs, the kernel blocks its signal in that thread.
        is_under_way = any(_has_signal(status, field) for field in ("SigPnd", "ShdPnd", "SigBlk"))
        self._num_quiet = 0 if is_under_way else self._num_quiet + 1
        self.read()
        return self._num_quiet >= (QUIET_LOOKS if self._dump else QUIET_LOOKS_WITHOUT_DUMP)

    def take(self) -> str:
        """What the worker does, as text: its state, and the stacks or why there are none."""
        self.read()
        self._deadline = None
        dump = self._dump.decode(errors="replace")
        self._dump.clear()
        # A fork has the main thread's identifier from its parent.
        stacks = arrange(dump, threading.get_ident(), _PACKAGE)
        return f"state: {self._state}\n{stacks or 'no Python stack: ' + self._explain()}"

    def _explain(self) -> str:
        if self._why_none:
            return self._why_none
        status = _status(self._pid, self._thread)
        if _letter(status) in "ZX":
            return "it has ended"
        if _letter(status) in _STOPPED:
            return "it is stopped, and runs no signal handler before it gets SIGCONT"
        if _letter(status) == "D":
            return "it waits in the kernel, and no signal reaches it"
        if _has_signal(status, "SigBlk"):
            return f"its code blocks {STACK_SIGNAL.name}"
        if any(_has_signal(status, field) for field in ("SigPnd", "ShdPnd")):
            return f"it did not get to run within {STACK_TIMEOUT:g} s"
        return f"its code has taken over {STACK_SIGNAL.name}, or closed the pipe"

    def _choose_thread(self) -> int:
        """The main thread, if it can run a handler.

        Else, as when it waits for a file server that does not answer, another one: the main thread's stack stands still
        then, and can be read from there. Not while it runs: frames that come and go cannot be read safely.
        """
        if _letter(_status(self._pid, self._pid)) == "R":
            return self._pid
        for thread in _threads(self._pid):
            status = _status(self._pid, thread)
            if _letter(status) != "D" and not _has_signal(status, "SigBlk"):
                return thread
        return self._pid

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)


def _threads(pid: int) -> list[int]:
    """Oldest first, so beginning with the main one; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread != pid, thread))
    return []


def _status(pid: int, thread: int) -> dict[str, str]:
    """What the kernel says of a thread; empty when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/status", errors="replace") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {}


def _letter(status: dict[str, str]) -> str:
    return status.get("State", "X")[0]


def _has_signal(status: dict[str, str], field: str) -> bool:
    return bool(int(status.get(field, "0"), 16) >> (STACK_SIGNAL - 1) & 1)


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
        _libc.tgkill(pid, thread, int(STACK_SIGNAL))
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
