"""One node server as a client sees it: its current session there, and the worker that serves ``rpc_async``.

A lost session stays lost: the next use of the node starts another one, which knows nothing of the first. The client
remembers what the node offered, so that its shares of workers stay the same while the node is away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcdataloader.client.connection import Connection
from rpcdataloader.client.exchange import ClientSettings
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import RemoteWorker, WorkerOwner
from rpcdataloader.wire.address import Address


class Node:
    """A node server at an address, with this client's current session there.

    Thread-safe.

    Args:
        ensure_running: Function to call before a session begins; restarts the embedded server if need be.

    Attributes:
        is_missed: True if a pass found it missing, and the user was told.
    """

    def __init__(
        self, address: Address, settings: ClientSettings, ensure_running: Callable[[], None] = lambda: None
    ) -> None:
        self.address = address
        self.is_missed = False
        self._ensure_running = ensure_running
        self._settings = settings
        self._lock = threading.Lock()
        # Guarded by the lock. The last session is the current one; those before it still drain.
        self._sessions: list[RemoteSession] = []
        self._rpc_worker: RemoteWorker | None = None
        self._num_workers: int | None = None

    def __str__(self) -> str:
        return str(self.address)

    def session(self) -> RemoteSession:
        """The current session, which may still be connecting; begun now if need be."""
        with self._lock:
            return self._current_session()

    def _current_session(self) -> RemoteSession:
        if not self._sessions or not self._sessions[-1].is_usable:
            self._ensure_running()
            self._sessions = [session for session in self._sessions if not session.is_over]
            self._sessions.append(RemoteSession(self.address, self._settings))
            self._sessions[-1].is_quiet = self.is_missed
            self._sessions[-1].start()
        return self._sessions[-1]

    @property
    def offered(self) -> int | None:
        """The number of workers that the node server offers, or last offered; None if it was never there."""
        for session in reversed(self._sessions):
            if session.welcome is not None:
                self._num_workers = session.num_workers
                break
        return self._num_workers

    def num_workers(self) -> int:
        """:attr:`offered`; waits for a node server that was never there.

        Raises:
            RPCError: The node server was never there, and cannot be reached.
        """
        if self.offered is None:
            self._num_workers = self.session().wait().num_workers
        assert self._num_workers is not None
        return self._num_workers

    def rpc_worker(self) -> RemoteWorker:
        """The worker that serves this client's ``rpc_async`` calls; begun now if need be."""
        with self._lock:
            if self._rpc_worker is None or not self._rpc_worker.is_usable:
                self._rpc_worker = self._current_session().open_worker(_RpcOwner())
            return self._rpc_worker

    def report(self, payload: bytes) -> None:
        """Tell the current session of the client's loops; see ``RemoteSession.report``."""
        for session in self._sessions[-1:]:
            session.report(payload)

    def wake(self) -> None:
        """Let threads that wait for the session check whether to go on waiting."""
        for session in self._sessions:
            session.wake()

    def close(self) -> None:
        """End the current session, and those that still drain."""
        for session in self._sessions:
            session.close()

    def connections(self) -> list[Connection]:
        """Every connection to this node."""
        return [connection for session in self._sessions for connection in session.connections()]


class _RpcOwner(WorkerOwner):
    """Does nothing: each request fails with its worker."""

    def worker_draining(self, worker: RemoteWorker) -> None:
        # It answers its requests, and ends with the client; its objects are lost then.
        if worker.connection.num_pending == 0:
            worker.close()
