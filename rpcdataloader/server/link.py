"""Events between the processes of one node, with descriptors where needed, over a socketpair.

The pairs keep message boundaries (SOCK_SEQPACKET), so that several processes may write to one end. Nothing that came
from the network travels here.
"""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence

from rpcdataloader.server.events import Event, decode, encode

MAX_MESSAGE = 16384
MAX_DESCRIPTORS = 4

# What a full queue, or too many descriptors under way, look like.
_NO_ROOM = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}


class Link:
    """One end of such a pair. A closed other end reads as None; writing to it does nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: deque[bytes] = deque()

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends, not inherited by programs that are executed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._sock.fileno()

    def send(self, event: Event, descriptors: Sequence[int] = ()) -> bool:
        """Send one event; waits while the other end is busy and its queue is full.

        Returns:
            Whether the event is on its way: somebody has the other end open, and the system has room for it.
        """
        return self._send(encode(event), descriptors, 0) is None

    def post(self, event: Event) -> bool:
        """Send one event without ever waiting: what has no room now goes with a later :meth:`flush`.

        Returns:
            Whether all that was posted has gone.
        """
        self._unsent.append(encode(event))
        return self.flush()

    def offer(self, event: Event, descriptors: Sequence[int]) -> bool:
        """Send one event with descriptors if there is room for it now; returns whether it is on its way."""
        return self.flush() and self._send(encode(event), descriptors, socket.MSG_DONTWAIT) is None

    def flush(self) -> bool:
        """Send what was posted, as far as there is room; returns whether all of it has gone."""
        while self._unsent:
            if self._send(self._unsent[0], (), socket.MSG_DONTWAIT) in _NO_ROOM:
                return False
            self._unsent.popleft()
        return True

    def _send(self, data: bytes, descriptors: Sequence[int], flags: int) -> int | None:
        # Not socket.send_fds and socket.recv_fds: in Python up to 3.13 they ignore the flags.
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        try:
            self._sock.sendmsg([data], ancillary, flags)
        except OSError as exc:
            if not isinstance(exc, ConnectionError) and exc.errno not in _NO_ROOM:
                raise
            return exc.errno
        return None

    def recv(self, *, wait: bool = True) -> tuple[Event, list[int]] | None:
        """The next event and its descriptors, which the caller owns; None when the other end is closed.

        Raises:
            BlockingIOError: There is none yet.
            OSError: This process has no room for the descriptors; the event is lost.
            ValueError: What came is no event; its descriptors are closed.
        """
        # Closed when another program is executed: what user code starts must not hold the sockets of clients.
        how = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        try:
            data, ancillary, flags, _address = self._sock.recvmsg(MAX_MESSAGE, space, how)
        except ConnectionError:
            return None
        descriptors = array("i")
        for _level, _type, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not data:
            return None
        try:
            return decode(data), list(descriptors)
        except ValueError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()
