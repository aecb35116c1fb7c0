"""Messages between the processes of one node: JSON objects, with descriptors where needed, over a socketpair.

The pairs keep message boundaries (SOCK_SEQPACKET), so that several processes may write to one end. Nothing that came
from the network travels here.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

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

    def send(self, event: str, descriptors: Sequence[int] = (), **fields: Any) -> bool:
        """Send one message; waits while the other end is busy and its queue is full.

        Returns:
            Whether the message is on its way: somebody has the other end open, and the system has room for it.
        """
        return self._send(_encode(event, fields), descriptors, 0) is None

    def post(self, event: str, **fields: Any) -> None:
        """Send one message without ever waiting: what has no room now goes with a later :meth:`flush`."""
        self._unsent.append(_encode(event, fields))
        self.flush()

    def offer(self, event: str, descriptors: Sequence[int], **fields: Any) -> bool:
        """Send one message with descriptors if there is room for it now; returns whether it is on its way."""
        return self.flush() and self._send(_encode(event, fields), descriptors, socket.MSG_DONTWAIT) is None

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

    def recv(self, *, wait: bool = True) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, which the caller owns; None when the other end is closed.

        Args:
            wait: Wait for one, if there is none yet.

        Raises:
            BlockingIOError: There is none yet.
            OSError: This process has no room for the descriptors; the message is lost.
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
        return (json.loads(data), list(descriptors)) if data else None

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()


def _encode(event: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"event": event, **fields}).encode()
