"""The dataset behind an ``RPCDataset``, which the script may ask and change while passes run.

A change is made at once in the worker that answers questions, and joins a list. A pass keeps the list with which it has
begun. The number of the last change that a session or worker has made says what it lacks: a session makes the changes
of the oldest running pass, and a worker those of its own pass that its session has not made.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from rpcdataloader.client.background import Waiting
from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset, describe_build
from rpcdataloader.client.discovery import Local, Remote
from rpcdataloader.client.local import ADDRESS as LOCAL
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import PendingReply, RemoteWorker, WorkerOwner, freeze, reference_of
from rpcdataloader.errors import ConnectError, ConnectionLostError, RPCError
from rpcdataloader.host.contents import Content
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.state import Change, append_change, assign, catch_up, changes_after, derive_seed, last_of
from rpcdataloader.server.datasets import change_shared
from rpcdataloader.server.local import Inherited
from rpcdataloader.wire.built import Built, built_here
from rpcdataloader.wire.by_value import main_globals
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import Encoded

logger = logging.getLogger("rpcdataloader.client")

# Sessions that have built a dataset for their workers.
_holding: weakref.WeakSet[RemoteSession] = weakref.WeakSet()


_MAY_WAIT = "workers are forks without these, in which a library may wait for them without end"


class _Questioner(WorkerOwner):
    """Does nothing: each question fails with its worker."""

    purpose = "questions"


def _is_needed(worker: RemoteWorker) -> bool:
    """Whether to end a worker would be noticed; for questions, another one comes."""
    return worker.purpose != _Questioner.purpose or worker.connection.num_pending > 0


class MutableDataset(RemoteDataset):
    """A remote dataset with questions and changes; thread-safe.

    Args:
        is_iterable: True for an iterable-style dataset, False for a map-style one; None to ask a node.
        where: Where to look for nodes once those that had it are lost.

    Attributes:
        leaves_threads: True if each worker builds it, and a session that had built it was left with threads.
    """

    leaves_threads = False

    def __init__(
        self, name: str, pickled: Encoded | None, *, shared: bool, is_iterable: bool | None, where: Local | Remote
    ) -> None:
        super().__init__(name, pickled, shared=shared)
        self._where = where
        # Held for a change, or to make the worker for questions: one change is made after the other.
        self._changing = Lock()
        self._query_worker: RemoteWorker | None = None
        self._told: RemoteWorker | None = None  # that has the script's definitions as of the last question
        # Guarded by the other lock.
        self._length: int | None = None
        self._asked_with = _Values(self._present_values())  # of the script's names, with which it has this length
        self._is_iterable = is_iterable
        self._last_change = 0  # number
        self._changes: tuple[Change, ...] = ()
        self._passes: weakref.WeakKeyDictionary[object, tuple[Change, ...]] = weakref.WeakKeyDictionary()  # by owner
        self._made: weakref.WeakKeyDictionary[RemoteSession, int] = weakref.WeakKeyDictionary()

    def begin_here(self, inherited: Inherited) -> None:
        """Have a session on this machine, which is born with the parts of the dataset, from now on."""
        self.local = get_client().local_node(None, inherited)
        weakref.finalize(self, get_client().janitor.leave, self.local.close).atexit = False

    def place_of_pass(self) -> LocalNode | None:
        """A place on this machine for one pass: its sessions have of the script what it is then, as torch's workers do.

        None for the place that the dataset has: where another one would build the dataset again, or where the script
        does not reach a session by a fork.
        """
        if self.local is None or not self.local.is_fork:
            return None
        if self._shared and self.key not in self.local.inherited.objects:
            return None
        return get_client().local_node(None, self.local.inherited)

    @property
    def is_shared(self) -> bool:
        """Whether it is built once for all workers of a node."""
        return self._shared

    def was_built_here(self, style: str, length: int | None) -> None:
        """Note what this process has built, for sessions that inherit it."""
        self._built("this machine", style, length)

    def build_in_workers(self, reason: str, *, leaves_threads: bool) -> None:
        """Let each worker build its own, wherever it is."""
        self._shared = False
        self._tell_of_workers("this machine", reason)
        if leaves_threads:
            text = "the constructor of dataset %s has left threads in this process: "
            advice = "call multiprocessing.set_start_method('forkserver') first"
            logger.warning(f"{text}%s, {advice}", self.name, _MAY_WAIT)

    def _built(self, node: str, style: str, length: int | None) -> None:
        with self._lock:
            self._is_iterable = style == "iterable"
            if self._last_change:
                return  # lengths may differ now
        super()._built(node, style, length)
        with self._lock:
            if not self._last_change:
                self._length = length

    def _note_session(self, session: RemoteSession, is_built: bool) -> None:
        super()._note_session(session, is_built)
        if is_built:
            _holding.add(session)

    def _leave_to_workers(self, session: RemoteSession, reason: str, *, leaves_threads: bool = False) -> None:
        """Let each worker build its own, in a session that has not done so if the constructor has left threads.

        A library would wait for these in a worker, where they are not.

        Raises:
            ConnectionLostError: Another session is needed.
        """
        if not leaves_threads or session in _holding or any(map(_is_needed, list(session.workers))):
            super()._leave_to_workers(session, reason)
            if leaves_threads:
                text = "the constructor of dataset %s has left threads in a session on %s that others need: "
                advice = "make such datasets first, or set build='worker'"
                logger.warning(f"{text}%s, {advice}", self.name, session.name, _MAY_WAIT)
            return
        self._tell_of_workers(session.name, reason)
        self.leaves_threads, self._shared = True, False
        session.is_replaced = True
        session.close()
        raise ConnectionLostError(f"{session.name} was ended, as a constructor has left threads there")

    # Changes

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes made so far, but for overwritten ones."""
        return self._changes

    def begin_pass(self, owner: object) -> tuple[Change, ...]:
        """Let the changes made so far be those of the pass of ``owner`` until :meth:`end_pass`, or while it lives."""
        with self._lock:
            self._passes[owner] = self._changes
            return self._changes

    def end_pass(self, owner: object) -> None:
        """Let sessions make changes that this pass lacks."""
        with self._lock:
            self._passes.pop(owner, None)

    def is_current(self, session: RemoteSession) -> bool:
        """Whether a session has the dataset, and lacks no change that it may make."""
        return self.is_on(session) and not self._lacking(session)

    def made_everywhere(self) -> int:
        """The number of the last change that all sessions have made: new workers inherit it."""
        with self._lock:
            sessions = [(session, is_built) for session, is_built in self._sessions.items() if session.is_usable]
            return min((self._made.get(session, 0) if is_built else 0 for session, is_built in sessions), default=0)

    def _lacking(self, session: RemoteSession) -> tuple[Change, ...]:
        """The changes that a session may make now: those with which the oldest running pass has begun.

        The workers of that pass are forked there; those of later passes make the others themselves.
        """
        with self._lock:
            if not self._sessions.get(session):
                return ()
            oldest = min(self._passes.values(), key=last_of, default=self._changes)
            return changes_after(self._made.get(session, 0), oldest)

    def _build(self, session: RemoteSession) -> None:
        is_new = not self.is_on(session)
        super()._build(session)
        if is_new and self._sessions[session] and not session.is_local:  # which inherits what this process has built
            self.compare(session.name, session.call(Built.of, self).wait())
        if lacking := self._lacking(session):
            if (reason := session.call(change_shared, self, self.key, lacking).wait()) is not None:
                self._leave_to_workers(session, f"after a change, {reason}")
            with self._lock:
                self._made[session], self._sessions[session] = last_of(lacking), reason is None

    def change(self, func: Callable[..., Any], *args: Any) -> Any:
        """Run ``func(dataset, *args)`` in the worker for questions, and from the next pass on in all other processes.

        Returns:
            The result.

        Raises:
            ConnectionLostError: No node with the dataset is left, or the worker died of the change.
            Exception: ``func`` failed; the change is not made elsewhere.
        """
        self._check_process()
        with self._changing:
            worker = self._worker()
            number = self._last_change + 1
            have = worker.session.has if isinstance(self._where, Local) else None
            call = freeze({"function": func, "args": args}, persistent_id=reference_of, have=have)
            change = Change(number, None, call, derive_seed(number))
            self._last_change = number  # never again: a change that failed may have been made in part
            try:
                result = self._answer(worker, catch_up, self, self.key, (change,))
            finally:
                with self._lock:
                    self._length = None
            if func is assign and result:
                change = change._replace(attribute=args[0])
            with self._lock:
                self._changes = append_change(self._changes, change)
            return result

    # Questions

    def length(self) -> int:
        """Its ``len``.

        Raises:
            TypeError: It has no length.
        """
        if (here := self._here()) is not None:
            return len(here)
        if (length := self._length) is None or self._has_news():
            last_change = self._last_change
            length = self.query(len)
            with self._lock:
                if self._last_change == last_change:
                    self._length = length
        return length

    def _present_values(self) -> list[Any]:
        """What the script means now by the names that the dataset needs."""
        script = main_globals() if self.definitions else {}
        return [script.get(name) for name in sorted(self.definitions)]

    def _has_news(self) -> bool:
        """Whether the script means something else by one of them than when it was asked last."""
        return not self._asked_with.are_same(self._present_values())

    def _here(self) -> Any:
        """The dataset itself, if this process has built it and no change was made; None otherwise."""
        if self.local is None or self._last_change or not self.local.is_fork:
            return None
        return self.local.inherited.objects.get(self.key)

    def is_iterable(self) -> bool:
        """Whether it is iterable-style; otherwise map-style."""
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
        return self._answer(self._worker(), func, self, *args)

    def _worker(self) -> RemoteWorker:
        """The worker for questions, in which all changes are made."""
        while True:
            if (worker := self._query_worker) is not None and worker.is_usable:
                return worker
            with self._changing:
                sessions = [session for session in list(self._sessions) if session.is_usable]
                # A busy one may build another dataset for long, and one of a pass ends with it.
                lasting = [] if self.local is None else self.local.sessions
                usable = min(
                    sessions,
                    key=lambda session: (session.address == LOCAL and session not in lasting, session.is_busy),
                    default=None,
                )
                if self._query_worker is worker and usable is not None:
                    worker = usable.open_worker(_Questioner())
                    weakref.finalize(self, get_client().janitor.leave, worker.close).atexit = False
                    if not self._sessions.get(usable) and (built := self._answer(worker, built_here, self, self.key)):
                        self.compare(worker.name, built)
                    if changes := self.changes:
                        # They have succeeded before, and a question that follows shows a failure.
                        self._ask(worker, catch_up, self, self.key, changes)
                    self._query_worker = worker
                    return worker
            if usable is None:
                self._revive()

    def _revive(self) -> None:
        """Build it again on one of the nodes that had it, or on another one.

        Raises:
            ConnectionLostError: All of them are unreachable.
        """
        client, reasons = get_client(), []
        known: list[Node] = [] if self.local is None else [self.local]
        addresses = dict.fromkeys(session.address for session in list(self._sessions))
        known += [client.node(each, is_registered=True) for each in addresses if each != LOCAL]

        def sessions() -> Iterator[RemoteSession]:
            yield from client.in_order_of_coming([node.session() for node in known])
            try:
                # Which may have taken their place.
                others = client.nodes(self._where, self.local) if isinstance(self._where, Remote) else []
            except ConnectError as exc:
                reasons.append(str(exc))
            else:
                yield from client.in_order_of_coming([node.session() for node in others if node not in known])

        for session in sessions():
            try:
                session.wait()
                with Waiting(client.alarm, lambda: describe_build(self, [session])):  # noqa: B023  # in this round
                    self.build_on(session)
                return
            except (ConnectError, ConnectionLostError) as exc:
                reasons.append(f"{session.name}: {exc}")
        raise ConnectionLostError(f"dataset {self.name} is lost with its nodes: {'; '.join(reasons)}")

    def _answer(self, worker: RemoteWorker, func: Callable[..., Any], *args: Any) -> Any:
        """Ask a worker and wait, without limit, as the user's code may take long; the log says so."""
        answer = self._ask(worker, func, *args)
        with Waiting(get_client().alarm, lambda: f"an answer of dataset {self.name}, which {worker.name} computes"):
            return answer()

    def _ask(self, worker: RemoteWorker, func: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        answer, present = PendingReply(), self._present_values()
        complete, names = answer.complete, self.names
        if worker is self._told and self._asked_with.are_same(present):
            names = frozenset()
        else:
            complete = functools.partial(self._complete, answer, worker, _Values(present))
            with self._lock:
                self._length = None
        try:
            worker.call(Call(func, args, {}), complete, names=names)
        except ConnectionLostError as exc:
            answer.complete(exc)
        return answer.wait

    def _complete(
        self, answer: PendingReply, worker: RemoteWorker, present: _Values, reply: Message | RPCError
    ) -> None:
        """Take the reply to a question that brought present values; only then the worker is known to have them."""
        if isinstance(reply, Message) and reply.type == MessageType.REPLY:
            self._told, self._asked_with = worker, present
        answer.complete(reply)


class _Values:
    """What names of the script meant at a moment, and what these objects and attributes of classes contained."""

    def __init__(self, values: list[Any]) -> None:
        self._values = [(value, Content(_contents_of(value))) for value in values]

    def are_same(self, values: list[Any]) -> bool:
        """Whether these are the same objects, with the same contents, as far as that can be told."""
        if not all(value is before for value, (before, _content) in zip(values, self._values, strict=True)):
            return False
        return not any(content.has_changed(_contents_of(value)) for value, content in self._values)


def _contents_of(value: Any) -> Any:
    return dict(vars(value)) if isinstance(value, type) else value
