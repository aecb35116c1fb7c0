"""One node server as a client sees it: its current session there, and the worker that serves ``rpc_async``.

A lost session does not come back: the next use of the node starts another one, which knows nothing of the first.
What the node offered is remembered, so that shares of workers stay what they were while it is away.
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
    """A node server at an address, with the session that this client has there now.

    Thread-safe.

    Args:
        ensure_running: Called before a session is begun; starts the server again if it is this process's own.

    Attributes:
        is_missed: It was not there when a pass wanted it, and the user knows.
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
        """The current session, begun now if there is none; it may still be connecting."""
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
        """What the node server offers, or last offered; None if it was never there."""
        for session in reversed(self._sessions):
            if session.welcome is not None:
                self._num_workers = session.num_workers
                break
        return self._num_workers

    def num_workers(self) -> int:
        """The same; waits for the node server when it was never there.

        Raises:
            RPCError: It never was there, and cannot be reached.
        """
        if self.offered is None:
            self._num_workers = self.session().wait().num_workers
        assert self._num_workers is not None
        return self._num_workers

    def rpc_worker(self) -> RemoteWorker:
        """The worker that serves ``rpc_async`` calls of this client, begun now if there is none."""
        with self._lock:
            if self._rpc_worker is None or not self._rpc_worker.is_usable:
                self._rpc_worker = self._current_session().open_worker(_RpcOwner())
            return self._rpc_worker

    def report(self, payload: bytes) -> None:
        """Tell the current session of the client's loops; see ``RemoteSession.report``."""
        for session in self._sessions[-1:]:
            session.report(payload)

    def wake(self) -> None:
        """Let those who wait for the session look whether they still want to."""
        for session in self._sessions:
            session.wake()

    def close(self) -> None:
        """End the session, and those that still drain."""
        for session in self._sessions:
            session.close()

    def connections(self) -> list[Connection]:
        """Every connection to this node."""
        return [connection for session in self._sessions for connection in session.connections()]


class _RpcOwner(WorkerOwner):
    """The requests themselves are told when their worker is lost."""

    def worker_draining(self, worker: RemoteWorker) -> None:
        # It answers what it has, and ends when we do; objects that it holds are lost then.
        if worker.connection.num_pending == 0:
            worker.close()
