"""Child processes of the harness: started in groups of their own, stopped with everything that they have started.

A trainer is a process that does one measurement: this module calls a function there, and prints what it has found.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

# What this package is called in the processes that it starts. The repository is not on the path of all of them,
# because it holds the package of the same name as the original's.
PACKAGE = "benchmark"

_STOP_TIMEOUT = 10.0
_Result = TypeVar("_Result")


class ChildError(Exception):
    """A child process failed, and has said why on standard error."""


@contextlib.contextmanager
def running(module: str, args: Sequence[str], env: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Python module for as long as the ``with`` block lasts.

    Args:
        module: Run with ``python -m``.
        args: Its arguments.
        env: Its whole environment.
        folder: Where it runs. Must not be on anybody's path of modules, because ``python -m`` puts it in front of that.
    """
    command = [sys.executable, "-m", module, *args]
    options: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=env, cwd=folder, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_line(process: subprocess.Popen[str], start: str, timeout: float) -> str:
    """Return what follows ``start`` on the first line of output that starts so; ChildError after ``timeout`` s."""
    assert process.stdout is not None
    timer = threading.Timer(timeout, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith(start):
                return line.removeprefix(start).strip()
    finally:
        timer.cancel()
    raise ChildError(f"{process.args!r} ended, or {timeout:g} s passed, without {start!r}")


def stop_by_signals() -> None:
    """Let SIGINT and SIGTERM raise SystemExit, so that the context managers stop what was started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("stopped by a signal"))


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
        found: dict[str, Any] = json.loads(read_line(trainer, "found ", timeout))
        if trainer.wait(timeout):
            raise ChildError(f"{measure} ended with exit status {trainer.returncode}")
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
            print(f"{subject}, round {number + 1} of {num_rounds}, {loader}", end=": ", file=sys.stderr, flush=True)
            try:
                found[subject, loader][number] = measure(subject, loader)
                print(show(found[subject, loader][number]), file=sys.stderr)
            except (ChildError, OSError) as error:
                print(f"failed\n{error}", file=sys.stderr)
    return found


def describe_machine() -> str:
    return (
        f"{len(os.sched_getaffinity(0))} CPUs ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}, load average at the start {os.getloadavg()[0]:.2f}"
    )


if __name__ == "__main__":
    _be_trainer(*sys.argv[1:])
