"""Messages between the processes of one node: JSON objects, with descriptors where needed, over a socketpair.

The pairs keep message boundaries (SOCK_SEQPACKET), so that several processes may write to one end. Nothing that came
from the network travels here.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE = 16384
MAX_DESCRIPTORS = 4


class Link:
    """One end of such a pair. A closed other end reads as None; writing to it does nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Two ends, not inherited by programs that are executed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._sock.fileno()

    def send(self, event: str, descriptors: Sequence[int] = (), *, wait: bool = True, **fields: Any) -> bool:
        """Send one message.

        Args:
            wait: Wait while the other end is busy and its queue is full; the node server must not.

        Returns:
            Whether the message is on its way: somebody has the other end open, and room for it.
        """
        data = json.dumps({"event": event, **fields}).encode()
        try:
            socket.send_fds(self._sock, [data], list(descriptors), 0 if wait else socket.MSG_DONTWAIT)
        except (ConnectionError, BlockingIOError):
            return False
        return True

    def recv(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, which the caller owns; None when the other end is closed."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._sock, MAX_MESSAGE, MAX_DESCRIPTORS)
        except ConnectionError:
            return None
        return (json.loads(data), list(descriptors)) if data else None

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()
