"""The unsent messages of one side of a connection, and who sends them.

A caller sends a small message itself, as far as the kernel takes it without a wait. All else is sent by a thread of
this connection, which the first such message starts: what a caller must not be interrupted in, what takes long to seal,
and what the kernel has no room for. So no caller waits for the network, and no peer holds up another one.

Messages keep their order. A request that is not begun can be withdrawn. The cancellation of another one passes all that
is not begun, and comes with the last bytes of what is: who has received a request knows whether it was given up.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable

from rpcdataloader.host.locks import Condition
from rpcdataloader.wire.channel import Channel, Outgoing
from rpcdataloader.wire.frames import MessageType, as_bytes

# Limit in bytes of unanswered requests: little against the memory of a node with many workers, and enough to keep a
# network busy. The rest waits here, where it can be withdrawn, and the peer can read all that is sent to it.
WINDOW_BYTES = 64 << 20

# The end of a long message waits for the rest to be taken. It fits, with a cancellation, into one packet.
_TAIL_BYTES = 1 << 9
LONG_BYTES = 1 << 16

_REQUESTS = frozenset((MessageType.CALL, MessageType.LOAD, MessageType.BUILD, MessageType.STACK))


class Outbox:
    """Messages to send; thread-safe.

    Args:
        name: Name of the thread.
        failed: Function that takes the error that has ended the thread; must not raise.
        channel: Connection; None until :meth:`open`.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], channel: Channel | None = None) -> None:
        self.name = name
        self._failed = failed
        self._channel = channel
        self._changed = Condition()
        self._lock = self._changed.lock  # reentrant: a destructor may run anywhere, and warn
        # Messages in their order, requests by their number. Finalizers append, too, without the lock.
        self._waiting: deque[Outgoing | int] = deque()
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()  # wakes the thread
        # Guarded by the lock:
        self._thread: threading.Thread | None = None
        self._requests: dict[int, Outgoing] = {}  # those that are not begun
        self._cancelled: deque[Outgoing] = deque()
        self._is_busy = False  # True while a message is sealed or sent, or a rest of it waits
        self._is_closed = False
        # Requests and their bytes: sent, guarded by the lock, and answered, of the thread that receives.
        self._sent = [0, 0]
        self._answered = [0, 0]
        self._is_held = False  # True while a request waits for answers to others

    def open(self, channel: Channel, *, start: bool = False) -> None:
        """Begin to send over ``channel``; not for a thread that signal handlers interrupt.

        Args:
            start: Start the thread now, for what finalizers :meth:`post`.
        """
        with self._lock:
            self._channel = channel
            is_short = sum(request.size_bytes for request in self._requests.values()) <= LONG_BYTES
            while is_short and not self._is_busy and (message := self._next()) is not None:
                self._begin(message)
            if self._waiting or self._is_busy or start:
                self._start()
                self._bell.put(True)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, or is being sent."""
        return not (self._is_busy or self._waiting or self._cancelled)

    def put(self, *messages: Outgoing, now: bool = False) -> None:
        """Send messages, one after the other; never waits for the network.

        Args:
            now: Let this thread send them, if nothing else is to be sent before. An exception of a signal handler in
                the middle ends the connection.

        Raises:
            RuntimeError: The thread cannot be started.
            RPCError: The connection is lost, which the receiver sees too.
        """
        with self._lock:
            if self._is_closed:
                return
            if now and self._channel is not None and self.is_idle and self._has_room:
                self._begin(*messages)
                return
            self._start()
            for message in messages:
                if message.type in _REQUESTS:
                    self._requests[message.request_id] = message
                    self._waiting.append(message.request_id)
                else:
                    self._waiting.append(message)
            self._bell.put(True)

    def post(self, message: Outgoing) -> None:
        """Send a message that is no request; for finalizers: never blocks, takes no lock, starts no thread."""
        self._waiting.append(message)
        self._bell.put(True)

    def withdraw(self, number: int) -> bool:
        """Withdraw a request that is not begun; returns whether that was done."""
        with self._lock:
            return self._requests.pop(number, None) is not None

    def cancel(self, number: int, *, now: bool = False) -> None:
        """Send the cancellation of a request: past all others if that is begun, else after it; as :meth:`put`."""
        message = Outgoing(MessageType.CANCEL, number)
        with self._lock:
            if self._is_closed:
                return
            is_begun = number not in self._requests
            if now and is_begun and self._channel is not None and not (self._is_busy or self._cancelled):
                self._begin(message)
                return
            self._start()
            (self._cancelled if is_begun else self._waiting).append(message)
            self._bell.put(True)

    def answered(self, size_bytes: int) -> None:
        """Note the answer to a request; for the thread that receives."""
        self._answered[0] += 1
        self._answered[1] += size_bytes
        if self._is_held:
            self._is_held = False
            self._bell.put(True)

    @property
    def _has_room(self) -> bool:
        """Whether another request may be sent. One of any size may be, beside one that is unanswered."""
        sent, answered = self._sent, self._answered
        return sent[0] - answered[0] <= 1 or sent[1] - answered[1] <= WINDOW_BYTES

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all messages are sent, for at most ``timeout`` seconds; returns whether they are."""
        with self._lock:
            return self._changed.wait_for(lambda: self.is_idle, timeout)

    def drop(self) -> None:
        """Drop what is not sent; for the end of the thread, whose connection is lost."""
        with self._lock:
            self._is_closed, self._is_busy = True, False
            self._requests.clear()
            self._waiting.clear()
            self._cancelled.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is not sent, and wait for the thread, whose connection was shut down."""
        with self._lock:
            self._is_closed = True
            self._requests.clear()
            self._waiting.clear()
            self._cancelled.clear()
            thread = self._thread
        self._bell.put(True)
        if thread is not None and thread.ident is not None:
            thread.join()

    # With the lock

    def _start(self) -> None:
        """Start the thread, once it can send."""
        # Noted before its start, which Ctrl-C may interrupt: of two threads, each would send parts of messages.
        if (self._thread is None or self._thread.ident is None) and self._channel is not None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def _begin(self, *messages: Outgoing) -> None:
        """Send what the kernel takes of the messages now."""
        assert self._channel is not None
        self._is_busy, is_sent = True, True
        try:
            for message in messages:
                self._note(message)
            is_sent = self._channel.begin(*messages)
        finally:
            self._is_busy = not is_sent
        if not is_sent:
            self._start()
            self._bell.put(True)

    def _next(self) -> Outgoing | None:
        """Take the next message, and be busy with it; None if there is none that may be sent."""
        message: Outgoing | int | None
        self._is_busy = True  # before anything is taken out: others look at is_idle without the lock
        while self._cancelled or self._waiting:
            message = self._cancelled[0] if self._cancelled else self._waiting[0]
            if isinstance(message, int) and message in self._requests:
                # Before the look, so that the receiver does not miss it.
                self._is_held = True
                if not self._has_room:
                    break
                self._is_held = False
            (self._cancelled or self._waiting).popleft()
            if isinstance(message, int):
                message = self._requests.pop(message, None)
            if message is not None:
                return self._with_following(message)
        self._is_busy = False
        self._changed.notify_all()
        return None

    def _with_following(self, message: Outgoing) -> Outgoing:
        """Join RELEASE messages that follow each other."""
        payloads = [message.payload]
        while message.type == MessageType.RELEASE and self._waiting:
            following = self._waiting[0]
            if isinstance(following, int) or following.type != MessageType.RELEASE:
                break
            payloads.append(following.payload)
            self._waiting.popleft()
        return message if len(payloads) == 1 else message._replace(payload=b"".join(payloads))

    def _note(self, message: Outgoing) -> None:
        if message.type in _REQUESTS:
            self._sent[0] += 1
            self._sent[1] += message.size_bytes

    # The thread

    def _run(self) -> None:
        # A signal that interrupts a system call would cost a trip through the GIL.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while not self._is_closed:
                self._bell.get()
                for _ in range(self._bell.qsize()):
                    self._bell.get()
                self._send_all()
        except BaseException as exc:
            self._failed(exc)

    def _send_all(self) -> None:
        """Send until nothing is left that may be sent."""
        assert self._channel is not None
        with self._lock:
            # Of what a caller has begun. From here on, no caller begins anything.
            has_rest, self._is_busy = self._is_busy, True
        if has_rest:
            self._channel.transport.send(())
        while True:
            with self._lock:
                if (message := self._next()) is None:
                    return
                self._note(message)
            self._send(self._channel, message)
            # This frame must not keep the message while it waits for the next one.
            del message

    def _send(self, channel: Channel, message: Outgoing) -> None:
        if message.descriptor >= 0:
            channel.begin(message)
            return
        pieces = channel.seal(message)
        if message.type in _REQUESTS and message.size_bytes > LONG_BYTES:
            last = as_bytes(pieces.pop())
            channel.transport.send([*pieces, last[:-_TAIL_BYTES]])
            pieces = [last[-_TAIL_BYTES:]]
            with self._lock:
                for _ in range(len(self._cancelled)):
                    pieces += channel.seal(self._cancelled.popleft())
        channel.transport.send(pieces)
