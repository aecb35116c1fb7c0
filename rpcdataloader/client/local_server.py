"""The embedded node server of this process: the same server, on a private Unix socket.

It watches the pipe of its settings, so it ends with this process, however that ends. It is a session (setsid(2)) of its
own, so that Ctrl-C in the terminal reaches the trainer alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials

logger = logging.getLogger("rpcdataloader.client")

# The package's folder, needed when the package is not installed, comes last so that it shadows nothing. The current
# folder goes, for the same reason: sessions add it if the trainer has it.
_BOOT = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from rpcdataloader.server.embedded import main; main()"
)
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

STOP_TIMEOUT = 5.0


class LocalServer:
    """A node server subprocess. The constructor starts it, so that its imports run beside the caller's next steps.

    Raises:
        ConnectError: This system has no fork.
    """

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConnectError("an embedded pool needs fork; name remote workers, or use workers='inline'")
        self.credentials = Credentials(secrets.token_urlsafe(32).encode(), "the embedded pool")
        self._folder = tempfile.mkdtemp(prefix="rpcdataloader-")
        self.address = Address(path=os.path.join(self._folder, "socket"))
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._stopped = self._is_ready = False
        self._process: Any = None  # a Popen
        self._start()

    def ensure_running(self) -> None:
        """Wait until it takes connections; start it again at the same address if it has ended without :meth:`stop`.

        Raises:
            ConnectError: It did not start; see its standard error.
        """
        with self._lock:
            if self._stopped:
                return
            if self._is_ready and (status := self._process.poll()) is not None:
                logger.warning("the embedded pool has ended (exit status %d); starting it again", status)
                self._end()
            elif not self._is_ready and self._environment != dict(os.environ):
                self._end()  # its workers inherit the environment, which has changed
            if self._process is None:
                os.mkdir(self._folder, 0o700)
                self._start()
            if not self._is_ready:
                self._wait()

    def _start(self) -> None:
        settings = {"path": self.address.path, "token": self.credentials.secret.decode()}
        self._environment = dict(os.environ)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _PACKAGE_FOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), json.dumps(settings).encode() + b"\n")
        except BaseException:
            self._end()
            raise

    def _wait(self) -> None:
        try:
            self._is_ready = bool(self._process.stdout.readline())
            if not self._is_ready:
                status = self._process.wait()
                raise ConnectError(f"the embedded pool did not start (exit status {status}); see its messages above")
        except BaseException:  # also Ctrl-C, while it imports torch
            self._end()
            raise

    def stop(self) -> None:
        """End it with all of its processes; idempotent."""
        with self._lock:
            self._stopped = True
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._close_pipes()
            process, self._process = self._process, None
            try:
                # While it imports, it notices nothing, and has nothing to end.
                process.wait(STOP_TIMEOUT if self._is_ready else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._is_ready = False
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget_in_child(self) -> None:
        """After a fork, in the child: let the server end with the parent."""
        self._lock = threading.Lock()
        self._stopped = True
        if self._process is not None:
            self._close_pipes()
            # The parent's child: nothing to wait for, nothing to warn of.
            self._process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
