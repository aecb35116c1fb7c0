"""One node server as a client sees it: its current session there, and the worker that serves ``rpc_async``.

A lost session stays lost: the next use of the node starts another one, which knows nothing of the first. The client
remembers what the node offered, so that its shares of workers stay the same while the node is away.
"""

from __future__ import annotations

import logging

from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import ClientSettings, RemoteWorker, WorkerOwner
from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.address import Address

logger = logging.getLogger("rpcdataloader.client")


class Node:
    """A node server at an address, with this client's current session there.

    Thread-safe.

    Attributes:
        is_local: True for a session of this machine in place of a node server.
        settings: Settings of the next session.
        is_missed: True if a pass found it missing, and the user was told.
        is_foreign: True if another version, or another program, answered last: a pass does not wait for it.
    """

    is_local = False

    def __init__(self, address: Address, settings: ClientSettings) -> None:
        self.address = address
        self.is_missed = self.is_foreign = False
        self.settings = settings
        self._lock = Lock()
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
                session = self._begin()
                self.sessions = [*(before for before in self.sessions if not before.is_over), session]
            return self.sessions[-1]

    def _begin(self) -> RemoteSession:
        return RemoteSession(self.address, self.settings, is_quiet=self.is_missed)

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
