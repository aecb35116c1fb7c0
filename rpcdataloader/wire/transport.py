"""Every socket call on a connection: options, exact receives and gathered sends.

Nothing above this module and ``connecting`` touches a socket or sees an ``OSError`` of one: failures
leave here as :class:`~rpcdataloader.errors.ConnectError` or :class:`~rpcdataloader.errors.ConnectionLostError` with
their cause.
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
import threading
import time
import weakref
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RPCTimeoutError

logger = logging.getLogger("rpcdataloader.client")

# sendmsg and recvmsg take this many pieces at once (IOV_MAX of Linux).
MAX_PIECES = 1024

# A short piece is received into a buffer of this size, with what follows it; larger ones go where they belong.
READ_AHEAD_BYTES = 16384

# While several times as much is to come over TCP, the kernel wakes the receiver once per so many bytes (SO_RCVLOWAT)
# and not for every segment: half of the CPU time, and over loopback 1.5 times the throughput. Larger marks gain more
# there, but then a 10 Gb/s link stands still while the receiver copies what fills the window.
LOW_WATER_BYTES = 1 << 20

# Between two ends on one machine no more than this is on its way (SO_SNDBUF, which Linux doubles: socket(7)). It stays
# in the processor's cache: 1.1 to 1.3 times the throughput. Megabytes, which the kernel would allow, are for networks
# with a round trip to fill.
SAME_HOST_SEND_BYTES = 1 << 17

# A dead peer is found after 10 + 3 * 5 = 25 seconds without a word, whether or not anything was asked of it. A peer
# that is merely stopped still answers the probes, since its kernel does: TCP_USER_TIMEOUT would cut it off.
KEEPALIVE_IDLE = 10
KEEPALIVE_INTERVAL = 5
KEEPALIVE_PROBES = 3

# Seconds between two looks at a connection that may be cut off while keep-alive rests; see is_cut_off.
LOOK_INTERVAL = 2.0

# Of struct tcp_info (linux/tcp.h): tcpi_retransmits and tcpi_probes, tcpi_last_data_recv and tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xBB48xII")

# tcpi_busy_time and tcpi_rwnd_limited there, in microseconds.
_TCP_TIMES = struct.Struct("=168xQQ")


class Stream:
    """A connected stream socket: gathered sends and exact receives.

    One thread may send while another receives. The socket is blocking, because ``settimeout`` defeats
    ``MSG_WAITALL``; a wait is ended by :meth:`shutdown` from another thread. :meth:`limit` is for the handshake,
    whose few bytes need a deadline and no speed.

    Args:
        traffic: Two counters, to which the bytes received and sent are added.

    Attributes:
        unread: What was read ahead and not taken yet.
    """

    def __init__(
        self, sock: socket.socket, name: str, traffic: MutableSequence[int] | memoryview | None = None
    ) -> None:
        self.name = name
        self._traffic: Any = [0, 0] if traffic is None else traffic
        self._sock = sock
        self._is_tcp = sock.family != socket.AF_UNIX
        self._is_wide = False  # its window holds several times LOW_WATER_BYTES
        self._ahead: memoryview | None = None
        self.unread = memoryview(b"")
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        # Also what turns non-blocking an accepted socket that inherited it.
        sock.settimeout(None)
        _streams.add(self)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._sock.fileno()

    def count_in(self, traffic: memoryview) -> None:
        """From now on, count the traffic there, beginning with what was counted until now."""
        traffic[0], traffic[1] = self._traffic[0], self._traffic[1]
        self._traffic = traffic

    def limit(self, deadline: Deadline) -> None:
        """Bound the sends and receives that follow; a deadline without limit makes them block again."""
        remaining = deadline.remaining()
        if remaining == 0.0:
            raise RPCTimeoutError(f"no answer from {self.name} in time")
        self._sock.settimeout(remaining)

    def send(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send all of ``pieces``, which are views of bytes, one after the other, without joining or copying them.

        Raises:
            ConnectionLostError: The peer is gone.
        """
        first = size = 0
        try:
            while first < len(pieces):
                window = pieces[first : first + MAX_PIECES]
                size = sum(map(len, window))
                # Counted before: when the peer has all of it, it may close, and so end this process, at any moment.
                self._traffic[1] += size
                sent = self._sock.sendmsg(window)
                if sent == size:
                    first += len(window)
                else:
                    self._traffic[1] -= size - sent
                    pieces, first = _without_start(pieces[first:], sent), 0
        except OSError as exc:
            self._traffic[1] -= size
            if _is_limit(exc):
                raise RPCTimeoutError(f"{self.name} takes no data") from exc
            raise ConnectionLostError(f"connection to {self.name} lost while sending: {exc.strerror or exc}") from exc

    def recv_into(self, views: Sequence[memoryview]) -> int:
        """Fill ``views`` in order; returns how many bytes arrived: all of them, fewer, or 0 at the end of file.

        The GIL is given up once for the whole wait and taken once at its end, however many segments arrive.

        Raises:
            ConnectionLostError: The kernel reported an error.
        """
        if not self.unread:
            if self._ahead is None or len(views) > 1 or len(views[0]) >= READ_AHEAD_BYTES:
                return self._recv(views)
            size = self._recv([self._ahead], 0)
            if size == 0:
                return 0
            self.unread = self._ahead[:size]
        filled = 0
        for view in views:
            part = self.unread[: len(view)]
            view[: len(part)] = part
            filled += len(part)
            self.unread = self.unread[len(part) :]
            if not self.unread:
                break
        return filled

    @property
    def has_unread(self) -> bool:
        """Whether something was read ahead that nobody has taken yet."""
        return bool(self.unread)

    def has_input(self) -> bool:
        """Whether the next receive will not wait: there is data, or the end of file."""
        return self.has_unread or bool(self._readable.poll(0))

    def count_waiting(self) -> int:
        """Bytes that the kernel has received and nobody has taken (``FIONREAD``, ioctl_tty(2))."""
        waiting = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._sock, termios.FIONREAD, waiting)
        return int.from_bytes(waiting, sys.byteorder)

    def sending_times(self) -> tuple[float, float]:
        """Seconds that the connection had data the peer has not acknowledged, and that the peer's window was full.

        Since the beginning; zeros where the system does not tell.
        """
        if self._sock.family != socket.AF_UNIX and hasattr(socket, "TCP_INFO"):
            with contextlib.suppress(OSError, struct.error):
                info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_TIMES.size)
                busy, window_full = _TCP_TIMES.unpack(info)
                return busy / 1e6, window_full / 1e6
        return 0.0, 0.0

    def read_ahead(self) -> None:
        """From now on, receive what follows a short piece together with it: a small message costs one system call.

        Not for a socket that is polled, or handed to another process: what was read ahead is in this object only.
        """
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))

    def _recv(self, views: Sequence[memoryview], flags: int = socket.MSG_WAITALL) -> int:
        views = views[:MAX_PIECES]
        try:
            if self._is_tcp and sum(map(len, views)) >= 4 * LOW_WATER_BYTES:
                size = self._recv_large(views, flags)
            elif len(views) == 1:
                size = self._sock.recv_into(views[0], 0, flags)
            else:
                size = self._sock.recvmsg_into(views, 0, flags)[0]
            self._traffic[0] += size
            return size
        except OSError as exc:
            if _is_limit(exc):
                raise RPCTimeoutError(f"{self.name} does not answer") from exc
            raise ConnectionLostError(f"connection to {self.name} lost: {exc.strerror or exc}") from exc

    def _recv_large(self, views: Sequence[memoryview], flags: int) -> int:
        # The kernel would wake nobody for an end that is shorter than the mark: that is received next.
        views = _without_end(views, LOW_WATER_BYTES)
        self._set_low_water(LOW_WATER_BYTES)
        try:
            return self._sock.recvmsg_into(views, 0, flags)[0]
        finally:
            self._set_low_water(1)

    def _set_low_water(self, size_bytes: int) -> None:
        if not self._is_wide:
            # The kernel makes room for what it is to wait for, and keeps it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4 * LOW_WATER_BYTES)
            self._is_wide = True
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def finish(self) -> None:
        """Tell the peer that nothing more will be sent; receiving goes on."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def linger(self) -> None:
        """Tell the peer that nothing more will be sent, and wait until it has closed too.

        Closing with unread input would reset the connection, and the peer could lose what it has not read yet.
        """
        self.finish()
        scrap = bytearray(65536)
        with contextlib.suppress(OSError):
            while self._sock.recv_into(scrap):
                pass

    def is_cut_off(self) -> bool:
        """Whether the peer's host has vanished, as far as that can be seen; see :func:`is_cut_off`."""
        return is_cut_off(self._sock)

    def shutdown(self) -> None:
        """End the connection in both directions and wake whoever waits in a send or receive."""
        shut_down(self._sock)

    def close(self) -> None:
        """Give the descriptor back; idempotent. Does not end a connection that another process shares."""
        self._sock.close()

    def require_same_user(self) -> None:
        """Refuse a peer of another user on a Unix socket; does nothing on TCP.

        Raises:
            AuthenticationError: The peer's user is neither ours nor root.
        """
        if self._sock.family != socket.AF_UNIX:
            return
        uid = peer_uid(self._sock)
        if uid not in (0, os.geteuid()):
            raise AuthenticationError(
                f"{self.name} belongs to user id {uid} and this process to {os.geteuid()}: "
                "without a secret only the same user may connect"
            )


def _without_start(views: Sequence[bytes | bytearray | memoryview], size_bytes: int) -> list[Any]:
    """All but the first ``size_bytes`` of what ``views`` hold, which is more."""
    position = 0
    while len(views[position]) <= size_bytes:
        size_bytes -= len(views[position])
        position += 1
    return [memoryview(views[position])[size_bytes:], *views[position + 1 :]]


def _without_end(views: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """All but the last ``size_bytes`` of what ``views`` hold, which is more."""
    rest = list(views)
    while len(rest[-1]) <= size_bytes:
        size_bytes -= len(rest.pop())
    if size_bytes:
        rest[-1] = rest[-1][:-size_bytes]
    return rest


def _is_limit(exc: OSError) -> bool:
    """Whether a limit of ours was reached; what keep-alive says of a host that is gone is a TimeoutError, too."""
    return isinstance(exc, TimeoutError) and exc.errno is None


# A fork that user code makes (multiprocessing, on either side) must not keep a connection open when this process ends.
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def _close_in_child() -> None:
    for stream in list(_streams):
        stream.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a connected Unix socket (``SO_PEERCRED``, unix(7))."""
    _pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def shut_down(sock: socket.socket) -> None:
    """End a connection, or the wait for one."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def tune(sock: socket.socket) -> None:
    """Set the options of a connected socket."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SAME_HOST_SEND_BYTES)


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the peer's host leaves unanswered what it should answer, for as long as keep-alive would bear it.

    The kernel sends no keep-alive probes while data is unacknowledged: it repeats the data, and gives up after a
    quarter of an hour. So somebody has to look, every :data:`LOOK_INTERVAL`. It counts what the kernel sent in vain,
    and so, unlike ``TCP_USER_TIMEOUT``, does not mean a host whose process is stopped: that still answers.

    False where the system does not tell, for a Unix socket, and for one that is closed.
    """
    if sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return False
    num_repeated, num_probes, *silent = _TCP_INFO.unpack(info)
    patience = KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_PROBES
    # In milliseconds, since data and since an acknowledgement came.
    return bool(num_repeated + num_probes >= KEEPALIVE_PROBES and min(silent) >= patience * 1000)


def _do_nothing() -> None:
    pass


class Deadline:
    """A point in time that bounds several steps together.

    Args:
        timeout: Seconds from now, or None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout
        self._cancelled = threading.Event()
        self._interrupt: Callable[[], None] = _do_nothing

    def remaining(self) -> float | None:
        """Seconds left, never negative; None when there is no limit."""
        if self._cancelled.is_set():
            return 0.0
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def cancel(self) -> None:
        """Let the time be over now, and end pauses and waits of others; from any thread, idempotent."""
        self._cancelled.set()
        self._interrupt()

    def when_cancelled(self, interrupt: Callable[[], None]) -> None:
        """Have a wait of another kind ended by :meth:`cancel`, or now if that was called already.

        Args:
            interrupt: Replaces the one before. May be called twice.
        """
        self._interrupt = interrupt
        if self._cancelled.is_set():
            interrupt()

    def pause(self, seconds: float) -> bool:
        """Wait for ``seconds``; returns False at once if that would be beyond the limit, or when cancelled."""
        remaining = self.remaining()
        if remaining is not None and remaining <= seconds:
            return False
        return not self._cancelled.wait(seconds)
