"""A session of a training process on its own machine: a child of it, which multiprocessing has started.

It inherits the script, or gets of it what multiprocessing sends, as a worker of torch's loader does. From there on it
is a session like any other: it forks the workers, and their replacements. There is no node server beside it: the
training process hands over the connections of workers itself, and needs no proof of who is at the other end of a socket
pair.

Nothing here must depend on a lock that another thread of the training process may have held at the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.fetch.samples import keep_whereabouts
from rpcdataloader.host.environment import Additions, install_modules, prepare_session, set_variables
from rpcdataloader.server import events
from rpcdataloader.server.datasets import Parts, open_files, why_not_shared
from rpcdataloader.server.events import Link, Row
from rpcdataloader.server.processes import be_child, end_with, keep_freed_memory, leave, name_process, prefer_for_oom
from rpcdataloader.server.session import Session, forget_inherited_exits
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.server.stacks import ForkedWorker
from rpcdataloader.wire.adopted import adopted
from rpcdataloader.wire.channel import Channel, pair_channel
from rpcdataloader.wire.credentials import INSECURE, TOKEN_VARIABLE
from rpcdataloader.wire.exceptions import dumps_exception
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.messages import Exited, Welcome
from rpcdataloader.wire.picklers import reply_as_multiprocessing, runs_script_again
from rpcdataloader.wire.pickling import Build, dumps_named, loads
from rpcdataloader.wire.slabs import Block
from rpcdataloader.wire.transport import Transport

logger = logging.getLogger("rpcdataloader.server")


@dataclass
class Inherited:
    """What a session is born with: as it is after a fork, else as it was pickled within the start of the process.

    One object, so that what is the same in the script is the same in the session.
    """

    num_workers: int  # of this machine
    objects: Mapping[int, Any] = field(default_factory=dict)  # datasets and a loader's functions, by key
    recipes: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)  # ``(callable, args, kwargs)`` of datasets
    additions: Additions = field(default_factory=Additions)
    parts: Mapping[str, Any] = field(default_factory=dict)  # of these, by the names that the user knows

    def __reduce__(self) -> tuple[Any, ...]:
        """What multiprocessing and torch let processes share is shared: tensors, locks, pipes, queues, managers.

        All else is pickled as for a node server, so lambdas, and the classes of a notebook, come along.
        """
        has_script = runs_script_again()
        encoded = dumps_named(
            {name: value for name, value in vars(self).items() if name != "parts"},
            self.parts,
            in_band=True,
            reducers=ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
            have=(lambda _name: True) if has_script else None,
            with_rest=not has_script,
        )
        return bytes, (encoded.with_definitions().payload,)


def run_local_session(
    control: socket.socket, link: socket.socket, life: Connection, inherited: Inherited | bytes
) -> None:
    """Be a session, in a process of its own, until its training process closes the connection.

    Args:
        control: This end of the control connection.
        link: This end of the link over which connections of workers come.
        life: A pipe whose other end the training process has until it dies.
        inherited: What it is born with; after another start than a fork, as it was sent.
    """
    # What user code starts is found by this number if this process is killed.
    os.setsid()
    be_child(None)
    # Code of the user, and programs that it starts, must not see the secret of node servers.
    os.environ.pop(TOKEN_VARIABLE, None)
    end_with(life)
    if life.poll():  # it has died meanwhile
        os._exit(1)
    forget_inherited_exits()
    name_process("rpcdl-session")
    status = 1
    try:
        channel = pair_channel(Transport(control, "the training process"), "the training process")
        _serve(channel, Link(link), life, inherited)
        status = 0
    except ConnectionLostError:  # the training process has gone, which is an end like any other
        status = 0
    except BaseException:
        logger.exception("the session of the workers of this machine ended by an error")
    finally:
        leave(status)


def _serve(channel: Channel, link: Link, life: Connection, inherited: Inherited | bytes) -> None:
    is_shared = True
    try:
        if isinstance(inherited, bytes):
            if "__mp_main__" in sys.modules:
                adopted.own_main()
            files = open_files()
            inherited = Inherited(**loads(inherited, (), adopt_main=True))
            # torch's workers each unpickle the dataset, which may then have threads, connections and files.
            is_shared = why_not_shared(inherited.objects, files) is None
        else:
            adopted.own_main()
        reply_as_multiprocessing()
        folder = _apply(inherited.additions)
        context = ServerContext(ServerSettings(), INSECURE, inherited.num_workers, life, is_local=True)
        # No fork's collector visits what lives now, so its pages stay shared.
        gc.freeze()
        session = LocalSession(channel, link, context, inherited, is_shared=is_shared)
    except BaseException as exc:
        channel.send(MessageType.ERROR, payload=dumps_exception(exc, f"process {os.getpid()} of this machine"))
        return
    welcome = Welcome(context.node, os.getpid(), context.num_workers)
    with contextlib.suppress(RPCError):
        channel.send(MessageType.WELCOME, payload=welcome.encode())
        session.serve()
    session.close()
    atexit._run_exitfuncs()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _apply(additions: Additions) -> str:
    """Set variables, and make modules importable that are not; returns a folder to remove in the end."""
    set_variables(additions.variables)
    modules = {name: module for name, module in additions.modules.items() if importlib.util.find_spec(name) is None}
    if not modules:
        return ""
    folder = os.path.join(tempfile.mkdtemp(prefix="rpcdataloader-"), "modules")
    prepare_session(folder, lambda: None, lambda: None)
    install_modules(modules)
    return os.path.dirname(folder)


class LocalSession(Session):
    """The loop of such a session."""

    def __init__(
        self, channel: Channel, link: Link, context: ServerContext, inherited: Inherited, *, is_shared: bool
    ) -> None:
        super().__init__(channel, link, context, context.counters.open())
        self._datasets.inherit(inherited.objects, shared=is_shared)
        self._recipes = inherited.recipes

    def _parts_of(self, build: Build, blocks: Sequence[Block]) -> Parts:
        if build.key in self._recipes:
            return lambda: self._recipes[build.key]
        return super()._parts_of(build, blocks)

    def _warn_of_threads(self) -> None:
        """Not of those of libraries, which torch's workers lack, too."""

    def _row_of(self, event: events.WorkerConnection) -> Row:  # noqa: ARG002
        return self._context.counters.open()

    def _close_row(self, row: Row) -> None:
        self._context.counters.close(row)

    def _free_row(self, worker: ForkedWorker, reason: str) -> None:  # noqa: ARG002
        self._close_row(worker.row)

    def _admit(
        self,
        transport: Transport,
        output: Sequence[int],  # noqa: ARG002
        event: events.WorkerConnection,
        row: Row,
    ) -> Channel | None:
        name_process("rpcdl-worker")
        prefer_for_oom()
        keep_freed_memory()
        self._node.close()
        row.since[0], row.pid[0] = time.monotonic_ns(), os.getpid()
        channel = pair_channel(transport, "the training process")
        welcome = Welcome(self._context.node, os.getpid(), self._context.num_workers, event.worker)
        try:
            channel.send(MessageType.WELCOME, payload=welcome.encode())
        except ConnectionLostError:  # the pass was over before its last worker had started
            return None
        keep_whereabouts(row.batch, row.sample)
        transport.count_in(row.traffic)
        return channel

    def _not_forked(self, event: events.WorkerConnection, problem: str) -> None:
        self._channel.send(MessageType.EXITED, payload=Exited(event.worker, 0, problem).encode())

    def _pass_on(self, report: bytes) -> None:
        """Nothing: there is no node server."""
