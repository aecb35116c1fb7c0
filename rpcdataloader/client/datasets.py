"""A dataset on the nodes of this client: built once on each, changed on all, let go with its last reference.

The client owns the recipe and the list of changes, so a session that is new, or a worker that builds for itself, can
be brought to the same state at any time.
"""

from __future__ import annotations

import contextlib
import functools
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
from rpcdataloader.client.exchange import PendingReply
from rpcdataloader.client.refs import DatasetRef
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import RemoteWorker, WorkerOwner
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError, SerializationError
from rpcdataloader.host.generators import get_states
from rpcdataloader.wire.buffers import pieces_of
from rpcdataloader.wire.frames import Message
from rpcdataloader.wire.messages import Build, Call
from rpcdataloader.wire.picklers import PersistentId
from rpcdataloader.wire.pickling import Encoded, dumps

logger = logging.getLogger("rpcdataloader.client")

# There is no limit of time: walking a large folder takes as long as it takes. But a line says what is waited for.
SLOW_BUILD_SECONDS = 10.0

_keys = itertools.count(1)

# Instances that are on nodes already, by the digest of their pickle: loaders of equal datasets share them.
_shipped: weakref.WeakValueDictionary[bytes, RemoteDataset] = weakref.WeakValueDictionary()
_shipped_lock = threading.Lock()

_Change = tuple[Callable[..., Any], tuple[Any, ...]]


class RemoteDataset:
    """One dataset; thread-safe.

    Args:
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``.
        shared: Build once per session, or else in every worker.
        is_iterable: Whether it is iterable-style; None if that is to be found out.
    """

    def __init__(self, name: str, pickled: Encoded, *, shared: bool, is_iterable: bool | None = None) -> None:
        self.key = next(_keys)
        self.name = name
        self._pickled = pickled
        self._shared = shared
        self._generators = get_states()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Guarded by the lock: for each session that has it, whether the session has built it itself.
        self._sessions: dict[RemoteSession, bool] = {}
        self._building: dict[RemoteSession, threading.Event] = {}
        self._length: int | None = None
        self._is_iterable = is_iterable
        self._changes: list[_Change] = []
        self._workers: weakref.WeakSet[RemoteWorker] = weakref.WeakSet()
        self._query_worker: RemoteWorker | None = None
        weakref.finalize(self, _release, self.key, self._sessions).atexit = False

    @property
    def ref(self) -> DatasetRef:
        """Stands for the dataset in a call to a session or worker that has it."""
        return DatasetRef(self.key)

    def build_on(self, sessions: Iterable[RemoteSession]) -> None:
        """Have it on all of ``sessions``, building where it is missing, at the same time.

        Whoever changes or asks it meanwhile does not wait for that.

        Raises:
            ConnectionLostError: A session has ended meanwhile. It is on all others all the same.
            Exception: Whatever building it raised, with the node in the remote traceback.
            TypeError: It is no dataset.
        """
        self._check_process()
        wanted = list(dict.fromkeys(sessions))
        while True:
            with self._lock:
                missing = [session for session in wanted if session not in self._sessions]
                awaited = [self._building[session] for session in missing if session in self._building]
                mine = [session for session in missing if session not in self._building]
                done = threading.Event()
                self._building.update(dict.fromkeys(mine, done))
            if mine:
                try:
                    self._build_missing(mine)
                finally:
                    with self._lock:
                        for session in mine:
                            del self._building[session]
                    done.set()
            for other in awaited:
                other.wait()
            if not awaited:
                return

    def is_on(self, session: RemoteSession) -> bool:
        """Whether workers of this session can use it."""
        return session in self._sessions

    def _build_missing(self, sessions: Sequence[RemoteSession]) -> None:
        slow = _SlowLine(self.name, [session.name for session in sessions])
        try:
            self._build(sessions, slow)
        except BaseException:
            # Also those that are still building it: nothing else will let it go there.
            for session in sessions:
                if session not in self._sessions:
                    session.release(self.key)
            raise
        finally:
            slow.close()

    def _build(self, sessions: Sequence[RemoteSession], slow: _SlowLine) -> None:
        payload = Build(self.key, self.name, self._shared, self._generators, self._pickled.payload).encode()
        waiting: list[tuple[RemoteSession, Callable[[], Any]]] = []
        replies: dict[RemoteSession, dict[str, Any]] = {}
        lost: ConnectionLostError | None = None
        for session in sessions:
            try:
                finished = functools.partial(slow.finished, session.name)
                waiting.append((session, session.build(payload, self._pickled.buffers, finished)))
            except ConnectionLostError as exc:
                lost = exc
        for session, wait in waiting:
            try:
                replies[session] = wait()
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
        """Make the changes in a session that has just built it, and count it among those that have it then."""
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
                session.call(func, self.ref, *args)()
            made += to_make

    def open_worker(
        self, session: RemoteSession, owner: WorkerOwner, keep_waiting: Callable[[], bool] = lambda: True
    ) -> RemoteWorker:
        """Ask a session that has it for a worker that uses it: one that is up to date, and told of later changes.

        The lock makes sure that no change comes between: the worker is forked after it, or is told.
        """
        self._check_process()
        with self._lock:
            worker = session.open_worker(owner, keep_waiting)
            if not self._inherits(worker):
                for func, args in self._changes:
                    worker.call(Call(func, (self.ref, *args), {}, ordered=True), _ignore)
            self._workers.add(worker)
            return worker

    def length(self) -> int:
        """``len`` of it.

        Raises:
            TypeError: It has none.
        """
        with self._lock:
            if self._length is None:
                self._length = self.query(len)
            return self._length

    def is_iterable(self) -> bool:
        """Whether it is iterable-style, and not map-style."""
        with self._lock:
            if self._is_iterable is None:
                self._is_iterable = self.query(_is_iterable)
            return self._is_iterable

    def query(self, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``func(dataset, *args)`` in a worker that is kept for such questions; returns the result.

        Raises:
            ConnectionLostError: No node that has it is left, or the worker died of the question.
            Exception: Whatever ``func`` raised.
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
            The results, one for every process that it ran in: sessions first.

        Raises:
            ConnectionLostError: No node that has it is left, or a process died of the change.
            Exception: Whatever ``func`` raised, in any of them; it is not applied later then.
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
                    waits = [session.call(func, self.ref, *args) for session in built]
                    waits += [self._ask(worker, func, args) for worker in workers]
                    self._changes.append(change)
                    break
            if not built and not workers:
                self._revive()
            # Whether these are forked before their session has changed or after, nobody could tell.
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
        """Whether the worker is forked with the dataset, or else makes its own."""
        return self._sessions.get(worker.session, False)

    def _idle_worker(self) -> RemoteWorker | None:
        """A worker for questions; None if there is no session left that has it. With the lock."""
        if self._query_worker is None or not self._query_worker.is_usable:
            usable = next((session for session in self._sessions if session.is_usable), None)
            if usable is None:
                return None
            self._query_worker = self.open_worker(usable, _QueryOwner())
            weakref.finalize(self, get_client().janitor.leave, self._query_worker.close).atexit = False
        return self._query_worker

    def _revive(self) -> None:
        """Build it again on one of the nodes that had it.

        Raises:
            ConnectionLostError: None of them can be reached.
        """
        with self._lock:
            sessions = list(self._sessions)
        addresses = dict.fromkeys(session.address for session in sessions)
        reasons: list[str] = []
        attempts = [get_client().node(address).session() for address in addresses]
        for session in attempts:
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
            worker.call(Call(func, (self.ref, *args), {}, ordered=True), answer.complete)
        except ConnectionLostError as exc:
            answer.complete(exc)
        return answer.wait


def _is_iterable(dataset: object) -> bool:
    return isinstance(dataset, IterableDataset)


def ship(instance: object) -> RemoteDataset:
    """An ordinary dataset instance as a remote one; the same one for equal instances while any of them is in use.

    Raises:
        SerializationError: It cannot be pickled; names the attribute path.
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


def dumps_named(content: Any, parts: Mapping[str, Any], *, persistent_id: PersistentId | None = None) -> Encoded:
    """Pickle ``content``.

    Args:
        parts: What it consists of, by the names that the user knows.

    Raises:
        SerializationError: It cannot be pickled; the attribute path to the reason begins with the name of a part.
    """
    try:
        return dumps(content, persistent_id=persistent_id)
    except SerializationError:
        for name, part in parts.items():
            dumps(part, persistent_id=persistent_id, name=name)
        raise


def _gather(waits: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of a change. A process that has ended since has no dataset to change, unless that leaves none."""
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
    """Leave out what ``latest`` sets again, so that ``dataset.epoch = n`` does not make the list grow for ever.

    Only while nothing else was changed in between, which may have looked at the value.
    """
    end = next(position for position, change in enumerate(changes) if change is latest)
    start = end
    while start > 0 and latest[0] is setattr and changes[start - 1][0] is setattr:
        start -= 1
    between = [change for change in changes[start:end] if change[1][0] != latest[1][0]]
    return [*changes[:start], *between, *changes[end:]]


def _release(key: int, sessions: dict[RemoteSession, bool]) -> None:
    for session in list(sessions):
        session.release(key)


def _ignore(_reply: Message | RPCError) -> None:
    """A change that fails here has succeeded in a session before; the request that follows will show what is wrong."""


def _forget_in_child() -> None:
    """After a fork, in the child: what is on nodes belongs to the parent."""
    global _shipped, _shipped_lock
    _shipped, _shipped_lock = weakref.WeakValueDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class _SlowLine:
    """Says once, after some seconds, which nodes are still building."""

    def __init__(self, name: str, nodes: Sequence[str]) -> None:
        self._name = name
        self._open = dict.fromkeys(nodes)
        self._start = time.monotonic()
        get_client().alarm.call_after(SLOW_BUILD_SECONDS, self._say)

    def finished(self, node: str) -> None:
        self._open.pop(node, None)

    def close(self) -> None:
        self._open.clear()

    def _say(self) -> None:
        if nodes := list(self._open):
            seconds = time.monotonic() - self._start
            logger.warning("dataset %s is being built on %s for %.0f s", self._name, ", ".join(nodes), seconds)


class _QueryOwner(WorkerOwner):
    """Nothing to do: each question is told when its worker is lost."""
