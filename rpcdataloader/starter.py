"""A node server that this process starts, here or through ssh, and that ends with it.

The first line of the server's standard input is the secret, and signs of life follow (``launch --exit-with-stdin``).
Its standard output has the ready line, and nothing that a peer or a dataset can write. These have words in the log,
which is passed on and never read here.

Servers start in the root folder: ``python -m`` searches the current folder first, and any other one may be another
user's on that machine. So their options take absolute paths, and their import path has no relative ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Seconds between two signs of life. Servers wait 60 s for one.
HEARTBEAT = 10.0

# Seconds for the last lines of a server that has ended: what it has started may hold its log open.
LAST_LINES_TIMEOUT = 1.0

# Longest line, so that a log without line feeds cannot grow this process.
MAX_LINE = 65536

_READY = re.compile(rb"rpcdataloader ready (\S+) num_workers=(\d+) pid=\d+")

# Options of ``launch`` that name files and folders.
_PATHS = {"--register", "--token-file", "--tls-cert", "--tls-key", "--tls-ca"}


@dataclass(frozen=True, slots=True)
class Ready:
    """The server takes connections."""

    address: str
    num_workers: int


# What a server tells: that it is ready, a line that it logs, and, as the last, None for its end.
Told = Ready | str | None


def arguments_of(options: Sequence[str], folder: str) -> list[str]:
    """Arguments of Python for a server with options of ``launch``, whose relative paths begin in ``folder``.

    A path with ``~`` stays as it is.
    """
    found = ["-m", "rpcdataloader.launch", "--exit-with-stdin"]
    is_path = False
    for option in options:
        name, is_joined, value = option.partition("=")
        if is_path:
            option = _absolute(option, folder)
        elif is_joined and name in _PATHS:
            option = f"{name}={_absolute(value, folder)}"
        is_path = not is_path and option in _PATHS
        found.append(option)
    return found


def _absolute(path: str, folder: str) -> str:
    return path if path in ("", "-") or path.startswith("~") else os.path.join(folder, path)


class ServerProcess:
    """A node server, or the ssh process in front of it.

    Args:
        command: Command line, of a server that reads its standard input.
        secret: Its first line there; None if the server finds the secret itself.
        tell: Function that takes what the server tells, in threads of this object.
        env, cwd: Environment and working directory; None for those of this process.

    Attributes:
        process: The process.
    """

    def __init__(
        self,
        command: Sequence[str],
        secret: bytes | None,
        tell: Callable[[Told], None],
        *,
        name: str = "server",
        env: dict[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._tell = tell
        self._is_closing = threading.Event()
        process: Any = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which tells the server
        )
        self.process = process
        os.set_blocking(process.stdin.fileno(), False)
        self._send(b"\n" if secret is None else secret + b"\n\n")  # with a first sign of life
        self._readers = [
            threading.Thread(target=function, name=f"rpcdl-{what} {name}", daemon=True)
            for what, function in (("ready", self._read_output), ("log", self._read_log))
        ]
        for thread in self._readers:
            thread.start()
        for what, function in ("beat", self._beat), ("wait", self._wait):
            threading.Thread(target=function, name=f"rpcdl-{what} {name}", daemon=True).start()

    def close(self) -> None:
        """Let the server drain and end; never waits."""
        self._is_closing.set()

    def _send(self, data: bytes) -> None:
        # The server may have ended, or its connection hang: both are seen elsewhere.
        with contextlib.suppress(OSError):
            os.write(self.process.stdin.fileno(), data)

    def _beat(self) -> None:
        while not self._is_closing.wait(HEARTBEAT):
            self._send(b"\n")
        self.process.stdin.close()

    def _read_output(self) -> None:
        is_ready = False
        for line in _lines_of(self.process.stdout):
            # Before it may come what the shell of a host prints at each login.
            if not is_ready and (match := _READY.fullmatch(line)):
                is_ready = True
                self._tell(Ready(match[1].decode(), int(match[2])))
            else:
                self._log(line)

    def _read_log(self) -> None:
        for line in _lines_of(self.process.stderr):
            self._log(line)

    def _log(self, line: bytes) -> None:
        self._tell(line.rstrip(b"\r").decode(errors="replace"))

    def _wait(self) -> None:
        output, log = self._readers
        output.join()  # which the server alone holds open; a command in place of ssh may leave it in the background
        self.process.wait()
        log.join(LAST_LINES_TIMEOUT)
        self._is_closing.set()
        self._tell(None)


def _lines_of(pipe: Any) -> Iterator[bytes]:
    # Without its buffer, whose lock would stop a fork that closes it.
    rest = b""
    with pipe:
        while data := os.read(pipe.fileno(), 65536):
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE:
                yield rest
                rest = b""
    if rest:
        yield rest
