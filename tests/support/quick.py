"""Node servers with options and limits of their own, started in milliseconds."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import connect
from rpcdataloader.wire.transport import Deadline
from tests.conftest import READY_LINE, TIMEOUT_SCALE, descendants, is_running, occupied, wait_until
from tests.support.zygote import Ended, Script, Zygote

_LAUNCH = """
import os, sys
from rpcdataloader import launch
from rpcdataloader.server import clients, events, logs, node, session, status, worker
{before}
os._exit(launch.main(sys.argv[1:]))  # taking torch apart takes half a second
"""


class QuickServer:
    """A node server that is forked from a process which has imported torch; otherwise like one from ``launch``.

    Args:
        options: Of the command line.
        before: Statements that run first, to change limits: ``node.PROOF_TIMEOUT = 0.5``.
    """

    def __init__(self, zygote: Zygote, options: tuple[str, ...], before: str = "") -> None:
        if "--port" not in options and not any(option.startswith("unix:") for option in options):
            options = ("--port", "0", *options)
        self._script: Script = zygote.start(_LAUNCH.format(before=before), *options)
        self.pid = self._script.pid
        self._ended: Ended | None = None
        wait_until(self._is_up, 30, "ready line")
        match = READY_LINE.fullmatch(self._script.output)
        assert match, self._script.output + self._script.errors
        self.address, self.num_workers = match[1], int(match[2])
        assert int(match[3]) == self.pid

    def _is_up(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return "\n" in self._script.output or not os.path.exists(f"/proc/{self.pid}")
        return False

    @property
    def log(self) -> str:
        """What it has logged, and what its workers have printed."""
        return self._script.errors

    def logged(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log; gives the match."""
        wait_until(lambda: re.search(pattern, self.log), what=lambda: f"{pattern!r} in {self.log}")
        match = re.search(pattern, self.log)
        assert match
        return match

    def processes(self) -> list[int]:
        """Its gates, sessions and workers."""
        return occupied(self.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, number: int) -> int:
        """Send it a signal, and wait for its end; gives the exit status."""
        self.signal(number)
        return self.wait()

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for its end; gives the exit status."""
        if self._ended is None:
            self._ended = self._script.wait(seconds * TIMEOUT_SCALE)
            if self._ended.status == -signal.SIGKILL:
                # A gate that it had just forked may end a moment later.
                wait_until(lambda: not self._listens(), what="the end of all that listens")
            assert READY_LINE.fullmatch(self._ended.output), "more than the ready line on standard output"
        return self._ended.status

    def _listens(self) -> bool:
        address = Address.parse(self.address)
        try:
            connect(address, Deadline(1.0)).close()
        except ConnectError:
            return False
        return True

    def stop(self) -> None:
        """End it at once, and wait until nothing of it is left."""
        below = descendants(self.pid)
        # Two that differ: the kernel keeps only one of a kind.
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ProcessLookupError):
                self.signal(number)
        self.wait()
        wait_until(lambda: not any(map(is_running, below)), 10, "processes of a stopped server")


@contextlib.contextmanager
def quick_server(zygote: Zygote, *options: str, before: str = "") -> Iterator[QuickServer]:
    """A server that ends with the block."""
    server = QuickServer(zygote, options, before)
    try:
        yield server
    finally:
        server.stop()
