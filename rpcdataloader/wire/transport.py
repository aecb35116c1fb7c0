"""Every socket call on a connection: options, exact receives and gathered sends.

Only this module and ``connecting`` touch sockets and their ``OSError``: failures leave here as
:class:`~rpcdataloader.errors.ConnectError` or :class:`~rpcdataloader.errors.ConnectionLostError` with their cause.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import struct
import sys
import termios
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RPCTimeoutError
from rpcdataloader.host.forks import Part, at_fork
from rpcdataloader.host.locks import Event

logger = logging.getLogger("rpcdataloader.client")

# Views of bytes, to be sent in order.
Views = Sequence[bytes | bytearray | memoryview]

# Most pieces of one sendmsg or recvmsg (IOV_MAX of Linux).
MAX_PIECES = 1024

# A short piece is received into a buffer of this size, with what follows it; larger ones into their own memory.
READ_AHEAD_BYTES = 16384

# While several times as much is to come over TCP, the kernel wakes the receiver once per this number of bytes
# (SO_RCVLOWAT) and not for every segment: half of the CPU time, and over loopback 1.5 times the throughput. Larger
# marks gain more there, but a 10 Gb/s link then stands still while the receiver copies a full window.
LOW_WATER_BYTES = 1 << 20

# Most bytes on their way between two ends on one machine (SO_SNDBUF, which Linux doubles: socket(7)): they stay in the
# processor's cache, for 1.1 to 1.3 times the throughput. The kernel's megabytes are for long round trips. A trainer
# sends in fewer parts: between two of them, its other threads take the interpreter lock.
SAME_HOST_SEND_BYTES = 1 << 17
TRAINER_SEND_BYTES = 1 << 19

# Keep-alive finds a dead peer after 10 + 3 * 5 = 25 seconds of silence, with or without requests. The kernel of a peer
# that is merely stopped still answers the probes: TCP_USER_TIMEOUT would cut it off.
KEEPALIVE_IDLE = 10
KEEPALIVE_INTERVAL = 5
KEEPALIVE_PROBES = 3

_DESCRIPTOR = struct.Struct("i")

# Plain numbers: to join two members of an enumeration costs as much as a system call.
_WAIT_FOR_ALL, _CLOSE_ON_EXEC = int(socket.MSG_WAITALL), int(socket.MSG_CMSG_CLOEXEC)
_HAS_LOST_DESCRIPTORS = int(socket.MSG_CTRUNC)

# Seconds between two looks at a connection that may be cut off while keep-alive is suspended; see is_cut_off.
CUT_OFF_PERIOD = 2.0

# Fields of struct tcp_info (linux/tcp.h): tcpi_retransmits, tcpi_probes, tcpi_backoff, tcpi_rto, tcpi_last_data_sent,
# tcpi_last_data_recv, tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBBB3xI32xI4xII")


class Transport:
    """A connected stream socket: gathered sends and exact receives.

    One thread may send while another receives. The socket is blocking, because ``settimeout`` defeats
    ``MSG_WAITALL``; :meth:`shutdown` from another thread ends a wait. :meth:`limit` is for the handshake, whose few
    bytes need a deadline and no speed.

    Attributes:
        is_local: True for a Unix socket.
        unread: Bytes read ahead and not taken yet.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self._traffic: Any = [0, 0]  # bytes received and sent
        self._sock = sock
        self._is_tcp = sock.family != socket.AF_UNIX
        self.is_local = not self._is_tcp
        self._takes_descriptors = False
        self._descriptor = -1  # received, and not taken yet
        self._is_wide = False  # its window holds several times LOW_WATER_BYTES
        self._rest: Views = ()  # what the kernel did not take
        self._ahead: memoryview | None = None
        self.unread = memoryview(b"")
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        # Also makes an accepted socket blocking that inherited non-blocking mode.
        sock.settimeout(None)
        _transports.add(self)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._sock.fileno()

    @property
    def peer_host(self) -> str:
        """The IP address of a TCP peer; empty for a Unix socket."""
        return socket.getnameinfo(self._sock.getpeername(), socket.NI_NUMERICHOST)[0] if self._is_tcp else ""

    def count_in(self, traffic: memoryview) -> None:
        """From now on, count the traffic there, starting with the count so far."""
        traffic[0], traffic[1] = self._traffic[0], self._traffic[1]
        self._traffic = traffic

    def limit(self, deadline: Deadline) -> None:
        """Bound later sends and receives; a deadline without limit makes them block again."""
        remaining = deadline.remaining()
        if remaining == 0.0:
            raise RPCTimeoutError(f"no answer from {self.name} in time")
        self._sock.settimeout(remaining)

    def send(self, pieces: Views) -> None:
        """Send what :meth:`send_now` has left, and all of ``pieces``, in order, without joining or copying them.

        Raises:
            ConnectionLostError: The peer is gone.
        """
        rest, self._rest = self._rest, ()
        self._transmit([*rest, *pieces] if rest else pieces, 0)

    def _transmit(self, pieces: Views, flags: int) -> Views:
        """Send pieces; returns those that the kernel did not take, which under ``MSG_DONTWAIT`` may be some."""
        size = 0
        try:
            while pieces:
                window = pieces[:MAX_PIECES]
                size = sum(map(len, window))
                # Counted before: a peer that has all of it may close at any moment, which may end this process.
                self._traffic[1] += size
                sent = self._sock.sendmsg(window, (), flags)
                if sent == size:
                    pieces = pieces[MAX_PIECES:]
                else:
                    self._traffic[1] -= size - sent
                    pieces = without_start(pieces, sent)
        except BlockingIOError:
            self._traffic[1] -= size
        except OSError as exc:
            self._traffic[1] -= size
            if _is_limit(exc):
                raise RPCTimeoutError(f"timed out sending to {self.name}") from exc
            raise ConnectionLostError(f"connection to {self.name} lost while sending: {exc.strerror or exc}") from exc
        return pieces

    def send_now(self, pieces: Views) -> bool:
        """As :meth:`send`, what the kernel takes without a wait.

        Returns:
            True if that is all; False if a rest is kept, with which the next send begins.

        Raises:
            ConnectionLostError: The peer is gone.
        """
        self._rest = self._transmit([*self._rest, *pieces] if self._rest else pieces, socket.MSG_DONTWAIT)
        return not self._rest

    def send_descriptor(self, piece: bytes | memoryview, descriptor: int) -> None:
        """Send a small piece over a Unix socket, and a descriptor with its first byte (``SCM_RIGHTS``, unix(7)).

        Raises:
            ConnectionLostError: The peer is gone.
        """
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor)
        try:
            sent = self._sock.sendmsg([piece[:1]], [rights])
        except OSError as exc:
            raise ConnectionLostError(f"connection to {self.name} lost while sending: {exc.strerror or exc}") from exc
        self._traffic[1] += sent
        self.send([piece[sent:]])

    def recv_into(self, views: Sequence[memoryview]) -> int:
        """Fill ``views`` in order; returns how many bytes arrived: all of them, fewer, or 0 at the end of file.

        The GIL is released once for the whole wait and taken once at its end, however many segments arrive.

        Raises:
            ConnectionLostError: The kernel reported an error.
        """
        if not self.unread:
            # Not past the end of a message with a descriptor: the next one may have another.
            ahead = self._ahead if self._descriptor < 0 else None
            if ahead is None or len(views) > 1 or len(views[0]) >= READ_AHEAD_BYTES:
                return self._recv(views)
            size = self._recv([ahead], 0)
            if size == 0:
                return 0
            self.unread = ahead[:size]
        filled = 0
        for view in views:
            part = self.unread[: len(view)]
            view[: len(part)] = part
            filled += len(part)
            self.unread = self.unread[len(part) :]
            if not self.unread:
                break
        return filled

    def peek(self) -> bytes:
        """Wait for the next byte, and leave it where it is; empty at the end of file, or after an error."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return b""  # the next receive sees the same

    @property
    def has_unread(self) -> bool:
        """Whether bytes that were read ahead wait for the reader."""
        return bool(self.unread)

    def has_input(self) -> bool:
        """Whether the next receive returns at once, with data or the end of file."""
        return self.has_unread or bool(self._readable.poll(0))

    def count_unacknowledged(self) -> int:
        """Bytes that were sent, but not acknowledged by the peer's host (``SIOCOUTQ``, tcp(7)); 0 for a Unix socket."""
        waiting = bytearray(4)
        if self._is_tcp:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._sock, termios.TIOCOUTQ, waiting)
        return int.from_bytes(waiting, sys.byteorder)

    def count_waiting(self) -> int:
        """Bytes that the kernel holds unread (``FIONREAD``, ioctl_tty(2))."""
        waiting = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._sock, termios.FIONREAD, waiting)
        return int.from_bytes(waiting, sys.byteorder)

    def read_ahead(self) -> None:
        """From now on, receive a short piece together with what follows: a small message costs one system call.

        Not for a socket that is polled, or handed to another process: only this object has the bytes read ahead.
        """
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))

    def take_descriptors(self) -> None:
        """From now on, keep descriptors that come with messages, instead of having the kernel close them."""
        self._takes_descriptors = True

    def take_descriptor(self) -> int:
        """The descriptor that came with the message just received, to be closed by the caller; -1 without one."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def _recv(self, views: Sequence[memoryview], flags: int = _WAIT_FOR_ALL) -> int:
        views = views[:MAX_PIECES]
        try:
            if self._takes_descriptors:
                size = self._recv_with_descriptor(views, flags)
            elif self._is_tcp and sum(map(len, views)) >= 4 * LOW_WATER_BYTES:
                size = self._recv_large(views, flags)
            elif len(views) == 1:
                size = self._sock.recv_into(views[0], 0, flags)
            else:
                size = self._sock.recvmsg_into(views, 0, flags)[0]
            self._traffic[0] += size
            return size
        except OSError as exc:
            if _is_limit(exc):
                raise RPCTimeoutError(f"timed out receiving from {self.name}") from exc
            raise ConnectionLostError(f"connection to {self.name} lost: {exc.strerror or exc}") from exc

    def _recv_with_descriptor(self, views: Sequence[memoryview], flags: int) -> int:
        # The kernel closes all but the first of a message. A receive ends where another one with a descriptor begins.
        room = socket.CMSG_LEN(_DESCRIPTOR.size)
        size, rights, found, _address = self._sock.recvmsg_into(views, room, flags | _CLOSE_ON_EXEC)
        if found & _HAS_LOST_DESCRIPTORS:
            # This process may have no more descriptors, so later ones would come for the wrong messages.
            self._takes_descriptors = False
        elif rights:
            self._drop_descriptor()
            (self._descriptor,) = _DESCRIPTOR.unpack(rights[0][2])
        return size

    def _drop_descriptor(self) -> None:
        if (unwanted := self.take_descriptor()) >= 0:
            os.close(unwanted)

    def _recv_large(self, views: Sequence[memoryview], flags: int) -> int:
        # The kernel does not wake the receiver for an end shorter than the mark: that is received next.
        views = _without_end(views, LOW_WATER_BYTES)
        self._set_low_water(LOW_WATER_BYTES)
        try:
            return self._sock.recvmsg_into(views, 0, flags)[0]
        finally:
            self._set_low_water(1)

    def _set_low_water(self, size_bytes: int) -> None:
        if not self._is_wide:
            # The kernel makes room for the mark, and keeps it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4 * LOW_WATER_BYTES)
            self._is_wide = True
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def finish(self) -> None:
        """Tell the peer that nothing more will be sent; receiving continues."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def linger(self) -> None:
        """Tell the peer that nothing more will be sent, and wait until it has closed too.

        Closing with unread input would reset the connection, and the peer could lose bytes it has not read yet.
        """
        self.finish()
        scrap = bytearray(65536)
        with contextlib.suppress(OSError):
            while self._sock.recv_into(scrap):
                pass

    def is_cut_off(self) -> bool:
        """Whether the peer's host has vanished, as far as this side can see; see :func:`is_cut_off`."""
        return is_cut_off(self._sock)

    def shutdown(self) -> None:
        """End the connection in both directions and wake the threads that wait in a send or receive."""
        shut_down(self._sock)

    def close(self) -> None:
        """Close the descriptor; idempotent. Does not end a connection that another process shares."""
        self._sock.close()
        self._drop_descriptor()

    def require_same_user(self) -> None:
        """Refuse a peer of another user on a Unix socket; does nothing on TCP.

        Raises:
            AuthenticationError: The peer's user is neither this process's nor root.
        """
        if self._is_tcp:
            return
        uid = peer_uid(self._sock)
        if uid not in (0, os.geteuid()):
            raise AuthenticationError(
                f"{self.name} belongs to user id {uid} and this process to {os.geteuid()}: "
                "without a secret only the same user may connect"
            )


def without_start(views: Views, size_bytes: int) -> list[Any]:
    """Drop the first ``size_bytes`` bytes of ``views``, which hold more."""
    position = 0
    while len(views[position]) <= size_bytes:
        size_bytes -= len(views[position])
        position += 1
    return [memoryview(views[position])[size_bytes:], *views[position + 1 :]]


def _without_end(views: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Drop the last ``size_bytes`` bytes of ``views``, which hold more."""
    rest = list(views)
    while len(rest[-1]) <= size_bytes:
        size_bytes -= len(rest.pop())
    if size_bytes:
        rest[-1] = rest[-1][:-size_bytes]
    return rest


def _is_limit(exc: OSError) -> bool:
    """Whether this side's limit was reached; keep-alive's error for a vanished host is a TimeoutError, too."""
    return isinstance(exc, TimeoutError) and exc.errno is None


# A fork by user code (multiprocessing, on either side) must not keep a connection open when this process ends.
_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


def _close_in_child() -> None:
    for transport in list(_transports):
        transport.close()


at_fork(Part.CONNECTIONS, in_child=_close_in_child)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a connected Unix socket (``SO_PEERCRED``, unix(7))."""
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def shut_down(sock: socket.socket) -> None:
    """End a connection, or the wait for one."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def tune(sock: socket.socket, same_host_send_bytes: int = SAME_HOST_SEND_BYTES) -> None:
    """Set the options of a connected socket."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, same_host_send_bytes)


def is_cut_off(sock: socket.socket) -> bool:
    """Whether data does not get through, for as long as keep-alive would wait.

    The kernel sends no keep-alive probes while data is unacknowledged: it retransmits the data, and gives up after a
    quarter of an hour. So callers look every :data:`CUT_OFF_PERIOD`. Either the peer's host leaves all unanswered; or
    it answers, but what it answers never includes the first unacknowledged byte, as behind a path that drops large
    packets. Unlike ``TCP_USER_TIMEOUT``, this spares a host whose process is stopped: that acknowledges what it has
    room for, and then answers the probes of a closed window, which count as no repetitions.

    False for a Unix socket, and for a closed one.
    """
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return False
    num_repeated, num_probes, backoff, timeout_us, since_sent, *silent = _TCP_INFO.unpack(info)
    # In milliseconds, as the times since data was sent, since data came and since an acknowledgement came.
    patience = (KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES) * 1000
    # The time from the first sending of that byte to its last repetition: the timeout doubles with each.
    repeated_for = timeout_us / 1000 * (2**num_repeated - 1) / 2**backoff
    if num_repeated >= KEEPALIVE_PROBES and repeated_for + since_sent >= patience:
        return True
    return bool(num_repeated + num_probes >= KEEPALIVE_PROBES and min(silent) >= patience)


class Deadline:
    """A point in time that bounds several steps together.

    Args:
        timeout: Seconds from now, or None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout
        self._cancelled = Event()
        self._interrupt: Callable[[], None] = lambda: None

    def remaining(self) -> float | None:
        """Seconds left, never negative; None when there is no limit."""
        if self._cancelled.is_set():
            return 0.0
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def cancel(self) -> None:
        """Let the time be over now, and end other threads' pauses and waits; from any thread, idempotent."""
        self._cancelled.set()
        self._interrupt()

    def when_cancelled(self, interrupt: Callable[[], None]) -> None:
        """Let :meth:`cancel` end a wait of another kind, now if it was called already.

        Args:
            interrupt: Function that ends the wait, in place of the previous one. May be called twice.
        """
        self._interrupt = interrupt
        if self._cancelled.is_set():
            interrupt()

    def pause(self, seconds: float) -> bool:
        """Wait for ``seconds``; returns False at once if that exceeds the limit, or when cancelled."""
        remaining = self.remaining()
        if remaining is not None and remaining <= seconds:
            return False
        return not self._cancelled.wait(seconds)
