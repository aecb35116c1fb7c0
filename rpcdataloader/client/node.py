"""One node server as a client sees it: its current session there, and the worker that serves ``rpc_async``.

A lost session stays lost: the next use of the node starts another one, which knows nothing of the first. The client
remembers what the node offered, so that its shares of workers stay the same while the node is away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import Any

from rpcdataloader.client.discovery import POOL_PREFIX
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import ClientSettings, RemoteWorker, WorkerOwner
from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import INSECURE, forget_credentials, remember_credentials

logger = logging.getLogger("rpcdataloader.client")

# The package's folder, needed when the package is not installed, comes last so that it shadows nothing. The current
# folder goes, for the same reason: sessions add it if the trainer has it.
_BOOT = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
    "from rpcdataloader.launch import run_embedded; run_embedded()"
)
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

STOP_TIMEOUT = 5.0


class Node:
    """A node server at an address, with this client's current session there.

    Thread-safe.

    Args:
        local: The embedded server, if it is the one at the address.

    Attributes:
        settings: Settings of the next session.
        is_missed: True if a pass found it missing, and the user was told.
        is_foreign: True if another version, or another program, answered last: a pass does not wait for it.
    """

    def __init__(self, address: Address, settings: ClientSettings, local: LocalServer | None = None) -> None:
        self.address = address
        self.is_missed = self.is_foreign = False
        self.local = local
        self.settings = settings
        self._lock = threading.RLock()
        # Guarded by the lock. The last session is the current one; those before it still drain.
        self.sessions: list[RemoteSession] = []
        self._rpc_worker: RemoteWorker | None = None
        self._num_workers: int | None = None

    def __str__(self) -> str:
        return str(self.address)

    def session(self) -> RemoteSession:
        """The current session, which may still be connecting; begun now if need be."""
        with self._lock:
            if not self.sessions or not self.sessions[-1].is_usable:
                if self.local is not None:
                    self.local.ensure_running()
                session = RemoteSession(self.address, self.settings, is_quiet=self.is_missed)
                self.sessions = [*(before for before in self.sessions if not before.is_over), session]
            return self.sessions[-1]

    @property
    def current(self) -> RemoteSession | None:
        """The current session, if it takes requests; never waits."""
        return next((session for session in self.sessions[-1:] if session.is_ready), None)

    @property
    def offered(self) -> int | None:
        """The number of workers that the node server offers, or last offered; None if it was never there."""
        for session in reversed(self.sessions):
            if session.welcome is not None:
                self._num_workers = session.welcome.num_workers
                break
        return self._num_workers

    def num_workers(self) -> int:
        """:attr:`offered`; waits for a node server that was never there.

        Raises:
            RPCError: The node server was never there, and cannot be reached.
        """
        if (offered := self.offered) is None:
            offered = self._num_workers = self.session().wait().num_workers
        return offered

    def rpc_worker(self) -> RemoteWorker:
        """The worker that serves this client's ``rpc_async`` calls; begun now if need be."""
        with self._lock:
            if self._rpc_worker is None or not self._rpc_worker.is_usable:
                self._rpc_worker = self.session().open_worker(_RpcOwner())
            return self._rpc_worker

    def wake(self) -> None:
        """Let threads that wait for the session check whether to go on waiting."""
        for session in self.sessions:
            session.wake()

    def close(self) -> None:
        """End the current session, and those that still drain."""
        for session in self.sessions:
            session.close()


class _RpcOwner(WorkerOwner):
    """Does nothing: each request fails with its worker."""

    def worker_draining(self, worker: RemoteWorker) -> None:
        # It answers its requests, and ends with the client; its objects are lost then.
        if worker.connection.num_pending == 0:
            worker.close()


class LocalServer:
    """The embedded node server of this process: the same server as a subprocess, on a private Unix socket.

    It has no secret: the kernel tells both sides the other's user, and lets no other user into the folder.

    The constructor starts it, so that its imports run beside the caller's next steps. It watches the pipe of its
    settings, so it ends with this process, however that ends. It is a session (setsid(2)) of its own, so that Ctrl-C in
    the terminal reaches the trainer alone.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=POOL_PREFIX)
        self.address = Address(path=os.path.join(self._folder, "socket"), name="local")
        # Of its own, so that the end of this server does not forget those of another.
        self._credentials = dataclasses.replace(INSECURE, source=f"insecure, of {self._folder}")
        remember_credentials(self.address, self._credentials)
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
            if self._process is None:
                os.mkdir(self._folder, 0o700)
                self._start()
            if not self._is_ready:
                self._wait()

    def _start(self) -> None:
        try:
            with _starting:
                _servers.add(self)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, _PACKAGE_FOLDER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,  # a buffer's lock, which a thread holds while it reads, would stop a fork that closes it
                    start_new_session=True,
                )
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), os.fsencode(self.address.path) + b"\n")
        except BaseException:
            self._end()
            raise

    def _wait(self) -> None:
        # After Ctrl-C, while it imports torch, it goes on: for another pass, or until this process ends.
        self._is_ready = bool(self._process.stdout.readline())
        if not self._is_ready:
            status = self._process.wait()
            self._end()
            raise ConnectError(f"the embedded pool did not start (exit status {status}); see its messages above")

    def stop(self) -> None:
        """End it with all of its processes; idempotent."""
        with self._lock:
            self._stopped = True
            forget_credentials(self._credentials)
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._close_pipes()
            process, self._process = self._process, None
            # While it imports, it notices nothing, and has nothing to end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT if self._is_ready else 0)
            process.kill()
            process.wait()
        self._is_ready = False
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget_in_child(self) -> None:
        """Let the server end with the parent."""
        self._lock = threading.Lock()
        self._stopped = True
        forget_credentials(self._credentials)
        if self._process is not None:
            self._close_pipes()
            # The parent's child: nothing to wait for, nothing to warn of.
            self._process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


# A child of a fork must not keep a server alive, so a fork waits while the pipes of one are open that it does not know.
_servers: weakref.WeakSet[LocalServer] = weakref.WeakSet()
_starting = threading.RLock()


def _forget_in_child() -> None:
    global _starting
    _starting = threading.RLock()
    for server in list(_servers):
        server.forget_in_child()


os.register_at_fork(
    before=lambda: _starting.acquire(), after_in_parent=lambda: _starting.release(), after_in_child=_forget_in_child
)
