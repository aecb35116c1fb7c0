"""Child processes that end with the command, whichever way it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from examples.storage_formats.errors import StudyError

# Asks the kernel for SIGTERM when the parent ends, and becomes the program. Not a preexec_fn, which must not run Python
# in a process with threads. PR_SET_PDEATHSIG is 1; the parent may have ended before the call.
GUARD = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals wait, as an interruption within :class:`subprocess.Popen` would leave a process that nobody knows."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Child:
    """A program in a process group of its own, so that Ctrl-C reaches the command alone, which then ends all others.

    It gets SIGTERM when the command ends without that, by SIGKILL for example. The kernel counts the end of the thread
    that starts it as the end of the command.

    Args:
        command: Program and arguments.
        log: File for its standard error, and for its standard output unless ``piped``.
        piped: Its standard output is read from :attr:`output`.
        env: Changes of the environment.
    """

    def __init__(self, command: list[str], log: Path, piped: bool = False, env: dict[str, str] | None = None) -> None:
        self.name, self.log = Path(command[0]).name, log
        try:
            with open(log, "ab") as file, _uninterrupted():
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else file,
                    stderr=file,
                    text=True,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
        except BaseException:
            if hasattr(self, "_process"):
                self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """CPU time of its process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime

    @property
    def output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def fail(self, what: str) -> StudyError:
        """An error about it, with the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return StudyError("\n".join([f"{what}; the last lines of {self.name}:", *lines]))

    def stop(self, timeout: float = 15.0) -> None:
        """End it with SIGTERM, and with SIGKILL what is left of its group, also at a second Ctrl-C."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def wait_for(child: Child, is_ready: object, what: str, timeout: float = 60.0) -> None:
    """Wait until ``is_ready()``; the child's end and the end of the time are errors."""
    assert callable(is_ready)
    deadline = time.monotonic() + timeout
    while not is_ready():
        if child.poll() is not None:
            raise child.fail(f"{what} ended before it was ready")
        if time.monotonic() > deadline:
            raise child.fail(f"{what} was not ready within {timeout:g} s")
        time.sleep(0.05)
