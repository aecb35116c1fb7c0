"""A client's session on one node: the control connection, and the workers that belong to it.

The loss of the control connection ends the session and all of its workers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from typing import Any

from rpcdataloader.client.background import Waiting
from rpcdataloader.client.connection import Connection, Request
from rpcdataloader.client.sharing import Partition, current_partition, has_process_group
from rpcdataloader.client.worker import (
    FIRST_PAUSE,
    MAX_PAUSE,
    ClientSettings,
    PendingReply,
    RemoteWorker,
    WorkerOwner,
    log_from_server,
    reference_of,
)
from rpcdataloader.errors import ConnectionLostError, RPCError, RPCTimeoutError
from rpcdataloader.host.environment import collect, import_modules, place, set_up
from rpcdataloader.host.snapshots import snapshots
from rpcdataloader.host.sources import Source, recorder
from rpcdataloader.wire import transport
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.channel import Channel
from rpcdataloader.wire.connecting import NO_ANSWER
from rpcdataloader.wire.exceptions import copy_to_raise
from rpcdataloader.wire.frames import Message, MessageType
from rpcdataloader.wire.handshake import NO_TICKET, Tickets, UnavailableError
from rpcdataloader.wire.known import Known
from rpcdataloader.wire.messages import Call, Exited, StackRequest, Welcome
from rpcdataloader.wire.pickling import Encoded, dumps
from rpcdataloader.wire.transport import Deadline

logger = logging.getLogger("rpcdataloader.client")

# Seconds that a lost worker connection waits for its session to report how the worker ended. The session is a neighbour
# of the worker and hears of it from the kernel; only a session that is busy building takes that long.
FATE_TIMEOUT = 2.0

# Seconds for the end of a worker that was closed before it was admitted: if it had a place, no report says when that is
# free.
UNREPORTED_TIMEOUT = 5.0

# Seconds for a killed worker to end.
END_TIMEOUT = 0.5

# A session answers within one second, even for a worker that does not, unless it is busy building.
STACK_TIMEOUT = 2.0


# Connections that break at first contact, after which no other is made.
MAX_BROKEN = 4


@contextlib.contextmanager
def told_while_waiting(sessions: Sequence[RemoteSession]) -> Iterator[None]:
    """Wait for sessions. If a signal handler ends the wait, nothing more is said of them until the next one."""
    for session in sessions:
        session.is_given_up = False
    try:
        yield
    except BaseException:
        for session in sessions:
            session.is_given_up = True
        raise


class RemoteSession:
    """This client's session on one node: the control connection.

    Attributes:
        is_quiet: True if waiting for it needs no log message.
        is_given_up: True if a signal handler, such as that of Ctrl-C, has ended the last wait for it.
        reason: Last known reason for which it is not ready, in words.
        num_exited: Number of its workers that were reported as exited, whose places are free.
        workers: Its workers that have not ended.
        is_replaced: True if this process ends it to begin another one.
    """

    _kind: type[RemoteWorker] = RemoteWorker

    is_local = False  # as of its node
    is_replaced = False

    _key = b""  # that of the tickets, once there are some

    def __init__(self, address: Address, settings: ClientSettings, *, is_quiet: bool = False) -> None:
        self.address = address
        self.name = str(address)
        self.host = ""  # its IP address: its workers must not need the resolver, nor reach another server of that name
        self.welcome: Welcome | None = None
        self._welcome: Welcome | None = None  # until the session is ready
        self._tickets: Tickets | None = None  # from then on
        self._settings = settings
        self._condition = settings.changed  # one for all, so that a thread can wait for any session
        # Guarded by the condition:
        self._exited: dict[int, Exited] = {}
        self._present: dict[int, RemoteWorker] = {}  # admitted, and not reported as exited
        self._unreported_until = 0.0  # the end of that of a worker which was closed before it was admitted
        self.num_exited = 0
        self._lost: RPCError | None = None
        self.draining = False
        self.is_quiet = is_quiet
        self.is_given_up = False
        self.reason = NO_ANSWER
        self._deadline = Deadline(settings.connect_timeout)
        self.connection = Connection(self.name, self, Known(self.has))
        self.workers: set[RemoteWorker] = set()
        self._partition = current_partition()
        # What the session was sent last of what may change, and its answer; and the sources that it has.
        self._sent: tuple[tuple[Any, ...], PendingReply] | None = None
        self._sources: dict[str, Source] = {}
        self._imported: set[str] = set()
        self._waiting = Waiting(settings.alarm, self._describe, self._partition.label)
        try:
            self.connection.start(self._deadline)
        except BaseException:  # without a thread for it, or with Ctrl-C meanwhile
            self._waiting.end()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether it is ready, or may still become so."""
        return not self.draining and not self.connection.has_ended

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.welcome is not None and self.is_usable

    @property
    def is_busy(self) -> bool:
        """Whether a request to it, such as to build a dataset, is pending."""
        return self.connection.num_pending > 0

    @property
    def is_over(self) -> bool:
        """Whether it and its workers have ended."""
        return self._lost is not None and not self.workers

    def has_room_soon(self, num_exited: int) -> bool:
        """Whether the node, which was full, gets a free place from this client: a worker has ended, or is ending.

        Args:
            num_exited: The attribute, from before the node was asked.
        """
        with self._condition:
            is_ending = not all(worker.is_usable for worker in self._present.values())
        return is_ending or self.num_exited != num_exited or time.monotonic() < self._unreported_until

    def wait(self, is_wanted: Callable[[], bool] = lambda: True) -> Welcome:
        """Wait until the session is ready.

        Args:
            is_wanted: Function called at every :meth:`wake`; False ends the wait.

        Raises:
            RPCError: The session did not start, has ended, or is no longer wanted.
        """
        with self._condition:
            with told_while_waiting([self]):
                self._condition.wait_for(lambda: self.welcome is not None or self._lost is not None or not is_wanted())
            if self._lost is not None:
                raise copy_to_raise(self._lost)
            if self.welcome is None:
                raise ConnectionLostError(f"{self.name}: {self.reason}")
            return self.welcome

    def wake(self) -> None:
        """Let the threads in :meth:`wait` check whether to go on waiting."""
        with self._condition:
            self._condition.notify_all()

    def make_ticket(self) -> bytes:
        """A new ticket, for a connection of a worker, once the session is ready."""
        assert self._tickets is not None
        return self._tickets.make()

    def update(self) -> Callable[[float | None], None]:
        """Tell the session of what it does not know: additions, paths, sources, and the rank of a process group.

        Returns:
            A function that waits until the session has applied it, and raises its errors, or ``RPCTimeoutError`` after
            as many seconds as its argument.
        """
        return self._tell(current_partition()).wait

    def _tell(self, partition: Partition) -> PendingReply:
        additions, where, has_group = self._settings.additions.current, place(), has_process_group()
        new = {name: source for name, source in recorder.look().items() if self._sources.get(name) is not source}
        state = additions, partition, has_group, where
        if self._sent is None or new or self._sent[0] != state or self._sent[0][0] is not additions:
            is_elsewhere = self._sent is None or self._sent[0][3] != where
            orders = snapshots.orders(new, self._key) if new else {}
            environment = collect(new, orders) if new or is_elsewhere else None
            ranks = partition.rank, partition.world_size, has_group
            self._sent = state, self.call(set_up, environment, additions, *ranks)
            self._sources |= new
        return self._sent[1]

    def import_early(self, modules: Set[str]) -> None:
        """Let the session import modules, so that workers forked later have them; returns at once."""
        if new := modules - self._imported:
            self._imported |= new
            self.call(import_modules, sorted(new))

    def call(self, func: Callable[..., Any], *args: Any) -> PendingReply:
        """Run ``func(*args)`` in the session."""
        call = tuple(Call(func, args, {}))
        return self.submit(MessageType.CALL, dumps(call, persistent_id=reference_of, have=self.has))

    def has(self, name: str) -> bool:  # noqa: ARG002
        """Whether it has had this global of the script since its beginning."""
        return False

    def is_born_with(self, key: int) -> bool:  # noqa: ARG002
        """Whether it has had the object of this key since its beginning."""
        return False

    def knows(self, key: int) -> bool:  # noqa: ARG002
        """Whether it has had the parts of this dataset since its beginning."""
        return False

    def submit(self, type: MessageType, content: Encoded, digest_of_blocks: bytes = b"") -> PendingReply:
        """Send a request to the session itself; if that has ended, its end is the answer."""
        answer = PendingReply()
        try:
            request = Request(answer.complete, self._settings.allocator)
            self.connection.submit(type, content, request, digest_of_blocks)
        except ConnectionLostError as exc:
            answer.complete(exc)
        return answer

    def report(self, payload: bytes) -> None:
        """Tell the session of the client's loops, unless it is busy; never blocks."""
        if self.is_ready and not self.is_busy:
            self.connection.tell(MessageType.REPORT, payload)

    def stack_of(self, number: int) -> str:
        """A worker's state and Python stacks, or the reason why they are missing.

        Waits until the worker's session has answered, at most 2 s. Never raises, as the text is needed most when
        something is wrong already: a missing answer is reported in the text.
        """
        return self._ask_for_stack(StackRequest(number)).stack()

    def end_worker(self, number: int, reason: str) -> Callable[[], str]:
        """End a worker of this session, even in the middle of a task; its requests fail with ``reason``.

        Returns at once. The worker takes no further requests. Its connection ends with it, or is closed half a second
        after the session's answer or 2 s of silence, in case the kernel does not let the worker go.

        Args:
            reason: Text for the error and for the node's log, such as ``"took longer than 5 s"``.

        Returns:
            A function that waits for the worker's last stack, as :meth:`stack_of` does.
        """
        workers = [worker for worker in list(self.workers) if worker.number == number]
        for worker in workers:
            worker.draining = True

        def close() -> None:
            for worker in workers:
                worker.close(ConnectionLostError(f"{worker.name} was ended: {reason}"))

        answer = self._ask_for_stack(StackRequest(number, reason))
        # Until then, the session may report the worker's stack.
        answer.add_done_callback(lambda _answer: self._settings.alarm.call_after(END_TIMEOUT, close))
        return answer.stack

    def _ask_for_stack(self, request: StackRequest) -> PendingReply:
        answer = self.submit(MessageType.STACK, Encoded(request.encode(), []))
        late = RPCTimeoutError(f"{self.name} did not answer within {STACK_TIMEOUT:g} s, perhaps as it is busy building")
        self._settings.alarm.call_after(STACK_TIMEOUT, lambda: answer.complete(late))
        return answer

    def fate(self, worker: int) -> Exited | None:
        """How a worker of this session ended; waits a little for the session's report. None without one."""
        with self._condition:
            self._condition.wait_for(lambda: worker in self._exited or self._lost is not None, FATE_TIMEOUT)
            return self._exited.get(worker)

    def admitted(self, worker: RemoteWorker) -> None:
        """A worker has its place on the node, until the session reports that its process has ended."""
        with self._condition:
            if worker.number not in self._exited:
                self._present[worker.number] = worker

    def held(self) -> str:
        """How many of the node's places this process holds, and for what."""
        purposes = Counter(worker.purpose for worker in list(self.workers) if worker.number)
        parts = [f"{number} for {purpose}" for purpose, number in purposes.most_common()]
        return f"this process holds {purposes.total()}{': ' * bool(parts)}{', '.join(parts)}"

    def left_early(self) -> None:
        """A worker was closed before it was admitted."""
        self._unreported_until = time.monotonic() + UNREPORTED_TIMEOUT

    def open_worker(self, owner: WorkerOwner, keep_waiting: Callable[[], bool] = lambda: True) -> RemoteWorker:
        """Ask for a worker; ``owner`` is told when it is ready or lost.

        Args:
            keep_waiting: Function called while the node is busy; False gives up.

        Raises:
            ConnectionLostError: This process cannot start a thread for it.
        """
        with self._condition:
            numbers = {worker.number for worker in list(self.workers)}
            if 0 not in numbers:  # a worker that connects has no number yet, and may have ended
                self._exited = {number: each for number, each in self._exited.items() if number in numbers}
        worker = self._kind(self, owner, keep_waiting, self._settings)
        self.workers.add(worker)
        try:
            worker.connection.start()
        except BaseException:  # without a thread for it, or with Ctrl-C while that starts
            worker.close()
            self.workers.discard(worker)
            raise
        return worker

    def close(self) -> None:
        """End the session and its workers."""
        for worker in list(self.workers):
            worker.close()
        self.connection.close()
        self._deadline.cancel()

    def connections(self) -> list[Connection]:
        """Every connection of the session."""
        return [self.connection, *(worker.connection for worker in list(self.workers))]

    # --- the control connection (receiver thread)

    def open(self) -> Channel:
        pause, num_broken = FIRST_PAUSE, 0
        tell: Callable[[str], None] = self._note
        while True:
            try:
                channel, self._welcome = self._settings.open(
                    self.address,
                    _no_ticket,
                    self._deadline,
                    retry=self._settings.waits_for_servers,
                    tell=tell,
                    find_host=lambda: self._settings.find_host(self.address),
                )
                break
            except (UnavailableError, ConnectionLostError) as exc:
                # The latter when what serves a connection is killed or has no time for it, or the network breaks it;
                # but it may be no node server.
                num_broken += isinstance(exc, ConnectionLostError)
                if num_broken > MAX_BROKEN or not self._deadline.pause(pause):
                    raise
                self._note(str(exc).removeprefix(f"{self.address}: "))
                tell = _say_nothing  # of the steps of the next attempt: the reason why there is one says more
                pause = min(2 * pause, MAX_PAUSE)
        self._key, self._tickets = channel.ticket_key, Tickets(channel.ticket_key, self._welcome.pid)
        with contextlib.suppress(OSError):  # it has gone already
            self.host = self._settings.hosts[self.address] = channel.transport.peer_host
        if channel.differences:
            logger.warning("%s differs from this client: %s", self.name, "; ".join(channel.differences))
        return channel

    def lacks_thread(self, reason: str) -> None:
        self._note(reason)
        self._waiting.poll()

    def _note(self, reason: str) -> None:
        self.reason = reason

    def _describe(self) -> str | None:
        limit = f"at most {self._settings.connect_timeout:g} s, RPCDATALOADER_CONNECT_TIMEOUT"
        return None if self.is_quiet or self.is_given_up else f"{self.name}: {self.reason} ({limit})"

    def ready(self) -> None:
        self.reason = "it looks for this script's folders and py_modules (is it busy, or does a file server hang?)"
        self._tell(self._partition).add_done_callback(self._is_set_up)
        if not self.address.is_unix:
            self._look()

    def _is_set_up(self, answer: Future[Message | RPCError]) -> None:
        # Not before: workers inherit the modules and the environment of the training script from their session.
        if isinstance(answer.result(), Message):
            self._waiting.end()
            with self._condition:
                self.welcome = self._welcome
                self._condition.notify_all()

    def _look(self) -> None:
        """End connections on which data no longer gets through; look again later (also the alarm's thread)."""
        if self.connection.has_ended:
            return
        if self.connection.is_cut_off():
            self.connection.close(ConnectionLostError(f"connection to {self.name} lost: its host no longer answers"))
            return
        for worker in list(self.workers):
            if worker.is_usable and worker.connection.is_cut_off():
                self.end_worker(worker.number, "its connection no longer carries data, though its node answers")
        self._settings.alarm.call_after(transport.CUT_OFF_PERIOD, self._look)

    def received(self, message: Message) -> None:
        if message.type == MessageType.EXITED:
            exited = Exited.decode(message.payload)
            with self._condition:
                self._exited[exited.worker] = exited
                self.num_exited += 1
                worker = self._present.pop(exited.worker, None)
                self._condition.notify_all()
            if worker is not None:
                # What it had sent may still come; but the end of the connection may be lost with all that follows.
                error = ConnectionLostError(f"{worker.name} {exited.reason}")
                self._settings.alarm.call_after(FATE_TIMEOUT, functools.partial(worker.close, error))
        elif message.type == MessageType.GOAWAY:
            self.draining = True
        elif message.type == MessageType.LOG:
            log_from_server(self.name, message, self._settings.printer)

    def explain(self, error: RPCError) -> RPCError:
        if not isinstance(error, ConnectionLostError) or self.welcome is None or not self.is_busy:
            return error
        # The sign of a dataset too large for its node; only the node server knows.
        explained = ConnectionLostError(
            f"{error} without an answer; if its session was killed, perhaps out of memory while it built a dataset, "
            "the log of that node server says so"
        )
        explained.__cause__ = error.__cause__
        return explained

    def lost(self, error: RPCError) -> None:
        self._waiting.end()
        with self._condition:
            self._lost = error
            self._condition.notify_all()
        # The node has ended these already, or will when it notices; a vanished host sends nothing.
        for worker in list(self.workers):
            worker.close(error if self.welcome is None else ConnectionLostError(str(error)))


def _say_nothing(_reason: str) -> None:
    pass


def _no_ticket() -> bytes:
    """What asks for a new session."""
    return NO_TICKET
