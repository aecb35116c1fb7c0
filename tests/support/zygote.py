"""Runs scripts without the second or two that importing torch takes: forks a process that has imported it.

A script ends like one that was started by itself, with everything that the interpreter does at its end; or, where a
test is not about that, without taking torch apart, which needs a quarter of a second.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import types
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
MADV_COLLAPSE = 25  # of linux/mman.h


@dataclass
class Ended:
    """How a script ended."""

    status: int
    output: str
    errors: str
    time: float  # of the monotonic clock, which all processes share


class Script:
    """A running script."""

    def __init__(self, zygote: Zygote, pid: int, folder: Path) -> None:
        self.pid = pid
        self._zygote = zygote
        self._folder = folder

    @property
    def output(self) -> str:
        """Its standard output until now."""
        return (self._folder / "stdout").read_text()

    @property
    def errors(self) -> str:
        """Its standard error until now."""
        return (self._folder / "stderr").read_text()

    def kill(self) -> None:
        """End it by SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 30.0) -> Ended:
        """Wait for its end."""
        status, end = self._zygote.wait(self.pid, seconds)
        return Ended(status, self.output, self.errors, end)


class Zygote:
    """The process that is forked.

    Args:
        folder: For what scripts print.
        modules: What it imports besides torch and the package.
    """

    def __init__(self, folder: Path, *modules: str) -> None:
        self._folder = folder
        self._num_scripts = 0
        self._ended: dict[int, tuple[int, float]] = {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            bufsize=0,
        )

    def start(self, source: str, *args: object, ends_quickly: bool = False) -> Script:
        """Run ``source`` as ``__main__``.

        Args:
            args: Its arguments.
            ends_quickly: If it succeeds, it ends after its threads and its ``atexit`` functions.
        """
        self._num_scripts += 1
        folder = self._folder / f"script{self._num_scripts}"
        folder.mkdir()
        (folder / "script.py").write_text(source)
        (folder / "stdout").touch()
        (folder / "stderr").touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), ends_quickly, *map(str, args)]).encode() + b"\n")
        started: list[int] = []
        while not started:
            self._read(120.0, started)
        return Script(self, started[0], folder)

    def wait(self, pid: int, seconds: float) -> tuple[int, float]:
        """Exit status and time of the end of a script."""
        deadline = time.monotonic() + seconds
        while pid not in self._ended:
            self._read(deadline - time.monotonic(), [])
        return self._ended[pid]

    def _read(self, seconds: float, started: list[int]) -> None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, seconds))
        assert ready, "the script does not end"
        event = json.loads(self._process.stdout.readline())
        if "status" in event:
            self._ended[event["pid"]] = (event["status"], event["time"])
        else:
            self._ended.pop(event["pid"], None)  # of an earlier script that had the number
            started.append(event["pid"])

    def close(self) -> None:
        """End it, and scripts that still run."""
        self._process.communicate()


def serve() -> list[Any] | None:
    """Fork for every line of standard input; returns twice: what it says in the fork, None at the end."""
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    while True:
        for descriptor, _events in poll.poll():
            if descriptor == 0:
                line = stdin.readline()
                if not line:
                    return None
                pid = os.fork()
                if pid == 0:
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    # Where the tests run in the background of a shell, it is ignored.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for other in children:
                        os.close(other)
                    request: list[Any] = json.loads(line)
                    return request
                report: dict[str, float] = {"pid": pid}
                child = os.pidfd_open(pid)
                children[child] = pid
                poll.register(child, select.POLLIN)
            else:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid, status = os.waitpid(children.pop(descriptor), 0)
                report = {"pid": pid, "status": os.waitstatus_to_exitcode(status), "time": time.monotonic()}
            os.write(1, json.dumps(report).encode() + b"\n")


def use_huge_pages() -> None:
    """Put memory of this process into huge pages, which halves what each fork of it costs; if the kernel can."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _offset, _device, inode, *_name = line.split()
        if mode == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in place.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


_may_end_quickly = False


def end_quickly() -> None:
    """The last of the ``atexit`` functions."""
    if _may_end_quickly:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def become(folder: str, ends_quickly: bool, args: list[str]) -> None:
    """Run a script in this process as if it had been started with it."""
    global _may_end_quickly
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND), descriptor)
    if ends_quickly:
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's, which take its operators apart
    path = f"{folder}/script.py"
    sys.argv = [path, *args]
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(path).read_text(), path, "exec"), vars(main))
    except SystemExit as exc:
        _may_end_quickly = ends_quickly and exc.code in (None, 0)
        raise
    _may_end_quickly = ends_quickly


if __name__ == "__main__":
    # Before all others, as the last one that is registered is the first one that is called.
    atexit.register(end_quickly)
    gc.disable()  # a tenth of the time of these imports, which leave next to no garbage
    # The folder of this file: a script that asks for a library must not get a module of the tests.
    del sys.path[0]
    import rpcdataloader.loader.dataloader
    import rpcdataloader.loader.dataset

    # Of a node server.
    import rpcdataloader.server.node  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    multiprocessing.set_start_method("fork")  # else, from Python 3.14 on, scripts would need a guard
    gc.enable()
    gc.freeze()  # or every end would visit and copy all that torch has made
    use_huge_pages()
    logging.getLogger("rpcdataloader.diagnosis").setLevel("ERROR")  # every pass waits on a busy machine
    if request := serve():
        become(request[0], request[1], request[2:])
