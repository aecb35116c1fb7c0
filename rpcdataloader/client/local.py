"""Workers of this machine: a session that is a child of this process, started by multiprocessing.

With the start method fork, the session inherits the script as it is at that moment. With spawn and forkserver it gets
what multiprocessing sends. In each case nothing of it passes through a node server, and no port is open.

The child ends when this process closes the control connection; or when it dies, even in the middle of user code.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import multiprocessing.process
import os
import select
import socket
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from rpcdataloader.client.node import Node
from rpcdataloader.client.session import FATE_TIMEOUT, RemoteSession
from rpcdataloader.client.worker import ClientSettings, FailedStartError, RemoteWorker, read_welcome
from rpcdataloader.errors import ConnectError, ConnectionLostError, LocalProtocolError, RPCError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.signals import signals_held, signals_let_through
from rpcdataloader.server.events import RETRY_PAUSE, Link, WorkerConnection
from rpcdataloader.server.local import Inherited, run_local_session
from rpcdataloader.server.processes import describe_exit, end_session, open_pidfd
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.by_value import main_globals
from rpcdataloader.wire.channel import Channel, pair_channel
from rpcdataloader.wire.handshake import UnavailableError
from rpcdataloader.wire.picklers import runs_script_again
from rpcdataloader.wire.shared import forks_read_nothing
from rpcdataloader.wire.transport import Deadline, Transport

logger = logging.getLogger("rpcdataloader.client")

ADDRESS = Address(name="local")

# Seconds for a session to end once its connection is closed: its workers, finalizers and exit functions have two.
END_TIMEOUT = 4.0

# Most seconds between two attempts to start a process while the system has no room for one.
_NO_ROOM_PAUSE = 1.0

_WHY = (
    "and says why on standard error: unless the start method is fork, a script must be a file, and needs `if __name__ "
    "== '__main__':` around what it does"
)
_TO_FORK = (
    "a lock that another thread held at the moment of the fork may stay locked in it: begin passes while such "
    "threads rest, or give the loader multiprocessing_context='forkserver'"
)


class LocalNode(Node):
    """The place of sessions of this machine, which are born with the same objects."""

    is_local = True

    def __init__(self, settings: ClientSettings, context: BaseContext, inherited: Inherited) -> None:
        super().__init__(ADDRESS, settings)
        self.is_fork = context.get_start_method() == "fork"
        self.inherited = inherited
        self._context = context
        self._num_workers = inherited.num_workers
        self.is_closed = False

    def session(self) -> RemoteSession:
        with signals_held():  # nobody would end a process that is not noted yet
            session = super().session()
        if self.is_closed:  # perhaps meanwhile: a fork takes a while, and `close` waits for none
            session.close()
        return session

    def _begin(self) -> RemoteSession:
        if self.is_closed:
            raise ConnectionLostError("the workers of this machine have ended")
        if self.sessions and self.sessions[-1].welcome is not None and not self.sessions[-1].is_replaced:
            # A process kept ready to fork it as it was would cost every pass another fork.
            logger.warning(
                "%s; another one begins, with the dataset and the globals that the script has now: if they have "
                "changed since the pass began, further batches differ",
                self.sessions[-1].connection.error or "the session of the workers of this machine has ended",
            )
        return LocalSession(self.settings, self._context, self.inherited)

    def close(self) -> None:
        self.is_closed = True
        super().close()
        self.inherited = Inherited(0)  # a process that is about to end must not keep a dataset here

    @property
    def has_ended(self) -> bool:
        """Whether it is closed, and no process of it is left."""
        return self.is_closed and not any(session.connection.is_alive for session in self.sessions)


class LocalWorker(RemoteWorker):
    """A worker of such a session, at the other end of a socket pair."""

    session: LocalSession

    def open(self) -> Channel:
        self.session.wait()
        self.number = next(self.session.numbers)
        channel = self.session.hand_over(self.number)
        self._wait.when_cancelled(channel.transport.shutdown)
        try:
            self._admitted(read_welcome(channel, self._wait))
        except UnavailableError as exc:
            self.refusal = exc.cause
            raise
        return channel


class LocalSession(RemoteSession):
    """A session that this process has started.

    Raises:
        ConnectError: The system has no room for another process.
        SerializationError: What it is born with cannot be pickled (spawn, forkserver).
        AssertionError: This process is a daemon of multiprocessing, which may have no children.
    """

    _kind = LocalWorker

    is_local = True

    def __init__(self, settings: ClientSettings, context: BaseContext, inherited: Inherited) -> None:
        self._is_fork = context.get_start_method() == "fork"
        has_script = self._is_fork or runs_script_again()
        present = list(main_globals().items())  # at once: other threads may make globals
        self._globals = {name: _teller(value) for name, value in present} if has_script else {}
        self._born_with = frozenset(inherited.objects)
        self._recipes = frozenset(inherited.recipes)
        self.numbers = itertools.count(1)
        self._process, self._transport, self._link, self._life = _start_when_there_is_room(
            context, inherited, Deadline(settings.connect_timeout)
        )
        self._pid = self._process.pid
        self._end = _open_end(self._pid)
        self._fate = ""  # how it has ended, once it has; its number may be another one's later
        try:
            super().__init__(ADDRESS, settings)
        except BaseException:  # without a thread for it
            self._transport.close()
            self._process.kill()
            self._collect()
            raise

    def has(self, name: str) -> bool:
        is_same, namespace = self._globals.get(name), main_globals()
        return is_same is not None and name in namespace and is_same(namespace[name])

    def is_born_with(self, key: int) -> bool:
        return key in self._born_with

    def knows(self, key: int) -> bool:
        return key in self._recipes

    def update(self) -> Any:
        """Nothing: what the script adds later reaches sessions that begin later."""
        return lambda _timeout: None

    def import_early(self, modules: Any) -> None:
        """Nothing: it has the modules of the script, or has imported them to begin."""

    def report(self, payload: bytes) -> None:
        """Nothing: there is no node server."""

    def hand_over(self, number: int) -> Channel:
        """Let the session fork a worker; returns this end of its connection.

        Raises:
            ConnectError: This process has no descriptors left.
            ConnectionLostError: The session has ended.
        """
        name = f"{self.name}/{number}"
        try:
            while True:
                with _forking, contextlib.ExitStack() as theirs:
                    if self.connection.has_ended:  # with the lock, with which the link is closed
                        break
                    ours, other = socket.socketpair()
                    theirs.enter_context(other)
                    transport = Transport(ours, name)
                    if self._link.offer(WorkerConnection(number, 0, "this process", None), [other.fileno()]):
                        return pair_channel(transport, name)
                    transport.close()
                time.sleep(RETRY_PAUSE)  # it is busy, and hundreds of connections wait; or it has just ended
        except OSError as exc:
            raise ConnectError(f"cannot connect to a worker of this machine: {exc.strerror or exc}") from exc
        raise ConnectionLostError(f"{self.name} has ended")

    def close(self) -> None:
        super().close()
        if self.welcome is None:
            with contextlib.suppress(ValueError):  # it has ended
                self._process.kill()  # it may still import, or hang

    # --- the control connection (receiver thread)

    def open(self) -> Channel:
        channel = pair_channel(self._transport, self.name)
        self._note("" if self._is_fork else "it imports what the script and its dataset need")
        # A fork answers before it runs any code of the user. Another process may import for as long as it likes.
        limit = self._deadline if self._is_fork else Deadline(None)
        self._deadline.when_cancelled(channel.transport.shutdown)
        try:
            self._welcome = read_welcome(channel, limit)
        except FailedStartError as exc:
            raise exc.error from exc.error.__cause__
        except ConnectError as exc:
            if self.connection.has_ended:  # it is not wanted any more
                raise
            self._process.kill()
            text = (
                f"process {self._pid}, which this process has forked to load data, has not answered within "
                f"{self._settings.connect_timeout:g} s: {_TO_FORK}"
            )
            logger.warning("%s", text)
            raise ConnectError(text) from exc
        return channel

    def _describe(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"process {self._pid}, which multiprocessing has started for workers of this machine{why}"

    def ready(self) -> None:
        self._waiting.end()
        with self._condition:
            self.welcome = self._welcome
            self._condition.notify_all()

    def explain(self, error: RPCError) -> RPCError:
        if not isinstance(error, ConnectionLostError):
            return error
        end = self._wait_for_end(FATE_TIMEOUT)
        if self.welcome is None and end.startswith("exited"):  # the next one would do the same
            return LocalProtocolError(
                f"process {self._pid}, which multiprocessing has started for the workers of this machine, {end} before "
                f"it was ready, {_WHY}"
            )
        return ConnectionLostError(f"the session of the workers of this machine (pid {self._pid}) {end}")

    def lost(self, error: RPCError) -> None:
        super().lost(error)
        self._collect()

    def _collect(self) -> None:
        """Collect the process, whose connection is closed, and close what belongs to it."""
        with _forking:
            self._link.close()
        if self._wait_for_end(END_TIMEOUT) == _STILL_THERE:
            self._process.kill()
            self._wait_for_end(END_TIMEOUT)
        if self._end >= 0:
            descriptor, self._end = self._end, -1
            os.close(descriptor)
        with _forking:
            self._life.close()
        with contextlib.suppress(ValueError):  # the kernel does not let it go
            self._process.close()

    def _wait_for_end(self, timeout: float) -> str:
        """How the process has ended, in words."""
        if self._fate:
            return self._fate
        poll = select.poll()
        poll.register(self._end if self._end >= 0 else self._process.sentinel, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return _STILL_THERE
        end = time.monotonic() + 1.0  # the fork server tells the status of its children a little later
        while (code := self._process.exitcode) is None and time.monotonic() < end and not self._is_fork:
            time.sleep(0.001)
        if code != 0:  # else it has done so itself
            end_session(self._pid)
        if code is None:  # other code of this process has collected it
            self._fate = "has ended"
        else:
            self._fate = describe_exit(code << 8 if code >= 0 else -code)
        return self._fate


_STILL_THERE = "has closed its connection"


def _teller(value: Any) -> Callable[[Any], bool]:
    """A function that tells whether an object is this one.

    By its id alone, an object would be taken for one that has gone, and whose memory it has got. Lists and the like
    have no weak reference: it is the id nevertheless, as another one would keep what the script lets go.
    """
    try:
        refer: Callable[[], Any] = weakref.ref(value)
    except TypeError:
        if gc.is_tracked(value):
            number = id(value)
            return lambda other: id(other) == number
        return lambda other: other is value
    return lambda other: other is refer()


def _start_when_there_is_room(
    context: BaseContext, inherited: Inherited, deadline: Deadline
) -> tuple[Any, Transport, Link, Connection]:
    """As :func:`_start`; a limit on processes or descriptors may be reached for a moment only.

    Raises:
        ConnectError: There was no room before the deadline.
    """
    pause = 0.0
    while True:
        try:
            return _start(context, inherited)
        except OSError as exc:
            _close_pipes(exc)
            problem = f"cannot start a process for the workers of this machine: {exc.strerror or exc}"
            if exc.errno not in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise
            if not pause:
                logger.warning("%s; trying again, for at most %g s", problem, deadline.timeout)
            pause = min(2 * pause or 0.05, _NO_ROOM_PAUSE)
            with signals_let_through():
                has_time = deadline.pause(pause)
            if not has_time:
                raise ConnectError(problem) from exc


def _close_pipes(error: BaseException) -> None:
    """Close what multiprocessing leaves open if it cannot fork: the pipes are only known to the frame that failed."""
    for frame, _line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "multiprocessing.popen_fork" and frame.f_code.co_name == "_launch":
            for name in ("parent_r", "child_w", "child_r", "parent_w"):
                with contextlib.suppress(OSError):
                    os.close(frame.f_locals.get(name, -1))


def _start(context: BaseContext, inherited: Inherited) -> tuple[Any, Transport, Link, Connection]:
    """Start a process.

    Returns:
        It, and this process's ends of its control connection, of the link for connections of workers, and of the pipe
        whose end is its own.
    """
    theirs: list[socket.socket | Connection] = []
    try:
        with _forking:
            _theirs[threading.get_ident()] = theirs
            control, their_control = socket.socketpair()
            theirs.append(their_control)
            transport = Transport(control, str(ADDRESS))
            link, their_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.append(their_link)
            ours = Link(link)
            _ends.add(ours)
            their_life, life = multiprocessing.Pipe(duplex=False)
            theirs.append(their_life)
            _ends.add(life)
        process = context.Process(  # type: ignore[attr-defined]
            target=run_local_session,
            args=(their_control, their_link, their_life, inherited),
            name="rpcdataloader",
            daemon=True,
        )
        try:
            with _starting, forks_read_nothing(), _without_needless_warning(), _interruptible(context):
                process.start()
        except BaseException as exc:
            with _forking:
                for end in (transport, ours, life):
                    end.close()
            if process.pid is not None:  # Ctrl-C
                process.kill()
                process.join(END_TIMEOUT)
            if isinstance(exc, (ConnectionError, EOFError)) and context.get_start_method() == "forkserver":
                # From Python 3.14 on, the fork server runs the script to begin, and may end by that.
                raise LocalProtocolError(
                    f"multiprocessing's fork server, which starts the workers of this machine, has ended, {_WHY}"
                ) from exc
            raise
        # Else exit functions of multiprocessing would wait for it before the client closes its connection.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    finally:
        with _forking:
            _theirs.pop(threading.get_ident(), None)
            for each in theirs:
                each.close()
    return process, transport, ours, life


def _interruptible(context: BaseContext) -> contextlib.AbstractContextManager[None]:
    """Let signals through where a start waits: others than a fork take what they are sent once they have imported."""
    return contextlib.nullcontext() if context.get_start_method() == "fork" else signals_let_through()


@contextlib.contextmanager
def _without_needless_warning() -> Iterator[None]:
    """Python 3.12 and later warn of a fork beside threads, for which those of this package are no reason."""
    own = sum(thread.name.startswith("rpcdl-") for thread in threading.enumerate())
    if len(os.listdir("/proc/self/task")) - own > 1:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
        yield


def _open_end(pid: int) -> int:
    """A descriptor that becomes readable when a process ends; -1 on a kernel without (Linux 5.3 has them)."""
    try:
        return open_pidfd(pid)
    except OSError:
        return -1


# A child of another fork must not keep a session alive, nor hide its end. The lock is held while descriptors are opened
# or closed that such a child must not have; never as a thread begins to fork, which may take locks of libraries first.
_forking = Lock()
_starting = Lock()  # held for the filters of warnings, which threads share
_ends: weakref.WeakSet[Link | Connection] = weakref.WeakSet()
_theirs: dict[int, list[socket.socket | Connection]] = {}  # by the thread that is about to fork their owner


def _forget_in_child() -> None:
    global _forking, _starting
    _forking, _starting = Lock(), Lock()
    _theirs.pop(threading.get_ident(), None)  # those of this child
    for end in (*_ends, *itertools.chain.from_iterable(_theirs.values())):
        end.close()
    _theirs.clear()


at_fork(
    Part.SESSIONS, before=lambda: _forking.acquire(), in_parent=lambda: _forking.release(), in_child=_forget_in_child
)
