"""What a pass waits for: threads, sockets, other processes, and the clock.

The driver decides when each of these is asked for; results go to it from the thread that notices them. Except for
:meth:`Executor.open` and :meth:`Executor.end`, nothing here is called with the pass's condition.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rpcdataloader.client.background import Waiting
from rpcdataloader.client.client import get_client
from rpcdataloader.client.datasets import RemoteDataset
from rpcdataloader.client.discovery import Remote
from rpcdataloader.client.local import LocalNode
from rpcdataloader.client.node import Node
from rpcdataloader.client.session import RemoteSession
from rpcdataloader.client.worker import DatasetRef, RemoteWorker, WorkerOwner, freeze, reference_of
from rpcdataloader.errors import AuthenticationError, ConnectError, ConnectionLostError, RemoteProtocolError
from rpcdataloader.fetch import remote
from rpcdataloader.fetch.batch_loader import StreamState
from rpcdataloader.fetch.collate import registered
from rpcdataloader.host.environment import collect
from rpcdataloader.host.locks import Condition, Event, inherited
from rpcdataloader.host.parts import find_parts
from rpcdataloader.host.patches import is_patch
from rpcdataloader.host.process import ThreadSettings
from rpcdataloader.host.seldom import Seldom
from rpcdataloader.host.state import Change, changes_after, last_of
from rpcdataloader.loader.passes import Pass, functions_of, loader_spec
from rpcdataloader.loader.placement import Placement, build
from rpcdataloader.loader.settings import PassSettings
from rpcdataloader.loader.tasks import Task, describe
from rpcdataloader.plan.actions import ReportWait, Say
from rpcdataloader.plan.engine import Engine
from rpcdataloader.wire.built import Built
from rpcdataloader.wire.connecting import SHORTAGES
from rpcdataloader.wire.messages import Call, Path, Reference
from rpcdataloader.wire.picklers import Frozen
from rpcdataloader.wire.pickling import Encoded, dumps
from rpcdataloader.wire.told import sent_tensors, values_set

logger = logging.getLogger("rpcdataloader.loader")

# A thread that waits for a hanging file server cannot be woken; it does not use torch.
_LOOK_JOIN_TIMEOUT = 2.0

# Seconds until the next look after one that failed by an error of ours.
_FAILED_LOOK_PAUSE = 5.0
# Of all passes: an epoch may take a second.
_seldom = Seldom()

# Seconds until another attempt to start a thread.
_NO_THREAD_PAUSE = 1.0

_UNREACHABLE = "it is not reachable"

EngineEvent = Callable[[Engine[Node], float], None]


class Here(NamedTuple):
    """A place on this machine for one pass, whose sessions are born with its dataset."""

    node: LocalNode
    functions: DatasetRef | None  # stands in requests for the loader's functions, if they are born with these, too


class Opening(NamedTuple):
    """The first request to a worker, and its epoch."""

    begun: Pass
    request: Encoded


class Executor:
    """The outside of one pass.

    Args:
        dataset: The dataset; held as long as workers exist.
        here: The place of this pass's own workers on this machine, which end with it.

    Attributes:
        condition: Lock of the pass, on which its consumer waits.
        now: Clock.
        name: Name of the dataset.
        ask_ranks: :meth:`Client.ask_ranks` for this dataset.
    """

    now = staticmethod(time.monotonic)

    def __init__(
        self, settings: PassSettings, dataset: RemoteDataset, placement: Placement, here: Here | None = None
    ) -> None:
        self.condition = inherited(Condition())
        self._client = get_client()
        self.name = dataset.name
        self.ask_ranks = functools.partial(self._client.ask_ranks, dataset.name)
        self._settings = settings
        self._label = settings.partition.label
        self._dataset = dataset
        self._num_workers = len(placement.homes)
        self._here = here
        # As they are when the first worker is requested, for those that are not born with them.
        self._functions: dict[bool, Frozen] = {}  # by whether they are for this machine
        self._changes: tuple[Change, ...] = dataset.begin_pass(self)  # that its workers make
        self._told = last_of(self._changes)  # number of the last change of which all its workers know
        self._closed = Event()
        self._sought: set[Node] = set()  # nodes whose waits end with the pass
        self._gone: set[Node] = set()  # nodes that have left, which a seek under way no longer connects to
        nodes = (*placement.homes, *placement.others, *placement.missing)
        self._known = [node.address for node in nodes if not node.is_local]
        # Of the process and thread that begin the pass, for workers of nodes.
        self._environment = collect({}) if self._known or placement.followed else None
        self._thread = ThreadSettings.current()

    @property
    def is_over(self) -> bool:
        """Whether the client was closed, with all passes."""
        return self._client.is_closed

    def compare(self, where: str, built: Built) -> None:
        """Compare what a worker has built with what others have; raises a ``ValueError`` as the dataset does."""
        self._dataset.compare(where, built)

    def close(self, workers: Sequence[RemoteWorker]) -> None:
        """End workers, and the threads that look for nodes."""
        self._closed.set()
        self._dataset.end_pass(self)
        for worker in workers:
            worker.close()
        for node in list(self._sought):
            node.wake()
        if self._here is not None:
            self._here.node.close()

    # Nodes

    def session(self, node: Node) -> RemoteSession | None:
        """The session in which workers can be opened now; None without one. Never waits."""
        session = node.current
        return session if session is not None and self._dataset.is_on(session) else None

    def reason(self, node: Node) -> Exception:
        """The reason for which a node has no session now."""
        if (session := node.current) is not None and (short := self._dataset.shortages.get(session)) is not None:
            return short
        error = next((session.connection.error for session in node.sessions[-1:]), None)
        return error if isinstance(error, (ConnectError, ConnectionLostError)) else ConnectionLostError(_UNREACHABLE)

    def _start_thread(
        self,
        name: str,
        function: Callable[[], None],
        join_timeout: float | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """Run ``function`` in a thread, as soon as one can be started."""
        if not (self._closed.is_set() or self._client.start_thread(name, function, self._closed, join_timeout)):
            alarm = self._client.alarm
            waiting = waiting or Waiting(alarm, lambda: f"room for a thread of this process, {name}", self._label)
            alarm.call_after(
                _NO_THREAD_PAUSE, functools.partial(self._start_thread, name, function, join_timeout, waiting)
            )
        elif waiting is not None:
            waiting.end()

    def seek(self, node: Node, delay: float, feed: Callable[[EngineEvent], None]) -> None:
        """Connect to a node after ``delay`` seconds, and build the dataset there; ``feed`` takes the result."""
        self._sought.add(node)
        self._start_thread(f"rpcdl-seek {node}", functools.partial(self._seek, node, delay, feed))

    def _seek(self, node: Node, delay: float, feed: Callable[[EngineEvent], None]) -> None:
        if self._closed.wait(delay) or node in self._gone:
            return
        try:
            session = node.session()
            session.is_quiet = True  # the loss of a node is told once
            session.wait(lambda: not self._closed.is_set())
            session.update()(None)
            self._dataset.build_on(session)
            num_offered = node.num_workers()
        except (ConnectError, ConnectionLostError, RemoteProtocolError, AuthenticationError) as exc:
            failure, is_foreign = exc.with_traceback(None), isinstance(exc, (RemoteProtocolError, AuthenticationError))
            feed(lambda engine, _now: engine.crew.node_failed(node, failure, is_foreign=is_foreign))
        except BaseException as exc:
            reason = exc.with_traceback(None)
            if isinstance(exc, OSError) and exc.errno in SHORTAGES:  # for the constructor, or here
                feed(lambda engine, _now: engine.crew.node_failed(node, reason))
            else:
                feed(lambda engine, _now: engine.crew.node_hopeless(node, reason))
        else:
            feed(lambda engine, _now: engine.crew.node_up(node, session, num_offered))

    def watch(self, where: Remote, changed: Callable[[list[Node], list[Node]], None]) -> None:
        """Follow the node servers of ``where`` from now on, as they come and go, in a new thread.

        Args:
            changed: Function that takes the nodes that have come, restarted ones included, and those that have gone.
        """
        self._start_thread("rpcdl-look", functools.partial(self._watch, where, changed), _LOOK_JOIN_TIMEOUT)

    def _watch(self, where: Remote, changed: Callable[[list[Node], list[Node]], None]) -> None:
        known = dict.fromkeys(self._known, "")
        condition = " or ".join(lookup.condition for lookup in where.lookups)
        while not self._closed.is_set():
            pause = _FAILED_LOOK_PAUSE
            try:
                found, pause = self._client.follow(where)
                if self._closed.is_set() or self.is_over:
                    return
                nodes = {each: self._client.node(each, is_registered=True) for each in {**known, **found}}
                come = [address for address in found if known.get(address, None) not in ("", found[address])]
                missing = [address for address in known if address not in found]
                # A resolver may leave one out for a moment. A server that ends says so itself, and is not sought again.
                gone = [address for address in missing if nodes[address].current is None]
                known = found | {address: known[address] for address in missing if address not in gone}
                for address in gone:
                    logger.warning("%s%s leaves: it is no longer %s", self._label, address, condition)
                if come or gone:
                    came, left = [nodes[address] for address in come], [nodes[address] for address in gone]
                    self._gone = (self._gone - {*came}) | {*left}
                    changed(came, left)
            except Exception:
                logger.exception("cannot look for node servers")
            self._closed.wait(pause)

    # Workers

    def open(
        self, session: RemoteSession, opening: Opening, owner: WorkerOwner, keep_waiting: Callable[[], bool]
    ) -> RemoteWorker:
        """Request a worker; returns at once.

        Args:
            keep_waiting: Function called while its node has no room; False gives up.
        """
        session.import_early(opening.request.modules)
        return session.open_worker(owner, keep_waiting)

    def opening(self, begun: Pass, place: int, stream: StreamState | None, node: Node) -> Opening:
        """Make the first request to a worker on a node, which contains the user's pickled objects.

        Raises:
            SerializationError: They cannot be pickled.
        """
        # Workers that join later may have a higher number.
        spec = loader_spec(self._settings, begun, place, max(self._num_workers, place + 1), stream)
        functions, state = self._functions_for(node), None
        if isinstance(functions, Frozen) and self._environment is not None and not node.is_local:
            spec = replace(spec, thread=self._thread)
            state = remote.PassState(self._environment, set(filter(is_patch, functions.definitions)))
        changes = changes_after(self._dataset.made_everywhere(), self._changes)
        # Workers of this machine share the tensors themselves.
        told = values_set() if sent_tensors and not node.is_local else {}
        call = Call(remote.open_loader, (state, self._dataset, self._dataset.key, changes, told, spec, functions), {})
        return Opening(begun, dumps(tuple(call), persistent_id=reference_of))

    def _functions_for(self, node: Node) -> DatasetRef | Frozen:
        """The loader's functions, for the first request to a worker on a node."""
        if self._here is not None and node is self._here.node and self._here.functions is not None:
            return self._here.functions
        if (functions := self._functions.get(node.is_local)) is None:
            refer = functools.partial(self._reference_of, parts=find_parts(self._settings.dataset))
            have = None if (session := node.current) is None else session.has
            parts = {**functions_of(self._settings), "registered": {} if node.is_local else registered()}
            of_nodes = dict.fromkeys(("with_patches", "with_told"), not node.is_local)
            functions = freeze(parts, persistent_id=refer, have=have, names=self._dataset.names, **of_nodes)
            self._functions[node.is_local] = functions
        return functions

    def settle(self, workers: Sequence[RemoteWorker]) -> None:
        """Let the epoch that begins have all changes to the dataset; make them in the sessions of the workers."""
        self._changes = self._dataset.begin_pass(self)
        if last_of(self._changes) > self._told:
            with contextlib.suppress(ConnectionLostError):  # noticed later
                build(self._dataset, [worker.session for worker in workers if worker.session.is_ready])

    def settled(self) -> None:
        """Note that all workers are told of the changes, or are about to be."""
        self._told = last_of(self._changes)

    def restarting(self, begun: Pass, worker: RemoteWorker) -> Encoded:
        """Make the request that tells a worker of another epoch, and of changes to the dataset since the last one."""
        told = values_set() if sent_tensors and not worker.session.is_local else {}
        changed = self._dataset, self._dataset.key, changes_after(self._told, self._changes), told
        args = *changed, begun.progress.epoch, begun.first
        return dumps(tuple(Call(remote.start_epoch, args, {})), persistent_id=reference_of)

    def _reference_of(self, value: Any, parts: Mapping[int, tuple[Any, Path]]) -> Reference | None:
        """The persistent id of the dataset or a part of it, also inside a user's function, such as a bound method."""
        if (found := parts.get(id(value))) is not None:
            return "dataset", self._dataset.key, found[1]
        return reference_of(value)

    def end(self, late: Sequence[tuple[RemoteWorker, Task]]) -> None:
        """End workers that exceed a task's time limit, all at the same time; a new thread reports their stacks."""
        limit = self._settings.task_timeout
        for worker, task in late:
            reason = f"{describe(task)} took longer than {limit:g} s"
            task.stack = worker.session.end_worker(worker.number, reason)

        def report() -> None:
            for worker, task in late:
                assert task.stack is not None
                text = "%s took longer than %g s (task_timeout) on %s, which was here:\n%s"
                logger.warning(text, describe(task), limit, worker.name, task.stack())

        self._client.start_thread("rpcdl-report", report, self._closed)

    # The user

    def say(self, action: Say) -> None:
        """Log a line."""
        if not action.cause or _seldom.is_due(action.cause):
            logger.log(logging.WARNING if action.is_warning else logging.INFO, "%s", action.text)

    def report_wait(self, action: ReportWait, worker: RemoteWorker | None) -> None:
        """Report the batch that the consumer waits for, and its worker; in a new thread, as the stack takes time."""

        def report() -> None:
            begin = f"{self._label}the loop has waited {action.seconds:.0f} s"
            logger.warning("%s %s", begin, describe_wait(action, worker))

        self._client.start_thread("rpcdl-report", report, self._closed)


def describe_wait(report: ReportWait, worker: RemoteWorker | None) -> str:
    """A wait for a batch, in words, perhaps with the stack of its worker; waits for that, at most 2 s."""
    where = "which is not assigned" if worker is None else f"which is at {worker.name}"
    stack = "" if worker is None or not report.has_stack else "\n" + worker.session.stack_of(worker.number)
    return f"for {describe(report.payload)}, {where} ({report.summary}){stack}"
