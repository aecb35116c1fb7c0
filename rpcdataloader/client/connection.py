"""One connection of a client: requests are numbered, pipelined, and answered in any order.

Each has a receiver thread, which also connects, and an outbox. Callers, in any thread, never wait. The receiver waits
for nothing but input, and holds no lock across I/O; an error in a thread fails all pending requests.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpcdataloader.client.background import start_when_there_is_room
from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.locks import Lock
from rpcdataloader.wire.channel import Channel, Outgoing
from rpcdataloader.wire.exceptions import copy_to_raise
from rpcdataloader.wire.frames import Buffer, Flag, Message, MessageType, SharedBlock, heap_blocks
from rpcdataloader.wire.known import Known
from rpcdataloader.wire.messages import pack_blocks, pack_handles
from rpcdataloader.wire.outbox import LONG_BYTES, Outbox
from rpcdataloader.wire.pickling import Encoded
from rpcdataloader.wire.shared import Borrower
from rpcdataloader.wire.slabs import Allocator, Block, PageablePool, PageLock, PinnedAllocator
from rpcdataloader.wire.transport import Deadline

if TYPE_CHECKING:
    from rpcdataloader.client.session import RemoteSession
    from rpcdataloader.client.worker import RemoteWorker

logger = logging.getLogger("rpcdataloader.client")

_ALL_SIGNALS = signal.valid_signals()


# Seconds in which the system may come to have room for the thread that sends.
_NO_THREAD_TIMEOUT = 60.0


@dataclass(slots=True)
class Request:
    """A request that waits for its reply."""

    # Function that takes the REPLY or ERROR message, or the error that ended the connection; called once, by the
    # receiver thread; must neither block nor raise. Not called for a request cancelled before it was sent.
    complete: Callable[[Message | RPCError], None]
    allocator: Allocator
    is_task: bool = False  # a batch for a loader, which owns its worker: see :meth:`Connection.cancel_all`
    flags: int = 0  # bits of :class:`~rpcdataloader.wire.frames.Flag` to send with it
    size_bytes: int = 0  # set when it is submitted


class Connection:
    """A connection, opening or open; once lost, it stays lost.

    Args:
        name: Name in messages and threads; see :meth:`rename` for a better one, such as ``node07:6543/2``.
        owner: Object that the receiver thread lets ``open`` the channel, up to its welcome. It is told when the server
            is ``ready``, what was ``received`` and answers no request, and that the connection is ``lost``, after it
            was asked to ``explain`` the error; and, while it waits for a thread, why it ``lacks_thread``.
        sends_now: True to let callers send small messages themselves; Ctrl-C in the middle ends the connection.
        known: What the process there has of the script's definitions from the beginning.

    Attributes:
        has_ended: True if requests are refused, before the first pending one fails.
    """

    def __init__(
        self, name: str, owner: RemoteSession | RemoteWorker, known: Known | None = None, *, sends_now: bool = False
    ) -> None:
        self.name = name
        self.error: RPCError | None = None
        self._owner = owner
        self._channel: Channel | None = None
        self._borrower: Borrower | None = None  # of a worker on this machine
        self._sends_now = sends_now
        self._outbox = Outbox(f"rpcdl-send {name}", self._sending_failed)
        self._lock = Lock()
        # Guarded by the lock:
        self._pending: dict[int, Request] = {}
        # Those of them that are sent once the channel is open: what the process there has is known then.
        self._early: dict[int, tuple[MessageType, Encoded, bytes]] = {}
        self._last_request = 0
        self._known = known or Known()
        self.has_ended = False
        self._receiver = threading.Thread(target=self._receive, name=f"rpcdl-recv {name}", daemon=True)

    def rename(self, name: str) -> None:
        """Use another name from now on; also for the thread, as py-spy and faulthandler show it."""
        self.name = name
        self._receiver.name, self._outbox.name = f"rpcdl-recv {name}", f"rpcdl-send {name}"

    def start(self, deadline: Deadline | None = None) -> None:
        """Start to connect.

        Args:
            deadline: Limit of the attempts to start a thread, if there is no room for one; None for a single one.

        Raises:
            ConnectionLostError: No thread can be started: there are too many, or the interpreter ends.
        """
        try:
            start_when_there_is_room(self._receiver.start, deadline, self._owner.lacks_thread)
        except RuntimeError as exc:
            raise ConnectionLostError(f"cannot connect to {self.name}: {exc}") from exc

    def submit(self, type: MessageType, content: Encoded, request: Request, digest_of_blocks: bytes = b"") -> int:
        """Send a request; returns its number. The digest of its blocks is computed if it is not given.

        Raises:
            ConnectionLostError: The connection has ended. ``request`` is not completed.
        """
        with self._lock:
            if self.has_ended:
                raise self._reason()
            number = self._last_request = self._last_request + 1
            self._pending[number] = request
            if self._channel is None:
                self._early[number] = type, content, digest_of_blocks
            else:
                self._submit(number, type, content, digest_of_blocks)
        return number

    def _submit(self, number: int, type: MessageType, content: Encoded, digest_of_blocks: bytes) -> None:
        """Send a pending request; with the lock."""
        request = self._pending[number]
        if content.definitions:
            content = self._with_lacking(content, request)
        payload, buffers = content.payload, content.buffers
        size_bytes = request.size_bytes = content.size_bytes if buffers else len(payload)
        messages = [Outgoing(type, number, payload, buffers, request.flags, digest_of_blocks, size_bytes=size_bytes)]
        if self._borrower is not None and (ended := self._borrower.take_ended()):
            # Before the request, which may need the memory.
            messages.insert(0, Outgoing(MessageType.RETURN, payload=pack_blocks(ended)))
        try:
            # Within the lock, so that numbers rise on the wire: the server's GOAWAY names the last one that it
            # serves. To wake a thread costs two changes of the GIL's holder, which is more than a small message.
            self._outbox.put(*messages, now=self._sends_now and size_bytes <= LONG_BYTES)
        except RPCError:
            return  # the receiver sees the same error and reports it
        except RuntimeError as exc:
            del self._pending[number]
            raise ConnectionLostError(f"cannot send to {self.name}: {exc}") from exc

    def _with_lacking(self, content: Encoded, request: Request) -> Encoded:
        """The content with those definitions that the process there may lack; with the lock."""
        if not (lacking := self._known.lacking(content.definitions)):
            return content
        complete = request.complete

        def completed(reply: Message | RPCError) -> None:
            if isinstance(reply, Message) and reply.type == MessageType.REPLY:
                with self._lock:
                    self._known.arrived(lacking)
            complete(reply)

        request.complete = completed
        self._known.sending(lacking)
        return content.with_definitions(lacking)

    def inherited(self) -> Known:
        """What a process has of the definitions that is forked later from the one there."""
        with self._lock:
            return self._known.inherit()

    def _put(self, *messages: Outgoing, now: bool = False) -> None:
        try:
            self._outbox.put(*messages, now=now)
        except RPCError:
            return  # the receiver sees the same error and reports it

    def cancel(self, number: int) -> None:
        """Withdraw a request, which is dropped, or ask the server not to begin it, or not to send its result.

        The server still answers one that was sent, or is a task.
        """
        with self._lock:
            if (request := self._pending.get(number)) is None:
                return
            if self._early.pop(number, None) or (not request.is_task and self._outbox.withdraw(number)):
                del self._pending[number]
            else:
                self._cancel(number)

    def cancel_all(self) -> None:
        """Cancel every task of a loader."""
        with self._lock:
            for number, request in list(self._pending.items()):
                if request.is_task:
                    self._cancel(number)

    def _cancel(self, number: int) -> None:
        with contextlib.suppress(RPCError):
            self._outbox.cancel(number, now=self._sends_now)

    def fail_above(self, number: int, error: RPCError) -> None:
        """Fail the requests above ``number``, each with a copy of ``error``; for the receiver thread."""
        with self._lock:
            numbers = [other for other in self._pending if other > number]
            late = [self._pending.pop(other) for other in numbers]
            for other in numbers:
                self._outbox.withdraw(other)
        for request in late:
            self._complete(request, copy_to_raise(error))

    def release(self, handle: int) -> None:
        """Let an object of the server go; for finalizers: never blocks, takes no lock."""
        self._outbox.post(Outgoing(MessageType.RELEASE, payload=pack_handles([handle])))

    def tell(self, type: MessageType, payload: bytes) -> None:
        """Send a message without reply, unless others wait to be sent; for threads without signal handlers."""
        if self._channel is not None and self._outbox.is_idle:
            self._put(Outgoing(type, payload=payload), now=True)

    @property
    def is_open(self) -> bool:
        """Whether the server has answered; before that, the receiver's wait cannot be ended early."""
        return self._channel is not None

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._receiver.is_alive()

    def is_cut_off(self) -> bool:
        """Whether the server's host has vanished; see :func:`~rpcdataloader.wire.transport.is_cut_off`."""
        return self._channel is not None and self._channel.transport.is_cut_off()

    @property
    def num_pending(self) -> int:
        """The number of requests without a reply."""
        return len(self._pending)

    def close(self, error: RPCError | None = None) -> None:
        """End the connection and fail pending requests; idempotent, without waiting for the thread."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            self.error = error or ConnectionLostError(f"connection to {self.name} was closed by this process")
            channel = self._channel
        if channel is not None:
            channel.transport.shutdown()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread of a closed connection, at most ``timeout`` seconds; not for the caller's own."""
        if self._receiver.ident is not None and self._receiver is not threading.current_thread():
            self._receiver.join(timeout)

    # --- receiver

    def _receive(self) -> None:
        # A signal that interrupts a receive would cost a trip through the GIL every time.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
        error: RPCError
        try:
            channel = self._owner.open()
            try:
                self._serve(channel)
            finally:
                channel.transport.shutdown()
                self._outbox.close()
                channel.transport.close()
            error = ConnectionLostError(f"{self.name} closed the connection")
        except RPCError as exc:
            error = _without_frames(exc)
        except BaseException as exc:
            logger.exception("the receiver of %s failed", self.name)
            error = ConnectionLostError(f"connection to {self.name} ended by {type(exc).__name__}: {exc}")
            error.__cause__ = exc.with_traceback(None)
        self._fail(error)

    def _serve(self, channel: Channel) -> None:
        with self._lock:
            if self.has_ended:
                return
            self._channel = channel
            self._known.begun()
            for number in list(self._early):
                # Not by a variable of this frame, which lasts, and what is sent refers to the pass.
                self._submit(number, *self._early.pop(number))
        channel.allocate_with(self._allocate)
        if channel.transport.is_local:
            self._borrower = Borrower()
            channel.borrow_with(self._borrow)
        channel.transport.read_ahead()
        # Sends earlier requests. References are let go at once, though no further request comes.
        limit = Deadline(_NO_THREAD_TIMEOUT)
        start_when_there_is_room(
            lambda: self._outbox.open(channel, start=not self._sends_now), limit, self._owner.lacks_thread
        )
        self._owner.ready()
        while (message := channel.recv()) is not None:
            if message.type in (MessageType.REPLY, MessageType.ERROR):
                # Without the lock, which may be held during a send: one dict operation is atomic.
                request = self._pending.pop(message.request_id, None)
                if request is None:
                    raise RemoteProtocolError(
                        f"{self.name} answered request {message.request_id}, which is not pending"
                    )
                self._outbox.answered(request.size_bytes)
                request.complete(message)
                del request
            elif message.type == MessageType.MAPPING:
                self._map(message.payload, channel)
            else:
                self._owner.received(message)
            # This frame must not keep the batch while it waits for the next one.
            del message

    def _allocate(self, request_id: int, sizes: Sequence[int]) -> list[Any]:
        if (request := self._pending.get(request_id)) is None:
            return heap_blocks(request_id, sizes)  # nothing was asked, which is an error
        return [request.allocator.allocate(size) for size in sizes]

    def _map(self, payload: Buffer, channel: Channel) -> None:
        """Take memory that the worker wants to share; it is told when this has succeeded."""
        descriptor = channel.transport.take_descriptor()
        if self._borrower is None or descriptor < 0:  # lost on the way: behind a forwarded socket, or at the limit
            return
        number = int.from_bytes(payload, "little")
        if self._borrower.map(number, descriptor):
            # All requests to a worker of a loader have the same allocator.
            allocator = next((request.allocator for request in list(self._pending.values())), None)
            page_lock = _page_lock_of(allocator)
            is_registered = page_lock is not None and self._borrower.register(number, page_lock)
            flags = Flag.REGISTERED if is_registered else 0
            self._put(Outgoing(MessageType.MAPPING, payload=bytes(payload), flags=flags), now=True)

    def _borrow(self, request_id: int, shared: SharedBlock) -> Block:
        assert self._borrower is not None
        block = self._borrower.borrow(shared)
        request = self._pending.get(request_id)
        if request is None or isinstance(request.allocator, PageablePool):
            return block
        if _page_lock_of(request.allocator) is not None and self._borrower.is_registered(shared):
            return block
        pinned = request.allocator.allocate(shared.size_bytes)
        pinned.tensor.copy_(block.tensor)
        return pinned

    def _fail(self, error: RPCError) -> None:
        with self._lock:
            # From now on, callers take another connection.
            self.has_ended = True
        if self.error is None:
            with self._heard("the end"):
                error = self._owner.explain(error)
        with self._lock:
            self._borrower = None  # memory without blocks goes now
            if self.error is None:
                self.error = error
            pending, self._pending, self._early = self._pending, {}, {}
        self._outbox.close()
        for request in pending.values():
            self._complete(request, self._reason())
        with self._heard("the end"):
            self._owner.lost(self.error)

    def _complete(self, request: Request, error: RPCError) -> None:
        with self._heard("a request"):
            request.complete(error)

    @contextlib.contextmanager
    def _heard(self, what: str) -> Iterator[None]:
        """Log an exception of a function that must not raise: others must hear that their requests have failed, too."""
        try:
            yield
        except BaseException:
            logger.exception("%s: an error while its owner heard of %s", self.name, what)

    def _reason(self) -> RPCError:
        """Why the connection ended; a copy for each request, as one error would collect the tracebacks of all."""
        if self.error is None:
            return ConnectionLostError(f"connection to {self.name} is lost")
        return copy_to_raise(self.error)

    # --- sender

    def _sending_failed(self, error: BaseException) -> None:
        if not isinstance(error, RPCError):
            logger.error("sending to %s failed", self.name, exc_info=error)
        if self._channel is not None:
            self._channel.transport.shutdown()  # the receiver sees the same error and reports it


def _page_lock_of(allocator: Allocator | None) -> PageLock | None:
    return allocator.page_lock if isinstance(allocator, PinnedAllocator) else None


def _without_frames(error: RPCError) -> RPCError:
    """The error without tracebacks: their frames refer to the message being received, and the error is kept."""
    for part in (error, error.__cause__, error.__context__):
        if part is not None:
            part.__traceback__ = None
    return error
