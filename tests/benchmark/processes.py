"""Child processes of the harness: started in groups of their own, stopped with everything they started.

A trainer is a process that does one measurement: this module calls a function there, and prints what it has found.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

# What this package is called in the processes that it starts. The repository is not on the path of all of them,
# because it holds the package of the same name as the original's.
PACKAGE = "benchmark"

_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT = 10.0
_libc = ctypes.CDLL(None)
_Result = TypeVar("_Result")


def _die_with_parent() -> None:
    # For the one case that no context manager covers: the harness is killed by SIGKILL.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildError(Exception):
    """A child process failed; the text holds the end of what it wrote to standard error."""


class Child:
    """A running Python module whose standard output is read here and whose standard error goes to a file.

    Args:
        module: Run with ``python -m``.
        args: Its arguments.
        env: Its whole environment.
        folder: Where it runs, and where its standard error is kept. Must not be on anybody's path of modules, because
            ``python -m`` puts it in front of that.
    """

    def __init__(self, module: str, args: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.module = module
        self._log = folder / f"{module}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_line(self, start: str, timeout: float) -> str:
        """Return what follows ``start`` on the first line of output that starts so; ChildError after ``timeout`` s."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(start):
                    return line[len(start) :].strip()
        finally:
            timer.cancel()
        raise ChildError(f"{self.module} ended, or {timeout:g} s passed, without {start!r}\n{self.read_log()}")

    def read_log(self) -> str:
        """Return the end of what the child wrote to standard error."""
        return self._log.read_text(errors="replace")[-3000:]

    def wait(self, timeout: float) -> None:
        """Wait for the child to end by itself; ChildError when it does not, or not with exit status 0."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self.module} did not end within {timeout:g} s\n{self.read_log()}") from None
        if status:
            raise ChildError(f"{self.module} ended with exit status {status}\n{self.read_log()}")

    def stop(self) -> None:
        """Ask the child to end, then end its whole group. Says so when the child left something behind."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            print(f"{self.module} did not end within {_STOP_TIMEOUT:g} s of SIGTERM", file=sys.stderr)
        self._end_group()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _end_group(self) -> None:
        group = self._process.pid
        deadline = time.monotonic() + 2.0  # workers notice the end of their parent a moment later
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.02)
        print(f"{self.module} left processes behind: killing its group", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def stop_by_signals() -> None:
    """Let SIGINT and SIGTERM raise SystemExit, so that the context managers stop what was started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)


def _exit(_signal: int, _frame: object) -> NoReturn:
    sys.exit("stopped by a signal")


@contextlib.contextmanager
def running(module: str, args: Sequence[str], env: Mapping[str, str], folder: Path) -> Iterator[Child]:
    """Run a module for as long as the ``with`` block lasts."""
    child = Child(module, args, env, folder)
    try:
        yield child
    finally:
        child.stop()


def ask_trainer(
    measure: str, arguments: Mapping[str, Any], env: Mapping[str, str], folder: Path, timeout: float
) -> dict[str, Any]:
    """Call a function in a process of its own; returns what it has found.

    Args:
        measure: Module of this package, and the function in it, which returns a dataclass: ``"trainer.measure"``.
        arguments: By name; they become JSON on their way.

    Raises:
        ChildError: It failed.
    """
    with running(f"{PACKAGE}.processes", [measure, json.dumps(arguments)], env, folder) as trainer:
        found: dict[str, Any] = json.loads(trainer.read_line("found ", timeout))
        trainer.wait(timeout)
    return found


def _be_trainer(measure: str, arguments: str) -> None:
    stop_by_signals()  # so that torch's loader ends its workers
    # torch's loader keeps a descriptor open for each tensor that its workers send.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    module, _, function = measure.partition(".")
    found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)(**json.loads(arguments))
    print("found", json.dumps(asdict(found)), flush=True)


def measure_rounds(
    planned: Mapping[str, Sequence[str]],
    num_rounds: int,
    measure: Callable[[str, str], _Result],
    show: Callable[[_Result], str],
) -> dict[tuple[str, str], dict[int, _Result]]:
    """Measure all loaders in interleaved rounds, so that a machine that slows down slows all of them down.

    Args:
        planned: Loaders by what they are measured with.
        num_rounds: So many.
        measure: Called with a key of these and a loader.
        show: What is shown of a result.

    Returns:
        By subject, loader and number of the round; without those that have failed, which is shown.
    """
    found: dict[tuple[str, str], dict[int, _Result]] = {
        (subject, loader): {} for subject, loaders in planned.items() for loader in loaders
    }
    for number in range(num_rounds):
        for subject, loader in found:
            label = f"{subject}, round {number + 1} of {num_rounds}, {loader}"
            print(label, end=": ", file=sys.stderr, flush=True)
            try:
                found[subject, loader][number] = measure(subject, loader)
                print(show(found[subject, loader][number]), file=sys.stderr)
            except (ChildError, OSError) as error:
                print(f"failed\n{error}", file=sys.stderr)
    return found


if __name__ == "__main__":
    _be_trainer(*sys.argv[1:])
