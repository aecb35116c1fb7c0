"""A dataset on the nodes of this client: built once on each, released with its last reference.

The client owns the recipe, so it can build the dataset in a new session, too. Nothing here changes a dataset that is
built: :mod:`rpcdataloader.client.mutable` does.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy.random  # noqa: F401  # before anything is pickled: cloudpickle names the submodules that are loaded

from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import DatasetRef
from rpcdataloader.errors import ConnectionLostError, LocalProtocolError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.sources import recorder
from rpcdataloader.host.state import Change, get_states
from rpcdataloader.wire.built import Built
from rpcdataloader.wire.definitions import Table
from rpcdataloader.wire.digests import digest_memory
from rpcdataloader.wire.frames import MessageType, digest_blocks
from rpcdataloader.wire.pickling import Build, Encoded, dumps_named

logger = logging.getLogger("rpcdataloader.client")

# Lines of the log name up to that many nodes. Builds have no time limit, since walking a large folder may take long.
MAX_NAMED = 4

_TO_BE_EQUAL = (
    "Sort what it finds in a folder, and draw from the global random generators; or choose in the script, and give it "
    "the choice"
)

_keys = itertools.count(1)

# Instances on nodes, by the digest of their pickle: loaders of equal datasets share them.
_shipped: weakref.WeakValueDictionary[bytes, RemoteDataset] = weakref.WeakValueDictionary()
_shipped_lock = Lock()


class RemoteDataset(DatasetRef):
    """One dataset; thread-safe. In a call to a session or worker that has it, it stands for the dataset itself.

    Args:
        pickled: Pickle of ``(instance,)`` or ``(callable, args, kwargs)``; None without node servers.
        shared: Build once per session, or else in every worker.

    Attributes:
        blocks: ``pickled`` and its buffers, as bytes.
        local: Place of its sessions on this machine, if it has some of its own; closed with the dataset.
        names: Names of the script that its workers need.
        definitions: What the script meant by these names, and by those that they refer to.
        was_built: True once a session has had it.
        shortages: Why sessions could not build it for the moment.
    """

    # Guarded by the lock.
    _first_built: tuple[str, Built] | None = None  # where, and what; others are compared with it
    _has_told = False  # that others differ

    def __init__(self, name: str, pickled: Encoded | None, *, shared: bool = True) -> None:
        super().__init__(next(_keys))
        self.name = name
        self.spent = 0.0  # seconds of the longest build on a node in the present pass, with sending
        self._modules: Set[str] = frozenset() if pickled is None else pickled.modules
        self.names: Set[str] = frozenset() if pickled is None else pickled.names
        self.definitions: Table = {} if pickled is None else pickled.definitions
        self.blocks = [] if pickled is None else pickled.blocks
        self.local: LocalNode | None = None
        # Once for all nodes: the threads that send would compute it for each.
        self._digest = digest_blocks(self.blocks)
        self._shared = shared
        self._generators = get_states()
        self._pid = os.getpid()
        # Never held while this process waits, pickles, or runs user code.
        self._lock = Lock()
        # Guarded by the lock. Sessions that have the dataset: True, or False if their workers construct it.
        self._sessions: dict[RemoteSession, bool] = {}
        self._building: weakref.WeakKeyDictionary[RemoteSession, Lock] = weakref.WeakKeyDictionary()
        self._lengths: dict[str, int | None] = {}  # on each node
        # Sessions that have not answered in time, which a thread waits for.
        self.late: weakref.WeakSet[RemoteSession] = weakref.WeakSet()
        self.was_built = False
        self.shortages: weakref.WeakKeyDictionary[RemoteSession, OSError] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _release, self.key, self._sessions).atexit = False

    def build_on(self, session: RemoteSession) -> None:
        """Build it in a session that lacks it, and make the changes there that it may make.

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
            self._build(session)

    def is_current(self, session: RemoteSession) -> bool:
        """Whether :meth:`build_on` has nothing to do."""
        return self.is_on(session)

    def is_on(self, session: RemoteSession) -> bool:
        """Whether workers of this session can use the dataset."""
        return session in self._sessions

    def begin_pass(self, owner: object) -> tuple[Change, ...]:  # noqa: ARG002
        """Note that a pass of ``owner`` begins; returns the changes that its workers make."""
        return ()

    def end_pass(self, owner: object) -> None:
        """Note that this pass is over."""

    def made_everywhere(self) -> int:
        """The number of the last change that all sessions have made: new workers inherit it."""
        return 0

    def _build(self, session: RemoteSession) -> None:
        if self.is_on(session):
            return
        if session.is_born_with(self.key):
            self._note_session(session, True)
            return
        began = time.monotonic()
        wait_until_updated = session.update()  # before the build, as the session answers in order
        is_shared = self._shared  # until another node has answered that it cannot share it
        if not is_shared:
            session.import_early(self._modules)
        try:
            reply = self._ask_to_build(session, is_shared, lambda: wait_until_updated(None))
            if reply["shared"]:
                self._built(session.name, reply["kind"], reply["length"])
            elif is_shared:
                self._leave_to_workers(session, reply["reason"], leaves_threads=reply["leaves_threads"])
        except BaseException:
            session.connection.release(self.key)  # nothing else does, also if it is still building
            raise
        self.spent = max(self.spent, time.monotonic() - began)
        self._note_session(session, reply["shared"])

    def _note_session(self, session: RemoteSession, is_built: bool) -> None:
        """Note a session that has the dataset, and forget those before it."""
        with self._lock:
            for before in [other for other in self._sessions if other.address == session.address]:
                if not before.is_usable:
                    del self._sessions[before]
            self._sessions[session] = is_built
            self.was_built = True
            self.shortages.pop(session, None)

    def _leave_to_workers(self, session: RemoteSession, reason: str, *, leaves_threads: bool = False) -> None:  # noqa: ARG002
        """Let each worker build its own, from blocks that no constructor has changed."""
        self._tell_of_workers(session.name, reason)
        self._ask_to_build(session, False, lambda: None)

    def _tell_of_workers(self, where: str, reason: str) -> None:
        advice = "open files and connections, and start threads, on first use"
        text = "dataset %s is built in every worker instead of once on %s: %s; %s"
        logger.warning(text, self.name, where, reason, advice)

    def _ask_to_build(
        self, session: RemoteSession, shared: bool, wait_until_updated: Callable[[], None]
    ) -> dict[str, Any]:
        """Send the recipe, and wait for the answer."""
        payload = Build(self.key, self.name, shared, self._generators).encode()
        blocks, found = ([], b"") if session.knows(self.key) else (self.blocks, self._digest)
        content = Encoded(payload, blocks, definitions=self.definitions)
        answer = session.submit(MessageType.BUILD, content, found)
        try:
            wait_until_updated()
            reply: dict[str, Any] = answer.wait()
        except ConnectionLostError:
            if found and digest_blocks(self.blocks) != found:  # which the node has seen, too
                raise ValueError(
                    f"the arguments of dataset {self.name} have changed since the first node got them, so others "
                    "would build another dataset: give it a copy of what the script changes in place"
                ) from None
            raise
        return reply

    def _built(self, node: str, style: str, length: int | None) -> None:  # noqa: ARG002
        """Compare what nodes have built.

        Raises:
            ValueError: Its length is not that of other nodes.
        """
        with self._lock:
            lengths = self._lengths | {node: length}
            if is_same := len(set(lengths.values())) == 1:  # a node that differs is not counted
                self._lengths = lengths
        if not is_same:
            found = ", ".join(f"{length} on {name}" for name, length in lengths.items())
            raise ValueError(
                f"dataset {self.name} is not the same on all nodes: its length is {found}. Is the data complete "
                "everywhere? Does it depend on the order of a folder (sort it) or on the time?"
            )

    def compare(self, where: str, built: Built) -> None:
        """Compare what a process has built with what the first one has; warn once if lists differ.

        Raises:
            ValueError: It has another length.
        """
        with self._lock:
            first_where, first = self._first_built = self._first_built or (where, built)
            differing = first.differing(built)
            is_told, self._has_told = self._has_told, self._has_told or bool(differing)
        begin = f"dataset {self.name} is not the same wherever it is built: "
        if first.length != built.length:
            found = f"its length is {first.length} in {first_where}, and {built.length} in {where}"
            raise ValueError(f"{begin}{found}. {_TO_BE_EQUAL}")
        if differing and not is_told:
            text = "%s%s of %s and of %s differ, so samples may be lost, and others come twice. %s"
            logger.warning(text, begin, ", ".join(differing[:MAX_NAMED]), first_where, where, _TO_BE_EQUAL)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"dataset {self.name} belongs to process {self._pid}, of which this one is a fork, such as a worker of "
                "torch's loader: give the RPCDataset itself to RPCDataloader, or make one in this process"
            )


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
    pickled = dumps_named((instance,), {"dataset": instance}, with_rest=True, with_patches=True, with_told=True)
    # Its class may be another one than that of an equal instance before: defined again, or reloaded. So may a function
    # that it has.
    recorder.look()
    defined = sorted(pickled.names & pickled.definitions.keys())
    named = [(name, pickled.definitions[name].identity_of(name)) for name in defined]
    found = digest_memory([*pickled.blocks, memoryview(repr((named, recorder.num_reloaded)).encode())])
    new = _shipped.get(found) or RemoteDataset(name, pickled)  # without the lock: its digest takes seconds per gigabyte
    with _shipped_lock:
        remote = _shipped.setdefault(found, new)
        # The script may have changed those of an earlier instance.
        remote.blocks, remote.definitions = pickled.blocks, pickled.definitions
        return remote


def _release(key: int, sessions: dict[RemoteSession, bool]) -> None:
    for session in list(sessions):
        session.connection.release(key)


def _forget_in_child() -> None:
    """After a fork, in the child: datasets on nodes belong to the parent."""
    global _shipped, _shipped_lock
    _shipped, _shipped_lock = weakref.WeakValueDictionary(), Lock()


at_fork(Part.DATASETS, in_child=_forget_in_child)
