"""A node server beside an actor of an engine, on a machine of the cluster.

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

from rpcdataloader.wire.credentials import Credentials

# Seconds between two signs of life. Servers wait 60 s for one.
HEARTBEAT = 10.0

_READY = re.compile(r"rpcdataloader ready (\S+) num_workers=\d+ pid=\d+")


@dataclass(frozen=True, slots=True)
class Order:
    """A pool's description of its node servers.

    Attributes:
        credentials: Their secret; not shown by ``repr``.
        num_workers: Number of workers that each offers, and CPUs that it takes.
        launch: More options of ``launch``.
        find_host: Function for the address at which trainers reach the machine that runs it.
    """

    credentials: Credentials
    num_workers: int
    launch: tuple[str, ...]
    find_host: Callable[[], str]


class NodeActor:
    """Starts a node server on this machine, without waiting for it."""

    def __init__(self, order: Order) -> None:
        self._process = process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rpcdataloader.launch", "--host", order.find_host(), "--port", "0"),
                *("--num-workers", str(order.num_workers), "--log-level", "warning", *order.launch),
                *("--token-file", "-", "--exit-with-stdin"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # The server can import what this process can: engines bring packages along (runtime_env of Ray).
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
        # Threads without a reference to this object.
        follow = (process, self._ready, self._last_words, self.ended, closing)
        for name, function, args in ("beat", _beat, (process, closing)), ("follow", _follow, follow):
            threading.Thread(target=function, args=args, name=f"rpcdl-pool-{name}", daemon=True).start()

    def address(self) -> str | None:
        """Address for clients; None before the server is ready.

        Raises:
            RuntimeError: The server has ended.
        """
        if self.ended.is_set():
            status = f"a node server has ended with status {self._process.returncode}"
            raise RuntimeError(": ".join([status, *self._last_words]))
        return self._ready[0] if self._ready else None

    def stop(self) -> None:
        """Let the server drain and end; does not wait."""
        if not self._ready:
            self._process.kill()
        self._close()


def _beat(process: subprocess.Popen[bytes], closing: threading.Event) -> None:
    """Send the server signs of life until it is to end."""
    assert process.stdin is not None
    while True:
        with suppress(OSError):  # the server has ended
            process.stdin.write(b"\n")
        if closing.wait(HEARTBEAT):
            return process.stdin.close()


def _follow(
    process: subprocess.Popen[bytes],
    ready: list[str],
    last_words: list[str],
    ended: threading.Event,
    closing: threading.Event,
) -> None:
    """Read the ready line, and pass the log on to where the engine collects it, until the server has ended."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            text = line.decode(errors="replace").strip()
            if match := _READY.fullmatch(text):
                ready.append(match[1])
            else:
                last_words[:] = [text]
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
    process.wait()
    ended.set()
    closing.set()
