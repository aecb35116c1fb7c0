"""A dataset on the nodes of this client: built once on each, changed on all, released with its last reference.

The client owns the recipe and the list of changes, so it can bring a new session or worker to the same state.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from rpcdataloader.client.client import get_client
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import DatasetRef, PendingReply, RemoteWorker, WorkerOwner, dumps_named
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError
from rpcdataloader.host.generators import get_states
from rpcdataloader.wire.frames import MessageType, pieces_of
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import Build, Encoded

logger = logging.getLogger("rpcdataloader.client")

# Builds have no time limit, since walking a large folder may take long; after this time, a log line names the nodes.
SLOW_BUILD_SECONDS = 10.0

_keys = itertools.count(1)

# Instances on nodes, by the digest of their pickle: loaders of equal datasets share them.
_shipped: weakref.WeakValueDictionary[bytes, RemoteDataset] = weakref.WeakValueDictionary()
_shipped_lock = threading.Lock()

_Change = tuple[Callable[..., Any], tuple[Any, ...]]


class RemoteDataset(DatasetRef):
    """One dataset; thread-safe. In a call to a session or worker that has it, it stands for the dataset itself.

    Args:
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``.
        shared: Build once per session, or else in every worker.
        is_iterable: True for an iterable-style dataset, False for a map-style one; None to ask a node.
    """

    def __init__(self, name: str, pickled: Encoded, *, shared: bool, is_iterable: bool | None = None) -> None:
        super().__init__(next(_keys))
        self.name = name
        self._pickled = pickled
        self._shared = shared
        self._generators = get_states()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Guarded by the lock: the sessions that have it, and whether each has built it itself.
        self._sessions: dict[RemoteSession, bool] = {}
        self._building: weakref.WeakKeyDictionary[RemoteSession, threading.Lock] = weakref.WeakKeyDictionary()
        self._length: int | None = None
        self._is_iterable = is_iterable
        self._changes: list[_Change] = []
        self._workers: weakref.WeakSet[RemoteWorker] = weakref.WeakSet()
        self._query_worker: RemoteWorker | None = None
        weakref.finalize(self, _release, self.key, self._sessions).atexit = False

    def build_on(self, sessions: Iterable[RemoteSession]) -> None:
        """Build it on all ``sessions`` that lack it, at the same time.

        Changes and questions in the meantime do not wait for that.

        Raises:
            ConnectionLostError: A session has ended meanwhile. All others have the dataset nevertheless.
            Exception: The constructor failed; the remote traceback names the node.
            TypeError: The object built is no dataset.
        """
        self._check_process()
        wanted = list(dict.fromkeys(sessions))
        with self._lock:
            # In one order, so that two callers never wait for each other.
            locks = [self._building.setdefault(session, threading.Lock()) for session in sorted(wanted, key=id)]
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            if missing := [session for session in wanted if session not in self._sessions]:
                self._build_missing(missing)

    def is_on(self, session: RemoteSession) -> bool:
        """Whether workers of this session can use the dataset."""
        return session in self._sessions

    def _build_missing(self, sessions: Sequence[RemoteSession]) -> None:
        answers: dict[RemoteSession, PendingReply] = {}
        began = time.monotonic()

        def warn() -> None:
            if nodes := [session.name for session, answer in list(answers.items()) if not answer.done()]:
                seconds = time.monotonic() - began
                logger.warning("dataset %s is being built on %s for %.0f s", self.name, ", ".join(nodes), seconds)

        slow = get_client().alarm.call_after(SLOW_BUILD_SECONDS, warn)
        try:
            self._build(sessions, answers)
        except BaseException:
            # Also those that are still building: nothing else releases it there.
            for session in sessions:
                if session not in self._sessions:
                    session.connection.release(self.key)
            raise
        finally:
            slow.cancel()

    def _build(self, sessions: Sequence[RemoteSession], answers: dict[RemoteSession, PendingReply]) -> None:
        payload = Build(self.key, self.name, self._shared, self._generators, self._pickled.payload).encode()
        told: dict[RemoteSession, Callable[[], Any]] = {}
        replies: dict[RemoteSession, dict[str, Any]] = {}
        lost: ConnectionLostError | None = None
        for session in sessions:
            told[session] = session.follow()  # before the build, as the session answers in order
            if not self._shared:
                session.import_early(self._pickled.modules)
            answers[session] = session.submit(MessageType.BUILD, payload, self._pickled.buffers)
        for session, answer in answers.items():
            try:
                told[session]()
                replies[session] = answer.wait()
            except ConnectionLostError as exc:
                lost = exc
        for reply in replies.values():
            if reply["shared"] and not reply["kind"]:
                raise TypeError(f"{self.name} made no dataset: it has no __getitem__, and is no IterableDataset")
        lengths = {session.name: reply["length"] for session, reply in replies.items() if reply["shared"]}
        if lengths and self._length is not None and not self._changes:
            lengths["the nodes before"] = self._length
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{length} on {name}" for name, length in lengths.items())
            raise ValueError(
                f"dataset {self.name} is not the same on all nodes: its length is {found}. Is the data complete "
                "everywhere? Does it depend on the order of a folder (sort it) or on the time?"
            )
        for session, reply in replies.items():
            try:
                self._catch_up(session, reply)
            except ConnectionLostError as exc:
                lost = exc
        if lost is not None:
            raise lost

    def _catch_up(self, session: RemoteSession, reply: Mapping[str, Any]) -> None:
        """Apply the changes in a session that has just built it, and count the session among those that have it."""
        made: list[_Change] = []
        while True:
            with self._lock:
                to_make = [change for change in self._changes if not any(change is other for other in made)]
                if not to_make or not reply["shared"]:
                    for before in [other for other in self._sessions if other.address == session.address]:
                        if not before.is_usable:
                            del self._sessions[before]
                    self._sessions[session] = reply["shared"]
                    if reply["shared"]:
                        self._is_iterable = reply["kind"] == "iterable"
                        if self._length is None and not self._changes:
                            self._length = reply["length"]
                    return
            for func, args in to_make:
                session.call(func, self, *args)()
            made += to_make

    def open_worker(
        self, session: RemoteSession, owner: WorkerOwner, keep_waiting: Callable[[], bool] = lambda: True
    ) -> RemoteWorker:
        """Ask a session that has the dataset for a worker, which starts up to date and is told of later changes.

        The lock keeps changes out meanwhile: the worker is forked after a change, or is told.
        """
        self._check_process()
        with self._lock:
            worker = session.open_worker(owner, keep_waiting)
            if not self._inherits(worker):
                for func, args in self._changes:
                    # It has succeeded in a session before, and the request that follows shows a failure.
                    worker.call(Call(func, (self, *args), {}, ordered=True), lambda _reply: None)
            self._workers.add(worker)
            return worker

    def length(self) -> int:
        """Its ``len``.

        Raises:
            TypeError: It has no length.
        """
        with self._lock:
            if self._length is None:
                self._length = self.query(len)
            return self._length

    def is_iterable(self) -> bool:
        """Whether it is iterable-style; otherwise map-style."""
        with self._lock:
            if self._is_iterable is None:
                self._is_iterable = self.query(isinstance, IterableDataset)
            return self._is_iterable

    def query(self, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``func(dataset, *args)`` in a worker kept for such questions; returns the result.

        Raises:
            ConnectionLostError: No node with the dataset is left, or the worker died of the question.
            Exception: ``func`` failed.
        """
        self._check_process()
        while True:
            with self._lock:
                if (worker := self._idle_worker()) is not None:
                    wait = self._ask(worker, func, args)
                    break
            self._revive()
        return wait()

    def change(self, func: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``func(dataset, *args)`` wherever the dataset is now, and wherever it will be later.

        Returns:
            The results, one for every process that ran it: sessions first.

        Raises:
            ConnectionLostError: No node with the dataset is left, or a process died of the change.
            Exception: ``func`` failed in a process; the change is not applied later.
        """
        self._check_process()
        change = (func, args)
        while True:
            with self._lock:
                workers = [worker for worker in self._workers if worker.is_usable]
                built = [session for session, shared in self._sessions.items() if shared and session.is_usable]
                if not built and not workers and (worker := self._idle_worker()) is not None:
                    workers = [worker]
                connecting = [worker for worker in workers if self._inherits(worker) and not worker.connection.is_open]
                if (built or workers) and not connecting:
                    waits = [session.call(func, self, *args) for session in built]
                    waits += [self._ask(worker, func, args) for worker in workers]
                    self._changes.append(change)
                    break
            if not built and not workers:
                self._revive()
            # Connecting workers may be forked before or after their session changes.
            for worker in connecting:
                with contextlib.suppress(Exception):
                    self._ask(worker, callable, ())()
        try:
            results = _gather(waits)
        except BaseException:
            with self._lock:
                self._changes = [other for other in self._changes if other is not change]
            raise
        with self._lock:
            self._length = None
            self._changes = _without_overwritten(self._changes, change)
        return results

    def _inherits(self, worker: RemoteWorker) -> bool:
        """Whether the worker is forked with the dataset; otherwise it makes its own."""
        return self._sessions.get(worker.session, False)

    def _idle_worker(self) -> RemoteWorker | None:
        """A worker for questions; None if no session has the dataset. Holds the lock."""
        if self._query_worker is None or not self._query_worker.is_usable:
            usable = next((session for session in self._sessions if session.is_usable), None)
            if usable is None:
                return None
            self._query_worker = self.open_worker(usable, WorkerOwner())  # each question fails with its worker
            weakref.finalize(self, get_client().janitor.leave, self._query_worker.close).atexit = False
        return self._query_worker

    def _revive(self) -> None:
        """Build it again on one of the nodes that had it.

        Raises:
            ConnectionLostError: All of them are unreachable.
        """
        reasons: list[str] = []
        addresses = dict.fromkeys(session.address for session in list(self._sessions))
        for session in [get_client().node(address).session() for address in addresses]:
            try:
                session.wait()
                self.build_on([session])
                return
            except (ConnectError, ConnectionLostError) as exc:
                reasons.append(f"{session.name}: {exc}")
        raise ConnectionLostError(f"dataset {self.name} is lost with its nodes: {'; '.join(reasons)}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"dataset {self.name} belongs to process {self._pid}, of which this one is a fork: make one here"
            )

    def _ask(self, worker: RemoteWorker, func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
        answer = PendingReply(get_client().allocator)
        try:
            worker.call(Call(func, (self, *args), {}, ordered=True), answer.complete)
        except ConnectionLostError as exc:
            answer.complete(exc)
        return answer.wait


def ship(instance: object) -> RemoteDataset:
    """An ordinary dataset instance as a remote one; the same one for equal instances while any of them is in use.

    Raises:
        SerializationError: The dataset cannot be pickled; the message names the attribute path.
    """
    pickled = dumps_named((instance,), {"dataset": instance})
    digest = hashlib.sha256(pickled.payload)
    for piece in itertools.chain.from_iterable(map(pieces_of, pickled.buffers)):
        digest.update(piece)
    with _shipped_lock:
        remote = _shipped.get(digest.digest())
        if remote is None:
            remote = RemoteDataset(type(instance).__name__, pickled, shared=True)
            _shipped[digest.digest()] = remote
        return remote


def _gather(waits: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of a change. Processes that have ended do not count, unless all have."""
    results, lost = [], None
    for wait in waits:
        try:
            results.append(wait())
        except ConnectionLostError as exc:
            lost = exc
    if lost is not None and not results:
        raise lost
    return results


def _without_overwritten(changes: Sequence[_Change], latest: _Change) -> list[_Change]:
    """Drop changes that ``latest`` overwrites, so that ``dataset.epoch = n`` does not make the list grow without limit.

    Only if no other change came in between, which may have read the value.
    """
    end = next(position for position, change in enumerate(changes) if change is latest)
    start = end
    while start > 0 and latest[0] is setattr and changes[start - 1][0] is setattr:
        start -= 1
    between = [change for change in changes[start:end] if change[1][0] != latest[1][0]]
    return [*changes[:start], *between, *changes[end:]]


def _release(key: int, sessions: dict[RemoteSession, bool]) -> None:
    for session in list(sessions):
        session.connection.release(key)


def _forget_in_child() -> None:
    """After a fork, in the child: datasets on nodes belong to the parent."""
    global _shipped, _shipped_lock
    _shipped, _shipped_lock = weakref.WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
