"""A dataset on the nodes of this client: built once on each, changed on all, let go with its last reference.

The client owns the recipe and the list of changes, so a session that is new, or a worker that builds for itself, can
be brought to the same state at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rpcdataloader.client.node import Session, Worker, result_of
from rpcdataloader.client.pool import get_client
from rpcdataloader.client.refs import DatasetRef
from rpcdataloader.errors import RPCError
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Build, Call
from rpcdataloader.wire.pickling import Encoded, dumps

logger = logging.getLogger("rpcdataloader.client")

# There is no limit of time: walking a large folder takes as long as it takes. But a line says what is waited for.
SLOW_BUILD_SECONDS = 10.0

_keys = itertools.count(1)

# Instances that are on nodes already, by the digest of their pickle: loaders of equal datasets share them.
_shipped: weakref.WeakValueDictionary[bytes, RemoteDataset] = weakref.WeakValueDictionary()
_shipped_lock = threading.Lock()


class RemoteDataset:
    """One dataset; thread-safe.

    Args:
        name: For messages.
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``.
        shared: Build once per session, or else in every worker.
    """

    def __init__(self, name: str, pickled: Encoded, *, shared: bool) -> None:
        self.key = next(_keys)
        self.name = name
        self._pickled = pickled
        self._shared = shared
        self._lock = threading.RLock()
        # Guarded by the lock: for each session that has it, whether the session has built it itself.
        self._sessions: dict[Session, bool] = {}
        self._length: int | None = None
        self._changes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._query_worker: Worker | None = None
        weakref.finalize(self, _release, self.key, self._sessions).atexit = False

    @property
    def ref(self) -> DatasetRef:
        """Stands for the dataset in a call to a session or worker that has it."""
        return DatasetRef(self.key)

    def build_on(self, sessions: Iterable[Session]) -> None:
        """Have it on all of ``sessions``, building where it is missing, at the same time.

        Raises:
            Exception: Whatever building it raised, with the node in the remote traceback.
            TypeError: It has no ``__getitem__``.
        """
        with self._lock:
            missing = [session for session in dict.fromkeys(sessions) if session not in self._sessions]
            if not missing:
                return
            payload = Build(self.key, self.name, self._shared, self._pickled.payload).encode()
            waiting = [(session, session.build(payload, self._pickled.buffers)) for session in missing]
            slow = _SlowLine(self.name, [session.name for session in missing])
            try:
                for session, wait in waiting:
                    reply = wait()
                    self._sessions[session] = reply["shared"]
                    if reply["shared"]:
                        self._length = reply["length"]
                        if not reply["indexable"]:
                            raise TypeError(f"dataset {self.name} has no __getitem__: a map-style dataset needs one")
                    slow.finished(session.name)
            finally:
                slow.close()
            for session in missing:
                if self._sessions[session]:
                    for func, args in self._changes:
                        session.call(func, self.ref, *args)()

    def attach(self, worker: Worker) -> None:
        """A worker of one of the sessions is going to use it: bring it up to date, and tell it of later changes."""
        with self._lock:
            if not self._sessions.get(worker.session, False):
                for func, args in self._changes:
                    worker.call(Call(func, (self.ref, *args), {}, ordered=True), _ignore)
            self._workers.add(worker)

    def length(self) -> int:
        """``len`` of it.

        Raises:
            TypeError: It has none.
        """
        with self._lock:
            if self._length is None:
                self._length = self.query(len)
            return self._length

    def query(self, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``func(dataset, *args)`` in a worker that is kept for such questions; returns the result.

        Raises:
            Exception: Whatever ``func`` raised.
        """
        with self._lock:
            wait = self._ask(self._idle_worker(), func, args)
        return wait()

    def change(self, func: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``func(dataset, *args)`` wherever the dataset is now, and wherever it will be later.

        Returns:
            The results, one for every process that it ran in: sessions first.

        Raises:
            Exception: Whatever ``func`` raised, in any of them; it is not applied later then.
        """
        with self._lock:
            sessions = [session for session, built in self._sessions.items() if built and session.is_usable]
            waits = [session.call(func, self.ref, *args) for session in sessions]
            if not sessions:
                self._idle_worker()
            waits += [self._ask(worker, func, args) for worker in list(self._workers) if worker.is_usable]
            results = [wait() for wait in waits]
            self._changes.append((func, args))
            self._length = None
            return results

    def _idle_worker(self) -> Worker:
        if self._query_worker is None or not self._query_worker.is_usable:
            session = next(session for session in self._sessions if session.is_usable)
            self._query_worker = session.open_worker(_QueryOwner())
            self.attach(self._query_worker)
            weakref.finalize(self, get_client().janitor.leave, self._query_worker.close).atexit = False
        return self._query_worker

    def _ask(self, worker: Worker, func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
        condition = threading.Condition()
        replies: list[Message | RPCError] = []

        def complete(reply: Message | RPCError) -> None:
            with condition:
                replies.append(reply)
                condition.notify()

        def wait() -> Any:
            with condition:
                condition.wait_for(lambda: replies)
            return result_of(replies[0], get_client().allocator)

        worker.call(Call(func, (self.ref, *args), {}, ordered=True), complete)
        return wait


def ship(instance: object) -> RemoteDataset:
    """An ordinary dataset instance as a remote one; the same one for equal instances while any of them is in use.

    Raises:
        SerializationError: It cannot be pickled; names the attribute path.
    """
    pickled = dumps((instance,), name="dataset")
    digest = hashlib.sha256(pickled.payload)
    for buffer in pickled.buffers:
        digest.update(buffer)
    with _shipped_lock:
        remote = _shipped.get(digest.digest())
        if remote is None:
            remote = RemoteDataset(type(instance).__name__, pickled, shared=True)
            _shipped[digest.digest()] = remote
        return remote


def _release(key: int, sessions: dict[Session, bool]) -> None:
    for session in list(sessions):
        session.release(key)


def _ignore(_reply: Message | RPCError) -> None:
    """A change that fails here has succeeded in a session before; the request that follows will show what is wrong."""


class _SlowLine:
    """Says once, after some seconds, which nodes are still building."""

    def __init__(self, name: str, nodes: Sequence[str]) -> None:
        self._name = name
        self._open = list(nodes)
        self._start = time.monotonic()
        get_client().alarm.call_after(SLOW_BUILD_SECONDS, self._say)

    def finished(self, node: str) -> None:
        self._open.remove(node)

    def close(self) -> None:
        self._open.clear()

    def _say(self) -> None:
        if nodes := list(self._open):
            seconds = time.monotonic() - self._start
            logger.warning("dataset %s is being built on %s for %.0f s", self._name, ", ".join(nodes), seconds)


class _QueryOwner:
    """Nothing to do: each question is told when its worker is lost."""

    def worker_ready(self, worker: Worker) -> None:
        pass

    def worker_draining(self, worker: Worker, last_request: int) -> None:
        pass

    def worker_lost(self, worker: Worker, error: RPCError) -> None:
        pass
