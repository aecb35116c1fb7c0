"""A node server beside an actor of an engine: what runs on the machines of a cluster.

The server lives as long as the actor: it watches its standard input, which ends with the process of the actor, or with
the object (Dask drops an actor when its client has gone).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rpcdataloader.wire.credentials import Credentials

# Seconds between two signs of life. Servers wait 60 s for one.
HEARTBEAT = 10.0

_READY = re.compile(r"rpcdataloader ready (\S+) num_workers=\d+ pid=\d+\n")


@dataclass(frozen=True, slots=True)
class Order:
    """What node servers a pool wants.

    Attributes:
        credentials: Their secret; not shown by ``repr``.
        num_workers: How many workers each offers, and CPUs it takes.
        launch: More options of ``launch``.
        find_host: Gives the address of the machine that it is called on, by which trainers reach it.
    """

    credentials: Credentials
    num_workers: int
    launch: tuple[str, ...]
    find_host: Callable[[], str]


class NodeActor:
    """Starts a node server on this machine, and returns at once."""

    def __init__(self, order: Order) -> None:
        self._process = process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rpcdataloader.launch", "--host", order.find_host(), "--port", "0"),
                *("--num-workers", str(order.num_workers), "--log-level", "warning", *order.launch),
                *("--token-file", "-", "--exit-with-stdin"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # What can be imported here can be imported there: engines bring packages along (runtime_env of Ray).
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C in a terminal of the engine
        )
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(order.credentials.secret + b"\n")
        self.ended, closing = threading.Event(), threading.Event()
        self._close = weakref.finalize(self, closing.set)
        self._ready: list[str] = []
        self._last_words: list[str] = []
        # Threads that hold no reference to this object.
        _start_thread(_read, process, self._ready)
        _start_thread(_beat, process, closing)
        _start_thread(_wait, process, _start_thread(_relay, process, self._last_words), self.ended, closing)

    def address(self) -> str | None:
        """Where clients connect to; None before it takes connections.

        Raises:
            RuntimeError: The server has ended.
        """
        if self.ended.is_set():
            status = f"a node server has ended with status {self._process.returncode}"
            raise RuntimeError(": ".join([status, *self._last_words]))
        return self._ready[0] if self._ready else None

    def stop(self) -> None:
        """Let the server drain, and end; returns at once."""
        if not self._ready:
            self._process.kill()
        self._close()


def _start_thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=f"rpcdl-pool{function.__name__}", daemon=True)
    thread.start()
    return thread


def _read(process: subprocess.Popen[bytes], ready: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if match := _READY.fullmatch(line.decode(errors="replace")):
                ready.append(match[1])


def _beat(process: subprocess.Popen[bytes], closing: threading.Event) -> None:
    """Tell the server that its actor is there, until it is to end."""
    assert process.stdin is not None
    while True:
        with suppress(OSError):  # it has ended
            process.stdin.write(b"\n")
        if closing.wait(HEARTBEAT):
            return process.stdin.close()


def _wait(
    process: subprocess.Popen[bytes], relay: threading.Thread, ended: threading.Event, closing: threading.Event
) -> None:
    process.wait()
    relay.join(1.0)  # what it has said before
    ended.set()
    closing.set()


def _relay(process: subprocess.Popen[bytes], last_words: list[str]) -> None:
    """Pass on what the server logs, to where the engine collects that, and keep the last line."""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            last_words[:] = [line.decode(errors="replace").strip()]
            sys.stderr.write(last_words[0] + "\n")
            sys.stderr.flush()
