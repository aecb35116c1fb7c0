"""A dataset on the nodes of this client: built once on each, changed on all, released with its last reference.

The client owns the recipe and the list of changes, so it can bring a new session or worker to the same state. A change
is made at once in the worker that answers questions, and in all other processes when the next pass begins.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import numpy.random  # noqa: F401  # before anything is pickled: cloudpickle names the submodules that are loaded
from torch.utils.data import IterableDataset

from rpcdataloader.client.background import Waiting
from rpcdataloader.client.client import get_client
from rpcdataloader.client.discovery import Local, Remote
from rpcdataloader.client.local import ADDRESS as LOCAL
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import (
    DatasetRef,
    PendingReply,
    RemoteWorker,
    WorkerOwner,
    freeze,
    reference_of,
)
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.sources import recorder
from rpcdataloader.host.state import Change, catch_up, derive_seed, get_states, without_overwritten
from rpcdataloader.server.local import Inherited
from rpcdataloader.wire.definitions import Table
from rpcdataloader.wire.digests import digest_memory
from rpcdataloader.wire.frames import MessageType, digest_blocks
from rpcdataloader.wire.messages import Call
from rpcdataloader.wire.pickling import Build, Encoded, dumps_named

logger = logging.getLogger("rpcdataloader.client")

# Builds and questions have no time limit, since walking a large folder may take long; lines name up to that many nodes.
MAX_NAMED = 4

_keys = itertools.count(1)

# Instances on nodes, by the digest of their pickle: loaders of equal datasets share them.
_shipped: weakref.WeakValueDictionary[bytes, RemoteDataset] = weakref.WeakValueDictionary()
_shipped_lock = Lock()


class RemoteDataset(DatasetRef):
    """One dataset; thread-safe. In a call to a session or worker that has it, it stands for the dataset itself.

    Args:
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``; None without node servers.
        shared: Build once per session, or else in every worker.
        is_iterable: True for an iterable-style dataset, False for a map-style one; None to ask a node.
        where: Where to look for nodes once those that had it are lost; None to give up then.

    Attributes:
        blocks: ``pickled`` and its buffers, as bytes.
        local: Place of its sessions on this machine, if it has some of its own; closed with the dataset.
        names: Names of the script that its workers need.
        definitions: What the script meant by these names, and by those that they refer to.
    """

    def __init__(
        self,
        name: str,
        pickled: Encoded | None,
        *,
        shared: bool,
        is_iterable: bool | None = None,
        where: Local | Remote | None = None,
    ) -> None:
        super().__init__(next(_keys))
        self._where = where
        self.name = name
        self.spent = 0.0  # seconds of the longest build on a node in the present pass, with sending
        self._modules: Set[str] = frozenset() if pickled is None else pickled.modules
        self.names: Set[str] = frozenset() if pickled is None else pickled.names
        self.definitions: Table = {} if pickled is None else pickled.definitions
        self.blocks = [] if pickled is None else pickled.blocks
        self.local: LocalNode | None = None
        self._digest_of_blocks = b""
        self._digesting = Lock()
        self._shared = shared
        self._generators = get_states()
        self._pid = os.getpid()
        # Held for a change, or to make the worker for questions: one change is made after the other.
        self._changing = Lock()
        self._query_worker: RemoteWorker | None = None
        # Never held while this process waits, pickles, or runs user code.
        self._lock = Lock()
        # Guarded by the lock. For each session that has the dataset, the number of its last change; None if it leaves
        # the construction to its workers.
        self._sessions: dict[RemoteSession, int | None] = {}
        self._building: weakref.WeakKeyDictionary[RemoteSession, Lock] = weakref.WeakKeyDictionary()
        self._length: int | None = None
        self._lengths: dict[str, int] = {}  # on each node, before the first change
        self._is_iterable = is_iterable
        self._last_change = 0  # number
        # Sessions that have not answered in time, which a thread waits for.
        self.late: weakref.WeakSet[RemoteSession] = weakref.WeakSet()
        self._settled: tuple[Change, ...] = ()  # changes made everywhere
        self._pending: tuple[Change, ...] = ()  # those since the last pass began
        # Those that were settled as each pass began that still runs. A session has none that one of these lacks: its
        # workers are forked from there; those of later passes make the others themselves.
        self._of_passes: weakref.WeakKeyDictionary[object, tuple[Change, ...]] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _release, self.key, self._sessions).atexit = False

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

    def build_on(self, session: RemoteSession) -> None:
        """Build it in a session that lacks it, and make the settled changes there.

        Changes and questions in the meantime do not wait for that.

        Raises:
            ConnectionLostError: The session has ended meanwhile.
            Exception: The constructor or a change failed; the remote traceback names the node.
            TypeError: The object built is no dataset.
            ValueError: Its length is not that of other nodes, or its arguments have changed in place.
        """
        self._check_process()
        with self._lock:
            building = self._building.setdefault(session, Lock())
        with building:
            if session not in self._sessions:
                self._build(session)
            self._catch_up(session)

    def is_current(self, session: RemoteSession) -> bool:
        """Whether a session has the dataset, and lacks no change that it may make."""
        with self._lock:
            made = self._sessions.get(session, -1)
            return made is None or (made >= 0 and not _after(made, self._of_all_passes()))

    def is_on(self, session: RemoteSession) -> bool:
        """Whether workers of this session can use the dataset."""
        return session in self._sessions

    def _build(self, session: RemoteSession) -> None:
        if session.is_born_with(self.key):
            with self._lock:
                self._note_session(session, 0)
            return
        began = time.monotonic()
        wait_until_updated = session.update()  # before the build, as the session answers in order
        if not self._shared:
            session.import_early(self._modules)
        try:
            reply = self._ask_to_build(session, self._shared, lambda: wait_until_updated(None))
            if reply["shared"]:
                self._note_length(session.name, reply["length"])
            elif self._shared:
                self._leave_to_workers(session, reply["reason"])
        except BaseException:
            session.connection.release(self.key)  # nothing else does, also if it is still building
            raise
        self.spent = max(self.spent, time.monotonic() - began)
        with self._lock:
            self._note_session(session, 0 if reply["shared"] else None)
            if reply["shared"]:
                self._is_iterable = reply["kind"] == "iterable"

    def _note_session(self, session: RemoteSession, made: int | None) -> None:
        """Note a session that has the dataset, and forget those before it; with the lock."""
        for before in [other for other in self._sessions if other.address == session.address]:
            if not before.is_usable:
                del self._sessions[before]
        self._sessions[session] = made

    def _leave_to_workers(self, session: RemoteSession, reason: str) -> None:
        """Let each worker build its own, from blocks that no constructor has changed."""
        self._tell_of_workers(session.name, reason)
        self._ask_to_build(session, False, lambda: None)

    def _tell_of_workers(self, where: str, reason: str) -> None:
        advice = "open files and start threads on first use"
        text = "dataset %s is built in every worker instead of once on %s: %s; %s"
        logger.warning(text, self.name, where, reason, advice)

    @property
    def is_shared(self) -> bool:
        """Whether it is built once for all workers of a node."""
        return self._shared

    def was_built_here(self, style: str, length: int | None) -> None:
        """Note what this process has built, for sessions that inherit it."""
        self._is_iterable = style == "iterable"
        if length is not None:
            self._note_length("this machine", length)

    def build_in_workers(self, reason: str) -> None:
        """Let each worker build its own, wherever it is."""
        self._shared = False
        self._tell_of_workers("this machine", reason)

    def _ask_to_build(
        self, session: RemoteSession, shared: bool, wait_until_updated: Callable[[], None]
    ) -> dict[str, Any]:
        """Send the recipe, and wait for the answer."""
        payload = Build(self.key, self.name, shared, self._generators).encode()
        blocks, found = ([], b"") if session.knows(self.key) else (self.blocks, self._digest())
        content = Encoded(payload, blocks, definitions=self.definitions)
        answer = session.submit(MessageType.BUILD, content, found)
        try:
            wait_until_updated()
            reply: dict[str, Any] = answer.wait()
        except ConnectionLostError:
            if found:
                self._check_unchanged(self.blocks)  # which the node has done, too
            raise
        return reply

    def _digest(self) -> bytes:
        """The digest of the blocks, once for all nodes: the one thread that sends would compute it for each."""
        with self._digesting:
            if not self._digest_of_blocks:
                self._digest_of_blocks = digest_blocks(self.blocks)
            return self._digest_of_blocks

    def _check_unchanged(self, blocks: Sequence[memoryview]) -> None:
        if digest_blocks(blocks) != self._digest_of_blocks:
            raise ValueError(
                f"the arguments of dataset {self.name} have changed since the first node got them, so others "
                "would build another dataset: give it a copy of what the script changes in place"
            ) from None

    def _note_length(self, node: str, length: int) -> None:
        """Compare lengths, which may differ after changes.

        Raises:
            ValueError: It is not that of other nodes.
        """
        with self._lock:
            if self._last_change:
                return
            lengths = self._lengths | {node: length}
            if is_same := len(set(lengths.values())) == 1:  # a node that differs is not counted
                self._lengths, self._length = lengths, length
        if not is_same:
            found = ", ".join(f"{length} on {name}" for name, length in lengths.items())
            raise ValueError(
                f"dataset {self.name} is not the same on all nodes: its length is {found}. Is the data complete "
                "everywhere? Does it depend on the order of a folder (sort it) or on the time?"
            )

    def _catch_up(self, session: RemoteSession) -> None:
        """Make the settled changes that a session lacks, up to those that a running pass lacks, too."""
        with self._lock:
            changes, made = self._of_all_passes(), self._sessions.get(session)
        if made is not None and (late := _after(made, changes)):
            if (reason := session.call(catch_up, self, self.key, late).wait()) is not None:
                self._leave_to_workers(session, f"after a change, {reason}")
            with self._lock:
                self._sessions[session] = late[-1].number if reason is None else None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes made so far, but for overwritten ones."""
        with self._lock:
            return without_overwritten(self._settled + self._pending)

    def settle(self) -> None:
        """Let the changes made so far take effect in the pass that begins: sessions get them with :meth:`build_on`."""
        with self._lock:
            self._settled = without_overwritten(self._settled + self._pending)
            self._pending = ()

    def begin_pass(self, owner: object) -> None:
        """Let the settled changes be those of the pass of ``owner`` until :meth:`end_pass`, or while it lives."""
        with self._lock:
            self._of_passes[owner] = self._settled

    def end_pass(self, owner: object) -> None:
        """Let sessions make changes that this pass lacks."""
        with self._lock:
            self._of_passes.pop(owner, None)

    def _of_all_passes(self) -> tuple[Change, ...]:
        """The settled changes that no running pass lacks; with the lock."""
        ends = [changes[-1].number if changes else 0 for changes in self._of_passes.values()]
        return tuple(change for change in self._settled if change.number <= min(ends, default=change.number))

    def changes_after(self, number: int, owner: object) -> tuple[Change, ...]:
        """The changes of a pass that a worker lacks which has those up to ``number``."""
        with self._lock:
            return _after(number, self._of_passes.get(owner, self._settled))

    def changes_of_workers(self, owner: object) -> tuple[Change, ...]:
        """The changes of a pass that a new worker may lack, as it is forked without them or constructs the dataset."""
        with self._lock:
            made = [number or 0 for session, number in self._sessions.items() if session.is_usable]
        return self.changes_after(min(made, default=0), owner)

    def length(self) -> int:
        """Its ``len``.

        Raises:
            TypeError: It has no length.
        """
        if (length := self._length) is None:
            last_change = self._last_change
            length = self.query(len)
            with self._lock:
                if self._last_change == last_change:
                    self._length = length
        return length

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
            attribute = args[0] if func is setattr else None
            have = worker.session.has if isinstance(self._where, Local) else None
            call = freeze({"function": func, "args": args}, persistent_id=reference_of, have=have)
            change = Change(number, attribute, call, derive_seed(number))
            self._last_change = change.number  # never again: a change that failed may have been made in part
            try:
                result = self._answer(worker, catch_up, self, self.key, (change,))
            finally:
                with self._lock:
                    self._length = None
            with self._lock:
                pending = (*self._pending, change)
                self._pending = pending if attribute is None else without_overwritten(pending)
            return result

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
                    worker = usable.open_worker(WorkerOwner())  # each question fails with its worker
                    weakref.finalize(self, get_client().janitor.leave, worker.close).atexit = False
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

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"dataset {self.name} belongs to process {self._pid}, of which this one is a fork, such as a worker of "
                "torch's loader: give the RPCDataset itself to RPCDataloader, or make one in this process"
            )

    def _answer(self, worker: RemoteWorker, func: Callable[..., Any], *args: Any) -> Any:
        """Ask a worker and wait, without limit, as the user's code may take long; the log says so."""
        answer = self._ask(worker, func, *args)
        with Waiting(get_client().alarm, lambda: f"an answer of dataset {self.name}, which {worker.name} computes"):
            return answer()

    def _ask(self, worker: RemoteWorker, func: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        answer = PendingReply()
        try:
            worker.call(Call(func, args, {}), answer.complete)
        except ConnectionLostError as exc:
            answer.complete(exc)
        return answer.wait


def make_key() -> int:
    """A new key, for an object to which requests refer."""
    return next(_keys)


def describe_build(dataset: RemoteDataset, sessions: Iterable[RemoteSession]) -> str:
    """A build that is waited for, in words."""
    names = [session.name for session in sessions]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"dataset {dataset.name}, which is being built on {', '.join(names[:MAX_NAMED])}{more}"


def ship(instance: object, name: str) -> RemoteDataset:
    """An ordinary dataset instance as a remote one; the same one for equal instances while any of them is in use.

    Args:
        name: Its name in messages.

    Raises:
        SerializationError: The dataset cannot be pickled; the message names the attribute path.
    """
    pickled = dumps_named((instance,), {"dataset": instance}, with_rest=True, with_patches=True)
    # Its class may be another one than that of an equal instance before: defined again, or reloaded. So may a function
    # that it has.
    recorder.look()
    defined = sorted(pickled.names & pickled.definitions.keys())
    named = [(name, pickled.definitions[name].identity_of(name)) for name in defined]
    found = digest_memory([*pickled.blocks, memoryview(repr((named, recorder.num_reloaded)).encode())])
    with _shipped_lock:
        remote = _shipped.get(found)
        if remote is None:
            remote = RemoteDataset(name, pickled, shared=True)
            _shipped[found] = remote
        # The script may have changed those of an earlier instance.
        remote.blocks, remote.definitions = pickled.blocks, pickled.definitions
        return remote


def _after(number: int, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.number > number)


def _release(key: int, sessions: dict[RemoteSession, int | None]) -> None:
    for session in list(sessions):
        session.connection.release(key)


def _forget_in_child() -> None:
    """After a fork, in the child: datasets on nodes belong to the parent."""
    global _shipped, _shipped_lock
    _shipped, _shipped_lock = weakref.WeakValueDictionary(), Lock()


at_fork(Part.DATASETS, in_child=_forget_in_child)
