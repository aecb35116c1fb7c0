"""The embedded node server of this process: the same server, on a Unix socket that only we know.

It ends with this process however that ends, because it watches the pipe that its settings came through. It is a
session (setsid(2)) of its own, so that Ctrl-C in the terminal reaches the trainer alone.
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

from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import Credentials

logger = logging.getLogger("rpcdataloader.client")

# Where this package was imported from comes last, so that it shadows nothing, and is needed when it is not installed.
# The current folder goes, for the same reason: sessions add it, if the trainer has it.
_BOOT = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from rpcdataloader.server.embedded import main; main()"
)
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

STOP_TIMEOUT = 5.0


class LocalServer:
    """A node server subprocess; the constructor returns when it takes connections.

    Attributes:
        address: Of its Unix socket.
        credentials: Its secret, made for it alone.

    Raises:
        ConnectError: It did not start; its standard error tells why.
    """

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ConnectError("an embedded pool needs fork; name remote workers, or use workers='inline'")
        self.credentials = Credentials(secrets.token_urlsafe(32).encode(), "the embedded pool")
        self._folder = tempfile.mkdtemp(prefix="rpcdataloader-")
        self.address = Address(path=os.path.join(self._folder, "socket"))
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def ensure_running(self) -> None:
        """Start it again, at the same address, if it has ended; does nothing after :meth:`stop`.

        Raises:
            ConnectError: It did not start.
        """
        with self._lock:
            if not self._stopped and self._process.poll() is not None:
                logger.warning(
                    "the embedded pool has ended (exit status %d), and is started again", self._process.returncode
                )
                self._close_pipes()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address.path)
                self._start()

    def _start(self) -> None:
        settings = {"path": self.address.path, "token": self.credentials.secret.decode()}
        try:
            # Interrupted in here, it closes the pipe, which ends the server.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _PACKAGE_FOLDER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self._remove_folder()
            raise
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(settings).encode() + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BaseException:  # Ctrl-C, while it imports torch
            self._end()
            raise
        if not line:
            status = self._process.wait()
            self._end()
            raise ConnectError(f"the embedded pool did not start (exit status {status}); see its messages above")

    def stop(self) -> None:
        """End it, and everything it runs; idempotent."""
        with self._lock:
            self._stopped = True
            self._end()

    def _end(self) -> None:
        self._close_pipes()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget_in_child(self) -> None:
        """After a fork, in the child: do not keep the server alive when the parent dies."""
        self._lock = threading.Lock()
        self._stopped = True
        self._close_pipes()
        # It is not ours: nothing to wait for, nothing to warn of.
        self._process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
